"""Objectives of a student that learns what a teacher gave at each target, beside the target itself."""

from dataclasses import dataclass, field

import torch

from finetune.engine import IGNORE_INDEX, Batch
from finetune.objectives import ROW_TARGET, TEACHER_LOG_PROBS, TEACHER_TOKENS, NextToken, Totals
from finetune.torch_engine.divergence import Teacher
from finetune.torch_engine.forward import ModelForward, Targets


@dataclass(frozen=True)
class Distilled(NextToken):
    """alpha times the divergence from the teacher and 1 - alpha times the nll of each target; of the model's own
    answers without the nll; of an evaluation, which has no teacher, the nll.
    """

    alpha: float
    beta: float
    sums: tuple[str, ...] = field(default=("loss/divergence", "loss/nll"), init=False)
    num_counts = 2

    def count(self, batch: Batch) -> tuple[int, ...]:
        """(targets, those of them that the rows have)."""
        targets = batch.num_targets
        if ROW_TARGET not in batch.arrays:
            return targets, targets
        return targets, int(batch.arrays[ROW_TARGET].values[batch.labels_BS != IGNORE_INDEX].sum())

    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        if not forward.model.training:
            nll = forward.nll(batch)
            return nll, torch.stack([torch.zeros_like(nll), nll]).detach()
        loss, log_probs_T, targets = forward.distilled(batch, self._teacher)
        if ROW_TARGET in targets.arrays:
            log_probs_T = log_probs_T * targets.values(ROW_TARGET)
        nll = -log_probs_T.sum()
        divergence = (loss.detach() - (1 - self.alpha) * nll) / self.alpha
        return loss, torch.stack([divergence, nll])

    def _teacher(self, targets: Targets) -> Teacher:
        tokens_TK = targets.values(TEACHER_TOKENS).long()
        own: float | torch.Tensor = 1 - self.alpha
        if ROW_TARGET in targets.arrays:
            own = own * targets.values(ROW_TARGET).float()[:, None]
        return Teacher(tokens_TK, targets.values(TEACHER_LOG_PROBS).float(), self.alpha, own, self.beta)

    def sums_of(self, observed: torch.Tensor) -> dict[str, float]:
        return dict(zip(self.sums, observed.double().tolist(), strict=True))

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return {name: sums[name] / count for name, count in zip(self.sums, totals.counts, strict=True) if count}


class ForwardKL(Distilled):
    def __init__(self, alpha: float):
        super().__init__(alpha, 0.0)


class ReverseKL(Distilled):
    def __init__(self, alpha: float):
        super().__init__(alpha, 1.0)


class GeneralizedJSD(Distilled):
    """The divergence between both by `beta`, see divergence."""
