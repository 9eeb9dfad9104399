"""Losses of preference training from summed log-probabilities per document, and the objectives made of them.

P pairs of a chosen and a rejected answer to one prompt, D documents with a label. Nothing here is averaged: a step
divides each sum once, by its pairs or documents over all microbatches and ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from finetune.arrays import Named, Per
from finetune.engine import Batch
from finetune.objectives import LossOf, NextToken, Totals
from finetune.torch_engine.device import to_device, to_host
from finetune.torch_engine.forward import ModelForward, document_targets
from finetune.torch_engine.passes import Passes

REFERENCE = "reference"  # the array of documents' log-probabilities under the reference


class Pairs(NamedTuple):
    """A loss per pair, differentiable, and the detached rewards of both answers."""

    loss_P: torch.Tensor
    chosen_rewards_P: torch.Tensor
    rejected_rewards_P: torch.Tensor

    def observed(self) -> torch.Tensor:
        """Argument of `sums`: [2, P]."""
        return torch.stack([self.chosen_rewards_P, self.rejected_rewards_P])

    @staticmethod
    def sums(observed_2P: torch.Tensor) -> dict[str, float]:
        """Sums over the pairs, named as TRL names the averages."""
        chosen_P, rejected_P = observed_2P
        margins_P = chosen_P - rejected_P
        return {
            "rewards/chosen": chosen_P.sum().item(),
            "rewards/rejected": rejected_P.sum().item(),
            "rewards/margins": margins_P.sum().item(),
            "rewards/accuracies": float((margins_P > 0).sum().item()),
        }


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
        """Argument of `sums`: [3, D]."""
        return torch.stack([self.rewards_D, *(t.to(self.rewards_D.dtype) for t in (self.desirable_D, self.right_D))])

    @staticmethod
    def sums(observed_3D: torch.Tensor) -> dict[str, float]:
        """Sums over desirable and over other documents, named as TRL names the averages, and their numbers."""
        rewards_D = observed_3D[0]
        desirable_D = observed_3D[1].bool()
        return {
            "rewards/chosen": rewards_D[desirable_D].sum().item(),
            "rewards/rejected": rewards_D[~desirable_D].sum().item(),
            "rewards/accuracies": observed_3D[2].sum().item(),
            "chosen": float(desirable_D.sum().item()),
            "rejected": float((~desirable_D).sum().item()),
        }


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


@dataclass(frozen=True)
class OfPairs(NextToken):
    """Microbatches of pairs: document 2i of a dataset is pair i's chosen answer, 2i + 1 its rejected one."""

    beta: float = 0.1

    sums = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    counts_rows = True
    loss_of = LossOf.DOCUMENTS

    def count(self, batch: Batch) -> tuple[int, ...]:
        return (len(batch.rows) // 2,)

    def sums_of(self, observed: torch.Tensor) -> dict[str, float]:
        return Pairs.sums(observed)

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return {name: total / totals.count for name, total in sums.items()}


@dataclass(frozen=True)
class DPO(OfPairs):
    def prepare(self, passes: Passes, microbatches: list[Batch]) -> tuple[list[Batch], dict[str, float]]:
        return with_reference(passes, microbatches), {}

    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = pair_indices(batch, forward.device)
        log_probs_D, ref_D = log_probs_and_reference(forward, batch)
        pairs = dpo(log_probs_D[chosen], log_probs_D[rejected], ref_D[chosen], ref_D[rejected], self.beta)
        return pairs.loss_P.sum(), pairs.observed()


@dataclass(frozen=True)
class ORPO(OfPairs):
    def count(self, batch: Batch) -> tuple[int, ...]:
        """(pairs, target tokens of chosen answers)."""
        return len(batch.rows) // 2, int(document_targets(batch)[: len(batch.rows) : 2].sum())

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


@dataclass(frozen=True)
class KTO(NextToken):
    """Microbatches of documents with labels.

    The reference point is of the full step, over accumulation and ranks: TRL's, which takes each microbatch's own,
    where a step is one batch.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    sums = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "chosen", "rejected")
    counts_rows = True
    loss_of = LossOf.DOCUMENTS

    def prepare(self, passes: Passes, microbatches: list[Batch]) -> tuple[list[Batch], dict[str, float]]:
        """Microbatches with the reference, and "kl": the mean log-ratio of mismatched documents, 0 if negative."""
        mismatched = with_reference(passes, [b for b in microbatches if b.mismatched])
        log_ratios = to_host(passes.map(_log_ratios, mismatched))
        total, documents = passes.sum([sum((r.sum().item() for r in log_ratios), 0.0), sum(map(len, log_ratios))])
        learned = with_reference(passes, [b for b in microbatches if not b.mismatched])
        return learned, {"kl": max(0.0, total / max(1.0, documents))}

    def count(self, batch: Batch) -> tuple[int, ...]:
        return (len(batch.rows),)

    def loss(self, forward: ModelForward, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs_D, ref_D = (each[: len(batch.rows)] for each in log_probs_and_reference(forward, batch))
        labels = np.zeros(0, bool)
        if batch.rows:
            labels = np.array(batch.arrays["desirable"].values)
        desirable_D = to_device(labels, forward.device)
        labelled = kto(
            log_probs_D,
            ref_D,
            desirable_D,
            reference_point=totals.statistics["kl"],
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        return labelled.loss_D.sum(), labelled.observed()

    def sums_of(self, observed: torch.Tensor) -> dict[str, float]:
        return Labelled.sums(observed)

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        """Averages named as TRL's, and the share of rewards on the right side; no entry for kinds of answers absent
        from the step.
        """
        rewards = {f"rewards/{k}": sums[f"rewards/{k}"] / sums[k] for k in ("chosen", "rejected") if sums[k]}
        if len(rewards) == 2:
            rewards["rewards/margins"] = rewards["rewards/chosen"] - rewards["rewards/rejected"]
        documents = sums["chosen"] + sums["rejected"]
        right = {}
        if documents:
            right = {"rewards/accuracies": sums["rewards/accuracies"] / documents}
        return {**rewards, **right, **totals.statistics}


def _log_ratios(forward: ModelForward, batch: Batch) -> torch.Tensor:
    """Log-ratios of a microbatch's documents."""
    log_probs_D, ref_D = log_probs_and_reference(forward, batch)
    return (log_probs_D - ref_D)[: len(batch.rows)]


def log_probs_and_reference(forward: ModelForward, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Each document's log-probability, differentiable, and the reference's, which the batch holds."""
    log_probs_D = forward.document_log_probs(batch)
    reference_D = torch.as_tensor(batch.arrays[REFERENCE].values)
    return log_probs_D, to_device(reference_D.to(log_probs_D.dtype), log_probs_D.device)


def with_reference(passes: Passes, microbatches: list[Batch]) -> list[Batch]:
    """This rank's microbatches with the reference's log-probabilities, computed where they are not known. Collective.

    In forwards of their own, before a step's: nothing is kept for backward meanwhile.
    """
    filled = passes.filled(microbatches)
    unknown = [i for i, batch in enumerate(filled) if REFERENCE not in batch.arrays]
    log_probs = passes.log_probs_before_training([filled[i] for i in unknown])
    for i, log_probs_D in zip(unknown, log_probs, strict=False):
        filled[i] = filled[i].with_array(REFERENCE, Named(log_probs_D, Per.DOCUMENT, is_data=False))
    if len(log_probs) == len(unknown):
        return filled
    return []


def pair_indices(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the chosen and of the rejected documents in a batch of pairs, which alternate, see collate."""
    rows = np.array(batch.rows, np.int64)
    assert np.array_equal(rows[1::2], rows[::2] + 1) and not (rows[::2] % 2).any(), f"not pairs: {rows}"
    chosen = torch.arange(0, len(rows), 2, device=device)
    return chosen, chosen + 1
