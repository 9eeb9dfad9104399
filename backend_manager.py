"""Backend detection and probed capabilities of this machine, with a reason for each unsupported feature.

`CAPABILITIES` is the documented baseline; `BackendManager(...).capabilities` is probed on this machine. Detection reads
only files, package metadata and drivers, so constructing a manager takes milliseconds; probes run real work on the
device once and are cached per library versions and device. The room behind this file is finetune/backend/.
"""

import os
from dataclasses import replace
from functools import cached_property

import quantization_wrapper
from finetune.backend import detect, report
from finetune.backend.capabilities import (
    CAPABILITIES,
    ONEDNN_PAYS,
    Backend,
    BackendCapabilities,
    auto_cpu_matmul,
    auto_precision,
    merged,
)
from finetune.backend.detect import AUTO_ORDER, INSTALL, torch_build
from finetune.backend.machine import (
    GIB,
    cpu_facts,
    environment,
    environment_error,
    package_version,
    resident_bytes,
    system_memory,
    versions,
)
from finetune.backend.probes import ONEDNN_ERROR, PROBE_FAILURES, ProbeCache, probe_torch
from finetune.backend.report import memory_lines
from finetune.errors import first_line
from finetune.older.backend import PRECISION_MAP, QUANTIZATION_MAP, OlderManager, allowed, rows_that_fit
from finetune.system.terminal import say


class BackendManager(OlderManager):
    """Selects a backend and reports its capabilities.

    `backend`: a Backend, its name in any case, 'auto' or None (= auto).

    Raises ValueError for an unknown or unavailable backend, listing the available ones. A subclass adds a backend by
    overriding `_detect_available_backends`.
    """

    def __init__(self, backend: Backend | str | None = None, verbose: bool = True):
        self.unavailable: dict[Backend, str] = {}
        self.available = list(self._detect_available_backends())
        self.requested = self._named(backend)
        if self.requested is None:
            self.backend = self._choose()
        else:
            self.backend = self._checked(self.requested)
        if verbose:
            self.print_summary()

    @classmethod
    def from_env(cls, verbose: bool = True) -> "BackendManager":
        """A manager for the backend in FSDP_BACKEND; unset or 'auto': detected."""
        return cls(os.environ.get("FSDP_BACKEND") or None, verbose=verbose)

    @staticmethod
    def _named(backend: Backend | str | None) -> Backend | None:
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
        """Reason that auto selects this backend: each earlier one of AUTO_ORDER is unavailable, and why."""
        skipped = {b: self.unavailable.get(b, "not detected") for b in AUTO_ORDER[: AUTO_ORDER.index(self.backend)]}
        if Backend.MLX in skipped and Backend.MLX in self.available:
            skipped[Backend.MLX] = "its default device is not a GPU"
        reasons = "; ".join(f"{backend}: {why.partition(': pip')[0]}" for backend, why in skipped.items())
        order = ", ".join(b.value for b in AUTO_ORDER)
        return f"the first of {order} that is available{f' ({reasons})' if reasons else ''}"

    def _detect_available_backends(self) -> list[Backend]:
        """Backends available here, best first; sets `self.unavailable` to the reasons for the others."""
        found, self.unavailable = detect.available_backends()
        return found

    _mlx_has_gpu = staticmethod(detect.mlx_has_gpu)

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
        if run and self.cache.is_missing(facts):
            try:
                facts = self.cache.add_probed(probe_torch(str(self.backend)))
            except PROBE_FAILURES as error:
                return replace(base, reasons={"probes": f"failed here: {first_line(error)}"})
        if "bfloat16_speed" not in facts:
            return replace(base, reasons={"probes": "documented, not probed: a run probes first"})
        return merged(self.backend, base, facts)

    @cached_property
    def cache(self) -> ProbeCache:
        return ProbeCache(self.backend)

    def probe_quantization(self, method: str, bits: int) -> dict:
        """Probe result of one layer of `method` at `bits` on this device (quantization_wrapper.probe), cached.
        `error` None: it passed. ValueError for a pair that METHODS lacks.
        """
        if bits not in getattr(quantization_wrapper.METHODS.get(method), "bits", ()):
            raise ValueError(quantization_wrapper.unsupported(method, bits, None, 64))
        self.__dict__.pop("capabilities", None)
        found = self.cache.quantizer(method, bits, quantization_wrapper.probe)
        assert found is not None, "a probe that is given is run"
        return found

    def known_quantization(self, method: str, bits: int) -> dict | None:
        """The cached probe result; None if the pair was never probed."""
        return self.cache.quantizer(method, bits)

    def probe_all_quantizers(self) -> dict:
        """{'method/bits': probe result} of every pair; {} for an engine with its own quantizer, which is not probed."""
        if CAPABILITIES[self.backend].engine != "torch":
            return {}
        return {
            f"{method}/{bits}": self.probe_quantization(method, bits) for method, bits in quantization_wrapper.pairs()
        }

    def supports_quantization(self, bits: int) -> bool:
        """True if some method passes its probe at these bits; 16 means unquantized."""
        if CAPABILITIES[self.backend].engine != "torch":
            return bits in CAPABILITIES[self.backend].quantization_bits
        pairs = [p for p in quantization_wrapper.pairs() if p[1] == bits]
        return bits == 16 or any(self.probe_quantization(*p)["error"] is None for p in pairs)

    # ---- the device, reports

    @cached_property
    def device(self):
        """The torch.device; for MLX, mlx's default device."""
        if self.backend is Backend.MLX:
            import mlx.core

            return mlx.core.default_device()
        import torch

        return torch.device(str(self.backend))

    @property
    def num_devices(self) -> int:
        """Number of visible CUDA devices; 1 for any other backend."""
        if self.backend is Backend.CUDA:
            return max(1, detect.num_cuda_devices())
        return 1

    def describe(self) -> dict:
        """The content of print_summary as data."""
        return report.describe(self)

    def print_summary(self) -> None:
        say("\n".join(self.summary_lines()), in_words=True)

    def summary_lines(self) -> list[str]:
        return report.summary_lines(self)


def get_backend_manager(backend: Backend | str | None = None, verbose: bool = False) -> BackendManager:
    """A manager for `backend`, else for FSDP_BACKEND, else for the detected backend."""
    if backend is None:
        return BackendManager.from_env(verbose=verbose)
    return BackendManager(backend, verbose=verbose)


def get_device(backend: Backend | str | None = None):
    """The torch.device (for MLX, mlx's default device) of `backend`, else of FSDP_BACKEND, else of the detected one."""
    return get_backend_manager(backend).device


def detect_backend() -> Backend:
    """The backend that auto selects."""
    return BackendManager(verbose=False).backend
