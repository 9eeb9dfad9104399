"""Rows under supervision: a row stays in its slot for up to N_sup optimizer steps, y and z carried along.

A slot is a place in the step's batch. The table is global and the same on every rank; rank r holds every R-th slot.
Tensors (y and z of each slot) are the engine's.
"""

from dataclasses import dataclass

import numpy as np

from finetune.data.sampler import step_rows
from finetune.engine import Batch
from finetune.parts.train_state import Cursor

EMPTY = -1


@dataclass(frozen=True)
class SlotBatch(Batch):
    """A microbatch of slots. `slots`: their indices on this rank; `fresh_B`: y and z start here.
    `earliest_B`: the supervision step before which a row does not halt.
    """

    slots: np.ndarray
    fresh_B: np.ndarray
    puzzle_ids_B: np.ndarray
    earliest_B: np.ndarray


class Carry:
    """The table of slots: row, its epoch, and supervision steps taken. `max_steps`: N_sup."""

    def __init__(self, num_slots: int, max_steps: int, halting: bool):
        self.max_steps = max_steps
        self.halting = halting
        self.rows, self.epochs, self.steps = (np.full(num_slots, fill, np.int64) for fill in (EMPTY, 0, 0))

    def refill(self, num_rows: int, seed: int, cursor: Cursor) -> Cursor:
        """Gives rows to empty slots, up to the epoch's end; where the next rows are.
        Without halting all rows leave together, and the next ones arrive together.
        """
        empty = np.flatnonzero(self.rows == EMPTY)
        if not len(empty) or (not self.halting and len(empty) < len(self.rows)):
            return cursor
        rows, after = step_rows(num_rows, len(empty), seed, cursor)
        taken = empty[: len(rows)]
        self.rows[taken], self.epochs[taken], self.steps[taken] = rows, cursor.epoch, 0
        return after

    def occupied(self, data_rank: int, data_ranks: int) -> np.ndarray:
        """Slots of one rank that hold a row, as global indices."""
        mine = np.arange(data_rank, len(self.rows), data_ranks)
        return mine[self.rows[mine] != EMPTY]

    def advance(self, halted: np.ndarray) -> None:
        """One optimizer step is done; rows of slots where `halted`, or at N_sup, leave."""
        busy = self.rows != EMPTY
        self.steps[busy] += 1
        leave = busy & ((self.steps >= self.max_steps) | (halted if self.halting else False))
        if not self.halting and leave.any():
            leave = busy
        self.rows[leave] = EMPTY

    def state(self) -> dict[str, np.ndarray]:
        return {"rows": self.rows.copy(), "epochs": self.epochs.copy(), "steps": self.steps.copy()}

    def load(self, state: dict) -> None:
        for name in ("rows", "epochs", "steps"):
            getattr(self, name)[:] = np.asarray(state[name])


def earliest_halt(seed: int, epoch: int, row: int, probability: float, max_steps: int) -> int:
    """The first supervision step at which a row may halt: 1, or with `probability` a random one of 2..N_sup."""
    if probability == 0 or max_steps < 2:
        return 1
    rng = np.random.default_rng([seed, epoch, row, 1])
    if rng.random() < probability:
        return int(rng.integers(2, max_steps + 1))
    return 1
