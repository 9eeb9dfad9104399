"""The device a rank trains on, and its compute threads."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

SIMULATED = "simulated"  # a device that no machine has: see simulated.py
WITHOUT_VALUES = ("meta", SIMULATED)  # nothing can be tried there: kernels are assumed to work


def device_of(backend: str, local_rank: int | None = None) -> torch.device:
    """The device of a backend; of several ranks on one host, each takes its own if there are several devices."""
    if local_rank is None or backend in ("cpu", "mps"):
        return torch.device(backend)
    if torch.get_device_module(backend).device_count() == 1:  # a launcher that shows each rank its own
        return torch.device(backend, 0)
    return torch.device(backend, local_rank)


def to_device(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host array or tensor on `device`; the host does not wait until the device has done its earlier work."""
    tensor = torch.as_tensor(array)
    if tensor.device.type == device.type or device.type in ("cpu", "mps"):  # MPS copies so from its own memory only
        return tensor.to(device)
    if device.type == "cuda":  # from pageable memory the copy waits for the device
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def fused_optimizer(device: torch.device) -> dict:
    """Arguments of torch's optimizers that make a step one kernel, on devices that have it."""
    if device.type in ("cpu", "cuda", "mps", "xpu"):
        return {"fused": True}
    return {}


def pins_memory(device: torch.device) -> bool:
    """True if copies between `device` and pinned memory go on beside its work."""
    return device.type not in ("cpu", *WITHOUT_VALUES) and hasattr(torch.get_device_module(device), "Stream")


def resizes_storages(device: torch.device) -> bool:
    """True if torch takes a storage's memory on `device` away and gives it again."""
    return device.type in ("cuda", "meta")


def counts_peaks(device: torch.device) -> bool:
    """True if torch's allocator counts the peak bytes of `device`."""
    return device.type in ("cuda", "xpu")


def random_states(device: torch.device) -> list[torch.device]:
    """Devices beside the CPU whose random state a forward on `device` advances, for torch.random.fork_rng."""
    if device.type == "cuda":
        return [device]
    return []


def indices_to_device(indices: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """int64 host tensors on `device`, in one copy."""
    if device.type == "cpu" or not indices:
        return indices
    packed = to_device(torch.cat([index.reshape(-1) for index in indices]), device)
    parts = packed.split([index.numel() for index in indices])
    return [part.view(index.shape) for part, index in zip(parts, indices, strict=True)]


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of floating-point tensors in host memory, as fp64: one wait for the device, however many they are."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu().double()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


FREE_FOR_WEIGHTS = 0.7  # of the free memory, in generation: it also keeps keys and values


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device, cached blocks included; None if it does not say, as a CPU."""
    module = torch.get_device_module(device)
    if device.type in ("cpu", *WITHOUT_VALUES) or not hasattr(module, "mem_get_info"):
        return None
    return module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)


def rounds_to_tf32(device: torch.device) -> bool:
    """True if fp32 products on `device` have 10 bits: switched on in torch, or forced by the environment, as NVIDIA's
    containers do.
    """
    if device.type != "cuda":
        return False
    forced = os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1"
    return forced or torch.backends.cuda.matmul.fp32_precision == "tf32"


def has_flash_kernels(device: torch.device) -> bool:
    """True if torch's flash attention runs there: from CUDA capability 8.0 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def prepare_attention(device: torch.device) -> None:
    """SDPA without cuDNN, in this process: it plans for each new shape, a second or so each, and lengths always
    differ.
    """
    if device.type != "cpu":
        torch.backends.cuda.enable_cudnn_sdp(False)


def fp64_device(device: torch.device) -> torch.device:
    """Device for fp64 sums over values of `device`: itself, or the CPU for devices that may lack fp64, such as MPS."""
    if device.type == "cuda":
        return device
    return torch.device("cpu")


def fp64_or_fp32(device: torch.device) -> torch.dtype:
    """The widest type that `device` surely has."""
    if fp64_device(device) == device:
        return torch.float64
    return torch.float32


ATTENTION = ("flash", "mem_efficient", "math", "cudnn")  # torch's kernels, on a CPU too


def _enable_attention(kind: str, is_enabled: bool) -> None:
    getattr(torch.backends.cuda, f"enable_{kind}_sdp")(is_enabled)


def enable_every_attention() -> None:
    """Lets torch choose among all of its kernels of attention, as by default."""
    for kind in ATTENTION:
        _enable_attention(kind, True)


def restorers_of_kernels() -> list[Callable[[], object]]:
    """Functions that restore which kernels of attention are enabled, and the precisions of products in fp32."""
    found: list[Callable[[], object]] = []
    for kind in ATTENTION:
        is_enabled = getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()
        found.append(functools.partial(_enable_attention, kind, is_enabled))
    backends: Any = torch.backends  # to which torch adds `matmul` as it is imported
    for where in (backends, backends.mkldnn.matmul, backends.cuda.matmul):
        found.append(functools.partial(setattr, where, "fp32_precision", where.fp32_precision))
    return found


@contextlib.contextmanager
def kept_settings() -> Iterator[None]:
    """A context whose end restores the settings of torch that functions of this module change, and its dtype."""
    dtype = torch.get_default_dtype()
    threads = torch.get_num_threads()
    products = _onednn().matmul.fp32_precision
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        _onednn().matmul.fp32_precision = products
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


_forked: list[bool] = []  # not empty in a child whose parent may have computed with several threads


@functools.cache
def compute_alone_after_fork() -> None:
    """Lets children that are forked from now on compute with one thread: GNU OpenMP would wait there for the threads of
    the parent, which a fork leaves behind.
    """
    os.register_at_fork(after_in_child=compute_alone)


def compute_alone() -> None:
    """Computes with one thread in this process from now on."""
    torch.set_num_threads(1)
    _forked.append(True)


def set_num_threads(local_ranks: int = 1) -> None:
    """Sets torch's compute threads to the cores that this process may use, divided by the ranks on this host. The
    user's own setting wins.
    """
    if _forked:
        return
    set_by = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ)
    # torchrun sets 1 if the user set nothing.
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if set_by and not (local_ranks > 1 and by_torchrun):
        return
    if hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))


TF32_EPS = 2.0**-10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _onednn() -> Any:
    """torch.backends.mkldnn, whose `matmul` torch adds when it is imported."""
    return torch.backends.mkldnn


def uses_onednn() -> bool:
    """True if oneDNN multiplies fp32 matrices on a CPU in this process, not torch's BLAS."""
    return torch.backends.mkldnn.is_available() and _onednn().matmul.fp32_precision == "bf16"


def set_onednn(used: bool) -> None:
    """Selects the library for fp32 matmuls on a CPU in this process: oneDNN, or torch's BLAS.

    "bf16" only permits oneDNN to round inputs; BackendManager's probe has shown that it does not on this processor.
    torch.get_float32_matmul_precision() raises once this is set: torch does not mix its two interfaces.
    """
    if torch.backends.mkldnn.is_available():
        _onednn().matmul.fp32_precision = "bf16" if used else "none"
