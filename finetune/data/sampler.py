"""The order of rows: a pure function of (seed, epoch), of which a checkpoint keeps a cursor of two numbers."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetune.errors import PlanError
from finetune.parts.train_state import Cursor


@dataclass(frozen=True)
class Mix:
    """Datasets of `sizes` rows, one after the other, of which rows are drawn by weight.

    An epoch draws as many rows as there are; a dataset that has fewer than its share begins again, in another order.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    def draws(self) -> list[int]:
        """Rows that an epoch draws of each dataset: at least one, together as many as there are rows."""
        shares = [self.num_rows * weight / sum(self.weights) for weight in self.weights]
        found = [max(1, int(share)) for share in shares]
        by_rest = sorted(range(len(shares)), key=lambda i: found[i] - shares[i])
        for k in range(max(0, self.num_rows - sum(found))):
            found[by_rest[k % len(found)]] += 1
        while sum(found) > self.num_rows and max(found) > 1:
            found[found.index(max(found))] -= 1
        return found

    def rows_of_epoch(self, seed: int, epoch: int) -> np.ndarray:
        """The rows that an epoch draws, by dataset: each continues where the epoch before ended."""
        parts = []
        first = 0
        for i, (size, draws) in enumerate(zip(self.sizes, self.draws(), strict=True)):
            start = epoch * draws
            end = (epoch + 1) * draws
            for p in range(start // size, -(-end // size)):
                order = _permutation(size, [seed, i, p, 1])
                parts.append(first + order[max(0, start - p * size) : end - p * size])
            first += size
        return np.concatenate(parts)


def num_rows_of(rows: "int | Mix") -> int:
    if isinstance(rows, int):
        return rows
    return sum(rows.draws())


def _permutation(size: int, entropy: list[int]) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy))).permutation(size)


# ------ order


def num_held_out(num_rows: int, fraction: float) -> int:
    """The number of rows that a fraction of so many holds out: at least one, and not the last."""
    if not fraction or num_rows < 2:
        return 0
    return min(max(round(num_rows * fraction), 1), num_rows - 1)


def split_validation(
    made_of: Sequence[str], fraction: float, seed: int, kind_of: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, validation rows), each in ascending order, with at least one row each.

    `made_of`: where each row is from. Those of one conversation, text or pair stay together, as one holds what another
    is asked: as many as fit into the fraction. Where these are less than half of it, as of long texts, the rest are the
    last rows of another: none of them is in the prompt of one before. `kind_of`: a number of each row; some rows of
    each kind are trained on, where others can be held out instead.
    """
    num_rows = len(made_of)
    if num_rows < 2:
        raise PlanError(f"--validation_split {fraction}: needs at least 2 rows, the data has {num_rows}. Use 0.")
    most = num_held_out(num_rows, fraction)
    together: dict[object, list[int]] = {}
    for row, source in enumerate(made_of):
        together.setdefault(source, []).append(row)
    groups = list(together.values())
    held: list[int] = []
    kinds = np.zeros(num_rows, np.int64) if kind_of is None else kind_of
    left = np.bincount(kinds)
    waiting = []  # groups that are all of what is left of their kind
    drawn = [groups[i] for i in _permutation(len(groups), [seed, len(groups)])]
    for rows in drawn:
        kind = kinds[rows[0]]
        if left[kind] <= len(rows):
            waiting.append(rows)
        elif len(held) + len(rows) <= most:
            held += rows
            left[kind] -= len(rows)
    for rows in waiting:
        if 2 * len(held) < most and len(held) + len(rows) <= most:
            held += rows
    if 2 * len(held) < most or not held:
        larger = next(rows for rows in drawn if len(rows) > most - len(held))
        held += larger[len(held) - most :]
    is_held = np.isin(np.arange(num_rows), held)
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


GROUPS_SEARCHED = 20_000  # about a second; later groups are rarely larger


@functools.lru_cache(maxsize=2)
def epoch_order(rows: int | Mix, seed: int, epoch: int) -> np.ndarray:
    """Row order of an epoch, of so many rows or of a mixture: a seeded permutation. Read-only."""
    order = _permutation(num_rows_of(rows), [seed, epoch])
    if isinstance(rows, Mix):
        order = rows.rows_of_epoch(seed, epoch)[order]
    order.setflags(write=False)
    return order


def total_steps(rows: int | Mix, rows_per_step: int, num_epochs: int, max_steps: int) -> int:
    """Number of optimizer steps. max_steps > 0 overrides num_epochs; an epoch may end with a smaller step."""
    if max_steps > 0:
        return max_steps
    return num_epochs * -(-num_rows_of(rows) // rows_per_step)


def step_rows(rows: int | Mix, rows_per_step: int, seed: int, cursor: Cursor) -> tuple[np.ndarray, Cursor]:
    """(rows of the step at `cursor`, cursor of the next step)."""
    num_rows = num_rows_of(rows)
    assert 0 <= cursor.index < num_rows, (cursor, num_rows)
    found = epoch_order(rows, seed, cursor.epoch)[cursor.index : cursor.index + rows_per_step]
    end = cursor.index + len(found)
    return found, Cursor(cursor.epoch + 1, 0) if end == num_rows else Cursor(cursor.epoch, end)


def first_steps(rows: int | Mix, rows_per_step: int, seed: int, number: int):
    """Yields the rows of each of the first `number` steps."""
    cursor = Cursor()
    for _ in range(number):
        found, cursor = step_rows(rows, rows_per_step, seed, cursor)
        yield found


def rows_so_far(rows: int | Mix, seed: int, cursor: Cursor):
    """Yields the rows drawn before `cursor`, an epoch at a time."""
    for epoch in range(cursor.epoch):
        yield epoch_order(rows, seed, epoch)
    if cursor.index:
        yield epoch_order(rows, seed, cursor.epoch)[: cursor.index]


def rank_rows(rows: np.ndarray, data_rank: int, data_ranks: int) -> np.ndarray:
    """The rows of a step for one data rank: every data_ranks-th, for any number of rows, without dropping any."""
    return rows[data_rank::data_ranks]
