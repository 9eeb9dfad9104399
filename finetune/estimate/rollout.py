"""Predicted memory of sampling, which a step that learns from answers of the model's own begins with.

Answers are counted at their full length: an upper bound where they end before it. Sampling and training follow one
another, so that the peak is the larger of the two. See torch_engine/generation/decode.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.estimate.inference import Work, dense_copies, generation_items, layer_bytes
from finetune.estimate.memory import base_bytes, gathered_bytes, trainable_weights
from finetune.estimate.model_cost import ModelCost
from finetune.parts.engine_limits import FIRST_TOKENS, MLX_ROOM, PREFILL_TOKENS
from finetune.parts.parts import Parts
from finetune.parts.sampled import sampled_of

# What stands while answers are sampled, of the items of a run's memory.
STANDING = ("base", "trainable", "optimizer", "dequantized", "staged", "libraries", "kernels", "snapshot")
SORTED = 24  # bytes per logit of a draw with --top_p


@dataclass(frozen=True)
class Rollout:
    """One rank's answers of a step: its prompts' lengths, `group` answers of `answer` tokens to each; `forward`: tokens
    of prompts that go through the layers at once.
    """

    prompts: tuple[int, ...]
    group: int
    answer: int
    forward: int

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.group

    @property
    def longest(self) -> int:
        return max(self.prompts)

    @property
    def prefilled(self) -> int:
        """Tokens of the largest forward over prompts."""
        return max(self.longest, min(self.forward, sum(self.prompts)))

    @property
    def room(self) -> int:
        """Tokens of an answer that a layer's cache has room for at last."""
        room = FIRST_TOKENS
        while room < self.answer - 1:
            room *= 2
        return room


def rollout_of(plan: Parts, prompts: Sequence[int]) -> Rollout:
    how = sampled_of(plan)
    forward = max(plan.steps.microbatch_tokens or 0, plan.data.row_length)
    return Rollout(tuple(prompts), how.group, how.most, forward)


def planned(plan: Parts) -> Rollout:
    """The largest rollout before data are read: prompts as long as the context leaves them; one of them while
    --batch_size is open.
    """
    how = sampled_of(plan)
    longest = max(1, plan.data.context_length - how.most)
    prompts = 1
    if isinstance(plan.steps.batch_size, int):
        prompts = math.ceil(how.fraction * plan.steps.batch_size * plan.steps.accumulation)
    return rollout_of(plan, [longest] * prompts)


def with_sampling(found: dict, m: ModelCost, rollout: Rollout, ranks: int = 1) -> dict:
    """memory.estimate's result, or where sampling takes more, what stands beside it and `sampling`."""
    standing = {name: n for name, n in found["items"].items() if name in STANDING}
    sampling = sampling_bytes(m, rollout, ranks)
    total = sum(standing.values()) + sampling
    if total <= found["total"]:
        return found
    return found | {"total": total, "items": standing | {"sampling": sampling}}


def with_judge(found: dict, held: int, reading: int) -> dict:
    """memory.estimate's result with a teacher beside it, that holds so many bytes, and more while it reads."""
    standing = {name: n for name, n in found["items"].items() if name in STANDING} | {"teacher": held}
    if sum(standing.values()) + reading > found["total"] + held:
        return found | {"total": sum(standing.values()) + reading, "items": standing | {"teacher reads": reading}}
    return found | {"total": found["total"] + held, "items": found["items"] | {"teacher": held}}


def sampling_bytes(m: ModelCost, rollout: Rollout, ranks: int = 1) -> int:
    """Peak bytes beside the weights while answers are sampled: dense copies, keys and values, one forward, logits."""
    if sampled_of(m.plan).copies_prompts:
        return _bytes_in_rows(m, rollout)
    held = 0
    if ranks > 1:
        held = base_bytes(m) + 4 * trainable_weights(m) + gathered_bytes(m)
    elif not m.full:
        held = dense_copies(m, adapted=True)
    if m.plan.data.layout == "padded":  # transformers' generate, a prompt at a time
        work = Work(rows=rollout.group, prompt=rollout.longest, new=rollout.answer)
        return int(held + sum(n for name, n in generation_items(m, work, adapted=True).items() if name != "dense"))
    per_token = 2 * m.shape.num_layers * m.k * m.compute
    of_prompts = len(rollout.prompts) * rollout.longest * per_token
    prefilling = layer_bytes(m, rollout.prefilled)
    own = rollout.rows * rollout.room * per_token
    decoding = own + layer_bytes(m, rollout.rows) + _drawing_bytes(m, rollout)
    return int(held + of_prompts + max(prefilling, decoding))


def _bytes_in_rows(m: ModelCost, rollout: Rollout) -> int:
    """The same where each answer is a row with its prompt: keys and values of all rows, those of a layer once more
    while they grow or rows leave; see mlx_engine/sampling.py.
    """
    shape = m.shape
    room = -(-(rollout.longest + rollout.answer) // MLX_ROOM) * MLX_ROOM
    held = 2 * rollout.rows * room * m.k * m.compute * (shape.num_layers + 1)
    prefilling = layer_bytes(m, min(PREFILL_TOKENS, len(rollout.prompts) * rollout.longest))
    drawn = rollout.rows * shape.vocab_size * (m.compute + 3 * 4)
    if sampled_of(m.plan).top_p < 1:
        drawn += rollout.rows * shape.vocab_size * SORTED
    return int(held + max(prefilling, layer_bytes(m, rollout.rows) + drawn))


def _drawing_bytes(m: ModelCost, rollout: Rollout) -> int:
    """Bytes of one token of each row: scores of a layer, or logits, those before and what is drawn from them."""
    how = sampled_of(m.plan)
    b = m.compute
    scores = rollout.rows * m.shape.num_heads * (rollout.longest + rollout.room) * (3 * b + 12)
    copies = 2 * b + 8
    if b < 4:
        copies += 4
    if how.temperature != 1:
        copies += 4
    if how.top_p < 1:
        copies += SORTED
    return max(scores, rollout.rows * m.shape.vocab_size * copies)
