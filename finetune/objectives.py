"""What a step minimizes: the protocol that every objective follows, the table of objectives, and next-token.

A step divides each sum once, over its microbatches and ranks, so that no objective averages. Objectives of preferences
are beside the engine that computes them: a row of the table names the class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the flags are made from OBJECTIVES, and --help imports no numpy
    from collections.abc import Callable

    from finetune.engine import Batch


@dataclass(frozen=True)
class ObjectiveFacts:
    """One row of OBJECTIVES: a class of a module. `arguments`: {argument of the class: flag of its value}.

    `defaults`: {flag: its value where the user gave none}, if that is not the flag's own. `pairs`: a row is a chosen
    and a rejected answer. `labels`: a row is an answer with a label. `needs_reference`: it compares with the model
    before training. `mismatches`: prompts with other rows' answers are read before a step. `rate`: its learning rate
    divided by that of the next token, see plan.learning_rate.
    """

    module: str
    name: str
    summary: str
    arguments: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, float] = field(default_factory=dict)
    pairs: bool = False
    labels: bool = False
    needs_reference: bool = False
    mismatches: bool = False
    rate: float = 1.0

    @property
    def is_preference(self) -> bool:
        return self.pairs or self.labels


BETA = {"beta": "preference_beta"}
OBJECTIVES = {
    "none": ObjectiveFacts("finetune.objectives", "NextToken", "the next token of every answer"),
    "dpo": ObjectiveFacts(
        "finetune.torch_engine.preference",
        "DPO",
        "pairs: the chosen answer gains on the rejected one, relative to the model before training",
        BETA,
        pairs=True,
        needs_reference=True,
        rate=0.05,
    ),
    "orpo": ObjectiveFacts(
        "finetune.torch_engine.preference",
        "ORPO",
        "pairs: the chosen answer is learned, and its odds rise",
        BETA,
        pairs=True,
        rate=0.1,
    ),
    "simpo": ObjectiveFacts(
        "finetune.torch_engine.preference",
        "SimPO",
        "pairs: the chosen answer's mean log-probability leads the rejected one's by a margin",
        BETA | {"gamma": "simpo_gamma"},
        {"preference_beta": 2.0},
        pairs=True,
        rate=0.1,
    ),
    "kto": ObjectiveFacts(
        "finetune.torch_engine.preference",
        "KTO",
        "answers with a label, relative to the model before training",
        BETA | {"desirable_weight": "desirable_weight", "undesirable_weight": "undesirable_weight"},
        labels=True,
        needs_reference=True,
        mismatches=True,
        rate=0.05,
    ),
}


@dataclass(frozen=True)
class Totals:
    """What the full step counts. `counts`: of Objective.count, summed; the first divides the loss.

    `statistic`: a number that `prepare` found over all ranks' microbatches.
    """

    counts: tuple[int, ...]
    statistic: float = 0.0

    @property
    def count(self) -> int:
        return self.counts[0]


class Objective(Protocol):
    """What the engine asks of an objective. `sums`: names of what `loss` sums; `counts_rows`: the loss is per row."""

    sums: tuple[str, ...]
    counts_rows: bool

    def prepare(self, passes, microbatches: list[Batch]) -> tuple[list[Batch], float]:
        """(this rank's microbatches to learn from, a statistic of the step), before its first loss. Collective.

        `passes`: forwards without gradients, see torch_engine.passes.
        """

    def count(self, batch: Batch) -> tuple[int, ...]:
        """Numbers whose sums over a step `loss` and `means` divide by; the first divides the loss."""

    def loss(self, forward, batch: Batch, totals: Totals) -> tuple[object, object]:
        """(summed loss of a microbatch, differentiable; what `sums_of` is made of, a floating-point tensor on the
        device, or None).
        """

    def sums_of(self, observed) -> dict[str, float]:
        """{name in `sums`: sum} of a microbatch, from what `loss` observed: in fp64 on the host, once the device has
        computed the step.
        """

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        """The metrics of a step, from its sums."""


class NextToken:
    """The nll of every target token."""

    sums: tuple[str, ...] = ()
    counts_rows = False

    def prepare(self, passes, microbatches: list[Batch]) -> tuple[list[Batch], float]:
        return passes.share(microbatches), 0.0

    def count(self, batch: Batch) -> tuple[int, ...]:
        return (batch.num_targets,)

    def loss(self, forward, batch: Batch, totals: Totals) -> tuple[object, object]:
        return forward.nll(batch), None

    def sums_of(self, observed) -> dict[str, float]:
        return {}

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return {}


def build(name: str, arguments: dict[str, float]) -> Objective:
    """The objective of a row of OBJECTIVES, with its arguments."""
    facts = OBJECTIVES[name]
    implementation: Callable[..., Objective] = getattr(import_module(facts.module), facts.name)
    return implementation(**arguments)
