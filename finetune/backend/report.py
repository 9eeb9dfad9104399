"""Capabilities of a backend as data and as lines of text: `--verbose`, and `describe()` for programs."""

import platform
from dataclasses import asdict
from typing import Protocol

from finetune.backend.capabilities import Backend, BackendCapabilities
from finetune.backend.machine import GIB, cpu_facts, environment, memory_info, system_memory, versions


class Manager(Protocol):
    """The interface of a BackendManager that reports read."""

    backend: Backend
    requested: Backend | None
    available: list[Backend]
    unavailable: dict[Backend, str]

    @property
    def device(self) -> object: ...
    @property
    def capabilities(self) -> BackendCapabilities: ...
    def documented_or_cached(self) -> BackendCapabilities: ...
    def probe_all_quantizers(self) -> dict: ...
    def describe(self) -> dict: ...
    def summary_lines(self) -> list[str]: ...


def describe(manager: Manager) -> dict:
    """The content of summary_lines as data. `manager`: a BackendManager."""
    return {
        "backend": str(manager.backend),
        "available": [str(b) for b in manager.available],
        "unavailable": {str(b): why for b, why in manager.unavailable.items()},
        "capabilities": asdict(manager.documented_or_cached()),
        "cpu": cpu_facts(),
        "memory": dict(zip(("total", "available"), system_memory(), strict=True)),
        "versions": versions(),
        "environment": environment(),
    }


def summary_lines(manager: Manager) -> list[str]:
    """Probes what is not cached."""
    caps = manager.capabilities
    facts = describe(manager)
    memory = memory_info(manager.backend)
    yes = {True: "yes", False: "no"}
    lines = [
        f"System: {platform.platform()}, Python {platform.python_version()}, {facts['cpu']['model']} x "
        f"{facts['cpu']['cores']}",
        "Versions: " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v),
        f"Selected backend: {manager.backend}" + ("" if manager.requested else " (auto)"),
        f"Available backends: {', '.join(facts['available'])}",
        *(f"  not {name}: {why}" for name, why in facts["unavailable"].items()),
        f"Device: {manager.device}",
        f"Quantization bits: {', '.join(map(str, caps.quantization_bits))} with "
        f"{', '.join(caps.quantization_backends)}"
        f" ({len(caps.quantizers)} of the pairs probed; --doctor probes all)",
        f"Distributed: {yes[caps.supports_distributed]} ({caps.distributed_backend})",
        f"FSDP: {yes[caps.supports_fsdp]}",
        f"bf16: {yes[caps.supports_bfloat16]}",
        f"Flash attention: {yes[caps.supports_flash_attention]}",
        *memory_lines(str(manager.backend), memory),
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
