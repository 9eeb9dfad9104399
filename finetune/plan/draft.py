"""The plan while it is being resolved: values so far, the facts they are resolved against, and a reason for each
change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from backend_manager import Backend, BackendCapabilities
from finetune.adapters.continued import SavedAdapter
from finetune.config import DEFAULTS, TrainConfig, settings_asked
from finetune.data.lengths import DataSample
from finetune.distributed.env import RankEnv
from finetune.distributed.parallel_dims import ParallelDims
from finetune.estimate.budget import MemoryBudget, parse_size
from finetune.estimate.model_shape import ModelShape
from finetune.parts.data import DataPlan
from finetune.parts.parts import Parts
from finetune.plan.demo import demo_defaults
from finetune.plan.plan_base import Adjustment


@dataclass(frozen=True)
class Facts:
    """What a plan is resolved against.

    `probe(method, bits)`: one quantizer's probe result, None if it was not run; by default what
    `capabilities.quantizers` holds. `prequantized`: the quantization settings of a base stored quantized, see
    model_files.files.stored_format. `inherited`: see plan.resume.inherited_from_checkpoint. `env`: this process's rank
    if a launcher started it; without one there are `num_devices` ranks unless --world_size says otherwise.
    `environment`: environment variables, in which `accelerate launch` leaves its config file's requests. `sample`: of
    the data, None if they cannot be read now. `adapter`: that a new run continues from. `degrees`: settings of
    the layout that plan.degrees chose.
    """

    backend: Backend
    capabilities: BackendCapabilities
    shape: ModelShape | None = None
    inherited: dict | None = None
    probe: Callable[[str, int], dict | None] | None = None
    prequantized: dict | None = None
    env: RankEnv | None = None
    num_devices: int = 1
    environment: dict = field(default_factory=dict)
    sample: Callable[[DataPlan], DataSample | None] | None = None
    adapter: SavedAdapter | None = None
    degrees: dict = field(default_factory=dict)

    def probe_quantizer(self, method: str, bits: int) -> dict | None:
        if self.probe is not None:
            return self.probe(method, bits)
        return self.capabilities.quantizers.get(f"{method}/{bits}")


class Draft:
    """One value per setting; rules read and change them in the order of resolve.RULES.

    `values` starts as defaults < demo < inherited < requested. A rule changes a value with `adjust`, which records why,
    or assigns to `values` if the user left the setting open and the value is its documented default.
    """

    def __init__(self, requested: dict, facts: Facts):
        self.facts, self.backend, self.capabilities, self.shape = facts, facts.backend, facts.capabilities, facts.shape
        self.requested = {k: v for k, v in requested.items() if v is not None}
        self._asked = settings_asked(requested)
        self.demo, inherited = demo_defaults(self._asked), dict(facts.inherited or {})
        self.inherited_rows_per_step = inherited.pop("rows_per_step", None)
        # What a run found by a word that is not the default, a resumed one does not find again.
        found = {k: v for k, v in inherited.items() if self._asked.get(k) in ("auto", "search")}
        self.values = {**DEFAULTS, **self.demo, **inherited, **self._asked, **found, **facts.degrees}
        self.adjustments: list[Adjustment] = []
        self.notices: list[str] = []
        self._sampled: tuple = ()
        self.dims, self.local_world_size, self.distribution = ParallelDims(), 1, "ptd"

    def is_open(self, setting: str) -> bool:
        """True if neither the user, the demo nor the run that is resumed settled it."""
        return self.values[setting] == "auto" or not (
            self.given(setting) or setting in self.demo or setting in (self.facts.inherited or {})
        )

    def data_sample(self) -> DataSample | None:
        """Some rows of the data, read once; None if they cannot be read now."""
        if not self._sampled and self.facts.sample:
            self._sampled = (self.facts.sample(self.parts().data),)
        return self._sampled[0] if self._sampled else None

    def parts(self, **changes) -> Parts:
        """The typed parts of the values so far and the ranks so far, with these settings changed."""
        return Parts(TrainConfig(**{**self.values, **changes}), self.dims, self.distribution)

    def given(self, setting: str) -> bool:
        """True if the user set it; the word auto, where it is the default, sets nothing."""
        return setting in self._asked

    def adjust(self, setting: str, value, reason: str) -> None:
        """Changes a value and records why; nothing if it has that value already."""
        if self.values[setting] != value:
            self.adjustments.append(Adjustment(setting, self.values[setting], value, reason))
            self.values[setting] = value

    @property
    def is_resumed(self) -> bool:
        """True if a saved run continues, which has settled what was open."""
        return self.facts.inherited is not None

    @property
    def continues_adapter(self) -> bool:
        """True if --adapter's own weights train on, whose rank it has."""
        return self.facts.adapter is not None and not self.values["adapter_merge"]

    @property
    def on_cpu(self) -> bool:
        """True if the run is planned for this machine's CPU, not for an assumed device."""
        return self.backend is Backend.CPU and not self.assumes_accelerator

    @property
    def assumes_accelerator(self) -> bool:
        """True if the plan is for an accelerator that this machine does not have."""
        return bool(self.values["assume_memory"]) and not self.given("backend")

    def memory_budget(self) -> MemoryBudget | None:
        """Memory per rank that the plan may use: this machine's device, or --assume_memory's; None if unknown."""
        values, backend = self.values, str(self.backend)
        memory_bytes, ranks = self.capabilities.memory_bytes, values["assume_world_size"] or 1
        if values["assume_memory"]:
            memory_bytes = parse_size(values["assume_memory"])
            backend = "cuda" if self.assumes_accelerator else backend
        if not memory_bytes:
            return None
        budget = MemoryBudget(memory_bytes, backend, ranks)
        if self.dims.world_size == 1:
            return budget
        unified = self.backend in (Backend.CPU, Backend.MPS, Backend.MLX) and not values["assume_memory"]
        ranks_per_device = self.local_world_size if unified else 1
        return replace(budget, memory_bytes=memory_bytes // ranks_per_device, ranks=self.dims.shards, dims=self.dims)

    @property
    def may_offload(self) -> bool:
        """True if the plan may keep weights in host memory where nothing else fits."""
        accelerated = self.backend is Backend.CUDA or self.assumes_accelerator
        return accelerated and self.dims.shards > 1 and self.is_open("use_cpu_offload") and self.distribution == "ptd"
