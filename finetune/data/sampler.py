"""The order of rows: a pure function of (seed, epoch), of which a checkpoint keeps a cursor of two numbers."""

import functools
from dataclasses import dataclass

import numpy as np

from finetune.errors import PlanError


@dataclass(frozen=True)
class Cursor:
    """Position in the data: `index` rows of epoch `epoch` are consumed."""

    epoch: int = 0
    index: int = 0


# ------ order


def split_validation(num_rows: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, validation rows), each in ascending order, with at least one row each."""
    if num_rows < 2:
        raise PlanError(f"--validation_split {fraction}: needs at least 2 rows, the data has {num_rows}. Use 0.")
    num_validation = min(max(round(num_rows * fraction), 1), num_rows - 1)
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, num_rows]))).permutation(num_rows)
    return np.sort(order[num_validation:]), np.sort(order[:num_validation])


GROUPS_SEARCHED = 20_000  # about a second; later groups are rarely larger


@functools.lru_cache(maxsize=2)
def epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Row order of an epoch: a seeded permutation. Read-only."""
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(num_rows)
    order.setflags(write=False)
    return order


def total_steps(num_rows: int, rows_per_step: int, num_epochs: int, max_steps: int) -> int:
    """Number of optimizer steps. max_steps > 0 overrides num_epochs; an epoch may end with a smaller step."""
    return max_steps if max_steps > 0 else num_epochs * -(-num_rows // rows_per_step)


def step_rows(num_rows: int, rows_per_step: int, seed: int, cursor: Cursor) -> tuple[np.ndarray, Cursor]:
    """(rows of the step at `cursor`, cursor of the next step)."""
    assert 0 <= cursor.index < num_rows, (cursor, num_rows)
    rows = epoch_order(num_rows, seed, cursor.epoch)[cursor.index : cursor.index + rows_per_step]
    end = cursor.index + len(rows)
    return rows, Cursor(cursor.epoch + 1, 0) if end == num_rows else Cursor(cursor.epoch, end)


def rank_rows(rows: np.ndarray, data_rank: int, data_ranks: int) -> np.ndarray:
    """The rows of a step for one data rank: every data_ranks-th, for any number of rows, without dropping any."""
    return rows[data_rank::data_ranks]
