"""The interface between the training loop and a framework's engine. Numpy arrays, strings and numbers only.

Shapes: B rows of the microbatch, S positions. A flat (padding-free) microbatch has B == 1, its documents packed end
to end.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from finetune.safetensors_io import TensorShard

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """One microbatch. `labels_BS[b, s]`: the token to predict at position s (already shifted), or IGNORE_INDEX.

    `position_ids_BS` restarts at 0 in each document; `document_ids_BS` numbers the documents, -1 is padding.
    `rows`: dataset row numbers.
    """

    input_ids_BS: np.ndarray
    labels_BS: np.ndarray
    position_ids_BS: np.ndarray
    document_ids_BS: np.ndarray
    rows: tuple[int, ...]

    @property
    def num_targets(self) -> int:
        return int((self.labels_BS != IGNORE_INDEX).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int((self.document_ids_BS >= 0).sum())


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step over all ranks: summed NLL, number of targets, gradient norm before clipping."""

    nll: float
    num_targets: int
    num_tokens: int
    grad_norm: float
    skipped: bool = (
        False  # fp16 only: the scaled gradient overflowed; the loss scale was lowered, weights are unchanged
    )


@dataclass(frozen=True)
class MemoryStats:
    """Peak bytes since the last call, above the process after its imports; per item if the engine can tell."""

    total: int
    items: dict = field(default_factory=dict)


class Engine(Protocol):
    """The interface of a training engine. Arrays are numpy; tensor names are PEFT's or transformers'."""

    def train_step(self, microbatches: list[Batch], lr: float) -> StepResult: ...

    def evaluate(self, microbatches: list[Batch], stop=None) -> tuple[float, int]:
        """(summed NLL, number of targets), without gradients and dropout; returns early once `stop()` is true."""

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, eos_ids: set[int], stop_row=None
    ) -> list[list[int]]: ...

    def full_weights(self):
        """Context with all-gathered weights, in which ranks may generate independently."""

    def all_reduce_max(self, number: int) -> int:
        """All-reduce max over ranks. Collective, like all methods below."""

    def all_reduce_sum(self, number: float) -> float:
        """All-reduce sum over ranks."""

    def all_gather_object(self, value) -> list:
        """All-gather of JSON values, in rank order."""

    def trainable_state(self) -> dict[str, np.ndarray]:
        """Trainable weights by checkpoint name. Arrays may alias the engine's memory: use them before the next step."""

    def optimizer_state(self) -> tuple[dict[str, np.ndarray], dict]:
        """Optimizer state: (tensors named '<parameter>.<moment>', JSON values such as the loss scale)."""

    writes_parts: bool  # True if each rank can save its own shards, in place of the two methods above

    def parts(self) -> tuple[list[TensorShard], list[TensorShard]]:
        """(weight shards, optimizer state shards) that this rank writes."""

    def optimizer_values(self) -> dict:
        """The JSON values of optimizer_state."""

    def rng_state(self) -> dict[str, np.ndarray]: ...

    def load_state(self, trainable: dict, optimizer: dict, values: dict, rng: dict) -> None: ...

    def memory(self) -> MemoryStats: ...
