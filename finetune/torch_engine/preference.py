"""Losses of preference training, from summed log-probabilities per document, and what a step minimizes.

P pairs of a chosen and a rejected answer to one prompt, D documents with a label. Nothing here is averaged: a step
divides each sum once, by its pairs or documents over all microbatches and ranks.
"""

from dataclasses import dataclass, replace
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

    def sums(self) -> dict[str, float]:
        """Sums over the pairs, named as TRL names the averages."""
        # One transfer, and fp64 where every device's host has it.
        chosen_P, rejected_P = torch.stack([self.chosen_rewards_P, self.rejected_rewards_P]).cpu().double()
        margins_P = chosen_P - rejected_P
        return {
            "rewards/chosen": chosen_P.sum().item(),
            "rewards/rejected": rejected_P.sum().item(),
            "rewards/margins": margins_P.sum().item(),
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


class Labelled(NamedTuple):
    """A loss per document, differentiable, and its detached reward."""

    loss_D: torch.Tensor
    rewards_D: torch.Tensor
    desirable_D: torch.Tensor

    def sums(self) -> dict[str, float]:
        """Sums over desirable and over other documents, named as TRL names the averages, and their numbers."""
        rewards_D, desirable_D = self.rewards_D.cpu().double(), self.desirable_D.cpu()
        return {
            "rewards/chosen": rewards_D[desirable_D].sum().item(),
            "rewards/rejected": rewards_D[~desirable_D].sum().item(),
            "chosen": float(desirable_D.sum().item()),
            "rejected": float((~desirable_D).sum().item()),
        }


def kto(log_probs_D, ref_D, desirable_D, reference_point, beta, desirable_weight, undesirable_weight) -> Labelled:
    """weight * (1 - sigmoid(+-(beta * (log-ratio - reference point)))): Ethayarajh et al. 2024, section 4.2.

    + for desirable documents, - for the others, each with its weight. `reference_point`: max(0, the mean log-ratio of
    documents that pair each prompt of a step with another row's answer), section 4.1.
    """
    rewards_D = beta * (log_probs_D - ref_D)
    distance_D = rewards_D - beta * reference_point
    sign_D = torch.where(desirable_D, 1.0, -1.0).to(distance_D.dtype)
    weight_D = torch.where(desirable_D, desirable_weight, undesirable_weight).to(distance_D.dtype)
    return Labelled(weight_D * torch.sigmoid(-sign_D * distance_D), rewards_D.detach(), desirable_D)


# ------ objectives of a step


class NextToken:
    """The nll of every target token. Every objective of a step has these attributes and methods."""

    sums = ()  # what `loss` sums beside the loss
    per_row = False  # the loss is divided by preference rows, not by target tokens
    looks_ahead = False  # some microbatches are for `ahead`
    compares = False  # microbatches must hold their documents' `reference_D`

    def split(self, microbatches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
        """(microbatches that only `ahead` reads, those that are learned from)."""
        return [], microbatches

    def ahead(self, forward, batch: Batch) -> tuple[float, float]:
        """Two numbers whose sums over the step are known before its first loss."""
        return 0.0, 0.0

    def count(self, batch: Batch) -> int:
        """What a step's loss is divided by, summed over its microbatches and ranks."""
        return batch.num_targets

    def count_nll_targets(self, batch: Batch) -> int:
        """Target tokens of a term that is divided by their number instead."""
        return 0

    def known(self, count: int, nll_targets: int, ahead) -> float:
        """What a loss needs of the full step; `ahead`: the sums of `ahead`."""
        return 0.0

    def loss(self, forward, batch: Batch, known: float) -> tuple[torch.Tensor, dict]:
        """(summed loss of a microbatch, differentiable; {name in `sums`: sum})."""
        return forward.nll(batch), {}

    def means(self, sums: dict, count: int, known: float) -> dict:
        """The metrics of a step, from its sums."""
        return {}


@dataclass(frozen=True)
class PairObjective(NextToken):
    """DPO or ORPO on microbatches of pairs: document 2i of a dataset is pair i's chosen answer, 2i + 1 its rejected."""

    name: str  # dpo or orpo
    beta: float = 0.1

    sums = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    per_row = True

    @property
    def compares(self) -> bool:
        return self.name == "dpo"

    def count(self, batch: Batch) -> int:
        return len(batch.rows) // 2

    def count_nll_targets(self, batch: Batch) -> int:
        return int(document_targets(batch)[pair_indices(batch)[0]].sum()) if self.name == "orpo" else 0

    def known(self, count: int, nll_targets: int, ahead) -> float:
        """Pairs per target token of chosen answers, so that dividing by pairs divides ORPO's nll by its tokens."""
        return count / max(1, nll_targets)

    def loss(self, forward, batch: Batch, known: float) -> tuple[torch.Tensor, dict]:
        chosen, rejected = (torch.from_numpy(i).to(forward.device) for i in pair_indices(batch))
        if self.name == "orpo":
            log_probs_D = forward.document_log_probs(batch)
            counts_D = torch.from_numpy(document_targets(batch)).to(forward.device)
            pairs = orpo(log_probs_D[chosen], log_probs_D[rejected], counts_D[chosen], counts_D[rejected], self.beta)
            return pairs.loss_P.sum() - known * log_probs_D[chosen].sum(), pairs.sums()
        log_probs_D, ref_D = log_probs_and_reference(forward, batch)
        pairs = dpo(log_probs_D[chosen], log_probs_D[rejected], ref_D[chosen], ref_D[rejected], self.beta)
        return pairs.loss_P.sum(), pairs.sums()

    def means(self, sums: dict, count: int, known: float) -> dict:
        return {name: total / count for name, total in sums.items()}


@dataclass(frozen=True)
class LabelledObjective(NextToken):
    """KTO on microbatches of documents with labels.

    The reference point is of the full step, over accumulation and ranks: TRL's, who takes each microbatch's own, where
    a step is one batch.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    sums = ("rewards/chosen", "rewards/rejected", "chosen", "rejected")
    per_row = looks_ahead = compares = True

    def split(self, microbatches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
        return [b for b in microbatches if b.mismatched], [b for b in microbatches if not b.mismatched]

    def ahead(self, forward, batch: Batch) -> tuple[float, float]:
        """(summed log-ratios, documents) of a mismatched microbatch."""
        log_probs_D, ref_D = log_probs_and_reference(forward, batch)
        return (log_probs_D - ref_D)[: len(batch.rows)].cpu().double().sum().item(), len(batch.rows)

    def count(self, batch: Batch) -> int:
        return len(batch.rows)

    def known(self, count: int, nll_targets: int, ahead) -> float:
        """The reference point."""
        total, documents = ahead
        return max(0.0, total / max(1.0, documents))

    def loss(self, forward, batch: Batch, known: float) -> tuple[torch.Tensor, dict]:
        log_probs_D, ref_D = (each[: len(batch.rows)] for each in log_probs_and_reference(forward, batch))
        labels = np.zeros(0, bool) if batch.desirable_D is None else np.array(batch.desirable_D)
        desirable_D = torch.from_numpy(labels).to(forward.device)
        found = kto(log_probs_D, ref_D, desirable_D, known, self.beta, self.desirable_weight, self.undesirable_weight)
        return found.loss_D.sum(), found.sums()

    def means(self, sums: dict, count: int, known: float) -> dict:
        """As TRL's; of answers that the step has none of, nothing."""
        found = {f"rewards/{k}": sums[f"rewards/{k}"] / sums[k] for k in ("chosen", "rejected") if sums[k]}
        if len(found) == 2:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found | {"kl": known}


def counts_of(objective: NextToken, microbatches: list[Batch]) -> list[int]:
    """What the loss is divided by, targets, tokens, and targets of the term that is divided by their number."""
    count, nll_targets = objective.count, objective.count_nll_targets
    found = [[count(b), b.num_targets, b.num_tokens, nll_targets(b)] for b in microbatches]
    return [sum(column) for column in zip(*found or [[0] * 4], strict=True)]


def objective_of(settings) -> NextToken:
    """What a step of a run with these settings minimizes."""
    method, beta = settings.preference, settings.preference_beta
    if method == "none":
        return NextToken()
    if method == "kto":
        return LabelledObjective(beta, settings.desirable_weight, settings.undesirable_weight)
    return PairObjective(method, beta)


def log_probs_and_reference(forward, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Each document's log-probability, differentiable, and the reference's, which the batch holds."""
    log_probs_D = forward.document_log_probs(batch)
    return log_probs_D, torch.from_numpy(np.array(batch.reference_D)).to(log_probs_D.dtype).to(log_probs_D.device)


@torch.no_grad()
def reference_log_probs(forward, batch: Batch) -> torch.Tensor:
    """Each document's log-probability under the base with its adapters off."""
    with adapters_off(forward.model):
        return forward.document_log_probs(batch)


@torch.no_grad()
def compared(objective: NextToken, parallel, microbatches: list[Batch], advice) -> list[Batch]:
    """Microbatches with the reference's log-probabilities, where the objective needs them and they are not there.

    In forwards of their own, before a step's: nothing is kept for backward meanwhile. `advice(batch)`: a context around
    each. Collective.
    """
    found = list(microbatches)
    asked = [i for i, batch in enumerate(found) if objective.compares and batch.reference_D is None]
    for i in asked:
        with advice(found[i]):
            log_probs_D = parallel.call(reference_log_probs, parallel.forward, found[i])
        found[i] = replace(found[i], reference_D=log_probs_D.cpu().double().numpy())
    if asked:
        parallel.reshard()
    return found


@torch.no_grad()
def sums_ahead(objective: NextToken, parallel, microbatches: list[Batch], advice, stop=None) -> list[float]:
    """The sums of `objective.ahead` over all ranks' microbatches, without dropout. Collective."""
    if not objective.looks_ahead:
        return [0.0, 0.0]
    forward, total = parallel.forward, np.zeros(2)
    forward.model.eval()
    groups = forward.groups
    for batch in forward.filled(microbatches, int(groups.all_reduce_max(len(microbatches)))):
        if stop and stop():
            break
        (batch,) = compared(objective, parallel, [batch], advice)
        with advice(batch):
            total += parallel.call(objective.ahead, forward, batch)
    parallel.reshard()
    return groups.all_gather_scalars(total.tolist()).sum(0).tolist()


def pair_indices(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Where the chosen and the rejected documents of the batch's pairs are: one after the other, see collate."""
    rows = np.array(batch.rows, np.int64)
    assert np.array_equal(rows[1::2], rows[::2] + 1) and not (rows[::2] % 2).any(), f"not pairs: {rows}"
    return np.arange(0, len(rows), 2), np.arange(1, len(rows), 2)
