"""TrainState: the one thing that changes while a run trains."""

from dataclasses import dataclass

from finetune.engine import StepResult


@dataclass(frozen=True)
class Cursor:
    """Position in the data: `index` rows of epoch `epoch` are consumed."""

    epoch: int = 0
    index: int = 0


@dataclass
class TrainState:
    """State of a run: the one thing that changes while it trains."""

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
    eval_pending: bool = False  # a signal ended the evaluation that was due at this step, or its samples
    dataset_tokens: list | None = None  # of a stream of several datasets: tokens of each so far; None: not known
    stream: dict | None = None  # where the source of the steps is beside the cursor: of --streaming, what it has read

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.index)

    def forget_best(self) -> None:
        """Forgets the best evaluation: those that follow are of other rows, or on another base."""
        self.best_loss = None
        self.best_step = None
        self.worse_evals = 0

    def advance(self, result: StepResult, cursor: Cursor) -> None:
        """One step is done, with this StepResult; the next begins at `cursor`."""
        self.step = self.step + 1
        self.epoch = cursor.epoch
        self.index = cursor.index
        self.num_tokens += result.num_tokens
        self.loss = result.loss
