"""Text generation as all engines share it: the settings of sampling, and rows that end one by one."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from finetune.arrays import Named
from finetune.errors import MODEL_ERRORS, PlanError, is_out_of_memory
from finetune.system.terminal import say


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling: greedy at temperature 0; top_k 0 and top_p 1 keep all tokens.

    top_k keeps the k likeliest tokens. Of these, top_p keeps a token if the likelier ones together have a probability
    below top_p; the likeliest always stays.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Sampling()


@dataclass(frozen=True)
class Sampled:
    """A sampled answer: its tokens with the one that ended it, if `ended`, and their log-probabilities under the
    policy, whose logits are divided by the temperature.
    """

    ids: list[int]
    log_probs: list[float]
    ended: bool


def uniforms(seeds: list, number: int) -> np.ndarray:
    """[answers, number] of [0, 1): what decides an answer's tokens, of each seed (a tuple of whole numbers) alone."""
    rows = [np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).random(number) for seed in seeds]
    return np.stack(rows)


def answered_within(
    limit: int | None,
    prompts: list,
    max_new_tokens: int,
    stop_row: Callable[[int, list[int]], bool] | None,
    on_token: Callable[[list[int]], None] | None,
    answer: Callable[..., list[list[int]]],
    together: bool = True,
) -> list[list[int]]:
    """New tokens of each prompt, by `answer(prompts, max_new_tokens, stop_row, on_token)`, so that no row has more than
    `limit` positions and none depends on how long the others are. `together`: rows that have room for all tokens are
    answered at once; the others one at a time.

    A row ends at the limit. A prompt that is as long as the limit loses its start, so that a quarter of it is left for
    the answer; a line on standard error says so.
    """
    rooms = [max_new_tokens] * len(prompts)
    if limit is not None:
        too_long = max(map(len, prompts))
        kept = limit - max(1, min(max_new_tokens, limit // 4))
        if too_long >= limit:
            cut = f"note: a prompt of {too_long} tokens is cut to its last {kept}, as the model takes {limit}"
            say(cut, file=sys.stderr)
        if any(isinstance(p, Prompt) and len(p) >= limit for p in prompts):
            raise PlanError(f"a prompt with images has {too_long} tokens, the model takes {limit}. Shrink its images.")
        prompts = [p if len(p) < limit else p[-kept:] for p in prompts]
        rooms = [min(max_new_tokens, limit - len(p)) for p in prompts]
    at_once = [row for row, room in enumerate(rooms) if together and room == max_new_tokens]
    apart = [[row] for row in range(len(prompts)) if row not in set(at_once)]
    found: dict[int, list[int]] = {}
    for rows in ([at_once] if at_once else []) + apart:
        stop = None if stop_row is None else lambda i, ids, rows=rows: stop_row(rows[i], ids)
        new = answer([prompts[row] for row in rows], rooms[rows[0]], stop, on_token if rows[0] == 0 else None)
        found |= dict(zip(rows, new, strict=True))
    return [found[row] for row in range(len(prompts))]


def together_as_alone(first_logits: Callable, vocab_size: int, limit: int | None, tolerance: float) -> bool:
    """True if, in a trial, prompts of unequal length get the same logits in a batch as alone.

    `first_logits(prompts)`: fp32 logits [B, V] of the token after each, in numpy. `tolerance`: of the largest logit.
    """
    lengths = [min(n, (limit or 10) - 1) for n in (2, 9, 5)]
    prompts = [[(7 * i + row) % vocab_size for i in range(1, n + 1)] for row, n in enumerate(lengths)]
    alone = np.concatenate([first_logits([prompt]) for prompt in prompts])
    try:
        together = first_logits(prompts)
    except MODEL_ERRORS as error:  # shapes that do not fit each other
        if is_out_of_memory(error):
            raise
        return False
    return bool(np.abs(together - alone).max() <= tolerance * np.abs(alone).max())


class ShownImages(Protocol):
    """Maker of the model's arrays of images, which are known by their digests."""

    def of_prompt(self, prompt: "Prompt", /) -> dict[str, np.ndarray]: ...
    def beside(self, tokens: np.ndarray, images: Sequence[Sequence[bytes]], /) -> dict[str, Named]: ...
    def shortened(self, ids: np.ndarray, /) -> np.ndarray: ...
    def pictures(self, images: Sequence[bytes], /) -> list[str]: ...


class Prompt(list):
    """Tokens of a prompt that shows images, whose digests are `images`; `source` makes the model's arrays of them."""

    def __init__(self, ids: Sequence[int], images: Sequence[bytes], source: ShownImages):
        super().__init__(ids)
        self.images = tuple(images)
        self.source = source

    def inputs(self) -> dict[str, np.ndarray]:
        """{name: array} that the model takes beside the tokens."""
        return self.source.of_prompt(self)

    def pictures(self) -> list[str]:
        """The images, small, as data: URIs."""
        return self.source.pictures(self.images)


def legible(prompt: list[int]) -> list[int]:
    """The tokens of a prompt as a person reads them: one in the place of each image."""
    if isinstance(prompt, Prompt):
        return prompt.source.shortened(np.array(prompt, np.int64)).tolist()
    return prompt


class NewTokens:
    """The new tokens of each row, without the stop token.

    `stop_row(row, ids)`: True to end a row; `on_token(ids)`: called with those of the first row as they grow.
    """

    def __init__(self, num_rows: int, eos_ids: set[int], stop_row: Callable | None, on_token: Callable | None):
        self.eos_ids = eos_ids
        self.stop_row = stop_row
        self.on_token = on_token
        self.ids: list[list[int]] = [[] for _ in range(num_rows)]
        self.done = [False] * num_rows

    def add(self, tokens: list[int]) -> bool:
        """Adds the next token of each row that has not ended; True if all have now."""
        for row, (token, ids) in enumerate(zip(tokens, self.ids, strict=True)):
            if self.done[row] or token in self.eos_ids:
                self.done[row] = True
                continue
            ids.append(token)
            if row == 0 and self.on_token:
                self.on_token(ids)
            self.done[row] = bool(self.stop_row and self.stop_row(row, ids))
        return all(self.done)
