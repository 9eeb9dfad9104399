"""A frozen base larger than its device: decoder layers pass through two buffers, read from disk or host memory.

Every weight of layer i is a view of buffer i mod 2 at fixed places, so no tensor is exchanged. Before a layer computes,
in forward, recomputation or backward, its bytes are brought into its buffer; a thread reads the next layer's into the
other one meanwhile. Of a weight autograd saves the view, and the layer is brought again before backward reads it:
numbers are those of a full base, bit for bit.
"""

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.engine import BaseReads
from finetune.parts.engine_limits import OFFLOAD_BUFFERS
from finetune.system.threads import in_background
from finetune.torch_engine.device import pins_memory, resizes_storages
from finetune.torch_engine.memory_stats import trim_heap
from finetune.torch_engine.weights.packed_base import EMBEDDING, HEAD, LayerFile, PackedBase, bytes_of
from finetune.torch_engine.weights.packed_files import PackedFile

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


class _Buffer:
    """A buffer on the device. `ready`: of the read that fills it; `holds`: the layer whose bytes it will have then."""

    def __init__(self, size: int, device: torch.device):
        self.pages: mmap.mmap | None = None
        if device.type == "cpu" and size:
            self.pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.content = torch.frombuffer(self.pages, dtype=torch.uint8)
        else:
            self.content = torch.empty(size, dtype=torch.uint8, device=device)
        self.holds: int | None = None
        self.ready: Future | None = None

    @property
    def address(self) -> int:
        return self.content.untyped_storage().data_ptr()

    def release(self) -> None:
        """Gives its memory away where the device can, until it is filled again."""
        self.holds = None
        if self.pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED)
        elif resizes_storages(self.content.device):
            self.content.untyped_storage().resize_(0)

    def take_back(self) -> None:
        if not self.content.untyped_storage().nbytes():
            self.content.untyped_storage().resize_(self.content.numel())


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
        self.counters = BaseReads()
        self.readers: list[PackedFile] = []
        self.host: list[torch.Tensor] = []
        self.staging: list[torch.Tensor] = []
        self.module: Any = None  # torch's, of a device that copies beside its work
        self.stream: Any = None
        self.owners: dict[int, int] = {}
        self.outer: dict[str, OuterWeight] = {}
        self.head_follows = False

    # ---- at the start

    def hold(self, base: PackedBase, device: torch.device) -> None:
        """Takes the layers of an entry; buffers on `device` are as large as the largest that each holds."""
        base.keep(self)
        self.make_buffers(base.layers, device)
        pinned = pins_memory(device)
        if self.source == "host":
            self.host = [torch.empty(_size(places), dtype=torch.uint8, pin_memory=pinned) for places in self.places]
            for reader, places, content in zip(self.readers, self.places, self.host, strict=True):
                reader.fill(_parts(reader.file, places, content))
        elif self.on_device:
            self.staging = [torch.empty_like(b.content, device="cpu", pin_memory=pinned) for b in self.buffers]
        if pinned:
            self.module = torch.get_device_module(device)
            self.stream = self.module.Stream(device)

    def make_buffers(self, layers: list[LayerFile], device: torch.device) -> None:
        """Gives each tensor of the layers its place in a buffer on `device`."""
        self.device = device
        self.on_device = device.type != "cpu"
        self.layers = layers
        self.readers = list(map(PackedFile, layers))
        self.places = list(map(_places, layers))
        sizes = list(map(_size, self.places))
        count = min(OFFLOAD_BUFFERS, len(sizes))
        self.buffers = [_Buffer(max(sizes[i::count]), device) for i in range(count)]
        self._know_buffers()

    def _know_buffers(self) -> None:
        """Notes where the buffers are, by which what autograd saves is known as theirs. 0 is no place: a buffer whose
        memory is away has it, and an empty tensor.
        """
        self.owners = {buffer.address: i for i, buffer in enumerate(self.buffers) if buffer.address}

    def tensors_of(self, layer: LayerFile) -> dict[str, torch.Tensor]:
        """The layer's tensors: views of its buffer."""
        number = self.layers.index(layer)
        content = self.buffers[number % len(self.buffers)].content
        return {name: place.of(content) for name, place in self.places[number].items()}

    def hold_outer(self, role: str, file: LayerFile, model: PreTrainedModel) -> None:
        """Leaves the weight of the embedding or the head in its file; `attach` lets it be read from there."""
        self.outer[role] = weight = OuterWeight(file, self.device, self.source, self.make_room)
        module: Any = model.get_submodule(file.prefix)
        module.weight = nn.Parameter(torch.empty(0, weight.shape[1], dtype=weight.dtype), requires_grad=False)

    def attach(self, model: PreTrainedModel) -> None:
        """Lets each layer's forward bring its weights, and embedding and head read theirs."""
        holder: Any = model
        holder.base_offload = self
        for number, layer_file in enumerate(self.layers):
            layer: Any = model.get_submodule(layer_file.prefix)
            # In modules within the layer: a layer's own forward is, by version of transformers, what is recomputed or
            # what recomputes.
            for module in layer.modules():
                if module is not layer:
                    module.register_forward_pre_hook(partial(self._before, number))
            if not self.recomputes:
                layer.forward = partial(self._forward, layer.forward)
        self._attach_outer(model)

    def _attach_outer(self, model: PreTrainedModel) -> None:
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        of_head = self.outer.get(HEAD)
        if EMBEDDING in self.outer:
            if head is not None and head.weight is embedding.weight:
                of_head = self.outer[EMBEDDING]
            embedding.padding_idx = None  # of a vocabulary that is not there
            embedding.register_forward_pre_hook(EmbeddingRows(self.outer[EMBEDDING]))
        if of_head is not None:
            del head.weight
            head.__class__ = HeadInFile
            head.outside = of_head
            self.head_follows = True

    @property
    def reads_rows(self) -> bool:
        """True if of the embedding there are the rows of the last forward's tokens."""
        return EMBEDDING in self.outer

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
        first, unless the head needs the room.
        """
        if in_backward():
            after = number - 1
        elif number == len(self.layers) - 1 and (torch.is_grad_enabled() or self.head_follows):
            return None  # backward begins with it
        else:
            after = (number + 1) % len(self.layers)
        if after < 0 or after % len(self.buffers) == number % len(self.buffers):
            return None
        return after

    def make_room(self) -> None:
        """Gives the buffers' memory away until the next layer is asked for: a head is read, and no layer computes."""
        for buffer in self.buffers:
            if buffer.ready is not None:
                self._await(buffer)
            buffer.release()

    def _ask(self, number: int) -> None:
        buffer = self.buffers[number % len(self.buffers)]
        buffer.take_back()
        self._know_buffers()
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
            self.readers[number].fill(_parts(layer, places, found))
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


class EmbeddingRows:
    """A hook before an embedding's forward: its weight becomes the rows of these tokens, their ids the rows' places."""

    def __init__(self, weight: "OuterWeight"):
        self.weight = weight

    def __call__(self, embedding: Any, args: tuple) -> tuple:
        ids, *others = args
        known = ids.unique()
        embedding.weight = self.weight.rows(known.tolist())
        return torch.searchsorted(known, ids.contiguous()), *others


class HeadInFile(nn.Linear):
    """A frozen LM head whose weight is there while it is used: read anew each time it is asked for."""

    outside: "OuterWeight"

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # a parameter where it is on the device
        return self.outside.full()


class OuterWeight:
    """The weight of an embedding, a head or both, in its file; `source` "host": in host memory too, for a head.
    `make_room`: called before a head is read.
    """

    def __init__(self, file: LayerFile, device: torch.device, source: str, make_room: Callable[[], None]):
        self.reader = PackedFile(file)
        self.device = device
        self.keeps = source == "host"
        self.make_room = make_room
        self.content: torch.Tensor | None = None
        ((self.dtype, self.shape),) = file.tensors.values()

    @property
    def count(self) -> int:
        return self.shape[0] * self.shape[1]

    def rows(self, ids: list[int]) -> nn.Parameter:
        """The rows of these tokens [ids, width]. Raises CheckpointDamagedError."""
        return nn.Parameter(self.reader.rows(ids).to(self.device), requires_grad=False)

    def full(self) -> torch.Tensor:
        """The weight [vocabulary, width], on the device. Raises CheckpointDamagedError."""
        self.make_room()
        content = self.content
        if content is None:
            if self.device.type == "cpu":
                trim_heap()  # what the layers left is room for it
            content = torch.empty(self.shape, dtype=self.dtype, pin_memory=pins_memory(self.device) and self.keeps)
            self.reader.fill([content.view(torch.uint8).numpy().reshape(-1).data])
        if self.keeps:
            self.content = content
        return content.to(self.device, non_blocking=self.keeps)


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
