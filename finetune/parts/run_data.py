"""Interfaces of what a run reads: the source of its steps' microbatches, and with it what is evaluated and answered."""

from typing import Any, Protocol

import numpy as np

from finetune.engine import BatchT, Engine, StepResult
from finetune.parts.train_state import Cursor, TrainState

PROCESSOR = "image processor"  # of what digests are of, beside data sets


class StepSource(Protocol[BatchT]):
    """Source of each step's microbatches: rows of files or of a stream, or answers sampled in the step.

    Its position is the state's `cursor` and `stream`, which a checkpoint keeps with the engine's random state: a
    resumed run gives the same steps, to the bit. An objective's row names the class. `plan`: the run's own, of train.py
    or of pretrain.py.
    """

    def step(self, plan: Any, state: TrainState, engine: Engine[BatchT]) -> tuple[list[BatchT], np.ndarray, Cursor]:
        """(microbatches of this data rank, all rows of the step, where the next step begins). Collective: the engine
        may answer prompts, with the weights as they are before the step.
        """
        ...

    def count_step(self, state: TrainState) -> None:
        """Called once for each step that was taken, before the state advances; may set `state.stream`."""
        ...

    def metrics(self) -> dict[str, Any]:
        """Facts of the step's microbatches beside its loss, once `step` has made them."""
        ...

    def resume(self, state: TrainState) -> list[str]:
        """Notices on data that are read while training. Raises PlanError if they are not those of the state."""
        ...

    def total_steps(self, plan: Any) -> int:
        """Optimizer steps of the run."""
        ...

    def sources_of(self, rows: np.ndarray) -> list[str]:
        """Sources of these rows of a step."""
        ...


class RunData(StepSource[BatchT], Protocol[BatchT]):
    """Everything that a run reads."""

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
    def evaluation_batches(self, plan: Any, pad_id: int) -> dict[str, list]: ...
    def evaluation_values(self, results: dict[str, StepResult]) -> dict: ...
    def sample_prompts(self, number: int) -> list[tuple]: ...
