"""Divergences of a student from what is kept of a teacher's distribution, and their gradients.

T targets; K tokens of the teacher's at each, and with the rest of the vocabulary together B = K + 1 parts of it; B = K
where these are all tokens: rows of either head that are none of them then have no part in it. A divergence of the parts
is at most that of the full distributions, and they differ by the teacher's (reverse: the student's) mass of the rest
times the divergence within it (the chain rule of KL).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

SMALLEST = 1e-37  # of a probability whose logarithm is taken


class Divergence(NamedTuple):
    """A divergence [T], and p * dD/dp of each part [T, B], up to a multiple of p."""

    of_T: torch.Tensor
    weighted_TB: torch.Tensor


def divergence(log_q_TB: torch.Tensor, log_p_TB: torch.Tensor, beta: float) -> Divergence:
    """The generalized Jensen-Shannon divergence of a teacher's q and a student's p: Agarwal et al. 2024, eq. 1.

    beta KL(q | m) + (1 - beta) KL(p | m) with m = beta q + (1 - beta) p; at 0 KL(q | p), at 1 KL(p | q).
    """
    q_TB = log_q_TB.exp()
    p_TB = log_p_TB.exp()
    if beta == 0.0:
        return Divergence(_kl(q_TB, log_q_TB, log_p_TB), -q_TB)
    if beta == 1.0:
        return Divergence(_kl(p_TB, log_p_TB, log_q_TB), p_TB * (log_p_TB - log_q_TB))
    log_m_TB = (beta * q_TB + (1 - beta) * p_TB).clamp_min(SMALLEST).log()
    of_q_T = _kl(q_TB, log_q_TB, log_m_TB)
    of_p_T = _kl(p_TB, log_p_TB, log_m_TB)
    return Divergence(beta * of_q_T + (1 - beta) * of_p_T, (1 - beta) * p_TB * (log_p_TB - log_m_TB))


def _kl(p_TB: torch.Tensor, log_p_TB: torch.Tensor, log_q_TB: torch.Tensor) -> torch.Tensor:
    return (p_TB * (log_p_TB - log_q_TB)).sum(-1)


@dataclass(frozen=True)
class Teacher:
    """A teacher's distribution at some targets: its tokens [T, K] and their log-probabilities [T, B], with that of all
    others at the end, unless all are kept. `alpha`: weight of the divergence; `own`: of the targets' nll, [T, 1] where
    it differs; `beta`: see divergence.
    """

    tokens_TK: torch.Tensor
    log_q_TB: torch.Tensor
    alpha: float
    own: float | torch.Tensor
    beta: float

    @property
    def has_rest(self) -> bool:
        return self.log_q_TB.shape[1] > self.tokens_TK.shape[1]

    def at(self, part: slice) -> "Teacher":
        own = self.own
        if isinstance(own, torch.Tensor):
            own = own[part]
        return replace(self, tokens_TK=self.tokens_TK[part], log_q_TB=self.log_q_TB[part], own=own)

    def to_gradient(self, probs_TV: torch.Tensor, log_p_TK: torch.Tensor) -> torch.Tensor:
        """Divergence [T] from a student with these probabilities, which become the gradient in its logits of alpha
        times the divergence and `own` times log of the sum of their exponentials. `log_p_TK`: of the tokens.
        """
        count = self.tokens_TK.shape[1]
        has_other_rows = count < probs_TV.shape[1]
        log_p_TB = log_p_TK
        if has_other_rows and not self.has_rest:
            log_p_TB = log_p_TK.log_softmax(-1)
        if self.has_rest:
            probs_TV.scatter_(1, self.tokens_TK, 0.0)
            rest_T1 = probs_TV.sum(-1, keepdim=True).clamp_min(SMALLEST)
            log_p_TB = torch.cat([log_p_TK, rest_T1.log()], 1)
        found = divergence(self.log_q_TB, log_p_TB, self.beta)
        total_T1 = found.weighted_TB.sum(-1, keepdim=True)
        own = self.own
        p_TB = log_p_TB.exp()
        if self.has_rest:
            share_T1 = found.weighted_TB[:, -1:] / p_TB[:, -1:].clamp_min(SMALLEST)
            probs_TV *= self.alpha * (share_T1 - total_T1) + own
        elif has_other_rows:
            probs_TV *= own
        of_tokens = self.alpha * (found.weighted_TB - p_TB * total_T1)[:, :count] + own * log_p_TK.exp()
        probs_TV.scatter_(1, self.tokens_TK, of_tokens)
        return found.of_T

    def of_logits(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Divergence [T] from a student with these logits, by torch's own operations."""
        log_p_TV = F.log_softmax(logits_TV.float(), -1)
        log_p_TB = log_p_TV.gather(1, self.tokens_TK)
        if self.has_rest:
            others_TV = log_p_TV.scatter(1, self.tokens_TK, float("-inf"))
            log_p_TB = torch.cat([log_p_TB, others_TV.logsumexp(-1, keepdim=True)], 1)
        elif log_p_TB.shape[1] < log_p_TV.shape[1]:
            log_p_TB = log_p_TB.log_softmax(-1)
        return divergence(self.log_q_TB, log_p_TB, self.beta).of_T


def top_log_probs(
    logits_TV: torch.Tensor, count: int, tokens_V: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the likeliest tokens [T, K], log-probabilities [T, B] of theirs and of all others), of logits. `tokens_V`: the
    ones to choose from; they are numbered by their places in it. Where all of them are taken, log-probabilities are
    among them.
    """
    if tokens_V is not None and count >= len(tokens_V):
        return top_log_probs(logits_TV.index_select(1, tokens_V), count)
    log_p_TV = F.log_softmax(logits_TV.float(), -1)
    allowed_TV = log_p_TV
    if tokens_V is not None:
        allowed_TV = log_p_TV.index_select(1, tokens_V)
    log_p_TK, tokens_TK = allowed_TV.topk(min(count, allowed_TV.shape[1]), -1)
    if tokens_TK.shape[1] == logits_TV.shape[1]:
        return tokens_TK, log_p_TK
    own_TK = tokens_TK
    if tokens_V is not None:
        own_TK = tokens_V[tokens_TK]
    rest_T1 = log_p_TV.scatter_(1, own_TK, float("-inf")).logsumexp(-1, keepdim=True)
    return tokens_TK, torch.cat([log_p_TK, rest_T1], 1)
