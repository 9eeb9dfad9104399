"""Where a step's microbatches come from: the protocol of rows in files, of streams and of sampled answers."""

from typing import Protocol

import numpy as np

from finetune.engine import Batch, Engine
from finetune.parts.parts import Parts
from finetune.parts.train_state import Cursor, TrainState


class StepSource(Protocol):
    """The part of a run's data that its steps read.

    Its position is the state's `cursor` and `stream`, which a checkpoint keeps with the engine's random state: a
    resumed run gives the same steps, to the bit. An objective's row names the class.
    """

    def step(self, plan: Parts, state: TrainState, engine: Engine) -> tuple[list[Batch], np.ndarray, Cursor]:
        """(microbatches of this data rank, all rows of the step, where the next step begins). Collective: the engine
        may answer prompts, with the weights as they are before the step.
        """
        ...

    def count(self, state: TrainState) -> None:
        """Called once for each step that was taken, before the state advances; may set `state.stream`."""
        ...

    def resume(self, state: TrainState) -> list[str]:
        """Notices on data that are read while training. Raises PlanError if they are not those of the state."""
        ...

    def total_steps(self, plan: Parts) -> int:
        """Optimizer steps of the run."""
        ...

    def sources_of(self, rows: np.ndarray) -> list[str]:
        """Where these rows of a step are from."""
        ...

    def close(self) -> None:
        """Ends what reads rows while training."""
        ...
