"""Objectives of a step: the protocol that all of them follow, and next-token.

A step divides each sum once, over its microbatches and ranks, so that no objective averages. Objectives of preferences
are beside the engine that computes them: a row of parts.objectives names the class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from finetune.engine import Batch
from finetune.parts.objectives import OBJECTIVES
from finetune.parts.rows import implementation

# arrays per target, of rows that a teacher has read
TEACHER_TOKENS = "teacher_tokens"
TEACHER_LOG_PROBS = "teacher_log_probs"
TEACHER_LOG_PROB = "teacher_log_prob"  # of the target itself
ROW_TARGET = "row_target"  # 1 at targets of the rows, 0 at those of the model's own answers


class LossOf(Enum):
    """The source of an objective's loss, which decides the fraction of it that is a rank's own, where ranks
    share a batch: ModelForward's `nll`, its `target_log_probs`, or its `document_log_probs` and `document_outputs`.
    """

    NLL = "nll"
    TARGETS = "targets"
    DOCUMENTS = "documents"


@dataclass(frozen=True)
class Totals:
    """Counts of the full step. `counts`: of Objective.count, summed; the first divides the loss.

    `statistics`: results of `prepare` over all ranks' microbatches, by name.
    """

    counts: tuple[int, ...]
    statistics: Mapping[str, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.counts[0]


class Objective(Protocol):
    """Interface of an objective. `sums`: names of what `loss` sums; `counts_rows`: the loss is per row; `loss_of`: what
    it is computed from.
    """

    sums: tuple[str, ...]
    counts_rows: bool
    loss_of: LossOf

    def prepare(self, passes: Any, microbatches: list[Batch]) -> tuple[list[Batch], dict[str, float]]:
        """(this rank's microbatches to learn from, numbers of the full step), before its first loss. Collective.

        `passes`: forwards without gradients, see torch_engine.passes.
        """

    def count(self, batch: Batch) -> tuple[int, ...]:
        """Numbers whose sums over a step `loss` and `means` divide by; the first divides the loss."""

    def loss(self, forward: Any, batch: Batch, totals: Totals) -> tuple[Any, Any]:
        """(summed loss of a microbatch, differentiable; what `sums_of` is made of, a floating-point tensor on the
        device, or None).
        """

    def sums_of(self, observed: Any) -> dict[str, float]:
        """{name in `sums`: sum} of a microbatch, from what `loss` observed: in fp64 on the host, once the device has
        computed the step.
        """

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        """The metrics of a step, from its sums."""


class NextToken:
    """The nll of every target token."""

    sums: tuple[str, ...] = ()
    num_counts = 1
    counts_rows = False
    loss_of = LossOf.NLL

    def prepare(self, passes: Any, microbatches: list[Batch]) -> tuple[list[Batch], dict[str, float]]:
        """The microbatches as they are; in an evaluation, where every rank holds all of them, this rank's."""
        return passes.share(microbatches), {}

    def count(self, batch: Batch) -> tuple[int, ...]:
        return (batch.num_targets,)

    def loss(self, forward: Any, batch: Batch, totals: Totals) -> tuple[Any, Any]:
        return forward.nll(batch), None

    def sums_of(self, observed: Any) -> dict[str, float]:
        return {}

    def means(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return {}


def build(name: str, arguments: dict[str, float], mlx: bool = False) -> Any:
    """The objective of a row of OBJECTIVES, with its arguments: an Objective, or with `mlx` the MLX engine's."""
    facts = OBJECTIVES[name]
    return implementation(facts.mlx if mlx else facts.implementation)(**arguments)
