"""RunPlan: the frozen result of planning; TrainState: the one thing that changes while a run trains."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from finetune.config import FIELDS, TrainConfig
from finetune.data.sampler import Cursor
from finetune.distributed.parallel_dims import ParallelDims
from finetune.estimate.budget import MemoryBudget
from finetune.estimate.model_shape import ModelShape
from finetune.model_files.files import ModelFiles, find_model_of
from finetune.plan.parts import PARTS, Parts
from finetune.schedule import Schedule


@dataclass(frozen=True)
class Adjustment:
    """A setting whose requested or default value was not used, and why."""

    setting: str
    requested: object
    used: object
    reason: str

    def __str__(self) -> str:
        return f"{self.setting}: {format_value(self.requested)} -> {format_value(self.used)} ({self.reason})"


@dataclass(frozen=True)
class SavedRun:
    """A run on disk that --resume names: the folder it continues in, its saved plan, the checkpoint if one was named.

    `notices`: what the user should know about these files.
    """

    output_dir: Path
    saved_plan: dict
    step_folder: Path | None
    notices: tuple[str, ...] = ()

    @property
    def is_outside(self) -> bool:
        """True for a checkpoint that is not one of the output_dir's."""
        root = self.output_dir.resolve()
        return self.step_folder is not None and self.step_folder.parent not in (root, root / "checkpoints")


@dataclass(frozen=True, kw_only=True)
class RunPlan(Parts):
    """What will run: the parts, and how they were found. `requested`: only what the user set.

    `shape`, `memory_budget` and `files` are what the plan was resolved against: they are not saved, and each rank finds
    the model's files on its own host.
    """

    requested: dict
    adjustments: tuple[Adjustment, ...]
    notices: tuple[str, ...]
    backend: str
    engine: str
    resume_from: SavedRun | None = None
    shape: ModelShape | None = None
    memory_budget: MemoryBudget | None = None
    files: ModelFiles | None = None

    @property
    def data_ranks(self) -> int:
        return self.dims.data_ranks

    @property
    def asked_length(self) -> str:
        """What sets the number of steps, as it was written."""
        return self.steps.length_flag

    @property
    def lr_flag(self) -> str:
        """The learning rate, as it is written."""
        return f"--lr {self.steps.lr}"

    @property
    def rows_per_step(self) -> int:
        return self.steps.batch_size * self.steps.accumulation * self.data_ranks

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

    def changed(self, changes: dict) -> "RunPlan":
        """The plan with {setting: (value used, reason)}, an Adjustment for each that differs."""
        new = {k: v for k, (v, _) in changes.items() if getattr(self.settings, k) != v}
        adjustments = tuple(Adjustment(k, getattr(self.settings, k), v, changes[k][1]) for k, v in new.items())
        return replace(self.with_settings(**new), adjustments=self.adjustments + adjustments)

    def to_json(self) -> dict:
        """What run_plan.json holds."""
        saved = {name for name, field in FIELDS.items() if field.metadata["saved"]}
        settled = {k: v for k, v in asdict(self.settings).items() if k in saved}
        return {
            "requested": {k: v for k, v in self.requested.items() if k in saved},
            "settled": settled | {"backend": self.backend, "backend_type": self.backend, "engine": self.engine},
            "adjustments": [asdict(a) for a in self.adjustments],
        }

    def serialize(self) -> str:
        """JSON of all that other ranks need: every decision, without what it was resolved against."""
        content = asdict(replace(self, shape=None, memory_budget=None, files=None))
        content = {name: value for name, value in content.items() if name not in PARTS}
        return json.dumps(content, default=str)

    @classmethod
    def deserialize(cls, text: str) -> "RunPlan":
        content = json.loads(text)
        content["settings"] = TrainConfig(**content["settings"])
        content["adjustments"] = tuple(Adjustment(**a) for a in content["adjustments"])
        content["notices"] = tuple(content["notices"])
        content["dims"] = ParallelDims(**content["dims"])
        if content["resume_from"]:
            saved = content["resume_from"]
            step_folder = saved["step_folder"] and Path(saved["step_folder"])
            content["resume_from"] = SavedRun(
                Path(saved["output_dir"]), saved["saved_plan"], step_folder, tuple(saved["notices"])
            )
        return cls(**content)

    def on_this_host(self) -> "RunPlan":
        """The plan with the model's files as this host has them."""
        return replace(self, files=find_model_of(asdict(self.settings)))

    def digest(self) -> str:
        """sha256 of everything settled except the output_dir."""
        settled = {k: v for k, v in self.to_json()["settled"].items() if k != "output_dir"}
        return hashlib.sha256(json.dumps(settled, sort_keys=True).encode()).hexdigest()


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


def format_value(value) -> str:
    """A setting's value as messages show it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else str(value)
