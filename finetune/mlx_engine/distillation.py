"""Losses of a student beside a teacher in MLX, from logits: the formulas of torch_engine/distillation.py.

T targets of a microbatch, with those that only fill its shape: every array of `beside` is 0 there. K tokens of the
teacher's at each, and with the rest of the vocabulary together B = K + 1 parts of it; B = K if these are all tokens.
"""

import mlx.core as mx
import numpy as np

from finetune.distillation import OfSampledTokens, OfTeacher
from finetune.engine import Batch
from finetune.mlx_engine.head import log_sum_exp, sum_of_rows
from finetune.mlx_engine.preference import Beside
from finetune.objectives import ROW_TARGET, TEACHER_LOG_PROB, TEACHER_LOG_PROBS, TEACHER_TOKENS, LossOf, Totals

SMALLEST = 1e-37  # of a probability whose logarithm is taken


class Distilled(OfTeacher):
    """Students of a teacher whose distribution is known at each target."""

    loss_of = LossOf.TARGETS
    of_targets: tuple[str, ...] = (TEACHER_TOKENS, TEACHER_LOG_PROBS, ROW_TARGET)
    of_logits: tuple[str, ...] = (TEACHER_TOKENS, TEACHER_LOG_PROBS)

    def beside(self, batch: Batch, totals: Totals) -> dict[str, np.ndarray]:
        return {}

    def of_chunk(self, logits_TV: mx.array, labels_T1: mx.array, tokens_TK: mx.array, log_q_TB: mx.array) -> mx.array:
        """[T, 2]: log p(label) of each position, and the divergence there."""
        log_p_TV = logits_TV - log_sum_exp(logits_TV)
        log_p_TB = mx.take_along_axis(log_p_TV, tokens_TK, axis=-1)
        if log_q_TB.shape[1] > tokens_TK.shape[1]:
            others_TV = mx.put_along_axis(mx.ones(log_p_TV.shape), tokens_TK, mx.array(0.0), axis=-1)
            rest_T1 = mx.maximum(sum_of_rows(mx.exp(log_p_TV) * others_TV), SMALLEST)
            log_p_TB = mx.concatenate([log_p_TB, mx.log(rest_T1)], axis=-1)
        elif log_p_TB.shape[1] < log_p_TV.shape[1]:
            log_p_TB = log_p_TB - log_sum_exp(log_p_TB)
        log_p_T1 = mx.take_along_axis(log_p_TV, labels_T1, axis=-1)
        divergence_T = divergence(log_q_TB, log_p_TB, self.beta)
        return mx.concatenate([log_p_T1, divergence_T[:, None]], axis=-1)

    def loss_of_targets(self, found_T2: mx.array, beside: Beside) -> tuple[mx.array, mx.array]:
        """`found_T2`: of `of_chunk`, 0 where a target only fills the shape."""
        log_p_T = found_T2[:, 0]
        if ROW_TARGET in beside:
            log_p_T = log_p_T * beside[ROW_TARGET]
        nll = -log_p_T.sum()
        apart = found_T2[:, 1].sum()
        return self.alpha * apart + (1 - self.alpha) * nll, mx.stop_gradient(mx.stack([apart, nll]))


class ForwardKL(Distilled):
    def __init__(self, alpha: float):
        super().__init__(alpha, 0.0)


class ReverseKL(Distilled):
    def __init__(self, alpha: float):
        super().__init__(alpha, 1.0)


class GeneralizedJSD(Distilled):
    """The divergence between both by `beta`, see divergence."""


class SampledKL(OfSampledTokens, Distilled):
    """The reverse KL of answers that the student sampled, by the sampled tokens alone (REINFORCE)."""

    of_targets = (TEACHER_LOG_PROB, ROW_TARGET)
    of_logits = ()

    def loss_of_targets(self, log_p_T: mx.array, beside: Beside) -> tuple[mx.array, mx.array]:
        row_T = beside[ROW_TARGET]
        own_T = mx.stop_gradient(log_p_T)
        found_T = (own_T - beside[TEACHER_LOG_PROB].squeeze(1)) * (1 + log_p_T - own_T)
        apart = ((1 - row_T) * found_T).sum()
        nll = -(row_T * log_p_T).sum()
        loss = self.alpha * apart + (1 - self.alpha) * nll
        return loss, mx.stop_gradient(mx.stack([apart, nll]))


def divergence(log_q_TB: mx.array, log_p_TB: mx.array, beta: float) -> mx.array:
    """[T]: the generalized Jensen-Shannon divergence of a teacher's q and a student's p, see torch's."""
    q_TB = mx.exp(log_q_TB)
    p_TB = mx.exp(log_p_TB)
    if beta == 0.0:
        return (q_TB * (log_q_TB - log_p_TB)).sum(axis=-1)
    if beta == 1.0:
        return (p_TB * (log_p_TB - log_q_TB)).sum(axis=-1)
    log_m_TB = mx.log(mx.maximum(beta * q_TB + (1 - beta) * p_TB, SMALLEST))
    of_q_T = (q_TB * (log_q_TB - log_m_TB)).sum(axis=-1)
    of_p_T = (p_TB * (log_p_TB - log_m_TB)).sum(axis=-1)
    return beta * of_q_T + (1 - beta) * of_p_T
