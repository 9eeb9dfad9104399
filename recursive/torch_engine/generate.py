"""Generation by the recursive model, with one KV cache per application of each layer.

Every call of the network is causal or looks at one position only, so incremental decoding is exact: a new token runs
the same N_sup * T * (n + 1) applications, each of which sees the keys and values it has made of the tokens before.
Prompts of unequal length are padded on the left, and what was padded is masked.
"""

from collections.abc import Callable
from typing import Any

import torch

from finetune.errors import PlanError
from finetune.generation import GREEDY, NewTokens, Sampling
from finetune.torch_engine.generation.sampling import choose
from recursive.torch_engine.model import RecursiveModel

ROOM = 4  # one part in so many of the context is kept for the answer to a long prompt


class Decoder:
    """A batch of prompts on their way: `logits(ids)` takes the next tokens of all rows and gives the last logits."""

    def __init__(self, model: RecursiveModel, starts: list[int]):
        if not model.arch.causal:
            raise PlanError("--checkpoint: was trained with arch.causal=false, on puzzles; it continues no text.")
        self.model = model
        self.caches: list = []
        self.length = 0
        self.starts_B = torch.tensor(starts, device=model.y0_D.device)  # padding before each prompt

    @torch.no_grad()
    def logits(self, ids_BS: torch.Tensor) -> torch.Tensor:
        model = self.model
        new = ids_BS.shape[1]
        at = torch.arange(self.length, self.length + new, device=ids_BS.device)
        positions = (at[None] - self.starts_B[:, None]).clamp(min=0)
        keys = torch.arange(self.length + new, device=ids_BS.device)
        seen = (keys[None, None] <= at[None, :, None]) & (keys[None, None] >= self.starts_B[:, None, None])
        # A padded position sees itself, as a softmax over nothing is not a number.
        seen |= keys[None, None] == at[None, :, None]
        context = model.context(new, positions, seen[:, None], self.caches)
        y, z = model.start(*ids_BS.shape)
        for _ in range(model.arch.supervision_steps):
            y, z = model(ids_BS, y, z, None, context, positions)
        self.length += new
        return model.logits(y).float()


def generate(
    model: RecursiveModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos_ids: set[int],
    pad_id: int,
    stop_row: Callable[[int, list[int]], bool] | None = None,
    on_token: Callable[[list[int]], None] | None = None,
    how: Sampling = GREEDY,
) -> list[list[int]]:
    """New token ids per prompt, without the stop token; greedy at temperature 0."""
    limit = model.seq_len
    device = model.y0_D.device
    kept = limit - min(max_new_tokens, max(1, limit // ROOM))
    prompts = [list(p)[-max(1, kept) :] for p in prompts]
    longest = max(map(len, prompts))
    room = max(1, min(max_new_tokens, limit - longest))
    decoder = Decoder(model, [longest - len(p) for p in prompts])
    ids = torch.tensor([[pad_id] * (longest - len(p)) + p for p in prompts], device=device)
    new = NewTokens(len(prompts), eos_ids, stop_row, on_token)
    for _ in range(room):
        chosen = choose(decoder.logits(ids)[:, -1], how)
        if new.add(chosen.tolist()):
            break
        ids = chosen[:, None]
    return new.ids


class RecursiveGenerator:
    """Adapter of the recursive model to the engine interface of generate.py; it only answers."""

    def __init__(self, model: RecursiveModel, pad_id: int):
        self.model = model
        self.pad_id = pad_id

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        eos_ids: set[int],
        stop_row: Callable[[int, list[int]], bool] | None = None,
        on_token: Callable[[list[int]], None] | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        return generate(
            self.model, prompts, max_new_tokens, eos_ids, self.pad_id, stop_row, on_token, Sampling(**sampling)
        )
