"""Measured memory of a run per item: tensors counted through torch, and the peak of the process for the rest.

Items are named as in finetune/estimate/memory.py. `workspace` is the total beyond the counted items: logits,
temporaries, library buffers; negative if gradients and activations never coexisted. `allocator` is the growth of the
process after the largest microbatch had run once with optimizer state present.
"""

import contextlib
import ctypes
import functools
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from backend_manager import resident_bytes
from finetune.backend.machine import process_bytes
from finetune.engine import Batch, MemoryStats
from finetune.parts.engine_limits import MAPPED_FROM_BYTES
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.device import counts_peaks
from finetune.torch_engine.parallel.placement import local_shard


class MemoryCounter:
    """Counts each kind of tensor when it may change: weights once, optimizer state after the step that creates it,
    activations for each microbatch larger than any before.
    """

    def __init__(self, model: nn.Module, trained: dict, device: torch.device):
        self.model = model
        self.trained = trained
        self.device = device
        self.baseline = 0
        self.moments: int | None = None
        self.gradients = 0
        self.activations = 0
        self.most_tokens = 0
        self.grew = False
        self.reference = 0
        self.standing: dict[str, int] | None = None
        self.own: frozenset[int] = frozenset()
        self.idle = 0  # bytes that a device's graphs compute in, which torch does not count as allocated

    def begin(self, baseline: int) -> int:
        """Peak bytes above `baseline` since process start; starts counting for training."""
        self.baseline = baseline
        return self.peak()

    def peak(self) -> int:
        """Peak bytes above the baseline since the last call."""
        if counts_peaks(self.device):
            module = torch.get_device_module(self.device)
            total = module.max_memory_allocated()
            module.reset_peak_memory_stats()
            return total + self.idle
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory()
        total = max(0, peak_resident_bytes() - self.baseline)
        reset_peak()
        return total

    @contextlib.contextmanager
    def kept_by(self, batch: Batch):
        """Context that counts the tensors autograd saves in a forward, if the batch is larger than any before."""
        tokens = batch.input_ids_BS.size
        if tokens <= self.most_tokens:
            yield
            return
        if self.standing is None:
            self.standing = self._count_standing()
        self.most_tokens = tokens
        self.grew = True
        kept = set()

        def keep(tensor: torch.Tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.own:
                kept.add(StorageWeakRef(storage))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
        # What nothing in the graph needed is gone again, and its address may have become another tensor's; a gathered
        # weight that was given back is empty.
        left = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in kept)
        self.activations = max(self.activations, sum(storage.nbytes() for storage in left if storage is not None))

    def count_gradients(self) -> None:
        """Counts gradients. Call it between backward and the optimizer step."""
        if not self.gradients:
            grads = [p.grad for p in self.trained.values() if p.grad is not None]
            self.gradients = sum(g.nbytes for g in grads if g.device.type == self.device.type)

    def _count_standing(self) -> dict[str, int]:
        here = [p for p in self.model.parameters() if not p.is_meta]  # meta parameters belong to other pipeline stages
        parameters = [local_shard(p) for p in here]
        buffers = list(self.model.buffers())
        cached = [m.cached for m in self.model.modules() if isinstance(m, QuantizedLinear) and m.cached is not None]
        modules: list[Any] = list(self.model.modules())
        squares = [m.row_square_O for m in modules if getattr(m, "row_square_O", None) is not None]
        frozen = [local_shard(p) for p in here if not p.requires_grad] + buffers + squares
        standing = {
            "base": self._bytes(frozen),
            "trainable": self._bytes(self.trained.values()),
            "dequantized": self._bytes(cached),
        }
        self.own = frozenset(t.untyped_storage().data_ptr() for t in (*parameters, *buffers, *cached))
        return standing

    def _bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the tensors on the device; offloaded ones are in host memory."""
        return storage_bytes([t for t in tensors if t.device.type == self.device.type])

    def stats(self, optimizer: torch.optim.Optimizer, snapshot: int = 0) -> MemoryStats:
        """Peak since the last call, per item. `snapshot`: bytes in host memory of the copy that is saved."""
        if self.standing is None:
            self.standing = self._count_standing()
        first = self.moments is None
        if not self.moments:  # created by the first step that is not skipped
            states = optimizer.state.values()
            self.moments = self._bytes(t for s in states for t in s.values() if torch.is_tensor(t))
        total = self.peak()
        snapshot = snapshot if self.device.type == "cpu" else 0
        if self.grew or first:
            self.reference = max(self.reference, total - snapshot)
            self.grew = first
        counted = {
            **self.standing,
            "gradients": self.gradients,
            "optimizer": self.moments,
            "activations": self.activations,
            "allocator": max(0, total - snapshot - self.reference),
            "snapshot": snapshot,
        }
        items = counted | {"workspace": total - sum(counted.values())}
        return MemoryStats(total, {name: n for name, n in items.items() if n})


def offloaded(model: nn.Module, pinned: bool):
    """A context in which what autograd saves is kept in host memory, but for weights and buffers: those stay anyway."""
    held = held_storages(model)

    def to_host(tensor: torch.Tensor):
        if tensor.untyped_storage().data_ptr() in held:
            return tensor.device, tensor
        host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned)
        host.copy_(tensor, non_blocking=pinned)
        return tensor.device, host

    def back(packed: tuple):
        device, tensor = packed
        return tensor.to(device, non_blocking=pinned)

    return torch.autograd.graph.saved_tensors_hooks(to_host, back)


def held_storages(model: nn.Module) -> set[int]:
    """Addresses of the storages of weights, of their dense copies and of buffers."""
    here = [local_shard(t.detach()) for t in model.parameters() if not t.is_meta] + list(model.buffers())
    cached = (m.cached for m in model.modules() if isinstance(m, QuantizedLinear) and m.cached is not None)
    return {t.untyped_storage().data_ptr() for t in (*here, *cached)}


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors, counting shared storages once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def current_resident_bytes() -> int:
    """Current resident memory of this process; 0 if the system does not report it."""
    return process_bytes("VmRSS") or 0


def peak_resident_bytes() -> int:
    """VmHWM of this process; without /proc, the peak since its start."""
    return process_bytes("VmHWM") or resident_bytes()


@functools.cache
def glibc():
    """The C library if it is glibc, else None."""
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        return ctypes.CDLL(None)
    return None


# Of malloc.h.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
_limits: dict[int, int] = {}  # what this process has set, which glibc does not tell


def set_limit(threshold: int, size: int) -> None:
    libc = glibc()
    if libc is not None:
        libc.mallopt(threshold, size)
        _limits[threshold] = size


def map_blocks_from(size: int) -> None:
    """Makes glibc mmap blocks of at least `size` bytes, so that freeing them returns memory to the system at once."""
    set_limit(MMAP_THRESHOLD, size)


def reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def trim_heap() -> None:
    """Returns freed memory to the system now, although the heap is kept otherwise."""
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)


def keep_heap(low_memory: bool, sharded: bool = False) -> None:
    """Keeps glibc's heap, once the weights are loaded: returning and refaulting each step's large blocks costs up to a
    third of the time.

    Blocks of 32 MiB and more are mapped individually, since the hole that such a block leaves is filled by small ones,
    and the next one would grow the heap. With `sharded` weights, from 4 MiB: activations fill the hole of every layer
    that was gathered, and a rank's heap grew by half of its memory. With `low_memory`, from 64 KiB: microbatches of
    other lengths have blocks of other sizes, and those of 64 KiB to 1 MiB left in the heap grew it by a quarter of a
    run's memory.
    """
    libc = glibc()
    if libc is None:
        return
    libc.malloc_trim(0)
    if low_memory:
        least = 2**16
    elif sharded:
        least = 2**22
    else:
        least = MAPPED_FROM_BYTES
    map_blocks_from(least)
    if not low_memory:
        set_limit(TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def kept_heap_limits() -> Iterator[None]:
    """A context whose end returns freed memory to the system, now and later: within another run by that run's limits,
    else as glibc does by itself, with the thresholds that it reaches once blocks of 32 MiB were freed.
    """
    before = {MMAP_THRESHOLD: MAPPED_FROM_BYTES, TRIM_THRESHOLD: 2**26} | _limits
    try:
        yield
    finally:
        for threshold, size in before.items():
            set_limit(threshold, size)
        trim_heap()
