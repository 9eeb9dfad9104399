"""RunPlan: the frozen result of planning."""

from dataclasses import asdict, dataclass, replace

from finetune.config import FIELDS, TrainConfig
from finetune.estimate.budget import MemoryBudget
from finetune.estimate.model_shape import ModelShape
from finetune.estimate.step_time import Machine
from finetune.model_files.files import ModelFiles, find_model_of
from finetune.parts.parts import Parts
from finetune.parts.plan_base import Adjustment, PlanBase, SavedRun
from finetune.parts.train_state import TrainState
from finetune.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class RunPlan(Parts, PlanBase):
    """A run as it is settled: the parts, and how they were found. `requested`: only what the user set.

    `shape`, `memory_budget`, `machine` and `files` are what the plan was resolved against: they are not saved, and each
    rank finds the model's files on its own host. `day`: that chat templates print, the first day of the run. `layouts`:
    lines on the layouts of the ranks that were compared.
    """

    settings: TrainConfig
    requested: dict
    adjustments: tuple[Adjustment, ...]
    notices: tuple[str, ...]
    backend: str
    engine: str
    resume_from: SavedRun | None = None
    shape: ModelShape | None = None
    memory_budget: MemoryBudget | None = None
    files: ModelFiles | None = None
    day: str = ""
    machine: Machine | None = None
    layouts: tuple[str, ...] = ()
    OUTPUT = "output_dir"
    LOCAL = ("shape", "memory_budget", "files", "machine", "layouts")

    @property
    def model(self) -> ModelFiles:
        """The files of the model, which a plan that trains has on each host."""
        assert self.files is not None, "the plan was resolved without a model"
        return self.files

    @property
    def asked_length(self) -> str:
        """The flag that sets the number of steps, as it is written."""
        return self.steps.length_flag

    @property
    def lr_flag(self) -> str:
        """The learning rate, as it is written."""
        return f"--lr {self.steps.lr}"

    @property
    def quantizes_again(self) -> bool:
        """True if a resumed run has its base in another format than the saved one."""
        if self.resume_from is None or self.quantization is None:
            return False
        return self.quantization.method != self.resume_from.saved_plan["settled"].get("quantization_backend")

    @property
    def has_adapter(self) -> bool:
        return not self.all_weights

    def schedule(self, total_steps: int) -> Schedule:
        return self.steps.schedule(total_steps)

    def eval_due(self, state: "TrainState") -> bool:
        every = self.output.eval_every
        return bool(every) and state.step % every == 0 and state.step < state.total_steps

    def save_due(self, state: "TrainState", stopping: bool) -> bool:
        every = self.output.save_every
        periodic = bool(every) and state.step % every == 0
        return self.output.save_model and (periodic or stopping or state.step == state.total_steps)

    @property
    def async_save(self) -> bool:
        return self.output.takes_snapshots

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
        return requested, settled | {"backend": self.backend, "backend_type": self.backend, "day": self.day}

    def on_this_host(self) -> "RunPlan":
        """The plan with the model's files as this host has them."""
        return replace(self, files=find_model_of(asdict(self.settings)))
