"""Losses of sampled answers in MLX, of log-probabilities per target: the formulas of torch_engine/policy.py.

T targets of a microbatch, with those that only fill its shape: every array of `beside` is 0 there; D answers.
"""

import mlx.core as mx
import numpy as np

from finetune.engine import Batch
from finetune.mlx_engine.preference import Beside, counts
from finetune.objectives import Totals
from finetune.rewards.ratios import OfRatios
from finetune.rewards.rollouts import ADVANTAGE, REFERENCE_LOG_PROB, SAMPLED_LOG_PROB, WEIGHT


class PerToken(OfRatios):
    """A ratio per token: GRPO, Dr. GRPO and DAPO."""

    of_targets = (ADVANTAGE, WEIGHT, SAMPLED_LOG_PROB, REFERENCE_LOG_PROB)
    of_logits = ()

    def beside(self, batch: Batch, totals: Totals) -> dict[str, np.ndarray]:
        return {}

    def loss_of_targets(self, log_probs_T: mx.array, beside: Beside) -> tuple[mx.array, mx.array]:
        advantage_T = beside[ADVANTAGE]
        sampled_T = beside.get(SAMPLED_LOG_PROB, mx.stop_gradient(log_probs_T))
        ratio_T = self.ratio(log_probs_T - sampled_T, beside)
        within_T = mx.clip(ratio_T, 1 - self.clip_low, 1 + self.clip_high)
        loss_T = -mx.minimum(ratio_T * advantage_T, within_T * advantage_T)
        below_T = (ratio_T < 1 - self.clip_low) & (advantage_T < 0)
        above_T = (ratio_T > 1 + self.clip_high) & (advantage_T > 0)
        kl_T = mx.zeros_like(log_probs_T)
        if self.kl_beta:
            r_T = beside[REFERENCE_LOG_PROB] - log_probs_T
            kl_T = (mx.exp(r_T) - r_T - 1) * ratio_T
            loss_T = loss_T + self.kl_beta * kl_T
        observed = mx.stack([(below_T | above_T).astype(mx.float32).sum(), kl_T.sum()])
        return (beside[WEIGHT] * loss_T).sum(), mx.stop_gradient(observed)

    def ratio(self, log_ratio_T: mx.array, beside: Beside) -> mx.array:
        """[T]: the ratio of each target's policy to the one that sampled it."""
        return mx.exp(log_ratio_T)


class WholeAnswer(PerToken):
    """A ratio per answer, the product of its tokens': RLOO, as TRL has it."""

    def beside(self, batch: Batch, totals: Totals) -> dict[str, np.ndarray]:
        return {"targets": counts(batch)}

    def ratio(self, log_ratio_T: mx.array, beside: Beside) -> mx.array:
        sums_D = mx.zeros(beside["targets"].shape).at[beside["documents"]].add(log_ratio_T)
        return self.of_answers(sums_D, beside["targets"])[beside["documents"]]

    def of_answers(self, sums_D: mx.array, counts_D: mx.array) -> mx.array:
        """[D]: an answer's ratio, from the sum of its tokens' log-ratios."""
        return mx.exp(sums_D)


class PerAnswer(WholeAnswer):
    """A ratio per answer, the geometric mean of its tokens': GSPO (Zheng et al. 2025, eq. 7)."""

    def of_answers(self, sums_D: mx.array, counts_D: mx.array) -> mx.array:
        return mx.exp(sums_D / mx.maximum(counts_D, 1))
