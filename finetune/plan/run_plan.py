"""RunPlan: the frozen result of planning; TrainState: the one thing that changes while a run trains."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from finetune.config import NOT_SAVED, TrainConfig
from finetune.distributed.parallel_dims import KEEPS_GATHERED, ParallelDims
from finetune.estimate import budget
from finetune.estimate.model_shape import ModelShape


@dataclass(frozen=True)
class Adjustment:
    """A setting that was not used as it was asked for, or as it stands by default, and why."""

    setting: str
    requested: object
    used: object
    reason: str

    def __str__(self) -> str:
        return f"{self.setting}: {format_value(self.requested)} -> {format_value(self.used)} ({self.reason})"


@dataclass(frozen=True)
class RunPlan:
    """What will run. `settings` hold every setting's settled value, `requested` only what the user set."""

    settings: TrainConfig
    requested: dict
    adjustments: tuple[Adjustment, ...]
    notices: tuple[str, ...]
    backend: str
    engine: str
    dims: ParallelDims = ParallelDims()
    distribution: str = "ptd"  # who sums gradients and cuts weights over the ranks: a key of accelerate_env.NAMES
    shape: ModelShape | None = None  # what the plan was made for; not saved
    room: budget.MemoryBudget | None = None

    @property
    def data_ranks(self) -> int:
        return self.dims.data_ranks

    @property
    def reshard_after_forward(self) -> bool:
        """Whether a layer's gathered weights are freed between its forward and its backward."""
        return self.settings.sharding_strategy not in KEEPS_GATHERED

    @property
    def rows_per_step(self) -> int:
        return self.settings.batch_size * self.settings.gradient_accumulation_steps * self.data_ranks

    @property
    def adapter(self) -> bool:
        return self.settings.train_type != "full"

    def to_json(self) -> dict:
        settled = {k: v for k, v in asdict(self.settings).items() if k not in NOT_SAVED}
        return {
            "requested": {k: v for k, v in self.requested.items() if k not in NOT_SAVED},
            "settled": settled | {"backend": self.backend, "backend_type": self.backend, "engine": self.engine},
            "adjustments": [asdict(a) for a in self.adjustments],
        }

    def to_wire(self) -> dict:
        """All that crosses to another rank, as JSON: what was decided, without the sizes it was decided by."""
        return {
            "settings": asdict(self.settings),
            "requested": self.requested,
            "notices": self.notices,
            "backend": self.backend,
            "adjustments": [asdict(a) for a in self.adjustments],
            "engine": self.engine,
            "dims": asdict(self.dims),
            "distribution": self.distribution,
        }

    @classmethod
    def from_wire(cls, wire: dict) -> "RunPlan":
        return cls(
            TrainConfig(**wire["settings"]),
            wire["requested"],
            tuple(Adjustment(**a) for a in wire["adjustments"]),
            tuple(wire["notices"]),
            wire["backend"],
            wire["engine"],
            ParallelDims(**wire["dims"]),
            wire["distribution"],
        )

    def digest(self) -> str:
        """sha256 of everything settled but where it is written to."""
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


def finalize(plan: RunPlan, proofs: dict) -> RunPlan:
    """The plan after loading: `proofs` maps a setting to (value used, reason)."""
    changed = {k: v for k, (v, _) in proofs.items() if getattr(plan.settings, k) != v}
    adjusted = tuple(Adjustment(k, getattr(plan.settings, k), v, proofs[k][1]) for k, v in changed.items())
    return replace(plan, settings=replace(plan.settings, **changed), adjustments=plan.adjustments + adjusted)


def format_value(value) -> str:
    return str(value).lower() if isinstance(value, bool) else "unset" if value is None else str(value)
