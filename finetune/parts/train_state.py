"""TrainState: the one thing that changes while a run trains; and the interface of the data that it counts."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from finetune.engine import StepResult


@dataclass(frozen=True)
class Cursor:
    """Position in the data: `index` rows of epoch `epoch` are consumed."""

    epoch: int = 0
    index: int = 0


@dataclass
class TrainState:
    """Where a run is: the one thing that changes while it trains."""

    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    index: int = 0  # rows of this epoch already used
    num_tokens: int = 0
    loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    status: str = "running"
    output_dir: str | None = None
    before: dict | None = None  # the evaluation at step 0
    scores: dict | None = None
    exit_code: int = 0
    worse_evals: int = 0  # in a row, since the best
    eval_pending: bool = False  # a signal ended the evaluation that was due at this step
    dataset_tokens: list | None = None  # of a stream of several datasets: tokens of each so far; None: not known
    stream: dict | None = None  # of --streaming: what was read of each file, and which rows were bad

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.index)

    def advance(self, result: StepResult, cursor: Cursor) -> None:
        """One step is done, with this StepResult; the next begins at `cursor`."""
        self.step = self.step + 1
        self.epoch = cursor.epoch
        self.index = cursor.index
        self.num_tokens += result.num_tokens
        self.loss = result.loss


class RunData(Protocol):
    """The interface of the data that a run reads. `plan`: the run's own, of train.py or of pretrain.py."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def train(self) -> Any: ...
    @property
    def validation(self) -> Any: ...
    @property
    def score_examples(self) -> list: ...
    @property
    def stop_ids(self) -> set[int]: ...
    def step(self, plan: Any, state: TrainState, data_rank: int, pad_id: int) -> tuple[list, np.ndarray, Cursor]: ...
    def evaluation_batches(self, plan: Any, pad_id: int) -> dict[str, list]: ...
    def evaluation_values(self, results: dict[str, StepResult]) -> dict: ...
    def sample_prompts(self, number: int) -> list[tuple]: ...
    def sources_of(self, rows: np.ndarray) -> list[str]: ...
    def count(self, state: TrainState) -> None: ...
    def resume(self, state: TrainState) -> list[str]: ...
    def total_steps(self, plan: Any) -> int: ...
