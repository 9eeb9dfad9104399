"""A frozen base larger than its device: decoder layers pass through two buffers, read from disk or host memory.

Every weight of layer i is a view of buffer i mod 2 at fixed places, so no tensor is exchanged. Before a layer computes,
in forward, recomputation or backward, its bytes are brought into its buffer; a thread reads the next layer's into the
other one meanwhile. Of a weight autograd saves the view, and the layer is brought again before backward reads it:
numbers are those of a full base, bit for bit.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.parts.engine_limits import OFFLOAD_BUFFERS
from finetune.system.files import open_file
from finetune.system.threads import in_background
from finetune.torch_engine.device import pins_memory
from finetune.torch_engine.weights.packed_base import LayerFile, PackedBase, bytes_of, read_verified, unreadable, verify

ALIGNED = 256  # bytes: what a device's kernels may expect of a tensor's first


@dataclass(frozen=True)
class Place:
    """A tensor's place in its layer's buffer."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        content = buffer[self.start : self.start + bytes_of((self.dtype, self.shape))]
        return content.view(self.dtype).view(self.shape)


@dataclass
class Counters:
    """Reads of layers so far. `waited_s`: of `read_s`, what computing did not hide."""

    reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    waited_s: float = 0.0


@dataclass
class _Buffer:
    """A buffer on the device. `ready`: of the read that fills it; `holds`: the layer whose bytes it will have then."""

    content: torch.Tensor
    holds: int | None = None
    ready: Future | None = None


class BaseOffload:
    """The layers of a packed base outside the device's memory. `source`: "disk" or "host"; `recomputes`: activations
    are recomputed layer by layer, so that nothing of a layer is saved from its forward.
    """

    def __init__(self, source: str, recomputes: bool):
        self.source = source
        self.recomputes = recomputes
        self.layers: list[LayerFile] = []
        self.places: list[dict[str, Place]] = []
        self.buffers: list[_Buffer] = []
        self.counters = Counters()
        self.identities: dict[int, tuple] = {}
        self.host: list[torch.Tensor] = []
        self.staging: list[torch.Tensor] = []
        self.module: Any = None  # torch's, of a device that copies beside its work
        self.stream: Any = None
        self.owners: dict[int, int] = {}
        self.embedding: EmbeddingRows | None = None

    # ---- at the start

    def hold(self, base: PackedBase, device: torch.device) -> None:
        """Takes the layers of an entry; buffers on `device` are as large as the largest that each holds."""
        base.keep(self)
        self.layers = base.layers
        self.device = device
        self.places = [_places(layer) for layer in base.layers]
        sizes = [_size(places) for places in self.places]
        count = min(OFFLOAD_BUFFERS, len(sizes))
        self.buffers = [
            _Buffer(torch.empty(max(sizes[i::count]), dtype=torch.uint8, device=device)) for i in range(count)
        ]
        self.owners = {b.content.untyped_storage().data_ptr(): i for i, b in enumerate(self.buffers)}
        self.on_device = device.type != "cpu"
        pinned = pins_memory(device)
        if self.source == "host":
            self.host = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
            for layer, places, content in zip(self.layers, self.places, self.host, strict=True):
                read_verified(layer, _parts(layer, places, content))
        elif self.on_device:
            self.staging = [torch.empty_like(b.content, device="cpu", pin_memory=pinned) for b in self.buffers]
        if pinned:
            self.module = torch.get_device_module(device)
            self.stream = self.module.Stream(device)

    def tensors_of(self, layer: LayerFile) -> dict[str, torch.Tensor]:
        """The layer's tensors: views of its buffer."""
        number = self.layers.index(layer)
        content = self.buffers[number % len(self.buffers)].content
        return {name: place.of(content) for name, place in self.places[number].items()}

    def hold_embedding(self, file: LayerFile, model: PreTrainedModel) -> None:
        """Gives the embedding, in each forward, the rows of its tokens, read from its file."""
        embedding: Any = model.get_submodule(file.prefix)
        self.embedding = rows = EmbeddingRows(file, self.device)
        embedding.weight = nn.Parameter(rows.read([]), requires_grad=False)
        embedding.padding_idx = None  # of a vocabulary that is not there
        embedding.register_forward_pre_hook(rows)

    def attach(self, model: PreTrainedModel) -> None:
        """Lets each layer's forward bring its weights. Raises PlanError for layers that share weights."""
        names = [layer.prefix for layer in self.layers]
        for pair in model.all_tied_weights_keys.items():
            if any(name.startswith(f"{prefix}.") for name in pair for prefix in names):
                raise PlanError(
                    f"--base_offload {self.source}: {type(model).__name__} shares {pair[0]} with {pair[1]}, and layers "
                    "pass one by one. Use none."
                )
        holder: Any = model
        holder.base_offload = self
        for number, name in enumerate(names):
            layer: Any = model.get_submodule(name)
            # In modules within the layer: a layer's own forward is, by version of transformers, what is recomputed or
            # what recomputes.
            for module in layer.modules():
                if module is not layer:
                    module.register_forward_pre_hook(partial(self._before, number))
            if not self.recomputes:
                layer.forward = partial(self._forward, layer.forward)

    @contextlib.contextmanager
    def present(self, name: str) -> Iterator[None]:
        """A context in which the weights of the named module are there, if it is in a layer."""
        for number, layer in enumerate(self.layers):
            if name.startswith(f"{layer.prefix}."):
                self.bring(number)
        yield

    # ---- in a step

    def _before(self, number: int, module: nn.Module, args: tuple) -> None:
        """Brings the layer of a module that begins its forward."""
        self.bring(number)

    def _forward(self, forward: Callable, *args: Any, **kwargs: Any):
        """A layer's forward, whose weights backward brings again."""
        with self.saving():
            return forward(*args, **kwargs)

    def bring(self, number: int) -> None:
        """Waits until the layer's weights are in its buffer, and asks for the next that will be needed.
        Raises CheckpointDamagedError.
        """
        buffer = self.buffers[number % len(self.buffers)]
        if buffer.holds != number:
            self._ask(number)
        if buffer.ready is not None:
            self._await(buffer)
        following = self._following(number)
        if following is not None and self.buffers[following % len(self.buffers)].holds != following:
            self._ask(following)

    def _following(self, number: int) -> int | None:
        """The layer after this one in the direction of the pass; after the last of a forward without backward the
        first.
        """
        if in_backward():
            after = number - 1
        elif torch.is_grad_enabled() and number == len(self.layers) - 1:
            return None  # backward begins with it
        else:
            after = (number + 1) % len(self.layers)
        if after < 0 or after % len(self.buffers) == number % len(self.buffers):
            return None
        return after

    def _ask(self, number: int) -> None:
        buffer = self.buffers[number % len(self.buffers)]
        if buffer.ready is not None:  # a guess that was wrong
            self._await(buffer)
        used = None
        if self.stream is not None:
            used = self.module.Event()
            used.record()
        buffer.holds = None  # of a thread that does not start, nothing comes
        buffer.ready = in_background(self._read, number, buffer.content, used, wait_at_exit=False)
        buffer.holds = number

    def _await(self, buffer: _Buffer) -> None:
        began = time.perf_counter()
        assert buffer.ready is not None and buffer.holds is not None
        waiting = buffer.ready
        buffer.ready = None
        number = buffer.holds
        buffer.holds = None
        copied, seconds = waiting.result()
        buffer.holds = number
        counted = self.counters
        counted.reads += 1
        counted.read_bytes += self.layers[number].num_bytes
        counted.read_s += seconds
        counted.waited_s += time.perf_counter() - began
        if isinstance(copied, torch.Tensor):  # a device without a stream of its own for copies
            _copy(buffer.content, copied)
        elif copied is not None:
            self.module.current_stream(self.device).wait_event(copied)

    def saving(self) -> contextlib.AbstractContextManager:
        """The context of a layer's forward whose saved tensors backward reads: of weights it is kept which layer they
        are of. What is around it, such as offload of activations, gets the others.
        """
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        outer = _hooks_around()

        def pack(tensor: torch.Tensor):
            at = self.owners.get(tensor.untyped_storage().data_ptr())
            if at is not None:
                return self.buffers[at].holds, tensor
            if outer:
                return None, outer[0](tensor)
            return None, tensor.detach()  # an output of its own node would keep a graph that has no backward for ever

        def unpack(packed: tuple):
            number, tensor = packed
            if number is not None:
                self.bring(number)
                return tensor
            return outer[1](tensor) if outer else tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    # ---- in a thread

    def _read(self, number: int, content: torch.Tensor, used: Any) -> tuple:
        """Reads a layer into its buffer; (what is left to do where the device computes: a copy, or an event to wait
        for; seconds). `used`: an event after the last kernel that reads the buffer.
        """
        began = time.perf_counter()
        layer = self.layers[number]
        places = self.places[number]
        found = content
        if self.host:
            found = self.host[number]
        else:
            if self.on_device:
                found = self.staging[number % len(self.buffers)]
            self._read_file(number, _parts(layer, places, found))
            found = found[: _size(places)]
        copied = None
        if self.stream is not None:
            with self.module.stream(self.stream):
                self.stream.wait_event(used)
                _copy(content, found, beside=True)
                copied = self.module.Event()
                copied.record(self.stream)
            if not self.host:
                copied.synchronize()  # the staging buffer is filled again
        elif self.on_device or self.host:
            return found, time.perf_counter() - began
        return copied, time.perf_counter() - began

    def _read_file(self, number: int, parts: list[memoryview]) -> None:
        """Reads by position. The whole file is verified the first time, and where it is no longer the same one."""
        layer = self.layers[number]
        try:
            with open_file(layer.path, "rb", buffering=0) as file:
                before = _identity(file.fileno())
                if self.identities.get(number) != before:
                    read_verified(layer, parts)
                    self.identities[number] = before
                    return
                _read_at(file.fileno(), parts, layer.start)
                if _identity(file.fileno()) != before:
                    raise unreadable(layer, "it was changed while it was read")
        except OSError as error:
            raise unreadable(layer, error.strerror or str(error)) from None


class EmbeddingRows:
    """A hook before an embedding's forward: its weight becomes the rows of these tokens, their ids the rows' places."""

    def __init__(self, file: LayerFile, device: torch.device):
        self.file = file
        self.device = device
        self.identity: tuple = ()  # of the file when it was verified
        ((self.dtype, (self.vocab, self.width)),) = file.tensors.values()

    def __call__(self, embedding: Any, args: tuple) -> tuple:
        ids, *others = args
        known = ids.unique()
        rows = self.read(known.tolist()).to(self.device)
        embedding.weight = nn.Parameter(rows, requires_grad=False)
        return torch.searchsorted(known, ids.contiguous()), *others

    def read(self, ids: list[int]) -> torch.Tensor:
        """[ids, width] in the file's dtype. Raises CheckpointDamagedError."""
        rows = torch.empty(len(ids), self.width, dtype=self.dtype)
        size = self.width * self.dtype.itemsize
        content = rows.view(torch.uint8).numpy()
        try:
            with open_file(self.file.path, "rb", buffering=0) as file:
                now = _identity(file.fileno())
                if now != self.identity:
                    verify(self.file)
                    self.identity = now
                for row, number in zip(content, ids, strict=True):
                    _read_at(file.fileno(), [row.data], self.file.start + number * size)
        except OSError as error:
            raise unreadable(self.file, error.strerror or str(error)) from None
        return rows


def of_model(model: nn.Module) -> BaseOffload | None:
    """The offload of a model's base, None where the base is on the device."""
    return getattr(model, "base_offload", None)


def in_backward() -> bool:
    """True where autograd calls: in a backward pass, or in a recomputation within it."""
    return torch._C._current_graph_task_id() != -1


def _hooks_around() -> tuple[Callable, Callable] | None:
    """(pack, unpack) of the saved_tensors_hooks that are on now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _copy(content: torch.Tensor, found: torch.Tensor, beside: bool = False) -> None:
    """Fills a buffer. What autograd saved of it is brought back before it is read, whatever was there between.
    `beside`: returns before the copy ends; who asks for it waits before `found` is filled again.
    """
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(content):
        content[: len(found)].copy_(found, non_blocking=beside)


def _places(layer: LayerFile) -> dict[str, Place]:
    at = 0
    found = {}
    for name, (dtype, shape) in layer.tensors.items():
        found[name] = Place(at, dtype, shape)
        at += -(-bytes_of((dtype, shape)) // ALIGNED) * ALIGNED
    return found


def _size(places: dict[str, Place]) -> int:
    return max((p.start + bytes_of((p.dtype, p.shape)) for p in places.values()), default=0)


def _parts(layer: LayerFile, places: dict[str, Place], content: torch.Tensor) -> list[memoryview]:
    """Places of the layer's tensors in a buffer in host memory, in the order of the file."""
    array = content.numpy()
    return [array[p.start : p.start + bytes_of(layer.tensors[name])].data for name, p in places.items()]


def _identity(handle: int) -> tuple:
    found = os.fstat(handle)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


MOST_PARTS = 512  # of one call: the system's limit is 1024
MOST_BYTES = 2**30  # of one call: the system's limit is 2 GiB


def _read_at(handle: int, parts: list[memoryview], start: int) -> None:
    """Fills `parts` from the file's bytes at `start` on. OSError where it ends before."""
    left = [part for part in parts if len(part)]
    while left:
        some = []
        size = 0
        for part in left[:MOST_PARTS]:
            some.append(part[: MOST_BYTES - size])
            size += len(some[-1])
            if size >= MOST_BYTES:
                break
        count = os.preadv(handle, some, start)
        if not count:
            raise OSError(0, "is cut")
        start += count
        while count:
            first = left[0]
            if count >= len(first):
                count -= len(first)
                left.pop(0)
            else:
                left[0] = first[count:]
                count = 0
