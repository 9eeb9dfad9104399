"""Rank-local shards while the model is still on meta: each rank reads and keeps only its rows.

`fully_shard` takes them from here.

Parameters stay on meta in their full shapes. `rows` alone decides which rows of a tensor are kept.
"""

import torch
from torch import nn

from finetune.plan.parts import Parts, loads_full_model
from finetune.torch_engine.parallel import fsdp
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.slices import Slice


class LocalShards:
    """This rank's rows of every tensor, keyed by the parameter on meta. `device`: where they are kept."""

    def __init__(self, groups: ProcessGroups, device: torch.device):
        self.groups, self.device, self.kept = groups, device, {}
        self.experts = {}  # {name of a module: number of its experts}, of which expert parallelism keeps some
        self.magnitudes_are_known = True  # False: DoRA's, of full rows, are computed once the model is sharded

    @classmethod
    def of(cls, groups: ProcessGroups, plan: Parts) -> "LocalShards | None":
        """None if this rank keeps everything, or must load the full model first. Collective."""
        if not groups.sharded or loads_full_model(plan):
            return None
        if plan.quantization and not fsdp.supports_integer_params(groups):
            return None
        return cls(groups, torch.device("cpu") if plan.memory.offload else groups.device)

    def rows(self, name: str, num_rows: int) -> slice:
        """This rank's rows of the tensor `name`, which has `num_rows`."""
        if not self.num_experts_of(name):
            return self.groups.local_rows(num_rows)
        first = 0
        if not name.endswith("lora_B"):  # all others have their experts one after the other
            (experts,) = Slice(0, 1, "ep").slices(num_rows, self.groups)
            first, num_rows = experts.start, experts.stop - experts.start
        rows = self.groups.local_rows(num_rows, "expert_shard")
        return slice(first + rows.start, first + rows.stop)

    def num_experts_of(self, name: str) -> int:
        """The number of experts in the module that a tensor belongs to; 0 if it is not one that ranks divide."""
        if self.groups.dims.ep == 1:
            return 0
        return next((count for owner, count in self.experts.items() if name.startswith(owner + ".")), 0)

    def parameter(self, name: str, tensor: torch.Tensor, shape: tuple | None = None) -> nn.Parameter:
        """A frozen parameter on meta whose rows are kept.

        `shape`: the full one, if `tensor` holds only this rank's rows, or one row in place of none.
        """
        full = tuple(tensor.shape) if shape is None else tuple(shape)
        parameter = nn.Parameter(torch.empty(full, dtype=tensor.dtype, device="meta"), requires_grad=False)
        if shape is None:
            self.give(name, parameter, tensor)
        else:
            rows = self.rows(name, full[0])
            self.kept[parameter] = tensor[: rows.stop - rows.start].to(self.device)
        return parameter

    def give(self, name: str, parameter: nn.Parameter, full: torch.Tensor) -> None:
        """Keeps a copy of this rank's rows of `full`, the value of a parameter on meta."""
        count = self.num_experts_of(name)
        if count and name.endswith("lora_B"):
            full = Slice(1, full.shape[1] // count, "ep").take(full, self.groups)
        rows = full[self.rows(name, len(full))]
        self.kept[parameter] = rows.to(device=self.device, dtype=parameter.dtype, copy=True)

    def module(self, name: str, module: nn.Module, num_rows: int | None = None) -> None:
        """Moves a new module's parameters to meta.
        `num_rows`: of the full one, if it was made of this rank's rows only.
        """
        for inner, part in module.named_modules(prefix=name):
            for leaf, old in part._parameters.items():
                if old is None or old.is_meta:
                    continue
                shape = None if num_rows is None else (num_rows, *old.shape[1:])
                part._parameters[leaf] = self.parameter(f"{inner}.{leaf}", old.detach(), shape)

    def rename(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """`new` takes the place of a parameter whose rows are kept."""
        self.kept[new] = self.kept.pop(old)

    def has(self, parameter: nn.Parameter) -> bool:
        return parameter in self.kept

    def forget_all_but(self, parameters) -> None:
        """Drops rows whose parameter is no longer the model's."""
        self.kept = {p: self.kept[p] for p in parameters if p in self.kept}

    def take(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's rows, which are dropped from here."""
        return self.kept.pop(parameter)
