"""Losses of sampled answers by their advantages: a clipped ratio to the policy that sampled, per token or per answer.

T targets of a microbatch, D answers. A step divides each sum once, by its answers over all microbatches and ranks; the
weight of an answer's tokens is data, see rewards.advantages.
"""

import numpy as np
import torch

from finetune.engine import Batch
from finetune.objectives import Totals
from finetune.rewards.ratios import OfRatios
from finetune.rewards.rollouts import ADVANTAGE, REFERENCE_LOG_PROB, SAMPLED_LOG_PROB, WEIGHT
from finetune.torch_engine.device import to_device
from finetune.torch_engine.forward import ModelForward, Targets, document_sums


def clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """-min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage): Schulman et al. 2017, eq. 7."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def is_clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """True where the clipped term is the smaller one, whose gradient is zero."""
    return ((ratio < 1 - low) & (advantage < 0)) | ((ratio > 1 + high) & (advantage > 0))


def divergence(log_prob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """exp(r) - r - 1 of r = log p_ref - log p: an unbiased, positive estimate of KL(p || p_ref) (Schulman 2020; GRPO,
    eq. 4).
    """
    r = reference - log_prob
    return torch.exp(r) - r - 1


class PerToken(OfRatios):
    """A ratio per token: GRPO, Dr. GRPO and DAPO."""

    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs_T, targets = forward.target_log_probs(batch)
        advantage_T, weight_T = (targets.values(name).to(log_probs_T.dtype) for name in (ADVANTAGE, WEIGHT))
        if SAMPLED_LOG_PROB in targets.arrays:
            sampled_T = targets.values(SAMPLED_LOG_PROB).to(log_probs_T.dtype)
        else:
            sampled_T = log_probs_T.detach()
        ratio_T = self.ratio(log_probs_T - sampled_T, targets, batch)
        loss_T = clipped(ratio_T, advantage_T, self.clip_low, self.clip_high)
        clip_T = is_clipped(ratio_T, advantage_T, self.clip_low, self.clip_high).to(log_probs_T.dtype)
        kl_T = torch.zeros_like(log_probs_T)
        if self.kl_beta:
            kl_T = divergence(log_probs_T, targets.values(REFERENCE_LOG_PROB).to(log_probs_T.dtype))
            kl_T = kl_T * ratio_T  # so that its gradient is the divergence's (DeepSeek-V3.2, 2025, eq. 7)
            loss_T = loss_T + self.kl_beta * kl_T
        return (weight_T * loss_T).sum(), torch.stack([clip_T.sum(), kl_T.sum()]).detach()

    def ratio(self, log_ratio_T: torch.Tensor, targets: Targets, batch: Batch) -> torch.Tensor:
        """[T]: the ratio of each target's policy to the one that sampled it."""
        return log_ratio_T.exp()


class WholeAnswer(PerToken):
    """A ratio per answer, the product of its tokens': RLOO, as TRL has it."""

    def ratio(self, log_ratio_T: torch.Tensor, targets: Targets, batch: Batch) -> torch.Tensor:
        sums_D, counts_D = document_sums(log_ratio_T, targets, batch)
        return self.of_answers(sums_D, counts_D).repeat_interleave(to_device(torch.from_numpy(counts_D), sums_D.device))

    def of_answers(self, sums_D: torch.Tensor, counts_D: np.ndarray) -> torch.Tensor:
        """[D]: an answer's ratio, from the sum of its tokens' log-ratios."""
        return sums_D.exp()


class PerAnswer(WholeAnswer):
    """A ratio per answer, the geometric mean of its tokens': GSPO (Zheng et al. 2025, eq. 7)."""

    def of_answers(self, sums_D: torch.Tensor, counts_D: np.ndarray) -> torch.Tensor:
        return (sums_D / to_device(torch.from_numpy(np.maximum(counts_D, 1)), sums_D.device)).exp()
