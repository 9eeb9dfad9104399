"""Distribution of a model's work and weights: the Parallelism protocol, and Local, the base of all others. The engine
never asks which one it holds.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from finetune.eight_bit import PIECES, by_name
from finetune.engine import Batch
from finetune.torch_engine import eight_bit, optim
from finetune.torch_engine.parallel.placement import Placement, is_sharded, local_shard
from finetune.torch_engine.parallel.process_groups import ProcessGroups

BUCKET_BYTES = 32 * 2**20


class Forward(Protocol):
    """The interface of a ModelForward that its distribution uses."""

    @property
    def model(self) -> Any: ...
    @property
    def groups(self) -> ProcessGroups: ...
    @property
    def pipeline(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...
    def share(self, microbatches: list[Batch], /) -> list[Batch]: ...
    def filled(self, microbatches: list[Batch], by_rank: np.ndarray, /) -> list[Batch]: ...
    def shape(self, batch: Batch, /) -> tuple[int, int]: ...


class Parallelism(Protocol):
    """Collective: every rank calls each method at the same point.

    `forward`: the model's (forward.ModelForward); `placement`: where each trainable parameter is. `local_params`:
    {name: what the optimizer updates, None if this rank has no row of it}. `averaging_factor`: a factor on each loss,
    for implementations that average gradients over ranks; 1 of others. `shards_weights`: True if a dense copy of every
    weight would defeat its purpose. `holds_slices`: True if what a rank holds of a tensor is a slice of it.
    `gathers_all`: whether generation gathers all weights; None: if they fit beside what the device holds. `in_full`:
    whether the last one did.
    """

    forward: Forward
    placement: Placement
    local_params: dict
    averaging_factor: float
    shards_weights: bool
    holds_slices: bool
    gathers_all: bool | None
    in_full: bool

    def call(self, work: Callable, *args: Any):
        """work(*args), which runs the model; weights outside the layers are gathered."""

    def backward(self, out: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        """Backward from `out`; `grad`: its gradient unless it is a loss."""

    def accumulating(self, last: bool):
        """A context around one microbatch of a step; gradients may stay unreduced until the last."""

    def attach(self, optimizer: torch.optim.Optimizer | None, max_grad_norm: float | None) -> None:
        """The optimizer over `local_params`, before the first step."""

    def reduce_gradients(self) -> dict:
        """Reduces gradients over all ranks; {name: parameter with its gradient} of what the optimizer updates."""

    def clip(self, parameters: dict, beside: list) -> tuple[float, list]:
        """(the norm of all gradients before clipping, `beside` on the host in fp64); scales gradients down to
        `max_grad_norm`. `beside`: tensors that the host reads at the same time.
        """

    def step(self) -> None:
        """The optimizer's step."""

    def drop_gradients(self) -> None: ...

    def reshard(self) -> None:
        """Frees what forwards without a backward have gathered."""

    def full_weights(self):
        """A context around generation, True if the ranks of a pipeline or tensor-parallel group then hold every weight
        and forwards need no others. False if ranks keep their shards, or each some experts: then all run forwards
        together, as many on each.
        """

    def gathered_for_saving(self):
        """A context in which `placement.gather` gives every weight of the model, trainable or not."""

    def gather(self, name: str) -> torch.Tensor | None:
        """A trainable weight in full, fp32, on the CPU of rank 0."""

    def copy_weight(self, name: str, full: Any) -> None:
        """Sets a trainable weight from the full tensor, or from anything that is sliced like one."""

    def moments(self) -> tuple[dict, dict]:
        """({'<name>.<moment>': this rank's shard}, {'<name>.step': count}) of the optimizer."""

    def load_moments(self, names: dict, tensors: dict, counts: dict) -> None:
        """Restores full moments. `names`: {name on disk: name}; `tensors`, `counts`: by name on disk."""


class Local:
    """One process, or replicas whose gradients are all-reduced once per step.
    Layers may be tensor or pipeline parallel.
    """

    averaging_factor = 1.0
    shards_weights = False
    holds_slices = True
    gathers_all: bool | None = None

    def __init__(self, forward: Forward, placement: Placement):
        self.forward = forward
        self.placement = placement
        self.groups = placement.groups
        self.local_params = local_params(placement.of_stage)
        self.optimizer: torch.optim.Optimizer | None = None  # of a rank that trains something
        self.max_grad_norm: float | None = None
        self.summon_depth = 0
        self.in_full = True

    def call(self, work: Callable, *args: Any):
        return work(*args)

    def backward(self, out: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        torch.autograd.backward(out, grad)

    def accumulating(self, last: bool):
        return contextlib.nullcontext()

    def attach(self, optimizer: torch.optim.Optimizer | None, max_grad_norm: float | None) -> None:
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm

    def reduce_gradients(self) -> dict:
        place = self.placement
        params = {n: p for n, p in self.local_params.items() if p is not None}
        move_gradients(place.of_stage, self.local_params)
        replicated = {n: p for n, p in place.of_stage.items() if self.local_params[n] is p}
        self._reduce_replicated([p for n, p in replicated.items() if not place.in_experts_group(n)])
        in_experts = [p for n, p in replicated.items() if place.in_experts_group(n)]
        all_reduce_gradients(in_experts, self.groups, "expert_data")
        all_reduce_gradients([p for n, p in params.items() if n in place.partial], self.groups, "tp")
        shared = [p for n, p in params.items() if place.pipeline.is_shared(n)]
        all_reduce_gradients(shared, self.groups, "embedding")
        return params

    def _reduce_replicated(self, parameters: list) -> None:
        all_reduce_gradients(parameters, self.groups, "data")

    def clip(self, parameters: dict, beside: list) -> tuple[float, list]:
        norm_groups = self.placement.norm_groups(self.local_params)
        return optim.clip(parameters, self.max_grad_norm, self.groups, norm_groups, beside)

    def step(self) -> None:
        assert self.optimizer is not None, "nothing trains here"
        self.optimizer.step()

    def drop_gradients(self) -> None:
        for parameter in (*self.placement.of_stage.values(), *self.local_params.values()):
            if parameter is not None:
                parameter.grad = None

    def reshard(self) -> None:
        pass

    @contextlib.contextmanager
    def full_weights(self):
        outermost = not self.summon_depth
        if outermost:
            self.in_full = self._gathers_all()
        self.summon_depth += 1
        try:
            with self._unsharded() if outermost and self.in_full else contextlib.nullcontext():
                yield self.in_full and self.groups.dims.ep == 1
        finally:
            self.summon_depth -= 1

    def _gathers_all(self) -> bool:
        return True

    def _unsharded(self):
        return contextlib.nullcontext()

    def gathered_for_saving(self):
        return contextlib.nullcontext()

    def gather(self, name: str):
        mine = None
        if name in self.placement.of_stage:
            mine = self.placement.local_shard(name).float()
        return self.placement.gather(name, mine)

    @torch.no_grad()
    def copy_weight(self, name: str, full: Any) -> None:
        if name in self.placement.of_stage:
            shard = np.asarray(self.placement.take_local(name, full))
            self.placement.local_shard(name).copy_(torch.from_numpy(shard))

    def moments(self) -> tuple[dict, dict]:
        assert self.optimizer is not None, "nothing trains here"
        return optim.state(self.optimizer, self.local_params)

    def load_moments(self, names: dict, tensors: dict, counts: dict) -> None:
        place = self.placement
        here = {key: name for key, name in names.items() if self.local_params.get(name) is not None}
        elsewhere = set(names) - set(here)

        def of_this_rank(values: dict) -> dict:
            return {key: value for key, value in values.items() if key.rpartition(".")[0] not in elsewhere}

        tensors = of_this_rank(tensors)
        of_8_bits = by_name(tensors)

        def local(key: str, full: Any):
            on_disk, _, moment = key.rpartition(".")
            name = here.get(on_disk)
            if name is None:  # unknown ones are refused
                return full
            if on_disk in of_8_bits:
                return optim.LazyArray(eight_bit.local_moment, place, name, of_8_bits[on_disk], moment)
            return optim.LazyArray(place.take_local, name, full)

        pieces = f".{PIECES}"
        tensors = {key: local(key, full) for key, full in tensors.items() if not key.endswith(pieces)}
        params = {key: self.local_params[name] for key, name in here.items()}
        assert self.optimizer is not None, "nothing trains here"
        optim.load_state(self.optimizer, params, tensors, of_this_rank(counts))


def local_params(of_stage: dict) -> dict:
    """{name: the parameter, or this rank's rows of it}; None if it has no row."""
    params = {}
    for name, parameter in of_stage.items():
        if is_sharded(parameter):
            rows = local_shard(parameter.detach())
            params[name] = nn.Parameter(rows) if rows.numel() else None
        else:
            params[name] = parameter
    return params


def move_gradients(of_stage: dict, local_params: dict) -> None:
    """Hands each sharded gradient to the rows that the optimizer updates."""
    for name, parameter in of_stage.items():
        rows = local_params[name]
        if rows is not None and rows is not parameter:
            if parameter.grad is None:
                rows.grad = None
            else:
                rows.grad = local_shard(parameter.grad)


@torch.no_grad()
def all_reduce_gradients(parameters: list, groups: ProcessGroups, group: str) -> None:
    """Sums the gradients of these parameters over a group, in buckets. A gradient that a rank lacks counts as zero."""
    if group not in groups.process_groups or not parameters:
        return
    present = torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64)
    present = groups.all_reduce(present, group)
    parameters = [p for p, ranks in zip(parameters, present.tolist(), strict=True) if ranks]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    bucket = []
    size = 0
    for i, p in enumerate(parameters):
        bucket.append(p.grad)
        size += p.grad.nbytes
        if size >= BUCKET_BYTES or i == len(parameters) - 1 or parameters[i + 1].grad.dtype != p.grad.dtype:
            flat = groups.all_reduce(torch.cat([g.reshape(-1) for g in bucket]), group)
            for g, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                g.copy_(summed.view_as(g))
            bucket = []
            size = 0
