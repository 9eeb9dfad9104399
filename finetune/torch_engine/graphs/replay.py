"""Microbatches whose forward and backward are captured once per bucket, and replayed: the host starts one graph.

The first microbatch of a bucket runs as it is, from the bucket's buffers; the second is captured; all others are
replayed. They are the same kernels on the same sizes, so that a resumed run, which captures anew, gives the same bits.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from finetune.engine import Batch
from finetune.errors import first_line, is_out_of_memory
from finetune.objectives import Totals
from finetune.torch_engine.forward import ModelForward
from finetune.torch_engine.graphs.buckets import Bucket, Buffers
from finetune.torch_engine.graphs.losses import LOSSES

# Of the norm of all gradients: kernels of attention add parts of one in the order in which they end, in 16 bits.
SAME = 1e-2
MOST = 64  # graphs: each keeps some megabytes of its launches; microbatches of further buckets run as they are


class NotCapturedError(RuntimeError):
    """A microbatch cannot be captured. The device's module may be left within a capture: nothing else can run."""


class Learned(NamedTuple):
    """Results of a microbatch, on the device: its summed loss, and what the objective observed."""

    loss: torch.Tensor
    observed: torch.Tensor | None


class Capture(Protocol):
    """Interface of captures of work on a device. Its inputs are in tensors that stay."""

    def alone(self, work: Callable[[], Any]) -> Any:
        """Result of work(), on the stream that captures."""

    def reading_nothing(self) -> AbstractContextManager:
        """A context in which it is an error that the host waits for the device: a capture could not be ended well."""

    def captured(self, work: Callable[[], Learned]) -> tuple[Callable[[], None], Learned]:
        """Captures the work: (a function that computes it, the tensors of its results). Nothing is computed yet."""

    def idle_bytes(self) -> int:
        """Bytes that replays compute in, and that torch does not count as allocated."""

    def release(self) -> None:
        """Frees the memory of graphs that are gone."""


class DeviceCapture:
    """Torch's graphs of a device, on a stream of its own, as torch's documentation asks. All graphs have one pool of
    memory: what one leaves there is copied before another is replayed.
    """

    def __init__(self, device: torch.device):
        self.module: Any = torch.get_device_module(device)
        self.stream = self.module.Stream(device)
        self.pool: Any = None

    def alone(self, work: Callable[[], Any]) -> Any:
        caller = self.module.current_stream()
        self.stream.wait_stream(caller)
        with self.module.stream(self.stream):
            found = work()
        caller.wait_stream(self.stream)
        return found

    @contextlib.contextmanager
    def reading_nothing(self) -> Iterator[None]:
        before = self.module.get_sync_debug_mode()
        self.module.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self.module.set_sync_debug_mode(before)

    def captured(self, work: Callable[[], Learned]) -> tuple[Callable[[], None], Learned]:
        graph = self.module.CUDAGraph()
        # Threads that copy rows to pinned memory meanwhile are no part of it. Torch leaves its stream current where a
        # capture fails.
        with self.module.stream(self.stream):
            with self.module.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                found = work()
        self.pool = graph.pool()
        return graph.replay, found

    def idle_bytes(self) -> int:
        segments = [each for each in self.module.memory_snapshot() if each["segment_pool_id"] == self.pool]
        return sum(each["total_size"] - each["allocated_size"] for each in segments)

    def release(self) -> None:
        self.pool = None
        self.module.empty_cache()


class _Held:
    """A bucket: its buffers, and once it is captured its graph. `reached`: the parameters that get gradients, and the
    adapters that do.
    """

    def __init__(self, buffers: Buffers):
        self.buffers = buffers
        self.reached: list[nn.Parameter] = []
        self.members: list[Any] = []
        self.replay: Callable[[], None] | None = None
        self.left: Learned | None = None


class Graphs:
    """The graphs of a model's training. Gradients are added in buffers that stay, as those of adapters in one buffer
    are, see lora/flat.py; `begin` and `end` go around the microbatches of a step.
    """

    def __init__(self, forward: ModelForward, objective: Any, trained: list[nn.Parameter], capture: Capture):
        self.forward = forward
        self.objective = objective
        self.of = LOSSES[type(objective)]
        self.capture = capture
        self.flat = getattr(forward.model, "flat_adapters", None)
        self._elsewhere: list[nn.Parameter] = []
        if self.flat is not None:
            self._elsewhere = list(self.flat.places)
        in_buffer = set(self._elsewhere)
        self.gradients = {p: torch.zeros_like(p) for p in trained if p not in in_buffer}
        self.held: dict[Bucket, _Held] = {}
        self.reached: dict[nn.Parameter, None] = {}
        self.idle_bytes = 0  # that replays compute in, see Capture

    def begin(self) -> None:
        """Empties the gradients before the microbatches of a step, which add theirs to them."""
        if self.gradients:
            torch._foreach_zero_(list(self.gradients.values()))
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        self.reached = {}

    def drop(self) -> None:
        """Drops all graphs, whose memory nothing else can use: what answers questions between steps needs it."""
        self.held = {}
        self.idle_bytes = 0
        self.capture.release()

    def end(self) -> None:
        """Takes the gradients from parameters that no microbatch of the step has reached."""
        for parameter in self.gradients.keys() - self.reached.keys():
            parameter.grad = None

    def check(self, batch: Batch, totals: Totals, around: Callable[[], AbstractContextManager]) -> str | None:
        """Reason not to trust replays of a microbatch like this; None if they give what the objective gives of it, and
        of other tokens what the same operations give without a graph. Gradients are left behind. `around`: a context of
        each forward.
        """
        others = replace(batch, input_ids_BS=np.roll(batch.input_ids_BS, 1, 1))
        asked = self._alone(batch, around, partial(self._as_asked, batch, totals))
        kernels_are_tried = self._alone(batch, around, self._first)
        off = _difference(kernels_are_tried, asked)
        if not off <= SAME:
            return f"a microbatch in a bucket is off by {off:.1e} of its norm"
        for given in (batch, others):  # the first replay is of what was captured
            with self.capture.reading_nothing():
                wanted = self._alone(given, around, self._first)
            off = _difference(self._alone(given, around, self._again), wanted)
            if not off <= SAME:
                return f"a replayed microbatch is off by {off:.1e} of its norm"
        return None

    def _alone(self, batch: Batch, around: Callable[[], AbstractContextManager], how: Callable) -> list[torch.Tensor]:
        """[the loss, lengths of all gradients] of a microbatch as a step."""
        self.begin()
        if self.flat is not None:
            self.flat.gradients.zero_()
        loss = self.learn(batch, 1.0, around(), how).loss
        gradients = list(self.gradients.values())
        if self.flat is not None:
            gradients.append(self.flat.gradients)
        return [loss, *map(_lengths, gradients)]

    def _as_asked(self, batch: Batch, totals: Totals, held: _Held, around: AbstractContextManager) -> Learned:
        """Computes the objective's own loss, without buckets; gradients are added where they stay."""
        with around:
            loss, observed = self.objective.loss(self.forward, batch, totals)
        loss.backward()
        return Learned(loss.detach(), observed)

    def learn(
        self, batch: Batch, factor: float, around: AbstractContextManager, how: Callable | None = None
    ) -> Learned:
        """Forward and backward of a microbatch, whose loss is multiplied by `factor` before it. `around`: a context of
        its forward where that runs on the host. `how`: `_first` or `_again`, whatever was done before.
        """
        bucket = Bucket.of(batch)
        held = self.held.get(bucket)
        is_new = held is None
        if held is None:
            held = _Held(Buffers(bucket, self.of.names, self.forward.device))
            if len(self.held) < MOST:
                self.held[bucket] = held
        held.buffers.fill(batch, self.forward.pad_id, factor, self.of.values(batch))
        if how is None:
            how = self._first if is_new else self._again
        learned = how(held, around)
        self.reached |= dict.fromkeys(held.reached)
        for member in held.members:
            member.reached = True
        observed = learned.observed
        if observed is not None:
            observed = observed[..., : self.of.observed_of(batch)].clone()
        return Learned(learned.loss.clone(), observed)

    def _first(self, held: _Held, around: AbstractContextManager) -> Learned:
        """Runs it as it is: kernels are tried, what is kept is made, and the parameters that it reaches are noted."""
        reached: list[nn.Parameter] = []
        handles = [p.register_post_accumulate_grad_hook(reached.append) for p in self.gradients]
        before = self._members()
        for member in before:
            member.reached = False
        try:
            learned = self.capture.alone(partial(self._work, held, around))
        finally:
            for handle in handles:
                handle.remove()
        held.members = self._members()
        held.reached = list(dict.fromkeys(reached))
        if any(parameter.grad is not None for parameter in self._elsewhere):
            raise ValueError("code of the model reads the weight of a layer that has an adapter")
        for member in before:
            member.reached = True
        return learned

    def _again(self, held: _Held, around: AbstractContextManager) -> Learned:
        if held.replay is None:
            try:
                held.replay, held.left = self.capture.captured(partial(self._work, held, around))
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                raise NotCapturedError(first_line(error)) from error
            self.idle_bytes = max(self.idle_bytes, self.capture.idle_bytes())
        held.replay()
        assert held.left is not None, "captured above"
        return held.left

    def _work(self, held: _Held, around: AbstractContextManager) -> Learned:
        fixed = held.buffers.fixed()
        with around:
            loss, observed = self.of.loss(self.objective, self.forward, fixed)
        (loss * fixed.factor).backward()
        return Learned(loss.detach(), observed)

    def _members(self) -> list[Any]:
        """The adapters in one buffer that have gradients in this step."""
        if self.flat is None:
            return []
        return [member for member in self.flat.members if member.reached]


def _lengths(gradient: torch.Tensor) -> torch.Tensor:
    """Norms of the rows of a matrix, which take little memory; a copy of what has one dimension."""
    if gradient.ndim < 2:
        return gradient.clone()
    return torch.linalg.vector_norm(gradient, dim=-1)


def _difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Difference of the loss divided by it, and of all gradients together by their norm; nan if one of them is."""
    total = 0.0
    for mine, right in ((found[:1], wanted[:1]), (found[1:], wanted[1:])):
        difference = torch.stack(torch._foreach_norm(torch._foreach_sub(mine, right))).norm()
        size = torch.stack(torch._foreach_norm(right)).norm()
        total += (difference / size.clamp_min(torch.finfo(size.dtype).tiny)).item()
    return total
