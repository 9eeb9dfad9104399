"""Objectives of a student that learns what a teacher gave at each target, beside the target itself."""

from dataclasses import dataclass, field

import torch

from finetune.engine import Batch
from finetune.objectives import TEACHER_LOG_PROBS, TEACHER_TOKENS, NextToken, Totals
from finetune.torch_engine.divergence import Teacher
from finetune.torch_engine.forward import ModelForward, Targets


@dataclass(frozen=True)
class Distilled(NextToken):
    """alpha times the divergence from the teacher and 1 - alpha times the nll of each target; of an evaluation, which
    has no teacher, the nll.
    """

    alpha: float
    beta: float
    sums: tuple[str, ...] = field(default=("loss/divergence", "loss/nll"), init=False)

    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        if not forward.model.training:
            nll = forward.nll(batch)
            return nll, torch.stack([torch.zeros_like(nll), nll]).detach()
        loss, log_probs_T = forward.distilled(batch, self._teacher)
        nll = -log_probs_T.sum()
        divergence = (loss.detach() - (1 - self.alpha) * nll) / self.alpha
        return loss, torch.stack([divergence, nll])

    def _teacher(self, targets: Targets) -> Teacher:
        tokens_TK = targets.values(TEACHER_TOKENS).long()
        return Teacher(tokens_TK, targets.values(TEACHER_LOG_PROBS).float(), self.alpha, self.beta)

    def sums_of(self, observed: torch.Tensor) -> dict[str, float]:
        return dict(zip(self.sums, observed.double().tolist(), strict=True))

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return {name: sums[name] / max(1, totals.count) for name in self.sums}


class ForwardKL(Distilled):
    def __init__(self, alpha: float):
        super().__init__(alpha, 0.0)


class ReverseKL(Distilled):
    def __init__(self, alpha: float):
        super().__init__(alpha, 1.0)


class GeneralizedJSD(Distilled):
    """The divergence between both by `beta`, see divergence."""
