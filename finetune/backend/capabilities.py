"""Capabilities of each backend: the documented baseline, and that merged with probes of this machine."""

from dataclasses import dataclass, field, replace
from enum import Enum


class Backend(str, Enum):
    """The device that training runs on. `str(backend)` is its value on the command line."""

    CUDA = "cuda"
    MPS = "mps"
    MLX = "mlx"
    CPU = "cpu"
    XPU = "xpu"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class BackendCapabilities:
    """Capabilities of a backend.

    `reasons`: per setting, why it is unsupported or differs from the documented baseline.
    """

    quantization_bits: tuple[int, ...] = (16,)
    quantization_backends: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("fp32",)
    supports_distributed: bool = False
    supports_fsdp: bool = False
    supports_bfloat16: bool = False
    supports_flash_attention: bool = False
    max_model_size_b: float | None = None
    distributed_backend: str | None = None
    engine: str = "torch"
    notes: str = ""
    bfloat16_speed: float | None = None  # measured matmul speed of bf16 relative to fp32
    onednn_speed: float | None = None  # measured fp32 matmul speed of oneDNN relative to torch's BLAS, where as exact
    product_rates: dict = field(default_factory=dict)  # FLOP/s by precision, of one thread on a CPU; as probed
    memory_rate: float | None = None  # bytes/s that a copy reads and writes, the same
    operator_seconds: float | None = None  # of host time to start an operator
    host_link_rate: float | None = None  # bytes/s from pinned host memory, on CUDA
    memory_bytes: int | None = None  # of the device, or of the system with unified memory
    probed: bool = False
    quantizers: dict = field(default_factory=dict)  # {'method/bits': result of quantization_wrapper.probe}
    reasons: dict = field(default_factory=dict)

    @property
    def max_model_size(self) -> float | None:
        """Older name of max_model_size_b."""
        return self.max_model_size_b


def auto_precision(backend: Backend, supports_bfloat16: bool) -> str:
    """The precision of auto: bf16 if it is fast here, else fp32 on a CPU and fp16 on a GPU."""
    if supports_bfloat16:
        return "bf16"
    return "fp32" if backend is Backend.CPU else "fp16"


ONEDNN_PAYS = 1.1  # below this gain the probe's own spread would decide


def auto_cpu_matmul(onednn_speed: float | None) -> str:
    """The library of --cpu_matmul auto: oneDNN if its fp32 products are exact and faster here, else torch's BLAS."""
    return "onednn" if onednn_speed is not None and onednn_speed >= ONEDNN_PAYS else "blas"


BF16_FROM = (8, 0)  # CUDA capability of the first GPUs with bf16 units

# The documented baseline of each backend, before any probe.
CAPABILITIES = {
    Backend.CUDA: BackendCapabilities(
        quantization_bits=(4, 8, 16),
        quantization_backends=("nf4", "bnb", "hqq", "quanto"),
        precisions=("fp32", "fp16", "bf16"),
        supports_distributed=True,
        supports_fsdp=True,
        supports_bfloat16=True,
        supports_flash_attention=True,
        distributed_backend="nccl",
        notes="NVIDIA GPUs, and AMD GPUs through ROCm, which torch also calls cuda",
    ),
    Backend.MPS: BackendCapabilities(
        quantization_bits=(8, 16),
        quantization_backends=("mlx", "quanto"),
        precisions=("fp32", "fp16"),
        supports_distributed=True,
        supports_fsdp=True,
        max_model_size_b=70,
        distributed_backend="gloo",
        notes="Apple GPUs through torch; collectives are staged through host memory",
    ),
    Backend.MLX: BackendCapabilities(
        quantization_bits=(4, 8, 16),
        quantization_backends=("mlx",),
        precisions=("fp32", "fp16"),
        supports_bfloat16=True,
        max_model_size_b=70,
        engine="mlx",
        notes="Apple's own framework, unified memory",
    ),
    Backend.CPU: BackendCapabilities(
        quantization_bits=(8, 16),
        quantization_backends=("hqq",),
        supports_distributed=True,
        supports_fsdp=True,
        max_model_size_b=7,
        distributed_backend="gloo",
        notes="any CPU; slow but correct, for experiments",
    ),
    Backend.XPU: BackendCapabilities(
        quantization_bits=(4, 8, 16),
        quantization_backends=("nf4", "bnb"),
        precisions=("fp32", "fp16", "bf16"),
        supports_distributed=True,
        supports_fsdp=True,
        supports_bfloat16=True,
        distributed_backend="xccl",
        notes="Intel GPUs through torch",
    ),
}


def merged(backend: Backend, base: BackendCapabilities, facts: dict) -> BackendCapabilities:
    """The baseline merged with the probe results, and the reason for each difference."""
    reasons = {}
    speed = facts["bfloat16_speed"]
    # On a GPU bf16 pays off through memory even at equal speed, where its units compute it; a CPU without bf16
    # instructions, and a GPU before capability 8.0, emulate them.
    capability = tuple(facts["capability"] or ())
    emulated = bool(capability) and capability < BF16_FROM
    bf16 = speed is not None and not emulated and (backend is not Backend.CPU or speed >= 1.1)
    if speed is None:
        reasons["bf16"] = f"failed here: {facts['bfloat16_error']}"
    elif emulated:
        version = ".".join(map(str, capability))
        reasons["bf16"] = f"{facts['device_name']} has CUDA capability {version}, and emulates bf16 below 8.0"
    elif not bf16:
        reasons["bf16"] = f"bf16 products have {speed:.2f} x the speed of fp32 here, measured"
    elif bf16 and not base.supports_bfloat16:
        reasons["bf16"] = f"{speed:.2f} x the speed of fp32, measured"
    if facts["onednn_error"]:
        reasons["cpu_matmul"] = facts["onednn_error"]
    pairs = facts.get("quantizers", {})
    failed = {pair: found["error"] for pair, found in pairs.items() if found["error"]}
    reasons |= {f"quantization {pair}": why for pair, why in failed.items()}
    passed = [pair.split("/") for pair in pairs if pair not in failed]
    names = {name for name, _ in passed} | (set(base.quantization_backends) - {p.split("/")[0] for p in failed})
    widths = {int(bits) for _, bits in passed}
    lost = {int(p.split("/")[1]) for p in failed} - widths
    bits = tuple(sorted((set(base.quantization_bits) - lost) | widths))
    if bits != base.quantization_bits:
        reasons["quantization_bits"] = f"probed {bits}, documented {base.quantization_bits}"
    if base.supports_flash_attention and not facts["flash"]:
        reasons["flash_attention"] = f"not on {facts['device_name']}: needs CUDA capability 8.0"
    if facts["capability"] and tuple(facts["capability"]) < (7, 0):
        reasons["capability"] = (
            f"{facts['device_name']} has CUDA capability {facts['capability']}, 7.0 is the documented minimum"
        )
    return replace(
        base,
        quantization_bits=bits,
        quantization_backends=tuple(sorted(names)),
        quantizers=pairs,
        precisions=("fp32", "fp16", "bf16") if speed is not None else ("fp32", "fp16"),
        supports_bfloat16=bf16,
        supports_flash_attention=base.supports_flash_attention and bool(facts["flash"]),
        bfloat16_speed=speed,
        onednn_speed=facts["onednn_speed"],
        product_rates=facts.get("product_rates") or {},
        memory_rate=facts.get("memory_rate"),
        operator_seconds=facts.get("operator_seconds"),
        host_link_rate=facts.get("host_link_rate"),
        memory_bytes=facts["memory"] or base.memory_bytes,
        probed=True,
        reasons=reasons,
    )
