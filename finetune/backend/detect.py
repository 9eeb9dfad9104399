"""Backends of this machine, from files, package metadata and drivers: no framework is imported."""

import ctypes
import glob
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from types import ModuleType

from finetune.backend.capabilities import Backend
from finetune.backend.machine import package_version
from finetune.errors import first_line

AUTO_ORDER = (Backend.CUDA, Backend.MLX, Backend.MPS, Backend.XPU, Backend.CPU)
INSTALL = {
    Backend.CUDA: "pip install torch --index-url https://download.pytorch.org/whl/cu128",
    Backend.MPS: "pip install torch on an Apple silicon Mac",
    Backend.MLX: "pip install mlx mlx-lm",
    Backend.XPU: "pip install torch --index-url https://download.pytorch.org/whl/xpu",
}


def torch_build() -> dict:
    """{'version', 'cuda', 'hip', 'xpu'} of the installed torch, read from its version file without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {"version": None, "cuda": None, "hip": None, "xpu": None}
    file = Path(list(spec.submodule_search_locations)[0]) / "version.py"
    text = ""
    if file.is_file():
        text = file.read_text(encoding="utf-8")
    found = dict(re.findall(r"^(cuda|hip|xpu)(?:\s*:[^=]+)?\s*=\s*'([^']+)'", text, re.M))
    return {"version": package_version("torch"), **{k: found.get(k) for k in ("cuda", "hip", "xpu")}}


def num_cuda_devices() -> int:
    """Number of devices that NVIDIA's driver reports, through its C API; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    failed = driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(number)) != 0
    if failed:
        return 0
    return number.value


def available_backends() -> tuple[list[Backend], dict[Backend, str]]:
    """(backends available here, best first; why each of the others is not)."""
    build = torch_build()
    reasons = {backend: _why_not_in_torch(backend, build) for backend in (Backend.CUDA, Backend.MPS, Backend.XPU)}
    has_mlx = importlib.util.find_spec("mlx") is not None
    reasons |= {Backend.MLX: None if has_mlx else f"mlx is not installed: {INSTALL[Backend.MLX]}", Backend.CPU: None}
    return [b for b in AUTO_ORDER if reasons[b] is None], {b: why for b, why in reasons.items() if why is not None}


def _why_not_in_torch(backend: Backend, build: dict) -> str | None:
    """Reason that torch cannot use the backend here; None if it can. Asks torch itself if it is already imported."""
    if build["version"] is None:
        return "torch is not installed: pip install torch"
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        why = _why_torch_refuses(torch, backend)
        return why and (_reason_of_build(backend, build) or f"torch {build['version']} {why}")
    return _reason_of_build(backend, build) or _why_no_device(backend, build)


def _why_torch_refuses(torch: ModuleType, backend: Backend) -> str | None:
    owners = {Backend.CUDA: torch.cuda, Backend.MPS: torch.backends.mps, Backend.XPU: torch.xpu}
    try:
        return None if owners[backend].is_available() else "finds no device that it can use"
    except (RuntimeError, AssertionError, AttributeError, OSError) as error:
        return f"cannot use it: {first_line(error)}"


def _why_no_device(backend: Backend, build: dict) -> str | None:
    """Reason that the system has no device for a torch with this backend, from drivers and device files; None if it has
    one.
    """
    if backend is Backend.CUDA and not (
        (build["hip"] and glob.glob("/dev/kfd")) or (build["cuda"] and num_cuda_devices() > 0)
    ):
        return f"torch {build['version']} has CUDA, but the driver reports no device"
    if backend is Backend.XPU and not glob.glob("/dev/dri/renderD*"):
        return "no Intel GPU was found"
    return None


def _reason_of_build(backend: Backend, build: dict) -> str | None:
    """Reason that the installed torch or this machine can never have the backend; None if it could."""
    version = f"torch {build['version']}"
    if backend is Backend.CUDA and not (build["cuda"] or build["hip"]):
        return f"{version} was built without CUDA: {INSTALL[Backend.CUDA]}"
    if backend is Backend.CUDA and os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all devices"
    if backend is Backend.MPS and not _is_apple_silicon():
        return "it needs an Apple silicon Mac"
    if backend is Backend.XPU and not build["xpu"]:
        return f"{version} was built without XPU"
    return None


def mlx_has_gpu() -> bool:
    """True if MLX's default device is a GPU (Metal or CUDA): only then does auto select MLX."""
    return _is_apple_silicon() or any(package_version(name) for name in ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13"))


def _is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"
