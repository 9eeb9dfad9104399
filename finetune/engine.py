"""The seam between frameworks: what the loop hands an engine and what it gets back. Numpy, strings and numbers only.

Shapes: B rows of the microbatch, S positions. A flat microbatch has B == 1 and its documents one after another.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from finetune.safetensors_io import TensorShard

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """One microbatch. `labels_BS[b, s]` is the token that position s must predict (already shifted), or IGNORE_INDEX.

    `position_ids_BS` restarts at 0 in each document; `document_ids_BS` numbers the documents, -1 is padding.
    `rows` are the dataset's row numbers in it.
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
    """One optimizer step, global over ranks: summed nll, the targets it is over, gradient norm before clipping."""

    nll: float
    num_targets: int
    num_tokens: int
    grad_norm: float
    skipped: bool = False  # fp16 only: the scaled gradient overflowed, the scale was lowered, weights are unchanged


@dataclass(frozen=True)
class MemoryStats:
    """Bytes: the peak since the last call above the process after its imports, by item where the engine can tell."""

    total: int
    items: dict = field(default_factory=dict)


class Engine(Protocol):
    """What the loop needs of a framework. Arrays in and out are numpy; names of tensors are PEFT's or transformers'."""

    def train_step(self, microbatches: list[Batch], lr: float) -> StepResult: ...

    def evaluate(self, microbatches: list[Batch], stop=None) -> tuple[float, int]:
        """(summed nll, number of targets), without gradients and without dropout; ends early where `stop()` says so."""

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, eos_ids: set[int], stop_row=None
    ) -> list[list[int]]: ...

    def full_weights(self):
        """A context in which ranks may generate each at its own pace."""

    def all_reduce_max(self, number: int) -> int:
        """The largest of all ranks' numbers; all call it at the same point, as they do all that follows."""

    def all_reduce_sum(self, number: float) -> float:
        """The sum of all ranks' numbers."""

    def all_gather_object(self, value) -> list:
        """Every rank's JSON value, in their order."""

    def trainable_state(self) -> dict[str, np.ndarray]:
        """Weights that train, by their names on disk. Arrays may share the engine's memory: use them before the next step."""

    def optimizer_state(self) -> tuple[dict[str, np.ndarray], dict]:
        """(tensors named '<parameter>.<moment>', JSON values such as the loss scale)."""

    writes_parts: bool  # whether each rank can save its own parts of what trains, in the place of the two methods above

    def parts(self) -> tuple[list[TensorShard], list[TensorShard]]:
        """(weights, moments) that this rank writes."""

    def optimizer_values(self) -> dict:
        """optimizer_state's JSON values alone."""

    def rng_state(self) -> dict[str, np.ndarray]: ...

    def load_state(self, trainable: dict, optimizer: dict, values: dict, rng: dict) -> None: ...

    def memory(self) -> MemoryStats: ...
