"""The half of mps_fsdp_wrapper that keeps the older wrapper's words and decisions; torch is imported in functions."""

import contextlib
import logging
import os
import warnings
from enum import Enum
from typing import Any

from finetune.backend.machine import GIB, system_memory

logger = logging.getLogger("mps_fsdp_wrapper")
FALLBACK_SWITCH = "PYTORCH_ENABLE_MPS_FALLBACK"  # torch reads it when it is imported


class NamedEnum(Enum):
    """Members that equal those of torch's enumeration of the same name."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Enum) and (type(self).__name__, self.name) == (type(other).__name__, other.name)

    def __hash__(self):
        return hash(self.name)  # as every Enum's

    @classmethod
    def of(cls, value: object):
        """The member that `value` is or names; torch's own members are known by their names. Raises ValueError."""
        if isinstance(value, str):
            name = value
        else:
            name = getattr(value, "name", str(value))
        if name not in cls.__members__:
            raise ValueError(f"{cls.__name__} {name}: unknown. Use one of {', '.join(cls.__members__)}.")
        return cls[name]


class ShardingStrategy(NamedEnum):
    """The tensors divided over the ranks: weights too, weights only between steps, or nothing."""

    FULL_SHARD = 1
    SHARD_GRAD_OP = 2
    NO_SHARD = 3


class BackwardPrefetch(NamedEnum):
    BACKWARD_PRE = 1
    BACKWARD_POST = 2


class UnifiedMemoryOptimizer:
    """Decisions about the one memory that host and device share. `reason`: why the last one was taken.

    `config`: an MPSFSDPConfig, read at each decision.
    """

    def __init__(self, config: Any, device_type: str = "mps"):
        self.config = config
        self.device_type = device_type
        self.reason = ""

    def available_bytes(self) -> int:
        """Bytes that the device may use: the pool's size if one is set."""
        import torch

        total = getattr(torch.get_device_module(self.device_type), "recommended_max_memory", None)
        if total:
            total = total()
        else:
            total = system_memory()[0]
        return min(total, self.config.unified_memory_pool_size or total)

    def optimize_sharding_strategy(self, model_size: int, available_memory: int) -> ShardingStrategy:
        """NO_SHARD below a quarter of the memory, SHARD_GRAD_OP to four fifths, FULL_SHARD above. Sizes in bytes.

        A larger ratio never shards less. Several processes on one Mac share its memory: there sharding saves nothing.
        """
        pool = self.config.unified_memory_pool_size
        if pool:
            memory = min(available_memory, pool)
        else:
            memory = available_memory
        if memory > 0:
            ratio = model_size / memory
        else:
            ratio = float("inf")
        strategy = ShardingStrategy.FULL_SHARD
        if ratio < 0.25:
            strategy = ShardingStrategy.NO_SHARD
        elif ratio < 0.8:
            strategy = ShardingStrategy.SHARD_GRAD_OP
        of = "the pool" if pool and pool < available_memory else "memory"
        self.reason = f"{strategy.name}: the model is {ratio:.0%} of {memory / GIB:.1f} GiB of {of}"
        logger.info(self.reason)
        return strategy

    def get_optimal_bucket_size(self) -> int:
        """Bytes of gradients to reduce together: 200e6 with 16 GiB or more, else 50e6.

        The older scripts call it on the class, with the bytes of memory.
        """
        if isinstance(self, UnifiedMemoryOptimizer):
            memory = self.available_bytes()
        else:
            memory = self
        return int(200e6 if memory >= 16 * GIB else 50e6)

    def setup_memory_pool(self) -> int:
        """Caps the device's memory at the configured pool size; the cap in bytes, 0 if none is configured."""
        import torch

        pool = self.config.unified_memory_pool_size
        if not pool:
            self.reason = "no pool size is set: the device's own limit holds"
            return 0
        module = torch.get_device_module(self.device_type)
        if hasattr(module, "set_per_process_memory_fraction"):
            # MPS counts in shares of the recommended working set, up to twice of it.
            module.set_per_process_memory_fraction(min(2.0, pool / module.recommended_max_memory()))
        if self.config.aggressive_memory_optimization and hasattr(module, "empty_cache"):
            module.empty_cache()
        self.reason = f"capped at {pool / GIB:.1f} GiB"
        return pool


class MPSOperatorFallback:
    """torch's way with an operator that MPS lacks: fail, or compute it on the CPU if it was asked to at import.

    `config`: an MPSFSDPConfig, or the names of operators as in the older scripts. `fell_back`: operators that did.
    """

    def __init__(self, config: Any):
        if isinstance(config, list | tuple):
            self.fallback_ops = config
        else:
            self.fallback_ops = config.fallback_to_cpu_ops
        self.fell_back: list[str] = []
        self.enabled = os.environ.get(FALLBACK_SWITCH) == "1"

    def patch_unsupported_ops(self) -> list[str]:
        """The configured operators, which fall back if the switch was set before torch was imported; else a warning
        says so. Nothing is patched: an operator that falls back is correct and slow.
        """
        if not self.enabled:
            warnings.warn(
                f"{FALLBACK_SWITCH} is not set: operators that MPS lacks raise NotImplementedError. Set it to 1 before "
                "torch is imported, in one process only.",
                stacklevel=2,
            )
        return sorted(self.fallback_ops)

    @contextlib.contextmanager
    def fallback_context(self):
        """Sets the switch for processes started inside, restores it after, and notes the operators that fell back."""
        names = (FALLBACK_SWITCH, "PYTORCH_MPS_FALLBACK")  # the second is what older scripts read
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, "1"))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield self
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            for warning in caught:
                operator = str(warning.message).partition("'aten::")[2].partition("'")[0]
                if operator and "fall back" in str(warning.message):
                    self.fell_back.append(f"aten::{operator}")
                else:
                    warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
