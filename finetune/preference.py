"""Objectives of preferences, as far as they need no engine's arrays: what a step counts, sums and reports, and the
reference.

Nothing here is averaged: a step divides each sum once, by its pairs or documents over all microbatches and ranks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.arrays import Named, Per
from finetune.engine import Batch, document_targets
from finetune.objectives import LossOf, NextToken, Totals

REFERENCE = "reference"  # the array of documents' log-probabilities under the reference


@dataclass(frozen=True)
class OfPairs(NextToken):
    """Microbatches of pairs: document 2i of a dataset is pair i's chosen answer, 2i + 1 its rejected one."""

    beta: float = 0.1

    sums = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    counts_rows = True
    loss_of = LossOf.DOCUMENTS

    def count(self, batch: Batch) -> tuple[int, ...]:
        return (len(batch.rows) // 2,)

    def sums_of(self, observed: Any) -> dict[str, float]:
        """Sums over the pairs, named as TRL names the averages. `observed`: the rewards of both answers [2, P]."""
        chosen_P, rejected_P = observed
        margins_P = chosen_P - rejected_P
        return {
            "rewards/chosen": chosen_P.sum().item(),
            "rewards/rejected": rejected_P.sum().item(),
            "rewards/margins": margins_P.sum().item(),
            "rewards/accuracies": float((margins_P > 0).sum().item()),
        }

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return {name: total / totals.count for name, total in sums.items()}


class WithReference(OfPairs):
    """Pairs whose loss compares with the model before training."""

    def prepare(self, passes: Any, microbatches: list[Batch]) -> tuple[list[Batch], dict[str, float]]:
        return with_reference(passes, microbatches), {}


class WithTokensOfChosen(OfPairs):
    """Pairs of which the chosen answers' tokens are learned beside."""

    num_counts = 2

    def count(self, batch: Batch) -> tuple[int, ...]:
        """(pairs, target tokens of chosen answers)."""
        return len(batch.rows) // 2, int(document_targets(batch)[: len(batch.rows) : 2].sum())


@dataclass(frozen=True)
class OfLabels(NextToken):
    """Microbatches of documents with labels.

    The reference point is of the full step, over accumulation and ranks: TRL's, which takes each microbatch's own,
    where a step is one batch.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    sums = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "chosen", "rejected")
    counts_rows = True
    loss_of = LossOf.DOCUMENTS

    def prepare(self, passes: Any, microbatches: list[Batch]) -> tuple[list[Batch], dict[str, float]]:
        """Microbatches with the reference, and "kl": the mean log-ratio of mismatched documents, 0 if negative."""
        mismatched = with_reference(passes, [b for b in microbatches if b.mismatched])
        log_ratios = passes.log_ratios(mismatched)
        total, documents = passes.sum([sum((r.sum().item() for r in log_ratios), 0.0), sum(map(len, log_ratios))])
        learned = with_reference(passes, [b for b in microbatches if not b.mismatched])
        return learned, {"kl": max(0.0, total / max(1.0, documents))}

    def count(self, batch: Batch) -> tuple[int, ...]:
        return (len(batch.rows),)

    def sums_of(self, observed: Any) -> dict[str, float]:
        """Sums over desirable and over other documents, named as TRL names the averages, and their numbers. `observed`
        [3, D]: rewards, labels, and whether the reward is on the label's side of the reference point.
        """
        rewards_D, desirable_D, right_D = observed
        desirable_D = desirable_D > 0
        return {
            "rewards/chosen": rewards_D[desirable_D].sum().item(),
            "rewards/rejected": rewards_D[~desirable_D].sum().item(),
            "rewards/accuracies": right_D.sum().item(),
            "chosen": float(desirable_D.sum().item()),
            "rejected": float((~desirable_D).sum().item()),
        }

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        """Averages named as TRL's, and the share of rewards on the right side; no entry for kinds of answers absent
        from the step.
        """
        rewards = {f"rewards/{k}": sums[f"rewards/{k}"] / sums[k] for k in ("chosen", "rejected") if sums[k]}
        if len(rewards) == 2:
            rewards["rewards/margins"] = rewards["rewards/chosen"] - rewards["rewards/rejected"]
        documents = sums["chosen"] + sums["rejected"]
        right = {}
        if documents:
            right = {"rewards/accuracies": sums["rewards/accuracies"] / documents}
        return {**rewards, **right, **totals.statistics}


def with_reference(passes: Any, microbatches: list[Batch]) -> list[Batch]:
    """This rank's microbatches with the reference's log-probabilities, computed where they are not known. Collective.

    In forwards of their own, before a step's: nothing is kept for backward meanwhile.
    """
    filled = passes.filled(microbatches)
    unknown = [i for i, batch in enumerate(filled) if REFERENCE not in batch.arrays]
    log_probs = passes.log_probs_before_training([filled[i] for i in unknown])
    for i, log_probs_D in zip(unknown, log_probs, strict=False):
        filled[i] = filled[i].with_array(REFERENCE, Named(log_probs_D, Per.DOCUMENT, is_data=False))
    if len(log_probs) == len(unknown):
        return filled
    return []


def labels_of(batch: Batch) -> np.ndarray:
    """True of desirable documents [D]; of an empty batch none."""
    if batch.rows:
        return np.array(batch.arrays["desirable"].values)
    return np.zeros(0, bool)


def check_pairs(batch: Batch) -> None:
    """Asserts that chosen and rejected documents alternate, see collate."""
    rows = np.array(batch.rows, np.int64)
    assert np.array_equal(rows[1::2], rows[::2] + 1) and not (rows[::2] % 2).any(), f"not pairs: {rows}"
