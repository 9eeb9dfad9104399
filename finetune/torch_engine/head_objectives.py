"""Objectives of heads that read whole documents. Nothing here is averaged, see finetune.objectives."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from finetune.arrays import Named, Per
from finetune.data.tokens.tokenize import LABEL
from finetune.engine import Batch
from finetune.objectives import LossOf, NextToken, Totals
from finetune.parts.heads import COSINE_SCALE
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


GRADIENTS = "vector_gradients"  # arrays of documents: the loss's gradient by each vector
ROW_LOSSES = "row_losses"  # and the loss of the row that it begins
FOUND = "found"  # and whether that row's positive is the nearest


class Ranked(NamedTuple):
    """The loss of each row, differentiable, and whether its positive is the nearest of all."""

    loss_R: torch.Tensor
    found_R: torch.Tensor


def ranking_loss(vectors_REH: torch.Tensor) -> Ranked:
    """Cross-entropy of each row's positive among the positives and negatives of all rows, by cosines times
    COSINE_SCALE: MultipleNegativesRankingLoss of sentence-transformers. `vectors_REH`: of each row the anchor, the
    positive, and if there is one the negative.
    """
    unit_REH = F.normalize(vectors_REH, dim=-1)
    candidates_CH = unit_REH[:, 1:].transpose(0, 1).flatten(0, 1)
    scores_RC = COSINE_SCALE * unit_REH[:, 0] @ candidates_CH.t()
    own_R = torch.arange(len(scores_RC), device=scores_RC.device)
    return Ranked(F.cross_entropy(scores_RC, own_R, reduction="none"), scores_RC.detach().argmax(-1) == own_R)


@dataclass(frozen=True)
class Vectors(OfDocuments):
    """The positive of each row is nearer to its anchor than the texts of all other rows of the step.

    All vectors of the step are computed without gradients first; a microbatch then learns by the loss's gradient by its
    own vectors, so that the loss is the same however a step is cut (Gao et al. 2021, GradCache).
    """

    hard_negatives: str

    sums = ("found",)

    @property
    def documents(self) -> int:
        return 3 if self.hard_negatives == "true" else 2

    def prepare(self, passes: Any, microbatches: list[Batch]) -> tuple[list[Batch], dict[str, float]]:
        """The microbatches with the gradient of the full step's loss by each of their vectors. Collective."""
        filled = passes.filled(microbatches)
        found = passes.map(_outputs, filled)
        real = [outputs_DH for outputs_DH, batch in zip(found, filled, strict=False) if batch.rows]
        sizes = [len(outputs_DH) for outputs_DH in real]
        mine = torch.cat(real) if real else found[0][:0]
        vectors_NH, first = passes.of_all_ranks(mine)
        vectors_NH.requires_grad_(True)
        with torch.enable_grad():
            ranked = ranking_loss(vectors_NH.unflatten(0, (-1, self.documents)))
            (gradients_NH,) = torch.autograd.grad(ranked.loss_R.sum(), vectors_NH)
        own = slice(first, first + sum(sizes))
        arrays = {
            GRADIENTS: gradients_NH,
            ROW_LOSSES: ranked.loss_R.detach().repeat_interleave(self.documents),
            FOUND: ranked.found_R.to(gradients_NH.dtype).repeat_interleave(self.documents),
        }
        parts = {name: iter(values[own].split(sizes)) for name, values in arrays.items()}
        learned = []
        for batch in filled:
            if batch.rows:
                for name, values in parts.items():
                    batch = batch.with_array(name, Named(next(values), Per.DOCUMENT, is_data=False))
            learned.append(batch)
        return learned, {}

    def count(self, batch: Batch) -> tuple[int, ...]:
        return (len(batch.rows) // self.documents,)

    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        vectors_DH = forward.document_outputs(batch)
        if not batch.rows:
            return vectors_DH.sum() * 0.0, vectors_DH.new_zeros(0)
        learned = (vectors_DH * batch.arrays[GRADIENTS].values).sum()
        losses_R = batch.arrays[ROW_LOSSES].values[:: self.documents]
        return learned - learned.detach() + losses_R.sum(), batch.arrays[FOUND].values[:: self.documents]

    def sums_of(self, observed: Any) -> dict[str, float]:
        return {"found": observed.sum().item()}

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return {"recall_at_1": sums["found"] / totals.count}


def _outputs(forward: ModelForward, batch: Batch) -> torch.Tensor:
    return forward.document_outputs(batch)
