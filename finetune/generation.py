"""What text generation has in common in all engines: the settings of sampling, and rows that end one by one."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from finetune.system.terminal import say


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: the likeliest at temperature 0; top_k 0 and top_p 1 keep all tokens.

    top_k keeps the likeliest. Of these, top_p keeps each before which the likelier ones have a smaller share of the
    probability than top_p, and the first in any case.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Sampling()


def answered_within(
    limit: int | None, prompts: list, max_new_tokens: int, stop_row, on_token, answer
) -> list[list[int]]:
    """New tokens of each prompt, by `answer(prompts, max_new_tokens, stop_row, on_token)`, so that no row has more than
    `limit` positions and none depends on how long the others are.

    A row ends at the limit. A prompt that is as long as the limit loses its start, so that a quarter of it is left for
    the answer; a line on standard error says so.
    """
    if limit is None:
        return answer(prompts, max_new_tokens, stop_row, on_token)
    room = max(1, min(max_new_tokens, limit // 4))
    too_long = max(map(len, prompts), default=0)
    if too_long >= limit:
        cut = f"note: a prompt of {too_long} tokens is cut to its last {limit - room}, as the model takes {limit}"
        say(cut, file=sys.stderr)
    prompts = [p if len(p) < limit else p[room - limit :] for p in prompts]
    together = [row for row, p in enumerate(prompts) if len(p) + max_new_tokens <= limit]
    found: dict[int, list[int]] = {}
    for rows in ([together] if together else []) + [[row] for row in range(len(prompts)) if row not in set(together)]:
        most = min(max_new_tokens, *(limit - len(prompts[row]) for row in rows))
        stop = None if stop_row is None else (lambda i, ids, rows=rows: stop_row(rows[i], ids))
        new = answer([prompts[row] for row in rows], most, stop, on_token if rows[0] == 0 else None)
        found |= dict(zip(rows, new, strict=True))
    return [found[row] for row in range(len(prompts))]


class NewTokens:
    """The new tokens of each row, without the stop token.

    `stop_row(row, ids)`: True to end a row; `on_token(ids)`: called with those of the first row as they grow.
    """

    def __init__(self, num_rows: int, eos_ids: set[int], stop_row: Callable | None, on_token: Callable | None):
        self.eos_ids, self.stop_row, self.on_token = eos_ids, stop_row, on_token
        self.ids, self.done = [[] for _ in range(num_rows)], [False] * num_rows

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
