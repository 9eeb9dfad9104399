"""Measured memory of an MLX run: the allocator's peak, and the bytes of each kind of array."""

from typing import Any

import mlx.core as mx

from finetune.engine import MemoryStats
from finetune.mlx_engine.layers import leaves
from finetune.mlx_options import MLXOptions

MEMORY_REFUSED = ("malloc",)  # in what MLX says then


class Memory:
    """Items are named as in finetune/estimate/memory.py; what was not counted is workspace: activations, logits."""

    def __init__(self, engine: Any):
        self.engine = engine

    def begin(self, options: MLXOptions) -> int:
        """Peak bytes of loading; sets the limits of --mlx_config and counts training from now on."""
        if options.cache_limit_gib is not None:
            mx.set_cache_limit(int(options.cache_limit_gib * 2**30))
        if options.wired_limit_gib is not None:
            mx.set_wired_limit(int(options.wired_limit_gib * 2**30))
        return self.peak()

    def peak(self) -> int:
        """Peak bytes since the last call."""
        total = mx.get_peak_memory()
        mx.reset_peak_memory()
        return total

    def stats(self) -> MemoryStats:
        """Peak since the last call, per item."""
        engine = self.engine
        total = self.peak()
        trainable = sum(p.nbytes for p in engine.params.values())
        trained = set(engine.paths.values())
        base = sum(a.nbytes for path, a in leaves(engine.model.parameters()) if path not in trained)
        items = {
            "base": base,
            "trainable": trainable,
            "gradients": trainable,
            "optimizer": sum(m.nbytes for m in engine.optimizer.moments.values()),
            "dequantized": sum(
                m._cached.nbytes for m in engine.model.modules() if getattr(m, "_cached", None) is not None
            ),
        }
        items["workspace"] = total - sum(items.values())
        return MemoryStats(total, {name: n for name, n in items.items() if n})
