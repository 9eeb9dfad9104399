"""Sampling several answers to each of several prompts, with mlx-lm's caches, from the model that trains.

The numbers that decide an answer's tokens are the torch engine's, and so is the rule by which they do: where logits
agree, so do answers. A prompt goes through the layers once, whatever the number of answers to it; each answer has a
copy of its keys and values. Rows leave the batch when they have ended.

P prompts, G answers to each at most, B answers under way, V vocabulary.
"""

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from finetune.generation import Sampled, Sampling
from finetune.mlx_engine.generate import restrict
from finetune.mlx_engine.head import log_probs_of_logits
from finetune.mlx_engine.mlx_lm_internals import BatchKVCache, make_prompt_cache
from finetune.parts.engine_limits import PREFILL_TOKENS
from finetune.system.process import restorer_of_folder

COMPACTED_AT = 0.75  # of the rows under way: below it, those that ended leave the batch
BLOCK = 256  # probabilities whose sums are searched first


@dataclass(frozen=True)
class Policy:
    """Source of samples. `limit`: of its positions; `together`: prompts of unequal length may share a batch, see
    generate.answers_together.
    """

    model: Any
    pad_id: int
    limit: int | None
    together: bool


@dataclass(frozen=True)
class Asked:
    """A prompt, the numbers of [0, 1) that decide its answers' tokens [G, most], and the most tokens of each."""

    prompt: list[int]
    uniforms_GL: np.ndarray
    most: int


def sample(policy: Policy, asked: list[Asked], eos_ids: set[int], how: Sampling) -> list[list[Sampled]]:
    """Answers to each prompt, as many as its numbers have rows."""
    if policy.together:
        return _answers(policy, asked, eos_ids, how)
    return [group for one in asked for group in _answers(policy, [one], eos_ids, how)]


def _answers(policy: Policy, asked: list[Asked], eos_ids: set[int], how: Sampling) -> list[list[Sampled]]:
    """The same of prompts that share a batch."""
    counts = [len(one.uniforms_GL) for one in asked]
    prompt_B = np.repeat(np.arange(len(asked)), counts)
    lengths_B = np.repeat([len(one.prompt) for one in asked], counts)
    most_B = np.repeat([one.most for one in asked], counts)
    steps = int(most_B.max())
    uniforms_BL = np.concatenate([_padded(one.uniforms_GL, steps) for one in asked])
    answers = [Sampled([], [], False) for _ in prompt_B]
    logits_BV, cache = _prefilled(policy, [one.prompt for one in asked], prompt_B)
    rows = np.arange(len(prompt_B))  # of those under way
    active = np.ones(len(rows), bool)
    for number in range(steps):
        tokens_B, log_probs_B = draw(logits_BV, how, uniforms_BL[rows, number])
        for i in np.flatnonzero(active):
            row = rows[i]
            token = int(tokens_B[i])
            one = answers[row]
            answers[row] = Sampled([*one.ids, token], [*one.log_probs, float(log_probs_B[i])], token in eos_ids)
            active[i] = token not in eos_ids and number + 1 < most_B[row]
        if not active.any():
            break
        if policy.together and _leave(policy, active, lengths_B[rows] + number + 1):
            kept = np.flatnonzero(active)
            for layer in cache:
                layer.filter(mx.array(kept))
            rows = rows[kept]
            tokens_B = tokens_B[kept]
            active = active[kept]
        logits_BV = policy.model(mx.array(tokens_B[:, None]), cache=cache)[:, -1]
    each = iter(answers)
    return [[next(each) for _ in range(count)] for count in counts]


def _leave(policy: Policy, active: np.ndarray, positions_B: np.ndarray) -> bool:
    """True if rows that have ended leave the batch: many of them, or one that has no position left."""
    if active.all():
        return False
    return active.mean() <= COMPACTED_AT or (policy.limit is not None and bool((positions_B >= policy.limit).any()))


def _prefilled(policy: Policy, prompts: list[list[int]], prompt_B: np.ndarray) -> tuple[mx.array, list]:
    """(logits [B, V] of the first token of each answer, the caches of its layers)."""
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    ids = np.array([[policy.pad_id] * n + prompt for n, prompt in zip(padding, prompts, strict=True)], np.int32)
    cache = make_prompt_cache(policy.model)
    if policy.together:
        cache = [BatchKVCache(padding) for _ in cache]
    else:  # caches of every kind have as many rows from the start
        ids = ids[prompt_B]
    step = max(1, PREFILL_TOKENS // len(ids))
    for start in range(0, width - 1, step):  # all but the last token, whose logits alone are computed
        policy.model(mx.array(ids[:, start : min(start + step, width - 1)]), cache=cache)
        mx.eval([layer.state for layer in cache])
    logits = policy.model(mx.array(ids[:, -1:]), cache=cache)[:, -1]
    if not policy.together:
        return logits, cache
    for layer in cache:
        layer.filter(mx.array(prompt_B))
    return logits[mx.array(prompt_B)], cache


def _padded(uniforms_GL: np.ndarray, length: int) -> np.ndarray:
    return np.pad(uniforms_GL, ((0, 0), (0, length - uniforms_GL.shape[1])))


def draw(logits_BV: mx.array, how: Sampling, uniform_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(a token of each row, its log-probability before top_k and top_p), as decode.draw has them in torch: the first
    token whose cumulated probability is above the row's number; greedy at temperature 0.

    Sums of blocks are searched first, on the host in fp64, which GPUs lack.
    """
    logits_BV = logits_BV.astype(mx.float32)
    if how.temperature <= 0:
        greedy_B = mx.argmax(logits_BV, axis=-1)
        log_probs_B = log_probs_of_logits(logits_BV, greedy_B[:, None])
        return np.array(greedy_B), np.array(log_probs_B)
    whole_BV = logits_BV / how.temperature
    largest_B1 = whole_BV.max(axis=-1, keepdims=True)
    blocks_BNC = _blocks(mx.exp(whole_BV - largest_B1))
    whole_BN = blocks_BNC.sum(axis=-1)
    sums_BN = whole_BN
    if how.top_k or how.top_p < 1:
        blocks_BNC = _blocks(mx.exp(restrict(logits_BV, how) - largest_B1))
        sums_BN = blocks_BNC.sum(axis=-1)
    mx.eval(blocks_BNC, sums_BN, whole_BN)
    of_blocks_BN = np.array(sums_BN).astype(np.float64)
    cumulated_BN = of_blocks_BN.cumsum(-1)
    wanted_B = uniform_B * cumulated_BN[:, -1]
    at = np.arange(len(wanted_B))
    block_B = np.minimum((cumulated_BN <= wanted_B[:, None]).sum(-1), cumulated_BN.shape[1] - 1)
    before_B = cumulated_BN[at, block_B] - of_blocks_BN[at, block_B]
    chosen_BC = np.array(blocks_BNC[mx.array(at), mx.array(block_B)]).astype(np.float64)
    place_B = (chosen_BC.cumsum(-1) <= (wanted_B - before_B)[:, None]).sum(-1)
    # Rounding may leave the last number beyond the block's sum: the last token with a probability is meant.
    last_B = BLOCK - 1 - (chosen_BC[:, ::-1] > 0).argmax(-1)
    place_B = np.minimum(place_B, last_B)
    log_whole_B = np.log(np.array(whole_BN).astype(np.float64).sum(-1))
    log_probs_B = np.log(chosen_BC[at, place_B]) - log_whole_B
    return block_B * BLOCK + place_B, log_probs_B.astype(np.float32)


def _blocks(parts_BV: mx.array) -> mx.array:
    rest = -parts_BV.shape[1] % BLOCK
    if rest:
        parts_BV = mx.pad(parts_BV, [(0, 0), (0, rest)])
    return parts_BV.reshape(len(parts_BV), -1, BLOCK)


@contextlib.contextmanager
def drawing_apart(seed: int) -> Iterator[None]:
    """A context whose random numbers follow from `seed` (32 bits); at its end the random states are as before.

    Those of torch too, where the user's code has imported it. MLX's are of each thread, and a function has its own.
    """
    restore_folder = restorer_of_folder()
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    torch = sys.modules.get("torch")
    of_torch = None
    if torch is not None:
        of_torch = torch.get_rng_state()
        torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        restore_folder()
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if torch is not None:
            torch.set_rng_state(of_torch)
