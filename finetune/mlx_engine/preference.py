"""Losses of preferences in MLX, of summed log-probabilities per document: the formulas of torch_engine/preference.py.

P pairs of a chosen and a rejected answer, which alternate; D documents. `beside`: what a microbatch has beside its
tokens, arrays by name, so that a compiled step is the same for all of them.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from finetune.engine import Batch, document_targets
from finetune.objectives import Totals
from finetune.preference import REFERENCE, OfLabels, OfPairs, WithReference, WithTokensOfChosen, check_pairs, labels_of

Beside = dict[str, mx.array]


class DPO(WithReference):
    """-log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected)): Rafailov et al. 2023, eq. 7."""

    def beside(self, batch: Batch, totals: Totals) -> dict[str, np.ndarray]:
        check_pairs(batch)
        return {REFERENCE: reference(batch)}

    def loss_of_documents(self, log_probs_D: mx.array, beside: Beside) -> tuple[mx.array, mx.array]:
        return of_rewards(self.beta * (log_probs_D - beside[REFERENCE]))


class ORPO(WithTokensOfChosen):
    """beta * -log sigmoid(log odds ratio) + the chosen answers' nll: Hong et al. 2024, eq. 6 and 7."""

    def beside(self, batch: Batch, totals: Totals) -> dict[str, np.ndarray]:
        check_pairs(batch)
        # The step divides by pairs; times pairs per token, the nll is divided by its tokens.
        share = np.array(totals.counts[0] / max(1, totals.counts[1]), np.float32)
        return {"targets": counts(batch), "pairs_per_token": share}

    def loss_of_documents(self, log_probs_D: mx.array, beside: Beside) -> tuple[mx.array, mx.array]:
        means_D = log_probs_D / beside["targets"]
        odds_D = means_D - _log_of_complement(means_D)
        loss = -self.beta * nn.log_sigmoid(odds_D[::2] - odds_D[1::2]).sum()
        rewards_D = self.beta * means_D
        return loss - beside["pairs_per_token"] * log_probs_D[::2].sum(), observed_pairs(rewards_D)


@dataclass(frozen=True)
class SimPO(OfPairs):
    """-log sigmoid(beta * (mean log p of chosen - mean log p of rejected) - gamma): Meng et al. 2024, eq. 6."""

    beta: float = 2.0
    gamma: float = 0.5

    def beside(self, batch: Batch, totals: Totals) -> dict[str, np.ndarray]:
        check_pairs(batch)
        return {"targets": counts(batch)}

    def loss_of_documents(self, log_probs_D: mx.array, beside: Beside) -> tuple[mx.array, mx.array]:
        return of_rewards(self.beta * log_probs_D / beside["targets"], self.gamma)


class KTO(OfLabels):
    """weight * (1 - sigmoid(+-(beta * (log-ratio - reference point)))): Ethayarajh et al. 2024, section 4.2."""

    def beside(self, batch: Batch, totals: Totals) -> dict[str, np.ndarray]:
        desirable_D = labels_of(batch)
        return {
            REFERENCE: reference(batch),
            "sign": np.where(desirable_D, 1.0, -1.0).astype(np.float32),
            "weight": np.where(desirable_D, self.desirable_weight, self.undesirable_weight).astype(np.float32),
            "kl": np.array(totals.statistics["kl"], np.float32),
        }

    def loss_of_documents(self, log_probs_D: mx.array, beside: Beside) -> tuple[mx.array, mx.array]:
        rewards_D = self.beta * (log_probs_D - beside[REFERENCE])
        signed_D = beside["sign"] * (rewards_D - self.beta * beside["kl"])
        loss = (beside["weight"] * mx.sigmoid(-signed_D)).sum()
        observed = mx.stack([rewards_D, *((x > 0).astype(mx.float32) for x in (beside["sign"], signed_D))])
        return loss, mx.stop_gradient(observed)


def of_rewards(rewards_D: mx.array, margin: float = 0.0) -> tuple[mx.array, mx.array]:
    """(-log sigmoid of the pairs' differences less a margin, summed; the rewards that were observed)."""
    return -nn.log_sigmoid(rewards_D[::2] - rewards_D[1::2] - margin).sum(), observed_pairs(rewards_D)


def observed_pairs(rewards_D: mx.array) -> mx.array:
    """Argument of OfPairs.sums_of: [2, P]."""
    return mx.stop_gradient(mx.stack([rewards_D[::2], rewards_D[1::2]]))


def counts(batch: Batch) -> np.ndarray:
    return document_targets(batch).astype(np.float32)


def reference(batch: Batch) -> np.ndarray:
    """Log-probabilities [D] under the model before training, which the batch holds."""
    return np.asarray(batch.arrays[REFERENCE].values, np.float32)


def _log_of_complement(log_p: mx.array) -> mx.array:
    """log(1 - p), without cancellation at either end; finite where p rounds to 1."""
    log_p = mx.minimum(log_p, -float(np.finfo(np.float32).eps))
    # Each branch gets values that it is finite for, or its gradient would be nan where the other is taken.
    near_one = log_p > -0.6931
    large = mx.where(near_one, log_p, -0.5)
    small = mx.where(near_one, -1.0, log_p)
    return mx.where(near_one, mx.log(-mx.expm1(large)), mx.log1p(-mx.exp(small)))
