"""Placement of each trainable parameter: its pipeline stage, its tensor- or expert-parallel slice, its FSDP rows.
Gathers and slices parameters accordingly.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.slices import LayerSlices


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a parameter on this rank, sharing its memory; any other tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def is_sharded(parameter: torch.Tensor) -> bool:
    """True if FSDP shards it by rows."""
    return isinstance(parameter, DTensor)


def unsharded_shape(parameter: torch.Tensor) -> torch.Size:
    """A parameter's shape before FSDP or ZeRO; under ZeRO-3 the parameter itself has none between forwards."""
    return getattr(parameter, "ds_shape", parameter.shape)


class Stages(Protocol):
    """The interface of a pipeline's stage that tells where a parameter is."""

    @property
    def number(self) -> int: ...
    def stage_of(self, name: str, /) -> int: ...
    def is_shared(self, name: str, /) -> bool: ...


class Placement:
    """`trainable`: {name: parameter} on all ranks, on meta if another pipeline stage has it.
    `of_stage`: those of this stage.
    """

    def __init__(self, model: PreTrainedModel, groups: ProcessGroups, layer_slices: LayerSlices, pipeline: Stages):
        self.model = model
        self.groups = groups
        self.pipeline = pipeline
        self.slices = layer_slices.slices
        self.partial = layer_slices.partial
        self.trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.of_stage = {n: p for n, p in self.trainable.items() if not p.is_meta}

    @property
    def trains_here(self) -> bool:
        """True if this stage has anything to train."""
        return bool(self.of_stage)

    def names_of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """Names of this stage's trainable parameters among `parameters`."""
        wanted = {id(p) for p in parameters}
        return [name for name, p in self.of_stage.items() if id(p) in wanted]

    def full_shape(self, name: str) -> tuple:
        """The shape of a parameter on one process."""
        if name in self.trainable:
            parameter = self.trainable[name]
        else:
            parameter = self.model.get_parameter(name)
        shape = list(unsharded_shape(parameter))
        cut = self.slices.get(name)
        if cut is not None:
            shape[cut.dim] = cut.full_size(shape[cut.dim], self.groups)
        return tuple(shape)

    def in_experts_group(self, name: str) -> bool:
        """True for what ranks of an expert-parallel group hold different parts of."""
        return name in self.slices and self.slices[name].group == "ep"

    def fsdp_group(self, name: str) -> str:
        """The group over whose ranks FSDP shards a parameter's rows, if it does."""
        return "expert_shard" if self.in_experts_group(name) else "shard"

    def local_shard(self, name: str) -> torch.Tensor:
        return local_shard(self.of_stage[name].detach())

    def local_slices(self, name: str) -> list[tuple[slice, ...]]:
        """This rank's part of the full tensor `name`: one slice per dimension, for each block of a sliced one."""
        shape = self.full_shape(name)
        cut = self.slices.get(name)
        full = [slice(0, n) for n in shape]
        if cut is None:
            parts = [full]
        else:
            parts = [[*full[: cut.dim], part, *full[cut.dim + 1 :]] for part in cut.slices(shape[cut.dim], self.groups)]
        if not is_sharded(self.of_stage[name]):
            return [tuple(part) for part in parts]
        if cut is None or len(parts) == 1 or cut.dim:
            first = parts[0][0]
            rows = self.groups.local_rows(first.stop - first.start, self.fsdp_group(name))
            rows = slice(first.start + rows.start, first.start + rows.stop)
            return [(rows, *part[1:]) for part in parts]
        return [(rows, *parts[0][1:]) for rows in self._rows_of_blocks(name, [part[0] for part in parts])]

    def _rows_of_blocks(self, name: str, blocks: list[slice]) -> list[slice]:
        """FSDP's rows of what `blocks` make when they are concatenated."""
        rows = self.groups.local_rows(sum(b.stop - b.start for b in blocks), self.fsdp_group(name))
        found = []
        at = 0
        for block in blocks:
            size = block.stop - block.start
            start = max(rows.start - at, 0)
            stop = min(rows.stop - at, size)
            if start < stop:
                found.append(slice(block.start + start, block.start + stop))
            at += size
        return found or [slice(blocks[0].start, blocks[0].start)]

    def take_local(self, name: str, full: Any):
        """Inverse of `gather`: this rank's slice of a full tensor, or of anything that is sliced like one."""
        if name not in self.slices and not is_sharded(self.of_stage[name]):
            return full[...]
        parts = [full[part] for part in self.local_slices(name)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, self.slices[name].dim)

    def is_writer(self, name: str) -> bool:
        """True on the lowest rank that holds this shard of `name`: the one that saves it."""
        at = self.groups.dims.coordinates(self.groups.rank)
        group = self.fsdp_group(name)
        return (
            at["dp_replicate"] == 0
            and (is_sharded(self.of_stage[name]) or self.groups.place(group)[0] == 0)
            and (name in self.slices or at["tp"] == 0)
            and self.pipeline.stage_of(name) == self.pipeline.number
        )

    def norm_groups(self, local_params: dict) -> dict[str, tuple]:
        """{parameter: groups over which it is sharded}, for the parameters that this rank counts in the grad norm."""
        groups = {}
        for name, parameter in local_params.items():
            if self.pipeline.stage_of(name) != self.pipeline.number:
                continue
            over_shards = parameter is not self.of_stage[name]
            over_slices: tuple[str, ...] = ()
            if name in self.slices:
                over_slices = (self.slices[name].group,)
            groups[name] = ((self.fsdp_group(name),) if over_shards else ()) + over_slices
        return groups

    def gather(self, name: str, shard: torch.Tensor | None) -> torch.Tensor | None:
        """Full CPU tensor on rank 0, from shards placed as the parameter `name`, sent by the stage that owns it.
        `shard`: this rank's, None if its stage has none. Collective.
        """
        owner = self.pipeline.stage_of(name)
        full = None
        if self.pipeline.number == owner:
            assert shard is not None, name
            full = self._gather_stage(name, shard)
        return self.groups.send_to_rank0(full, owner)

    def _gather_stage(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        parameter = self.model.get_parameter(name)
        shard = shard.detach().cpu()
        if is_sharded(parameter):
            shard = self.groups.all_gather_rows(shard, parameter.shape[0], self.fsdp_group(name))
        cut = self.slices.get(name)
        if cut is None:
            return shard
        return cut.all_gather(shard, self.groups)
