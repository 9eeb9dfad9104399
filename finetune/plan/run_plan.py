"""RunPlan: the frozen result of planning; TrainState: the one thing that changes while a run trains."""

from dataclasses import asdict, dataclass, replace

from finetune.config import FIELDS, TrainConfig
from finetune.data.sampler import Cursor
from finetune.distributed.parallel_dims import KEEPS_GATHERED, ParallelDims
from finetune.estimate.budget import MemoryBudget
from finetune.estimate.model_shape import ModelShape
from finetune.model_files.files import ModelFiles, find_model_of
from finetune.plan.plan_base import Adjustment, PlanBase, SavedRun
from finetune.schedule import Schedule, warmup_steps


@dataclass(frozen=True)
class RunPlan(PlanBase):
    """What will run. `settings` hold every setting's settled value, `requested` only what the user set.

    `shape`, `memory_budget` and `files` are what the plan was resolved against: they are not saved, and each rank finds
    the model's files on its own host.
    """

    settings: TrainConfig
    requested: dict
    adjustments: tuple[Adjustment, ...]
    notices: tuple[str, ...]
    backend: str
    engine: str
    dims: ParallelDims = ParallelDims()
    distribution: str = "ptd"  # who shards and all-reduces: a key of accelerate_config.NAMES
    resume_from: SavedRun | None = None
    shape: ModelShape | None = None
    memory_budget: MemoryBudget | None = None
    files: ModelFiles | None = None
    OUTPUT = "output_dir"
    LOCAL = ("shape", "memory_budget", "files")

    @property
    def reshard_after_forward(self) -> bool:
        """True if a layer's gathered weights are freed between its forward and its backward."""
        return self.settings.sharding_strategy not in KEEPS_GATHERED

    @property
    def asked_length(self) -> str:
        """What sets the number of steps, as it was written."""
        s = self.settings
        return f"--max_steps {s.max_steps}" if s.max_steps > 0 else f"--num_epochs {s.num_epochs}"

    @property
    def rows_per_step(self) -> int:
        return self.settings.batch_size * self.settings.gradient_accumulation_steps * self.data_ranks

    @property
    def quantizes_again(self) -> bool:
        """True if a resumed run has its base in another format than the saved one."""
        if self.resume_from is None or self.settings.train_type != "qlora":
            return False
        return self.settings.quantization_backend != self.resume_from.saved_plan["settled"].get("quantization_backend")

    @property
    def has_adapter(self) -> bool:
        return self.settings.train_type != "full"

    def schedule(self, total_steps: int) -> Schedule:
        s = self.settings
        warmup = warmup_steps(total_steps, s.warmup_steps, s.warmup_ratio)
        return Schedule(s.lr_scheduler, s.lr, total_steps, warmup, s.cosine_min_lr_ratio)

    def eval_due(self, state: "TrainState") -> bool:
        every = self.settings.eval_every
        return bool(every) and state.step % every == 0 and state.step < state.total_steps

    def save_due(self, state: "TrainState", stopping: bool) -> bool:
        every = self.settings.save_every
        periodic = bool(every) and state.step % every == 0
        return self.settings.save_model and (periodic or stopping or state.step == state.total_steps)

    def flat_settings(self) -> dict:
        return dict(vars(self.settings))

    @classmethod
    def settings_of(cls, values: dict) -> TrainConfig:
        return TrainConfig(**values)

    def saved(self) -> tuple[dict, dict]:
        saved = {name for name, field in FIELDS.items() if field.metadata["saved"]}
        requested, settled = (
            {k: v for k, v in values.items() if k in saved} for values in (self.requested, self.flat_settings())
        )
        return requested, settled | {"backend": self.backend, "backend_type": self.backend}

    def on_this_host(self) -> "RunPlan":
        """The plan with the model's files as this host has them."""
        return replace(self, files=find_model_of(asdict(self.settings)))


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
    eval_pending: bool = False  # a signal ended the evaluation that was due at this step
    dataset_tokens: list | None = None  # of a stream of several datasets: tokens of each so far; None: not known

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.index)

    def advance(self, result, cursor: Cursor) -> None:
        """One step is done, with this StepResult; the next begins at `cursor`."""
        self.step, self.epoch, self.index = self.step + 1, cursor.epoch, cursor.index
        self.num_tokens += result.num_tokens
        self.loss = result.loss
