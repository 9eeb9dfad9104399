"""Losses of preference training, from summed log-probabilities per document, and what a step minimizes.

P pairs of a chosen and a rejected answer to one prompt, D documents with a label. Nothing here is averaged: a step
divides each sum once, by its pairs or documents over all microbatches and ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from finetune.engine import Batch
from finetune.torch_engine.forward import document_targets
from finetune.torch_engine.lora.adapters import adapters_off


class Pairs(NamedTuple):
    """A loss per pair, differentiable, and the detached rewards of both answers."""

    loss_P: torch.Tensor
    chosen_rewards_P: torch.Tensor
    rejected_rewards_P: torch.Tensor

    def metrics(self) -> dict[str, float]:
        """Sums over the pairs, named as TRL names the averages."""
        margins_P = self.chosen_rewards_P - self.rejected_rewards_P
        return {
            "rewards/chosen": self.chosen_rewards_P.double().sum().item(),
            "rewards/rejected": self.rejected_rewards_P.double().sum().item(),
            "rewards/margins": margins_P.double().sum().item(),
            "rewards/accuracies": float((margins_P > 0).sum().item()),
        }


def dpo(chosen_P, rejected_P, ref_chosen_P, ref_rejected_P, beta: float) -> Pairs:
    """-log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected)): Rafailov et al. 2023, eq. 7.

    A log-ratio is log p - log p of the reference, of a full answer.
    """
    chosen_P, rejected_P = beta * (chosen_P - ref_chosen_P), beta * (rejected_P - ref_rejected_P)
    return Pairs(-F.logsigmoid(chosen_P - rejected_P), chosen_P.detach(), rejected_P.detach())


def orpo(chosen_P, rejected_P, num_chosen_P, num_rejected_P, beta: float) -> Pairs:
    """beta * -log sigmoid(log odds ratio of chosen to rejected): Hong et al. 2024, eq. 7, whose lambda is `beta`.

    odds = p / (1 - p), p the geometric mean over an answer's tokens, of which there are `num_*_P`. The nll of the
    chosen answers, eq. 6, is the caller's to add: it is divided by target tokens, not by pairs.
    """
    chosen_P, rejected_P = chosen_P / num_chosen_P, rejected_P / num_rejected_P
    log_odds_P = (chosen_P - _log_of_complement(chosen_P)) - (rejected_P - _log_of_complement(rejected_P))
    return Pairs(-beta * F.logsigmoid(log_odds_P), beta * chosen_P.detach(), beta * rejected_P.detach())


def _log_of_complement(log_p):
    """log(1 - p), without cancellation at either end; finite where p rounds to 1."""
    log_p = log_p.clamp_max(-torch.finfo(log_p.dtype).eps)
    # Each branch gets values that it is finite for, or its gradient would be nan where the other is taken.
    near_one = log_p > -0.6931
    large, small = torch.where(near_one, log_p, -0.5), torch.where(near_one, -1.0, log_p)
    return torch.where(near_one, torch.log(-torch.expm1(large)), torch.log1p(-torch.exp(small)))


def kl_reference_point(log_probs_D, ref_D) -> torch.Tensor:
    """max(0, mean log-ratio), without gradient: Ethayarajh et al. 2024, section 4.1.

    Of documents that pair each prompt of a step with another's answer.
    """
    return (log_probs_D - ref_D).detach().mean().clamp_min(0)


class Labelled(NamedTuple):
    """A loss per document, differentiable, and its detached reward."""

    loss_D: torch.Tensor
    rewards_D: torch.Tensor


def kto(log_probs_D, ref_D, desirable_D, reference_point, beta, desirable_weight, undesirable_weight) -> Labelled:
    """weight * (1 - sigmoid(+-(beta * (log-ratio - reference point)))): Ethayarajh et al. 2024, section 4.2.

    + for desirable documents, - for the others, each with its weight.
    """
    rewards_D = beta * (log_probs_D - ref_D)
    distance_D = rewards_D - beta * reference_point
    sign_D = torch.where(desirable_D, 1.0, -1.0).to(distance_D.dtype)
    weight_D = torch.where(desirable_D, desirable_weight, undesirable_weight).to(distance_D.dtype)
    return Labelled(weight_D * torch.sigmoid(-sign_D * distance_D), rewards_D.detach())


# ------ objectives of a step


class NextToken:
    """The nll of every target token."""

    metrics = ()

    def count(self, batch: Batch) -> int:
        """What a step's loss is divided by, summed over its microbatches and ranks."""
        return batch.num_targets

    def count_nll_targets(self, batch: Batch) -> int:
        """Target tokens of a term that is divided by their number instead."""
        return 0

    def loss(self, forward, batch: Batch, nll_weight: float) -> tuple[torch.Tensor, dict]:
        """(summed loss of a microbatch, differentiable; sums of metrics)."""
        return forward.nll(batch), {}


@dataclass(frozen=True)
class PairObjective:
    """DPO or ORPO on microbatches of pairs: document 2i of a dataset is pair i's chosen answer, 2i + 1 its rejected."""

    name: str  # dpo or orpo
    beta: float = 0.1

    metrics = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def count(self, batch: Batch) -> int:
        return len(batch.rows) // 2

    def count_nll_targets(self, batch: Batch) -> int:
        return int(document_targets(batch)[pair_indices(batch)[0]].sum()) if self.name == "orpo" else 0

    def loss(self, forward, batch: Batch, nll_weight: float) -> tuple[torch.Tensor, dict]:
        """`nll_weight`: pairs per target token of chosen answers in the step, so that dividing by pairs divides the nll
        by its tokens.
        """
        chosen, rejected = (torch.from_numpy(i).to(forward.device) for i in pair_indices(batch))
        if self.name == "orpo":
            log_probs_D = forward.document_log_probs(batch)
            counts_D = torch.from_numpy(document_targets(batch)).to(forward.device)
            pairs = orpo(log_probs_D[chosen], log_probs_D[rejected], counts_D[chosen], counts_D[rejected], self.beta)
            return pairs.loss_P.sum() - nll_weight * log_probs_D[chosen].sum(), pairs.metrics()
        with torch.no_grad(), adapters_off(forward.model):
            ref_D = forward.document_log_probs(batch)  # first, so that nothing is kept for backward meanwhile
        log_probs_D = forward.document_log_probs(batch)
        pairs = dpo(log_probs_D[chosen], log_probs_D[rejected], ref_D[chosen], ref_D[rejected], self.beta)
        return pairs.loss_P.sum(), pairs.metrics()


def pair_indices(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Where the chosen and the rejected documents of the batch's pairs are, in the order of pairs."""
    rows = np.array(batch.rows, np.int64)
    order = rows.argsort()
    assert np.array_equal(rows[order][1::2], rows[order][::2] + 1), f"a pair is not in one microbatch: {rows}"
    return order[::2], order[1::2]
