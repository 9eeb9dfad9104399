"""Facts that a plan is settled against: the machine, the model, the data, the run that is resumed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from backend_manager import Backend, BackendCapabilities
from finetune.adapters.continued import SavedAdapter
from finetune.data.lengths import DataSample
from finetune.distributed.env import RankEnv
from finetune.estimate.model_shape import KnownShape, ModelShape
from finetune.parts.data import DataPlan


@dataclass(frozen=True)
class Facts:
    """Facts that a plan is settled against.

    `probe(method, bits)`: one quantizer's probe result, None if it was not run; by default what
    `capabilities.quantizers` holds. `prequantized`: the quantization settings of a base stored quantized, see
    model_files.files.stored_format. `inherited`: see plan.resume.inherited_from_checkpoint. `env`: this process's rank
    if a launcher started it; without one there are `num_devices` ranks unless --world_size says otherwise.
    `environment`: environment variables, in which `accelerate launch` leaves its config file's requests. `sample`: of
    the data, None if they cannot be read now. `adapter`: that a new run continues from. `degrees`: settings of
    the layout that plan.degrees chose. `sees_images`: the model has a tower for images, and its processor.
    `weight_files`: the model's that are on this disk. `beside`: bytes of each device that are not the run's own: those
    of a teacher that stays in memory. `rope_factor`: by which --rope_scaling makes a base take longer rows.
    `added_tokens`: the number of --new_tokens that the tokenizer does not have.
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
    sees_images: bool = False
    weight_files: tuple[Path, ...] = ()
    beside: int = 0
    rope_factor: float | None = None
    added_tokens: int | None = None

    def probe_quantizer(self, method: str, bits: int) -> dict | None:
        if self.probe is not None:
            return self.probe(method, bits)
        return self.capabilities.quantizers.get(f"{method}/{bits}")

    @property
    def num_experts(self) -> int:
        """Experts per layer of the model; 0 if it has none, or is not known."""
        if self.shape:
            return self.shape.num_experts
        return 0

    @property
    def known_shape(self) -> KnownShape | None:
        """The model's shape if all that the estimates need of it is known, by formulas or traced."""
        if self.shape:
            return self.shape.known
        return None

    @property
    def context_limit(self) -> int | None:
        """The longest row that the model takes, where its config says so."""
        if self.shape:
            return self.shape.context_limit
        return None
