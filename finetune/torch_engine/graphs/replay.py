"""Microbatches whose forward and backward are captured once per bucket, and replayed: the host starts one graph.

The first microbatch of a bucket runs as it is, from the bucket's buffers; the second is captured; all others are
replayed. They are the same kernels on the same sizes, so that a resumed run, which captures anew, gives the same bits.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from finetune.engine import Batch
from finetune.torch_engine.forward import ModelForward
from finetune.torch_engine.graphs.buckets import Bucket, Buffers
from finetune.torch_engine.graphs.losses import LOSSES

# Of a gradient's norm: kernels of attention add parts of it in the order in which they end, in 16 bits.
SAME = 1e-2
MOST = 64  # graphs: each keeps some megabytes of its launches; microbatches of further buckets run as they are


class Learned(NamedTuple):
    """Results of a microbatch, on the device: its summed loss, and what the objective observed."""

    loss: torch.Tensor
    observed: torch.Tensor | None


class Capture(Protocol):
    """Interface of captures of work on a device. Its inputs are in tensors that stay."""

    def alone(self, work: Callable[[], Any]) -> Any:
        """Result of work(), on the stream that captures."""

    def captured(self, work: Callable[[], Learned]) -> tuple[Callable[[], None], Learned]:
        """Captures the work: (a function that computes it, the tensors of its results). Nothing is computed yet."""

    def release(self) -> None:
        """Gives memory back whose graphs are gone."""


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

    def captured(self, work: Callable[[], Learned]) -> tuple[Callable[[], None], Learned]:
        graph = self.module.CUDAGraph()
        # Threads that copy rows to pinned memory meanwhile are no part of it.
        with self.module.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            found = work()
        self.pool = graph.pool()
        return graph.replay, found

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

    def begin(self) -> None:
        """Empties the gradients before the microbatches of a step."""
        if self.gradients:
            torch._foreach_zero_(list(self.gradients.values()))
        self.reached = {}

    def drop(self) -> None:
        """Drops all graphs, whose memory nothing else can use: what answers questions between steps needs it."""
        self.held = {}
        self.capture.release()

    def end(self) -> None:
        """Gives parameters their gradients after them; those that no microbatch reached get none."""
        for parameter in self.gradients:
            parameter.grad = None
        for parameter in self.reached:
            parameter.grad = self.gradients[parameter]

    def check(self, batch: Batch, factor: float) -> str | None:
        """Reason not to trust replays of a microbatch like this; None if they give what its operations give without a
        graph, of these tokens and of others. Gradients are left behind.
        """
        others = replace(batch, input_ids_BS=np.roll(batch.input_ids_BS, 1, 1))
        for given in (batch, batch, others):  # the first replay is of what was captured
            wanted = self._alone(given, factor, self._first)
            found = self._alone(given, factor, self._again)
            for mine, right in zip(found, wanted, strict=True):
                off = (mine - right).norm() / right.norm().clamp_min(torch.finfo(right.dtype).tiny)
                if not off.item() <= SAME:
                    return f"a replayed microbatch is off by {off.item():.1e} of its norm"
        return None

    def _alone(self, batch: Batch, factor: float, how: Callable) -> list[torch.Tensor]:
        """[the loss, all gradients] of a microbatch as a step."""
        self.begin()
        if self.flat is not None:
            self.flat.gradients.zero_()
        loss = self.learn(batch, factor, contextlib.nullcontext(), how).loss
        gradients = list(self.gradients.values())
        if self.flat is not None:
            gradients.append(self.flat.gradients)
        return [loss, *(gradient.clone() for gradient in gradients)]

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
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        before = self._members()
        for member in before:
            member.reached = False
        try:
            learned = self.capture.alone(lambda: self._work(held, around))
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
            for parameter, gradient in self.gradients.items():
                parameter.grad = gradient
            with around:
                held.replay, held.left = self.capture.captured(lambda: self._work(held))
        held.replay()
        assert held.left is not None, "captured above"
        return held.left

    def _work(self, held: _Held, around: AbstractContextManager | None = None) -> Learned:
        fixed = held.buffers.fixed()
        if around is None:
            loss, observed = self.of.loss(self.objective, self.forward, fixed)
        else:
            with around:
                loss, observed = self.of.loss(self.objective, self.forward, fixed)
        (loss * fixed.factor).backward()
        return Learned(loss.detach(), observed)

    def _members(self) -> list[Any]:
        """The adapters in one buffer that have gradients in this step."""
        if self.flat is None:
            return []
        return [member for member in self.flat.members if member.reached]
