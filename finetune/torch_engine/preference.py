"""Losses of preference training from summed log-probabilities per document, and the objectives made of them.

P pairs of a chosen and a rejected answer to one prompt, D documents with a label. Nothing here is averaged, see
finetune.preference.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from finetune.engine import Batch, document_targets
from finetune.objectives import Totals
from finetune.preference import REFERENCE, OfLabels, OfPairs, WithReference, WithTokensOfChosen, check_pairs, labels_of
from finetune.torch_engine.device import to_device
from finetune.torch_engine.forward import ModelForward


class Pairs(NamedTuple):
    """A loss per pair, differentiable, and the detached rewards of both answers."""

    loss_P: torch.Tensor
    chosen_rewards_P: torch.Tensor
    rejected_rewards_P: torch.Tensor

    def observed(self) -> torch.Tensor:
        """Argument of OfPairs.sums_of: [2, P]."""
        return torch.stack([self.chosen_rewards_P, self.rejected_rewards_P])


def dpo(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    ref_chosen_P: torch.Tensor,
    ref_rejected_P: torch.Tensor,
    beta: float,
) -> Pairs:
    """-log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected)): Rafailov et al. 2023, eq. 7.

    A log-ratio is log p - log p of the reference, of a full answer.
    """
    chosen_P = beta * (chosen_P - ref_chosen_P)
    rejected_P = beta * (rejected_P - ref_rejected_P)
    return Pairs(-F.logsigmoid(chosen_P - rejected_P), chosen_P.detach(), rejected_P.detach())


def orpo(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    num_chosen_P: torch.Tensor,
    num_rejected_P: torch.Tensor,
    beta: float,
) -> Pairs:
    """beta * -log sigmoid(log odds ratio of chosen to rejected): Hong et al. 2024, eq. 7, whose lambda is `beta`.

    odds = p / (1 - p), p the geometric mean over an answer's tokens, of which there are `num_*_P`. The nll of the
    chosen answers, eq. 6, is the caller's to add: it is divided by target tokens, not by pairs.
    """
    chosen_P = chosen_P / num_chosen_P
    rejected_P = rejected_P / num_rejected_P
    log_odds_P = (chosen_P - _log_of_complement(chosen_P)) - (rejected_P - _log_of_complement(rejected_P))
    return Pairs(-beta * F.logsigmoid(log_odds_P), beta * chosen_P.detach(), beta * rejected_P.detach())


def simpo(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    num_chosen_P: torch.Tensor,
    num_rejected_P: torch.Tensor,
    beta: float,
    gamma: float,
) -> Pairs:
    """-log sigmoid(beta * (mean log p of chosen - mean log p of rejected) - gamma): Meng et al. 2024, eq. 6.

    Means are over an answer's tokens, of which there are `num_*_P`; there is no reference.
    """
    chosen_P = beta * chosen_P / num_chosen_P
    rejected_P = beta * rejected_P / num_rejected_P
    return Pairs(-F.logsigmoid(chosen_P - rejected_P - gamma), chosen_P.detach(), rejected_P.detach())


def _log_of_complement(log_p: torch.Tensor):
    """log(1 - p), without cancellation at either end; finite where p rounds to 1."""
    log_p = log_p.clamp_max(-torch.finfo(log_p.dtype).eps)
    # Each branch gets values that it is finite for, or its gradient would be nan where the other is taken.
    near_one = log_p > -0.6931
    large = torch.where(near_one, log_p, -0.5)
    small = torch.where(near_one, -1.0, log_p)
    return torch.where(near_one, torch.log(-torch.expm1(large)), torch.log1p(-torch.exp(small)))


class Labelled(NamedTuple):
    """A loss per document, differentiable, its detached reward, and whether that is on the label's side of the
    reference point.
    """

    loss_D: torch.Tensor
    rewards_D: torch.Tensor
    desirable_D: torch.Tensor
    right_D: torch.Tensor

    def observed(self) -> torch.Tensor:
        """Argument of OfLabels.sums_of: [3, D]."""
        return torch.stack([self.rewards_D, *(t.to(self.rewards_D.dtype) for t in (self.desirable_D, self.right_D))])


def kto(
    log_probs_D: torch.Tensor,
    ref_D: torch.Tensor,
    desirable_D: torch.Tensor,
    reference_point: float,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Labelled:
    """weight * (1 - sigmoid(+-(beta * (log-ratio - reference point)))): Ethayarajh et al. 2024, section 4.2.

    + for desirable documents, - for the others, each with its weight. `reference_point`: max(0, the mean log-ratio of
    documents that pair each prompt of a step with another row's answer), section 4.1.
    """
    rewards_D = beta * (log_probs_D - ref_D)
    distance_D = rewards_D - beta * reference_point
    sign_D = torch.where(desirable_D, 1.0, -1.0).to(distance_D.dtype)
    weight_D = torch.where(desirable_D, desirable_weight, undesirable_weight).to(distance_D.dtype)
    right_D = sign_D * distance_D.detach() > 0
    return Labelled(weight_D * torch.sigmoid(-sign_D * distance_D), rewards_D.detach(), desirable_D, right_D)


# ------ objectives of a step, see finetune/objectives.py


class DPO(WithReference):
    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = pair_indices(batch, forward.device)
        log_probs_D, ref_D = log_probs_and_reference(forward, batch)
        pairs = dpo(log_probs_D[chosen], log_probs_D[rejected], ref_D[chosen], ref_D[rejected], self.beta)
        return pairs.loss_P.sum(), pairs.observed()


class ORPO(WithTokensOfChosen):
    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = pair_indices(batch, forward.device)
        log_probs_D = forward.document_log_probs(batch)
        counts_D = to_device(document_targets(batch), forward.device)
        pairs = orpo(log_probs_D[chosen], log_probs_D[rejected], counts_D[chosen], counts_D[rejected], self.beta)
        # The step divides by pairs; times pairs per token, the nll is divided by its tokens.
        pairs_per_token = totals.counts[0] / max(1, totals.counts[1])
        return pairs.loss_P.sum() - pairs_per_token * log_probs_D[chosen].sum(), pairs.observed()


@dataclass(frozen=True)
class SimPO(OfPairs):
    beta: float = 2.0
    gamma: float = 0.5

    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = pair_indices(batch, forward.device)
        log_probs_D = forward.document_log_probs(batch)
        counts_D = to_device(document_targets(batch), forward.device)
        pairs = simpo(
            log_probs_D[chosen], log_probs_D[rejected], counts_D[chosen], counts_D[rejected], self.beta, self.gamma
        )
        return pairs.loss_P.sum(), pairs.observed()


class KTO(OfLabels):
    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs_D, ref_D = (each[: len(batch.rows)] for each in log_probs_and_reference(forward, batch))
        labelled = kto(
            log_probs_D,
            ref_D,
            to_device(labels_of(batch), forward.device),
            reference_point=totals.statistics["kl"],
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        return labelled.loss_D.sum(), labelled.observed()


def log_ratios(forward: ModelForward, batch: Batch) -> torch.Tensor:
    """Log-ratios of a microbatch's documents."""
    log_probs_D, ref_D = log_probs_and_reference(forward, batch)
    return (log_probs_D - ref_D)[: len(batch.rows)]


def log_probs_and_reference(forward: ModelForward, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Each document's log-probability, differentiable, and the reference's, which the batch holds."""
    log_probs_D = forward.document_log_probs(batch)
    reference_D = torch.as_tensor(batch.arrays[REFERENCE].values)
    return log_probs_D, to_device(reference_D.to(log_probs_D.dtype), log_probs_D.device)


def pair_indices(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the chosen and of the rejected documents in a batch of pairs."""
    check_pairs(batch)
    chosen = torch.arange(0, len(batch.rows), 2, device=device)
    return chosen, chosen + 1
