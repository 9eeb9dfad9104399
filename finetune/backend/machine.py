"""Facts of this machine and its environment: processor, memory, packages, variables. Read without a framework."""

import os
import platform
import re
import sys
from pathlib import Path

from finetune.backend.capabilities import Backend

GIB = 2**30


VERSIONS: dict[str, str] = {}  # of packages found so far: a run asks 66 times


def package_version(name: str) -> str | None:
    """Version from the package's metadata, without importing it; None of a package that is not installed (yet)."""
    import importlib.metadata  # takes 40 ms; keep --help fast

    if name not in VERSIONS:
        try:
            VERSIONS[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None
    return VERSIONS[name]


def cpu_facts() -> dict:
    """{'model', 'cores', 'physical_cores', 'flags'} of this CPU. `cores`: those that this process may use, the second
    threads of physical ones included; `flags`: its bf16 instructions, if the system reports them.
    """
    model = platform.processor() or platform.machine()
    flags: set[str] = set()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        named = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
        listed = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
        if named:
            model = named[1]
        if listed:
            flags = set(listed[1].split())
    except OSError:
        pass
    usable = set(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
    return {
        "model": model,
        "cores": len(usable),
        "physical_cores": len({_siblings(cpu) for cpu in usable}),
        "flags": sorted(flags & {"avx512_bf16", "amx_bf16", "bf16", "avx512f", "avx2"}),
    }


def _siblings(cpu: int) -> str:
    """The threads of the physical core of a logical one, as Linux lists them; itself where the system does not say."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


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
            total = min(total, int(limit))
            available = min(available, int(limit) - used)
    except (OSError, KeyError, ValueError):
        pass
    return total, available


def process_bytes(name: str) -> int | None:
    """A size of this process, by its name in /proc/self/status; None if the system does not report it."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    except OSError:
        return None
    if found:
        return int(found[1]) * 1024
    return None


def resident_bytes() -> int:
    """Anonymous resident memory of this process; the peak resident size if the system does not report it."""
    size = process_bytes("RssAnon")
    if size is not None:
        return size
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def memory_info(backend: Backend) -> dict:
    """Memory in bytes: total and available (of the device, or unified), allocated and reserved by the framework."""
    total, available = system_memory()
    info = {"total": total, "available": available, "allocated": 0, "reserved": 0, "unified": True}
    if backend is Backend.CPU:
        info["allocated"] = info["reserved"] = resident_bytes()
    elif backend is Backend.MLX:
        import mlx.core

        info["allocated"] = mlx.core.get_active_memory()
        info["reserved"] = info["allocated"] + mlx.core.get_cache_memory()
    elif backend is Backend.MPS:
        import torch

        info["allocated"] = torch.mps.current_allocated_memory()
        info["reserved"] = torch.mps.driver_allocated_memory()
    else:
        import torch

        module = torch.get_device_module(str(backend))
        free, total = module.mem_get_info()
        info.update(total=total, available=free, unified=False)
        info.update(allocated=module.memory_allocated(), reserved=module.memory_reserved())
    return info


PACKAGES = "torch transformers peft bitsandbytes hqq optimum-quanto mlx mlx-lm flash-attn safetensors numpy".split()
VARIABLES = (
    *("FSDP_BACKEND", "CUDA_VISIBLE_DEVICES", "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"),
    *("PYTORCH_ENABLE_MPS_FALLBACK", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"),
)


def versions() -> dict:
    return {name: package_version(name) for name in PACKAGES}


def environment() -> dict:
    """Environment variables that affect the backend, as currently set, without passwords in URLs."""
    return {name: re.sub(r"(?<=://)[^\s/?#]*@", "***@", os.environ[name]) for name in VARIABLES if name in os.environ}


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
