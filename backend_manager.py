"""Backend detection and probed capabilities of this machine, with a reason for each unsupported feature.

`CAPABILITIES` is the documented baseline; `BackendManager(...).capabilities` is probed on this machine. Detection reads
only files, package metadata and drivers, so constructing a manager takes milliseconds; probes run real work on the
device once and are cached per library versions and device.
"""

import ctypes
import glob
import hashlib
import importlib.util
import json
import os
import platform
import re
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path

GIB = 2**30
# What torch raises where a device, its driver or a kernel is missing.
PROBE_FAILURES = (
    RuntimeError,
    AssertionError,
    ImportError,
    AttributeError,
    NotImplementedError,
    OSError,
    TypeError,
    ValueError,
)


def first_line(error: BaseException) -> str:
    """What an error says in its first line; its type if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class Backend(str, Enum):
    """Where training runs. `str(backend)` is its value on the command line."""

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
    memory_bytes: int | None = None  # of the device, or of the system with unified memory
    probed: bool = False
    quantizers: dict = field(default_factory=dict)  # {'method/bits': result of quantization_wrapper.probe}
    reasons: dict = field(default_factory=dict)

    @property
    def max_model_size(self) -> float | None:
        """Older name of max_model_size_b."""
        return self.max_model_size_b


def auto_precision(backend: Backend, supports_bfloat16: bool) -> str:
    """What --precision auto means: bf16 if it is fast here, else fp32 on a CPU and fp16 on a GPU."""
    if supports_bfloat16:
        return "bf16"
    return "fp32" if backend is Backend.CPU else "fp16"


ONEDNN_PAYS = 1.1  # below this gain the probe's own spread would decide


def auto_cpu_matmul(onednn_speed: float | None) -> str:
    """What --cpu_matmul auto means: oneDNN if its fp32 products are exact and faster here, else torch's BLAS."""
    return "onednn" if onednn_speed is not None and onednn_speed >= ONEDNN_PAYS else "blas"


# The documented baseline of each backend, before any probe.
CAPABILITIES = {
    Backend.CUDA: BackendCapabilities(
        (4, 8, 16),
        ("nf4", "bnb", "hqq", "quanto"),
        ("fp32", "fp16", "bf16"),
        True,
        True,
        True,
        True,
        None,
        "nccl",
        "torch",
        "NVIDIA GPUs, and AMD GPUs through ROCm, which torch also calls cuda",
    ),
    Backend.MPS: BackendCapabilities(
        (8, 16),
        ("mlx", "quanto"),
        ("fp32", "fp16"),
        True,
        True,
        False,
        False,
        70,
        "gloo",
        "torch",
        "Apple GPUs through torch; collectives are staged through host memory",
    ),
    Backend.MLX: BackendCapabilities(
        (4, 8, 16),
        ("mlx",),
        ("fp32", "fp16"),
        False,
        False,
        True,
        False,
        70,
        None,
        "mlx",
        "Apple's own framework, unified memory",
    ),
    Backend.CPU: BackendCapabilities(
        (8, 16),
        ("hqq",),
        ("fp32",),
        True,
        True,
        False,
        False,
        7,
        "gloo",
        "torch",
        "any CPU; slow but correct, for experiments",
    ),
    Backend.XPU: BackendCapabilities(
        (4, 8, 16),
        ("nf4", "bnb"),
        ("fp32", "fp16", "bf16"),
        True,
        True,
        True,
        False,
        None,
        "xccl",
        "torch",
        "Intel GPUs through torch",
    ),
}
# The documented tables: precisions and quantizers documented for each backend.
PRECISION_MAP = {
    str(b): list(CAPABILITIES[b].precisions) for b in (Backend.CUDA, Backend.MPS, Backend.MLX, Backend.CPU)
}
QUANTIZATION_MAP = {"cuda": ["bnb", "hqq", "quanto"], "mps": ["mlx", "quanto"], "mlx": ["mlx"], "cpu": ["hqq"]}
AUTO_ORDER = (Backend.CUDA, Backend.MLX, Backend.MPS, Backend.XPU, Backend.CPU)
INSTALL = {
    Backend.CUDA: "pip install torch --index-url https://download.pytorch.org/whl/cu128",
    Backend.MPS: "pip install torch on an Apple silicon Mac",
    Backend.MLX: "pip install mlx mlx-lm",
    Backend.XPU: "pip install torch --index-url https://download.pytorch.org/whl/xpu",
}


def allowed(table: dict, backend, value: str) -> str:
    """`value` if `table` (PRECISION_MAP, QUANTIZATION_MAP) has it for the backend, else ValueError."""
    if value not in table[str(backend)]:
        raise ValueError(f"'{value}' is not documented for {backend}: it has {', '.join(table[str(backend)])}")
    return value


def package_version(name: str) -> str | None:
    """Version from the package's metadata, without importing it."""
    import importlib.metadata  # takes 40 ms; keep --help fast

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build() -> dict:
    """{'version', 'cuda', 'hip', 'xpu'} of the installed torch, read from its version file without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {"version": None, "cuda": None, "hip": None, "xpu": None}
    file = Path(list(spec.submodule_search_locations)[0]) / "version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = dict(re.findall(r"^(cuda|hip|xpu)(?:\s*:[^=]+)?\s*=\s*'([^']+)'", text, re.M))
    return {"version": package_version("torch"), **{k: found.get(k) for k in ("cuda", "hip", "xpu")}}


def _driver_device_count(library: str, init: str, count: str) -> int:
    """Number of devices reported by a GPU driver library, through its C API."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    number = ctypes.c_int(0)
    if getattr(driver, init)(0) != 0 or getattr(driver, count)(ctypes.byref(number)) != 0:
        return 0
    return number.value


def cpu_facts() -> dict:
    """{'model', 'cores', 'flags'} of this CPU; flags: its bf16 instructions, if the system reports them."""
    model, flags = platform.processor() or platform.machine(), set()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        model = (re.search(r"^model name\s*:\s*(.+)$", text, re.M) or [None, model])[1]
        flags = set((re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M) or [None, ""])[1].split())
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": model,
        "cores": cores,
        "flags": sorted(flags & {"avx512_bf16", "amx_bf16", "bf16", "avx512f", "avx2"}),
    }


def system_memory() -> tuple[int, int]:
    """(total, available) bytes of host memory, the container's limit included."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = total
    try:
        info = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.M))
        available = int(info["MemAvailable"]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        if limit != "max":
            total, available = min(total, int(limit)), min(available, int(limit) - used)
    except (OSError, KeyError, ValueError):
        pass
    return total, available


def rows_that_fit(model_size_b: float, context_length: int, memory_bytes: int, device: str) -> int:
    """Rows of one forward in 4-bit qlora with activation checkpointing, on a Llama-like model; 0 to 4096.

    The plan's memory prediction in closed form, for a model of which only the size is known: h hidden size, h / 128
    layers, an MLP of 8/3 h, 32,000 tokens. Bytes of the packed base, embedding, rank-16 adapters with Adam, one
    dequantized matrix; per token the inputs that checkpointing keeps and one layer's activations.
    """
    num_weights, vocab_size = max(float(model_size_b), 1e-3) * 1e9, 32000
    hidden = 64
    while vocab_size * hidden + 12 * max(2, hidden // 128) * hidden**2 < num_weights:
        hidden += 64
    layers, size = max(2, hidden // 128), 4 if device == "cpu" else 2
    base = 0.5625 * num_weights + vocab_size * hidden * size + 4864 * hidden * layers + 8 * hidden**2 // 3 * size
    per_row = context_length * hidden * size * (layers + (84 if device == "cpu" else 26))
    free = 0.92 * memory_bytes - base - 2**27 - (2**29 if device == "cpu" else 0)
    return int(min(max(0, free // per_row), 4096))


class BackendManager:
    """Selects a backend and reports its capabilities.

    `backend`: a Backend, its name in any case, 'auto' or None (= auto).

    Raises ValueError for an unknown or unavailable backend, listing the available ones. A subclass adds a backend by
    overriding `_detect_available_backends`.
    """

    CAPABILITIES = CAPABILITIES

    def __init__(self, backend=None, verbose: bool = True):
        self.unavailable = {}
        self.available = list(self._detect_available_backends())
        self.requested = self._named(backend)
        self.backend = self._choose() if self.requested is None else self._checked(self.requested)
        if verbose:
            self.print_summary()

    @classmethod
    def from_env(cls, verbose: bool = True) -> "BackendManager":
        """A manager for the backend in FSDP_BACKEND; unset or 'auto': detected."""
        return cls(os.environ.get("FSDP_BACKEND") or None, verbose=verbose)

    @staticmethod
    def _named(backend) -> Backend | None:
        if backend is None or isinstance(backend, Backend):
            return backend
        word = str(backend).strip().lower()
        if word == "auto":
            return None
        if word not in [b.value for b in Backend]:
            names = ", ".join(["auto", *(b.value for b in Backend)])
            raise ValueError(f"Backend '{backend}' is unknown. Use one of {names}.")
        return Backend(word)

    def _checked(self, backend: Backend) -> Backend:
        if backend not in self.available:
            have = ", ".join(b.value for b in self.available)
            why = self.unavailable.get(backend, "")
            raise ValueError(
                f"Backend '{backend}' is not available{f' ({why})' if why else ''}. Available here: {have}. "
                "Use --backend auto."
            )
        return backend

    def _choose(self) -> Backend:
        return next(b for b in AUTO_ORDER if b in self.available and not (b is Backend.MLX and not self._mlx_has_gpu()))

    @property
    def why_selected(self) -> str:
        """Why auto selects this backend: what of AUTO_ORDER before it is not here."""
        skipped = {b: self.unavailable.get(b, "not detected") for b in AUTO_ORDER[: AUTO_ORDER.index(self.backend)]}
        if Backend.MLX in skipped and Backend.MLX in self.available:
            skipped[Backend.MLX] = "its default device is not a GPU"
        reasons = "; ".join(f"{backend}: {why.partition(': pip')[0]}" for backend, why in skipped.items())
        order = ", ".join(b.value for b in AUTO_ORDER)
        return f"the first of {order} that is available{f' ({reasons})' if reasons else ''}"

    def _detect_available_backends(self) -> list[Backend]:
        """Backends available here, best first; sets `self.unavailable` to the reasons for the others."""
        build = torch_build()
        found = []
        if build["version"] is None:
            for backend in (Backend.CUDA, Backend.MPS, Backend.XPU):
                self.unavailable[backend] = "torch is not installed: pip install torch"
        else:
            found += self._detect_torch_gpus(build)
        if importlib.util.find_spec("mlx") is None:
            self.unavailable[Backend.MLX] = f"mlx is not installed: {INSTALL[Backend.MLX]}"
        else:
            found.append(Backend.MLX)
        return sorted(found, key=AUTO_ORDER.index) + [Backend.CPU]

    @property
    def _available_backends(self) -> list[Backend]:
        """Older name of `available`."""
        return self.available

    def _detect_torch_gpus(self, build: dict) -> list[Backend]:
        """Backends of torch: what torch itself says if it is imported already, else from files and drivers."""
        if hasattr(sys.modules.get("torch"), "cuda"):
            return self._ask_torch(sys.modules["torch"], build)
        found = []
        devices = {
            Backend.CUDA: lambda: (
                bool(build["hip"] and glob.glob("/dev/kfd"))
                or bool(build["cuda"])
                and _driver_device_count("libcuda.so.1", "cuInit", "cuDeviceGetCount") > 0
            ),
            Backend.MPS: lambda: True,
            Backend.XPU: lambda: bool(glob.glob("/dev/dri/renderD*")),
        }
        missing = {
            Backend.CUDA: f"torch {build['version']} has CUDA, but the driver reports no device",
            Backend.XPU: "no Intel GPU was found",
        }
        for backend, has_device in devices.items():
            why = self._reason_of_build(backend, build)
            if why is None and has_device():
                found.append(backend)
            else:
                self.unavailable[backend] = why or missing[backend]
        return found

    def _ask_torch(self, torch, build: dict) -> list[Backend]:
        """Backends that an imported torch can use; a driver that it cannot use is a reason."""
        answers = {
            Backend.CUDA: torch.cuda.is_available,
            Backend.MPS: torch.backends.mps.is_available,
            Backend.XPU: torch.xpu.is_available,
        }
        found = []
        for backend, is_available in answers.items():
            try:
                answer, why = bool(is_available()), f"torch {build['version']} finds no device that it can use"
            except (RuntimeError, AssertionError, AttributeError, OSError) as error:
                answer, why = False, f"torch {build['version']} cannot use it: {first_line(error)}"
            if answer:
                found.append(backend)
            else:
                self.unavailable[backend] = self._reason_of_build(backend, build) or why
        return found

    @staticmethod
    def _reason_of_build(backend: Backend, build: dict) -> str | None:
        """Why the installed torch or this machine can never have the backend; None if it could."""
        version = f"torch {build['version']}"
        if backend is Backend.CUDA and not (build["cuda"] or build["hip"]):
            return f"{version} was built without CUDA: {INSTALL[Backend.CUDA]}"
        if backend is Backend.CUDA and os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
            return "CUDA_VISIBLE_DEVICES hides all devices"
        if backend is Backend.MPS and not (sys.platform == "darwin" and platform.machine() == "arm64"):
            return "it needs an Apple silicon Mac"
        if backend is Backend.XPU and not build["xpu"]:
            return f"{version} was built without XPU"
        return None

    @staticmethod
    def _mlx_has_gpu() -> bool:
        """True if MLX's default device is a GPU (Metal or CUDA): only then does auto select MLX."""
        metal = sys.platform == "darwin" and platform.machine() == "arm64"
        return metal or any(package_version(name) for name in ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13"))

    # ---- capabilities of the selected backend

    @cached_property
    def capabilities(self) -> BackendCapabilities:
        """Capabilities probed on this machine (takes seconds the first time, then cached)."""
        return self._with_probes(run=True)

    def documented_or_cached(self) -> BackendCapabilities:
        """Capabilities without running probes: cached results, else the baseline with `probed` False."""
        return self.__dict__.get("capabilities") or self._with_probes(run=False)

    def _with_probes(self, run: bool) -> BackendCapabilities:
        base = replace(CAPABILITIES[self.backend], memory_bytes=system_memory()[0])
        if base.engine != "torch":
            return base
        facts = self.cache.read()
        if "bfloat16_speed" not in facts and run:
            try:
                facts = self.cache.add(probe_torch(str(self.backend)))
            except PROBE_FAILURES as error:
                return replace(base, reasons={"probes": f"failed here: {first_line(error)}"})
        if "bfloat16_speed" not in facts:
            return replace(base, reasons={"probes": "documented, not probed: a run probes first"})
        return _merged(self.backend, base, facts)

    @cached_property
    def cache(self) -> "ProbeCache":
        return ProbeCache(self.backend)

    def probe_quantization(self, method: str, bits: int) -> dict:
        """Probe result of one layer of `method` at `bits` on this device (quantization_wrapper.probe), cached.
        `error` None: it passed. ValueError for a pair that METHODS lacks.
        """
        import quantization_wrapper

        if bits not in getattr(quantization_wrapper.METHODS.get(method), "bits", ()):
            raise ValueError(quantization_wrapper.unsupported(method, bits, None, 64))
        known = self.known_quantization(method, bits)
        if known is None:
            known = quantization_wrapper.probe(method, bits, str(self.backend))
            if "is not installed" not in (known["error"] or ""):  # it may be installed before the next start
                pairs = self.cache.read().get("quantizers", {}) | {f"{method}/{bits}": known}
                self.cache.add({"quantizers": pairs})
        self.__dict__.pop("capabilities", None)
        return known

    def known_quantization(self, method: str, bits: int) -> dict | None:
        """The cached probe result; None if the pair was never probed."""
        return self.cache.read().get("quantizers", {}).get(f"{method}/{bits}")

    def supports_quantization(self, bits: int) -> bool:
        """True if some method passes its probe at these bits; 16 means unquantized."""
        import quantization_wrapper

        if CAPABILITIES[self.backend].engine != "torch":
            return bits in CAPABILITIES[self.backend].quantization_bits
        pairs = [p for p in quantization_wrapper.pairs() if p[1] == bits]
        return bits == 16 or any(self.probe_quantization(*p)["error"] is None for p in pairs)

    def supported_quantizers(self) -> tuple[str, ...]:
        """Quantizers that are documented or passed a probe, without those that failed all probes."""
        return self.capabilities.quantization_backends

    @property
    def device(self):
        """The torch.device; for MLX, mlx's default device."""
        return self.get_device()

    def get_device(self):
        """`device`, as a method."""
        if self.backend is Backend.MLX:
            import mlx.core

            return mlx.core.default_device()
        import torch

        return torch.device(str(self.backend))

    def get_dtype(self, prefer_bfloat16: bool = True):
        """Compute dtype (torch): bf16 if preferred and fast here, else fp16 on GPUs and fp32 on a CPU."""
        import torch

        word = auto_precision(self.backend, prefer_bfloat16 and self.capabilities.supports_bfloat16)
        return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[word]

    def get_distributed_backend(self) -> str | None:
        return CAPABILITIES[self.backend].distributed_backend

    def get_memory_info(self) -> dict:
        """Memory in bytes: total and available (of the device, or unified), allocated and reserved by torch.
        total_memory, free_memory, allocated_memory and reserved_memory are older names of the same.
        """
        total, available = system_memory()
        info = {"total": total, "available": available, "allocated": 0, "reserved": 0, "unified": True}
        if self.backend is Backend.CPU:
            info["allocated"] = info["reserved"] = resident_bytes()
        elif self.backend is Backend.MLX:
            import mlx.core

            info["allocated"] = mlx.core.get_active_memory()
            info["reserved"] = info["allocated"] + mlx.core.get_cache_memory()
        elif self.backend is Backend.MPS:
            import torch

            info["allocated"] = torch.mps.current_allocated_memory()
            info["reserved"] = torch.mps.driver_allocated_memory()
        else:
            import torch

            module = torch.get_device_module(str(self.backend))
            free, total = module.mem_get_info()
            info.update(total=total, available=free, unified=False)
            info.update(allocated=module.memory_allocated(), reserved=module.memory_reserved())
        older = {"free_memory": info["available"]}
        older |= {f"{name}_memory": info[name] for name in ("total", "allocated", "reserved")}
        return info | older

    def get_optimal_batch_size(
        self, model_size_b: float = 7, context_length: int = 512, sequence_length: int | None = None
    ) -> int:
        """Rows of `context_length` tokens that fit in one forward in the memory available now; at least 1.

        Predicted for qlora with activation checkpointing on a Llama-like model of `model_size_b` billion parameters.
        `sequence_length`: older name of context_length.
        """
        available = self.get_memory_info()["available"]
        return max(1, rows_that_fit(model_size_b, sequence_length or context_length, available, str(self.backend)))

    def fits_model_size(self, model_size_b: float) -> bool:
        """True if qlora with activation checkpointing on one row of 512 tokens is predicted to fit in memory."""
        return rows_that_fit(model_size_b, 512, self.get_memory_info()["total"], str(self.backend)) > 0

    def validate_model_size(self, model_size_b: float) -> bool:
        """True if `fits_model_size`. Raises ValueError with the largest size that fits otherwise."""
        if self.fits_model_size(model_size_b):
            return True
        low, high = 0.0, float(model_size_b)
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.fits_model_size(middle) else (low, middle)
        raise ValueError(
            f"model of {model_size_b:g} B parameters: exceeds the recommended limit of {low:.1f} B for "
            f"{self.backend} with {self.get_memory_info()['total'] / GIB:.1f} GiB. Use a smaller model or more devices."
        )

    # ---- reports

    def describe(self) -> dict:
        """The content of print_summary as data."""
        caps = self.documented_or_cached()
        memory = {k: v for k, v in zip(("total", "available"), system_memory(), strict=True)}
        return {
            "backend": str(self.backend),
            "available": [str(b) for b in self.available],
            "unavailable": {str(b): why for b, why in self.unavailable.items()},
            "capabilities": asdict(caps),
            "cpu": cpu_facts(),
            "memory": memory,
            "versions": versions(),
            "environment": environment(),
        }

    @property
    def num_devices(self) -> int:
        """Number of visible CUDA devices; 1 for any other backend."""
        if self.backend is not Backend.CUDA:
            return 1
        return max(1, _driver_device_count("libcuda.so.1", "cuInit", "cuDeviceGetCount"))

    def print_summary(self) -> None:
        print("\n".join(self.summary_lines()))

    def summary_lines(self) -> list[str]:
        caps, facts = self.capabilities, self.describe()
        memory = self.get_memory_info()
        yes = {True: "yes", False: "no"}
        lines = [
            f"System: {platform.platform()}, Python {platform.python_version()}, {facts['cpu']['model']} x "
            f"{facts['cpu']['cores']}",
            "Versions: " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v),
            f"Selected backend: {self.backend}" + ("" if self.requested else " (auto)"),
            f"Available backends: {', '.join(facts['available'])}",
            *(f"  not {name}: {why}" for name, why in facts["unavailable"].items()),
            f"Device: {self.get_device()}",
            f"Quantization bits: {', '.join(map(str, caps.quantization_bits))} with "
            f"{', '.join(caps.quantization_backends)}"
            f" ({len(caps.quantizers)} of the pairs probed; --doctor probes all)",
            f"Distributed: {yes[caps.supports_distributed]} ({caps.distributed_backend})",
            f"FSDP: {yes[caps.supports_fsdp]}",
            f"bf16: {yes[caps.supports_bfloat16]}",
            f"Flash attention: {yes[caps.supports_flash_attention]}",
            *memory_lines(str(self.backend), memory),
        ]
        lines += [f"  {setting}: {why}" for setting, why in caps.reasons.items()]
        return lines + [f"  {name}={value}" for name, value in facts["environment"].items()]


def memory_lines(backend: str, memory: dict) -> list[str]:
    """Memory as lines of text, in GiB."""
    if memory["unified"]:
        lines = [
            f"Total memory: {memory['total'] / GIB:.1f} GiB",
            f"Available memory: {memory['available'] / GIB:.1f} GiB",
        ]
        return lines + ([] if backend == "cpu" else [f"Allocated on the device: {memory['allocated'] / GIB:.1f} GiB"])
    return [
        f"Memory allocated: {memory['allocated'] / GIB:.1f} GiB",
        f"Memory reserved: {memory['reserved'] / GIB:.1f} GiB",
        f"Total memory: {memory['total'] / GIB:.1f} GiB",
    ]


def resident_bytes() -> int:
    """Anonymous resident memory of this process; the peak resident size if the system does not report it."""
    try:
        return int(re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) * 1024
    except (OSError, TypeError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict:
    names = (
        "torch",
        "transformers",
        "peft",
        "bitsandbytes",
        "hqq",
        "optimum-quanto",
        "mlx",
        "mlx-lm",
        "flash-attn",
        "safetensors",
        "numpy",
    )
    return {name: package_version(name) for name in names}


def environment() -> dict:
    """Environment variables that affect the backend, as currently set, without passwords in URLs."""
    names = (
        "FSDP_BACKEND",
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
        "PYTORCH_MPS_LOW_WATERMARK_RATIO",
        "PYTORCH_ENABLE_MPS_FALLBACK",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "HF_ENDPOINT",
        "HF_HUB_OFFLINE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_PROCID",
    )
    return {name: re.sub(r"(?<=://)[^\s/?#]*@", "***@", os.environ[name]) for name in names if name in os.environ}


def environment_error() -> str | None:
    """The reason why the environment variables are invalid, or None."""
    low, high = (os.environ.get(f"PYTORCH_MPS_{end}_WATERMARK_RATIO") for end in ("LOW", "HIGH"))
    try:
        if low is not None and high is not None and float(high) > 0 and float(low) > float(high):
            return (
                f"PYTORCH_MPS_LOW_WATERMARK_RATIO={low}: exceeds PYTORCH_MPS_HIGH_WATERMARK_RATIO={high}. "
                "Set the low one below the high one."
            )
    except ValueError:
        return f"PYTORCH_MPS_*_WATERMARK_RATIO={low}, {high}: must be numbers, such as 0.5 and 0.7."
    return None


# ---- probes


class ProbeCache:
    """Probe results on disk, keyed by backend, library versions, CPU and source code of the probed files."""

    def __init__(self, backend):
        here = Path(__file__).parent
        probed = [
            Path(__file__),
            here / "quantization_wrapper.py",
            *sorted((here / "finetune/quantizers").glob("*.py")),
        ]
        key = [
            str(backend),
            versions(),
            cpu_facts(),
            environment().get("CUDA_VISIBLE_DEVICES"),
            [file.read_text(encoding="utf-8") for file in probed],
        ]
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.file = root / "finetune" / "probes" / f"{backend}-{name}.json"

    def read(self) -> dict:
        """Cached results; {} if there are none or the file is not one that `add` writes: it is then written again."""
        try:
            facts = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return facts if _are_facts(facts) else {}

    def add(self, facts: dict) -> dict:
        """Merges `facts` into the cache and returns all; a read-only home directory only costs time."""
        facts = self.read() | facts
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside = self.file.with_suffix(f".{os.getpid()}")
            beside.write_text(json.dumps(facts, indent=1))
            beside.replace(self.file)
        except OSError:
            pass
        return facts


def _are_facts(facts) -> bool:
    """True for what probe_torch and probe_quantization cache."""
    if not isinstance(facts, dict):
        return False
    kinds = {
        "device_name": str,
        "bfloat16_speed": int | float | None,
        "bfloat16_error": str | None,
        "onednn_speed": int | float | None,
        "onednn_error": str | None,
        "flash": bool,
        "capability": list | None,
        "memory": int | None,
    }
    probed = {name: value for name, value in facts.items() if name != "quantizers"}
    if probed and not all(name in probed and isinstance(probed[name], kind) for name, kind in kinds.items()):
        return False
    capability = probed.get("capability") or []
    pairs = facts.get("quantizers", {})
    return (
        all(isinstance(number, int) for number in capability)
        and isinstance(pairs, dict)
        and all(re.fullmatch(r"\w+/\d{1,2}", pair) and _is_probe_result(found) for pair, found in pairs.items())
    )


def _is_probe_result(found) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("error", 0), str | None):
        return False
    numbers = ("weight_error", "product_error", "slowdown", "bits_per_weight")
    return isinstance(found["error"], str) or all(isinstance(found.get(name), int | float) for name in numbers)


def probe_torch(device: str) -> dict:
    """Runs all probes but those of quantizers: {'bfloat16_speed', 'bfloat16_error', 'flash', 'capability', ...}."""
    import torch

    facts = {
        "device_name": device,
        "bfloat16_speed": None,
        "bfloat16_error": None,
        "onednn_speed": None,
        "onednn_error": None,
        "flash": False,
        "capability": None,
        "memory": None,
    }
    if device == "cuda":
        facts["device_name"] = torch.cuda.get_device_name()
        facts["capability"] = torch.cuda.get_device_capability()
        facts["flash"] = torch.backends.cuda.is_flash_attention_available() and facts["capability"] >= (8, 0)
    if device in ("cuda", "xpu"):
        facts["memory"] = torch.get_device_module(device).mem_get_info()[1]
    return facts | _matmul_speeds(device)


ONEDNN_ERROR = 3e-6  # of the largest element: rounding in fp32 gives 1e-7 to 1e-6 here, bf16 arithmetic 1e-3


def _matmul_speeds(device: str) -> dict:
    """Speeds and errors of matmuls in bf16, relative to fp32's fastest, and of oneDNN's in fp32, relative to BLAS's.

    256x1024 times 1024x1024, as in a small microbatch; each the best of 8, in turns; on a CPU, the processor time of
    one thread, which other load changes least. oneDNN takes an fp32 matmul only if bf16 arithmetic is allowed in it;
    where the processor has instructions for that, products are not fp32's, and the error shows it.
    """
    import torch

    x, w = (torch.randn(n, 1024, device=device) for n in (256, 1024))
    ways = {"fp32": (torch.float32, "none"), "bf16": (torch.bfloat16, "none")}
    facts = {"bfloat16_speed": None, "bfloat16_error": None, "onednn_speed": None, "onednn_error": None}
    if device == "cpu" and torch.backends.mkldnn.is_available():
        ways["onednn"] = (torch.float32, "bf16")
    elif device == "cpu":
        facts["onednn_error"] = "this torch was built without oneDNN"
    times, failed, threads = {}, {}, torch.get_num_threads()
    try:
        if device == "cpu":
            torch.set_num_threads(1)
        for _ in range(9):
            for name, (dtype, allowed) in ways.items():
                if name not in failed:
                    try:
                        seconds, off = _timed_matmul(x.to(dtype), w.to(dtype), allowed, check=name not in times)
                        times.setdefault(name, []).append(seconds)
                        limit = ONEDNN_ERROR if name == "onednn" else 0.02
                        failed |= {name: f"error {off:.1e} on {device}"} if not off <= limit else {}
                    except (RuntimeError, TypeError) as error:
                        failed[name] = first_line(error)
    finally:
        torch.set_num_threads(threads)
    best = {name: min(found[1:]) for name, found in times.items() if name not in failed}
    if "onednn" in ways:
        facts["onednn_error"] = failed.get("onednn") and f"oneDNN's fp32 products fail here: {failed['onednn']}"
        both = "onednn" in best and "fp32" in best
        facts["onednn_speed"] = round(best["fp32"] / best["onednn"], 3) if both else None
        facts["onednn_error"] = facts["onednn_error"] or (None if both else f"fp32 matmuls: {failed.get('fp32')}")
    wrong = failed.get("fp32") or failed.get("bf16")
    facts["bfloat16_error"] = wrong and f"matmuls fail: {wrong}"
    if not facts["bfloat16_error"]:
        facts["bfloat16_speed"] = round(min(best["fp32"], best.get("onednn", best["fp32"])) / best["bf16"], 3)
    return facts


def _timed_matmul(x, w, allowed: str, check: bool) -> tuple[float, float]:
    """(seconds of one product, its error relative to the largest element; 0.0 without `check`)."""
    import torch

    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, allowed
    clock = time.thread_time if x.device.type == "cpu" else time.perf_counter
    try:
        start = clock()
        product = x @ w.T
        torch.get_device_module(x.device).synchronize()
        seconds = clock() - start
    finally:
        matmul.fp32_precision = before
    if not check:
        return seconds, 0.0
    exact = x.double().cpu() @ w.double().cpu().T
    return seconds, ((product.double().cpu() - exact).abs().max() / exact.abs().max()).item()


def _merged(backend: Backend, base: BackendCapabilities, facts: dict) -> BackendCapabilities:
    """The baseline merged with the probe results, and the reason for each difference."""
    reasons = {}
    speed = facts["bfloat16_speed"]
    # On a GPU bf16 pays off through memory even at equal speed; a CPU without bf16 instructions emulates them.
    bf16 = speed is not None and (backend is not Backend.CPU or speed >= 1.1)
    if speed is None:
        reasons["bf16"] = f"failed here: {facts['bfloat16_error']}"
    elif not bf16:
        reasons["bf16"] = f"this CPU has no bf16 matmul instructions: {speed:.2f} x the speed of fp32, measured"
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
        memory_bytes=facts["memory"] or base.memory_bytes,
        probed=True,
        reasons=reasons,
    )


def get_backend_manager(backend=None, verbose: bool = False) -> BackendManager:
    """A manager for `backend`, else for FSDP_BACKEND, else for the detected backend."""
    return BackendManager.from_env(verbose=verbose) if backend is None else BackendManager(backend, verbose=verbose)


def get_device(backend=None):
    """The torch.device (for MLX, mlx's default device) of `backend`, else of FSDP_BACKEND, else of the detected one."""
    return get_backend_manager(backend).device


def detect_backend() -> Backend:
    """The backend that auto selects."""
    return BackendManager(verbose=False).backend
