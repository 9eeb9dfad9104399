"""Objectives of sampled answers, as far as they need no engine's arrays: what a step counts, sums and reports."""

from dataclasses import dataclass
from typing import Any

from finetune.engine import Batch
from finetune.objectives import LossOf, NextToken, Totals


@dataclass(frozen=True)
class OfRatios(NextToken):
    """A clipped ratio to the policy that sampled, and the divergence from the model before training with `kl_beta`."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_beta: float = 0.0

    sums = ("clip_ratio", "kl")
    num_counts = 2
    counts_rows = True
    loss_of = LossOf.TARGETS

    def count(self, batch: Batch) -> tuple[int, ...]:
        """(answers, their tokens)."""
        return len(batch.rows), batch.num_targets

    def sums_of(self, observed: Any) -> dict[str, float]:
        return dict(zip(self.sums, observed.tolist(), strict=True))

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        """Averages over the tokens of a step."""
        tokens = max(1, totals.counts[1])
        found = {"clip_ratio": sums["clip_ratio"] / tokens}
        if self.kl_beta:
            found["kl"] = sums["kl"] / tokens
        return found
