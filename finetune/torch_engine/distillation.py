"""Objectives of a student that learns what a teacher gave at each target, beside the target itself."""

import torch

from finetune.distillation import OfSampledTokens, OfTeacher
from finetune.engine import Batch
from finetune.objectives import ROW_TARGET, TEACHER_LOG_PROB, TEACHER_LOG_PROBS, TEACHER_TOKENS, LossOf, Totals
from finetune.torch_engine.divergence import Teacher
from finetune.torch_engine.forward import ModelForward, Targets


class Distilled(OfTeacher):
    """Students of a teacher whose distribution is known at each target."""

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


class ForwardKL(Distilled):
    def __init__(self, alpha: float):
        super().__init__(alpha, 0.0)


class ReverseKL(Distilled):
    def __init__(self, alpha: float):
        super().__init__(alpha, 1.0)


class GeneralizedJSD(Distilled):
    """The divergence between both by `beta`, see divergence."""


class SampledKL(OfSampledTokens, Distilled):
    """KL(student | teacher) of answers that the student sampled, estimated by each sampled token: log p - log q, whose
    negative is the token's advantage (REINFORCE). The expected gradient at a target is that of the reverse KL there.
    """

    loss_of = LossOf.TARGETS

    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        if not forward.model.training:
            return super().loss(forward, batch, totals)
        log_p_T, targets = forward.target_log_probs(batch)
        row_T = targets.values(ROW_TARGET).to(log_p_T.dtype)
        found_T = sampled_kl(log_p_T, targets.values(TEACHER_LOG_PROB).squeeze(1).to(log_p_T.dtype))
        divergence = ((1 - row_T) * found_T).sum()
        nll = -(row_T * log_p_T).sum()
        loss = self.alpha * divergence + (1 - self.alpha) * nll
        return loss, torch.stack([divergence, nll]).detach()


def sampled_kl(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """[T]: log p - log q of sampled tokens, with the gradient of log p times it."""
    own_T = log_p_T.detach()
    return (own_T - log_q_T) * (1 + log_p_T - own_T)
