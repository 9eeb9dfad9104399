"""Which part of each tensor one rank of several keeps while the model is loaded: its own rows, and never the rest.

The model's parameters stay on meta in their whole shapes; a rank's rows stand here until `parallelize.shard` has cut the
model and puts them in. Which part of a named tensor is kept is said by `rows` alone.
"""

import torch
from torch import nn

from finetune.distributed.parallel_dims import loads_full_model
from finetune.torch_engine.parallel import fsdp
from finetune.torch_engine.parallel.process_groups import ProcessGroups


class LocalShards:
    """A rank's rows of every tensor, by the parameter on meta that they are of. `device`: where they stay."""

    def __init__(self, ranks: ProcessGroups, device: torch.device):
        self.ranks, self.device, self.kept = ranks, device, {}

    @classmethod
    def of(cls, ranks: ProcessGroups, settings, device: torch.device) -> "LocalShards | None":
        """None where this rank keeps everything, or must load it all first."""
        if not ranks.sharded or loads_full_model(settings):
            return None
        if settings.train_type == "qlora" and not fsdp.supports_integer_params(ranks):
            return None
        return cls(ranks, torch.device("cpu") if settings.use_cpu_offload else device)

    def rows(self, name: str, num_rows: int) -> slice:
        """The rows that this rank keeps of the tensor `name`, which has so many."""
        return self.ranks.local_rows(num_rows)

    def parameter(self, name: str, tensor: torch.Tensor, shape: tuple | None = None) -> nn.Parameter:
        """A frozen parameter on meta whose rows are kept. `shape`: the whole one, where `tensor` holds our rows alone, or a
        row in the place of none.
        """
        whole = tuple(tensor.shape) if shape is None else tuple(shape)
        parameter = nn.Parameter(torch.empty(whole, dtype=tensor.dtype, device="meta"), requires_grad=False)
        if shape is None:
            self.give(name, parameter, tensor)
        else:
            rows = self.rows(name, whole[0])
            self.kept[parameter] = tensor[: rows.stop - rows.start].to(self.device)
        return parameter

    def give(self, name: str, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Keeps our rows of `whole`, the value of a parameter on meta, on memory of their own."""
        rows = whole[self.rows(name, len(whole))]
        self.kept[parameter] = rows.to(device=self.device, dtype=parameter.dtype, copy=True)

    def module(self, name: str, module: nn.Module, num_rows: int | None = None) -> None:
        """Puts the parameters of a module just made on meta. `num_rows`: of the whole, where it was made of our rows alone."""
        for inner, part in module.named_modules(prefix=name):
            for leaf, old in part._parameters.items():
                if old is None or old.is_meta:
                    continue
                shape = None if num_rows is None else (num_rows, *old.shape[1:])
                part._parameters[leaf] = self.parameter(f"{inner}.{leaf}", old.detach(), shape)

    def has(self, parameter: nn.Parameter) -> bool:
        return parameter in self.kept

    def forget_all_but(self, parameters) -> None:
        """Lets go of rows whose parameter is no longer the model's."""
        self.kept = {p: self.kept[p] for p in parameters if p in self.kept}

    def take(self, parameter: nn.Parameter) -> torch.Tensor:
        """Our rows, which are let go of here."""
        return self.kept.pop(parameter)
