"""Objectives of heads that read whole documents. Nothing here is averaged, see finetune.objectives."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from finetune.data.tokens.tokenize import LABEL
from finetune.engine import Batch
from finetune.objectives import LossOf, NextToken, Totals
from finetune.preference import OfPairs
from finetune.torch_engine.device import to_device
from finetune.torch_engine.forward import ModelForward
from finetune.torch_engine.preference import Pairs, pair_indices


class OfDocuments(NextToken):
    """A loss of what a head gives of each document, summed over them."""

    counts_rows = True
    loss_of = LossOf.DOCUMENTS


@dataclass(frozen=True)
class Classes(OfDocuments):
    """The cross-entropy of each document's label."""

    num_labels: int

    sums = ("right",)

    def count(self, batch: Batch) -> tuple[int, ...]:
        return (len(batch.rows),)

    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        logits_DC = forward.document_outputs(batch)
        if not batch.rows:  # a microbatch without rows, which ranks share
            return logits_DC.sum() * 0.0, logits_DC.new_zeros(0)
        labels_D = to_device(torch.as_tensor(batch.arrays[LABEL].values), logits_DC.device)
        right_D = logits_DC.detach().argmax(-1) == labels_D
        return F.cross_entropy(logits_DC, labels_D, reduction="sum"), right_D.to(logits_DC.dtype)

    def sums_of(self, observed: Any) -> dict[str, float]:
        return {"right": observed.sum().item()}

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return {"accuracy": sums["right"] / totals.count}


def bradley_terry(chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> Pairs:
    """-log sigmoid(score of chosen - score of rejected): Bradley and Terry 1952, as Ouyang et al. 2022, eq. 1."""
    return Pairs(-F.logsigmoid(chosen_P - rejected_P), chosen_P.detach(), rejected_P.detach())


class Scores(OfPairs):
    """The score of the chosen answer exceeds that of the rejected one."""

    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        scores_D = forward.document_outputs(batch)[:, 0]
        if not batch.rows:
            return scores_D.sum() * 0.0, scores_D.new_zeros(2, 0)
        chosen, rejected = pair_indices(batch, forward.device)
        pairs = bradley_terry(scores_D[chosen], scores_D[rejected])
        return pairs.loss_P.sum(), pairs.observed()
