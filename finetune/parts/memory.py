"""Memory traded for time."""

from dataclasses import dataclass

from finetune.parts.fields import Settings

DECIDED = {"true": True, "false": False}  # auto is not, until it was tried
OFFLOADS = ("host", "disk")  # places of a base that is not on the device


@dataclass(frozen=True)
class MemoryPlan:
    """Settings that trade speed for memory or time to start. `loading_workers`: -1: as many as the machine takes.
    `compiles`: each decoder layer; None: if a timed microbatch says that it pays. `packed_cache`: auto, none or a
    folder; `graphs`: microbatches are replayed as CUDA graphs; None: if timed ones say that it pays;
    `base_offload`: host or disk, where the frozen layers are while the device has two of them; None: all there.
    """

    recompute: bool = False
    reentrant: bool = False
    offload: bool = False
    offload_activations: bool = False
    cache_dequantized: bool = False
    low_memory: bool = False
    loading_workers: int = -1
    compiles: bool | None = False
    graphs: bool | None = False
    packed_cache: str = "none"
    base_offload: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> "MemoryPlan":
        s = settings
        return cls(
            s.use_gradient_checkpointing == "true",
            s.reentrant_checkpointing,
            s.use_cpu_offload,
            s.use_activation_cpu_offload,
            s.cache_dequantized == "true",
            s.low_memory,
            s.loading_workers,
            DECIDED.get(s.compile),
            DECIDED.get(s.cuda_graphs),
            s.packed_cache,
            s.base_offload if s.base_offload in OFFLOADS else None,
        )
