"""Objectives of a student beside a teacher, as far as they need no engine's arrays: what a step counts and reports."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from finetune.engine import IGNORE_INDEX, Batch
from finetune.objectives import ROW_TARGET, NextToken, Totals


@dataclass(frozen=True)
class OfTeacher(NextToken):
    """alpha times the divergence from the teacher and 1 - alpha times the nll of each target; of the model's own
    answers without the nll; of an evaluation, which has no teacher, the nll. `beta`: of the divergence, see
    torch_engine/divergence.py.
    """

    alpha: float
    beta: float
    sums: tuple[str, ...] = field(default=("loss/divergence", "loss/nll"), init=False)
    num_counts = 2

    def count(self, batch: Batch) -> tuple[int, ...]:
        """(targets, those of them that the rows have)."""
        return batch.num_targets, of_rows(batch)

    def sums_of(self, observed: Any) -> dict[str, float]:
        return dict(zip(self.sums, observed.tolist(), strict=True))

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return averages(sums, totals.counts)


@dataclass(frozen=True)
class OfSampledTokens(OfTeacher):
    """The same by the sampled tokens alone: the reverse KL of the model's own answers, and the nll of the rows."""

    beta: float = field(default=1.0, init=False)
    num_counts = 3

    def count(self, batch: Batch) -> tuple[int, ...]:
        """(targets, those of the model's own answers, those of the rows)."""
        rows = of_rows(batch)
        return batch.num_targets, batch.num_targets - rows, rows

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return averages(sums, totals.counts[1:])


def averages(sums: dict[str, float], counts: Iterable[int]) -> dict[str, float]:
    """Each sum divided by its count, those of no target left out."""
    return {name: sums[name] / count for name, count in zip(sums, counts, strict=True) if count}


def of_rows(batch: Batch) -> int:
    """The number of targets that the rows have, not an answer of the model's own."""
    if ROW_TARGET not in batch.arrays:
        return batch.num_targets
    return int(batch.arrays[ROW_TARGET].values[batch.labels_BS != IGNORE_INDEX].sum())
