"""What text generation has in common in all engines: the settings of sampling, and rows that end one by one."""

from collections.abc import Callable
from dataclasses import dataclass


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
