"""Counts where a step makes the host wait for a device, as it would on a GPU, on the device `emulated`."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Operations whose result's shape, or whose Python value, depends on what a device holds.
READS_VALUES = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),
    *(aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default, aten.is_nonzero.default),
    aten.bincount.default,  # CUDA's reads the largest value
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
COPIES = {aten._to_copy.default, aten.copy_.default}


class HostWaits(TorchDispatchMode):
    """`reads`: operations for which the host waits for the device. `uploads`: copies to it that wait for it too."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.reads, self.uploads = device, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        held = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        here = [t for t in held if t.device.type == self.device]
        if here and func in READS_VALUES:
            self._note(self.reads, func, here)
        elif here and func in INDEXED and any(t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1])):
            self._note(self.reads, func, here)
        elif here and func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self._note(self.reads, func, here)
        out = func(*args, **kwargs)
        if func in COPIES:
            source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], out)
            if source.device.type == self.device and target.device.type == "cpu":
                self._note(self.reads, func, held)
            elif source.device.type == "cpu" and target.device.type == self.device:
                waits = not (args[2:] and args[2] or kwargs.get("non_blocking"))
                if waits:
                    self._note(self.uploads, func, held)
        return out

    def _note(self, found: list, func, held: list) -> None:
        found.append((str(func), [tuple(t.shape) for t in held]))
