"""Where each trainable parameter is: its pipeline stage, its tensor-parallel slice, its FSDP rows.

Gathers and slices parameters accordingly.
"""

import torch
from torch.distributed.tensor import DTensor

from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.tensor import TPShards


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a parameter on this rank, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(parameter) -> bool:
    """True if FSDP shards it by rows."""
    return isinstance(parameter, DTensor)


def unsharded_shape(parameter) -> torch.Size:
    """A parameter's shape before FSDP or ZeRO; under ZeRO-3 the parameter itself has none between forwards."""
    return getattr(parameter, "ds_shape", parameter.shape)


class Placement:
    """`trainable`: {name: parameter} on all ranks, on meta if another pipeline stage has it.

    `of_stage`: those of this stage.
    """

    def __init__(self, model, groups: ProcessGroups, tp_shards: TPShards, pipeline):
        self.model, self.groups, self.tp_shards, self.pipeline = model, groups, tp_shards, pipeline
        self.trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.of_stage = {n: p for n, p in self.trainable.items() if not p.is_meta}

    @property
    def trains_here(self) -> bool:
        """True if this stage has anything to train."""
        return bool(self.of_stage)

    def full_shape(self, name: str) -> tuple:
        """The shape of a trainable parameter on one process."""
        shape, dim = list(unsharded_shape(self.trainable[name])), self.tp_shards.dims.get(name)
        if dim is not None:
            shape[dim] *= self.groups.dims.tp
        return tuple(shape)

    def local_shard(self, name: str) -> torch.Tensor:
        return local_shard(self.of_stage[name].detach())

    def local_slice(self, name: str) -> tuple[slice, ...]:
        """One slice per dimension of the full tensor `name`: what this rank holds of it."""
        shape, dim = self.full_shape(name), self.tp_shards.dims.get(name)
        slices = [slice(0, n) for n in shape]
        if dim is not None:
            slices[dim] = self.groups.tp_slice(shape[dim])
        if is_sharded(self.of_stage[name]):
            tp_rows = slices[0]
            rows = self.groups.local_rows(tp_rows.stop - tp_rows.start)
            slices[0] = slice(tp_rows.start + rows.start, tp_rows.start + rows.stop)
        return tuple(slices)

    def take_local(self, name: str, full):
        """Inverse of `gather`: this rank's slice of a full tensor, or of anything that is sliced like one."""
        sharded = name in self.tp_shards.dims or is_sharded(self.of_stage[name])
        return full[self.local_slice(name)] if sharded else full[...]

    def is_writer(self, name: str) -> bool:
        """True on the lowest rank that holds this shard of `name`: the one that saves it."""
        dims, rank = self.groups.dims, self.groups.rank
        at = dims.coordinates(rank)
        return (
            at["dp_replicate"] == 0
            and (is_sharded(self.of_stage[name]) or dims.shard_rank(rank) == 0)
            and (name in self.tp_shards.dims or at["tp"] == 0)
            and self.pipeline.stage_of(name) == self.pipeline.number
        )

    def norm_groups(self, local_params: dict) -> dict[str, tuple]:
        """{parameter: groups over which it is sharded}, of those that this rank counts in the gradient norm."""
        groups = {}
        for name, parameter in local_params.items():
            if self.pipeline.stage_of(name) != self.pipeline.number:
                continue
            over_shards = parameter is not self.of_stage[name]
            groups[name] = (("shard",) if over_shards else ()) + (("tp",) if name in self.tp_shards.dims else ())
        return groups

    def gather(self, name: str, shard: torch.Tensor | None) -> torch.Tensor | None:
        """On rank 0 the full CPU tensor whose shards are placed as the parameter `name` is, from the stage that owns
        it.

        `shard`: this rank's, None if its stage has none. Collective.
        """
        owner = self.pipeline.stage_of(name)
        full = self._gather_stage(name, shard) if self.pipeline.number == owner else None
        return self.groups.send_to_rank0(full, owner)

    def _gather_stage(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        parameter, shard = self.model.get_parameter(name), shard.detach().cpu()
        if is_sharded(parameter):
            shard = self.groups.all_gather_rows(shard, parameter.shape[0])
        dim = self.tp_shards.dims.get(name)
        return shard if dim is None else self.groups.tp_all_gather(shard, dim)
