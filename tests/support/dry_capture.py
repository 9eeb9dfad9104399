"""Capture of a microbatch without a card: its operations are recorded, and a replay runs them on the same memory.

What a CUDA graph cannot do is refused: reading a number of a tensor, and shapes that depend on values.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.masked_select.default}
MAKES = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default}


def tensors_in(tree):
    return [x for x in tree_leaves(tree) if torch.is_tensor(x)]


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


class NothingRead(TorchDispatchMode):
    """A context in which reading a number of a tensor is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            raise RuntimeError(f"{func} reads numbers of the device")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """`operations`: (function, arguments, results) in order. `outside`: {storage: a tensor of it} of what was there
    before; `before`: [(tensor, its values)] of those that were written to.
    """

    def __init__(self):
        super().__init__()
        self.operations = []
        self.made = set()
        self.outside = {}
        self.before = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError(f"{func} reads numbers of the device")
        given = tensors_in((args, kwargs))
        for x in given:
            if storage_of(x) not in self.made:
                self.outside.setdefault(storage_of(x), x)
        for x in self._written(func, args, kwargs):
            if storage_of(x) not in self.made:
                self.before.append((x.detach(), x.detach().clone()))
        out = func(*args, **kwargs)
        results = tensors_in(out)
        self.made |= {storage_of(x) for x in results} - {storage_of(x) for x in given}
        self.operations.append((func, args, kwargs, results))
        return out

    def _written(self, func, args, kwargs):
        by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return tensors_in([by_name.get(name) for name in written])

    def undo(self):
        for tensor, values in reversed(self.before):
            tensor.copy_(values)

    def replay(self):
        for func, args, kwargs, results in self.operations:
            if func in MAKES:
                continue
            if func._schema.is_mutable:
                func(*args, **kwargs)
                continue
            given = {storage_of(x) for x in tensors_in((args, kwargs))}
            if all(storage_of(x) in given for x in results):  # views
                continue
            for kept, new in zip(results, tensors_in(func(*args, **kwargs)), strict=True):
                kept.copy_(new)


class DryCapture:
    """A Capture, see graphs/replay.py. `recorders`: of what was captured; `replays`: how many there were."""

    def __init__(self, device=None):
        self.recorders = []
        self.replays = 0

    def alone(self, work):
        return work()

    def captured(self, work):
        recorder = Recorder()
        with recorder:
            learned = work()
        with torch.no_grad():
            recorder.undo()  # a capture computes nothing
        self.recorders.append(recorder)
        return lambda: self._replay(recorder), learned

    def release(self):
        self.recorders = []

    def reading_nothing(self):
        return NothingRead()

    def idle_bytes(self):
        return 1000 * len(self.recorders)

    def _replay(self, recorder):
        self.replays += 1
        with torch.no_grad():
            recorder.replay()
