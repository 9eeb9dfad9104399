"""Base of the plans of train.py and pretrain.py: decisions with their reasons, on disk and between processes."""

import hashlib
import json
from dataclasses import Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from finetune.parts.output import LogPlan, OutputPlan
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.train_state import TrainState
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
    `notices`: what the user should know about these files. `begun`: the output_dir holds the run's beginning, without a
    checkpoint of its own; `step_folder` is the one of another folder that it began from.
    """

    output_dir: Path
    saved_plan: dict
    step_folder: Path | None
    notices: tuple[str, ...] = ()
    begun: bool = False

    @property
    def continues(self) -> bool:
        """True if the output_dir holds the run already."""
        return self.begun or not self.is_outside

    @property
    def is_outside(self) -> bool:
        """True for a checkpoint that is not one of the output_dir's."""
        root = self.output_dir.resolve()
        return self.step_folder is not None and self.step_folder.parent not in (root, root / "checkpoints")


class RunSettings(Protocol):
    """Settings that train.py and pretrain.py have in common."""

    @property
    def resume(self) -> str | None: ...
    @property
    def rank_timeout(self) -> float: ...


Plan = TypeVar("Plan", bound="PlanBase")


class PlanBase:
    """Methods of a frozen dataclass with these fields. A subclass says how its settings become flat values and back."""

    settings: RunSettings
    requested: dict
    adjustments: tuple[Adjustment, ...]
    notices: tuple[str, ...]
    backend: str
    engine: str
    dims: ParallelDims
    resume_from: SavedRun | None

    @property
    def output(self) -> OutputPlan:
        """Files of the run, and when they are written."""
        raise NotImplementedError

    @property
    def logs(self) -> LogPlan:
        """Destinations of the log."""
        raise NotImplementedError

    __dataclass_fields__: ClassVar[dict[str, Field]]
    OUTPUT: ClassVar[str]  # the setting that names the output folder
    LOCAL: ClassVar[tuple[str, ...]] = ()  # fields that stay in this process, None in others

    @property
    def load_best(self) -> bool:
        """True if the weights with the least validation loss are published."""
        return self.output.load_best

    def ends_early(self, state: TrainState) -> bool:
        """True if validation has not improved for as many evaluations as the plan allows."""
        return 0 < self.output.early_stopping <= state.worse_evals

    @property
    def data_ranks(self) -> int:
        return self.dims.data_ranks

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step over all data ranks."""
        raise NotImplementedError

    @property
    def trains(self) -> Any:
        """The weights that train: one of parts/trains.py."""
        raise NotImplementedError

    @property
    def has_adapter(self) -> bool:
        raise NotImplementedError

    @property
    def quantizes_again(self) -> bool:
        """True if a resumed run has its base in another format than the saved one."""
        raise NotImplementedError

    @property
    def async_save(self) -> bool:
        """True if checkpoints are written while steps go on."""
        raise NotImplementedError

    @property
    def asked_length(self) -> str:
        """The setting of the number of steps, as it is written."""
        raise NotImplementedError

    @property
    def lr_flag(self) -> str:
        """The learning rate, as it is written."""
        raise NotImplementedError

    def schedule(self, total_steps: int) -> Schedule:
        raise NotImplementedError

    def eval_due(self, state: TrainState) -> bool:
        raise NotImplementedError

    def save_due(self, state: TrainState, stopping: bool) -> bool:
        raise NotImplementedError

    def flat_settings(self) -> dict:
        """{setting: value} of all settings."""
        raise NotImplementedError

    @classmethod
    def settings_of(cls, values: dict):
        """The settings with these values, lists from JSON among them."""
        raise NotImplementedError

    def saved(self) -> tuple[dict, dict]:
        """(requested, settled) as run_plan.json holds them."""
        raise NotImplementedError

    def changed(self: Plan, changes: dict) -> Plan:
        """The plan with {setting: (value used, reason)}, an Adjustment for each that differs."""
        values = self.flat_settings()
        new = {name: value for name, (value, _) in changes.items() if values[name] != value}
        adjustments = tuple(Adjustment(name, values[name], value, changes[name][1]) for name, value in new.items())
        return replace(self, settings=self.settings_of(values | new), adjustments=self.adjustments + adjustments)

    def to_json(self) -> dict:
        """Content of run_plan.json."""
        requested, settled = self.saved()
        return {
            "requested": requested,
            "settled": settled | {"engine": self.engine},
            "adjustments": [asdict(a) for a in self.adjustments],
            **began_from(self.resume_from),
        }

    def digest(self) -> str:
        """sha256 of everything settled except the output folder."""
        settled = {k: v for k, v in self.to_json()["settled"].items() if k != self.OUTPUT}
        return hashlib.sha256(json.dumps(settled, sort_keys=True).encode()).hexdigest()

    def serialize(self) -> str:
        """JSON of all that other ranks need: every decision, without what it was resolved against."""
        whole = asdict(replace(self, **dict.fromkeys(self.LOCAL)))
        content = {f.name: whole[f.name] for f in fields(self)}
        return json.dumps(content | {"settings": self.flat_settings()}, default=str)

    @classmethod
    def deserialize(cls: type[Plan], text: str) -> Plan:
        content = json.loads(text)
        content["settings"] = cls.settings_of(content["settings"])
        content["adjustments"] = tuple(Adjustment(**a) for a in content["adjustments"])
        content["notices"] = tuple(content["notices"])
        content["dims"] = ParallelDims(**content["dims"])
        if content["resume_from"]:
            saved = content["resume_from"]
            step_folder = saved["step_folder"] and Path(saved["step_folder"])
            notices = tuple(saved["notices"])
            found = SavedRun(Path(saved["output_dir"]), saved["saved_plan"], step_folder, notices, saved["begun"])
            content["resume_from"] = found
        return cls(**content)

    def on_this_host(self: Plan) -> Plan:
        """The plan with what this host must find for itself."""
        return self


def began_from(saved: SavedRun | None) -> dict:
    """The checkpoint of another folder that a run begins from, as run_plan.json names it."""
    if saved is None or saved.step_folder is None or not saved.is_outside:
        return {}
    return {"began_from": str(saved.step_folder.resolve())}


def format_value(value: object) -> str:
    """A setting's value as messages show it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "unset"
    return str(value)
