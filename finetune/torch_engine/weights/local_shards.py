"""Rank-local shards while the model is still on meta: each rank reads and keeps only its part of every tensor.

A part is a slice over the tensor- or expert-parallel group, and of that slice FSDP's rows; a pipeline stage has no part
of what other stages hold. Parameters stay on meta in their full shapes, are sliced there as `parallelize` does it, and
get their values last, from here. Packed codes are sliced before they come here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

import quantization_wrapper
from finetune.parts.parts import Parts, loads_full_model
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.experts import fused
from finetune.torch_engine.experts.fused import QuantizedExperts
from finetune.torch_engine.parallel import expert, fsdp, pipeline, vocabulary
from finetune.torch_engine.parallel import tensor as tensor_parallel
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.slices import Slice, check_divides, slice_quantized
from quantization_wrapper import QuantizationConfig


@dataclass(frozen=True)
class _Made:
    """A full value that is computed when it is taken, and sliced then."""

    make: Callable[[], torch.Tensor]
    group: str
    cuts: tuple[Slice, ...] = ()


class LocalShards:
    """This rank's part of every tensor, keyed by the parameter on meta. `device`: where it is kept.

    `cuts`: {original parameter: its Slice}. `experts`: modules whose experts expert parallelism divides. `stages`:
    {original parameter, and its module: pipeline stages that hold it}; empty without a pipeline. `sizes`: {quantized
    layer or experts: sizes of this rank's slice}; until the model is sliced, the layers have their full sizes.
    `chunks`: of layers per pipeline stage.
    """

    def __init__(self, groups: ProcessGroups, device: torch.device, chunks: int = 1):
        self.groups = groups
        self.device = device
        self.chunks = chunks
        self.kept: dict[nn.Parameter, torch.Tensor] = {}
        self.made: dict[nn.Parameter, _Made] = {}
        self.cuts: dict[str, Slice] = {}
        self.experts: list[str] = []
        self.stages: dict[str, set[int]] = {}
        self.sizes: dict[nn.Module, tuple] = {}
        self.magnitudes_are_known = True  # False: DoRA's, of full rows, are computed once the model is sharded
        self.source: tuple[Path | str, dict | None] | None = (
            None  # (model folder, a checkpoint's initial adapter): what layerwise.Reference reads
        )

    @classmethod
    def of(cls, groups: ProcessGroups, plan: Parts) -> "LocalShards | None":
        """None if this rank keeps everything, or must load the full model first. Collective."""
        if not groups.divides_weights or loads_full_model(plan):
            return None
        if groups.sharded and plan.quantization:
            assert groups.mesh is not None, groups.dims
            if not fsdp.supports_integer_params(groups.mesh["shard"]):
                return None
        if plan.memory.offload:
            device = torch.device("cpu")
        else:
            device = groups.device
        return cls(groups, device, plan.parallel.pp_chunks)

    def prepare(self, model: PreTrainedModel) -> None:
        """Finds which part of each parameter is this rank's, from the model on meta, before its weights are read."""
        dims = self.groups.dims
        if dims.tp > 1:
            self.cuts = tensor_parallel.slices_of(model, dims.tp) | vocabulary.slices_of(model)
        if dims.ep > 1:
            self.experts = list(fused.reachable(model))
            self.cuts |= expert.slices_of(model, "ep")
        if dims.pp > 1:
            for name, stages in pipeline.stages_of(model, dims.pp, self.chunks).items():
                self.stages.setdefault(name, set()).update(stages)
            for name, other in model.all_tied_weights_keys.items():
                both = self.stages[name] | self.stages[other]
                self.stages |= {name: both, other: both}
            for name in list(self.stages):
                self.stages.setdefault(name.rpartition(".")[0], set()).update(self.stages[name])

    # ---- which part is this rank's

    def is_here(self, name: str) -> bool:
        """True unless other pipeline stages hold a parameter of this name."""
        while name and name not in self.stages:
            name = name.rpartition(".")[0]
        return not name or self.groups.coordinate("pp") in self.stages[name]

    def fsdp_group(self, name: str) -> str:
        """FSDP group of a parameter, see Placement.fsdp_group."""
        return "expert_shard" if name.startswith(tuple(f"{owner}." for owner in self.experts)) else "shard"

    def index(self, name: str, shape: tuple) -> list[tuple[slice, ...]]:
        """This rank's part of the unquantized tensor `name`: an index for each block of its slice, in order. Reads one
        row instead of none.
        """
        cut = self.cuts.get(name)
        group = self.fsdp_group(name)
        if cut is None:
            return [(_some(self.groups.local_rows(shape[0], group)),)]
        ranges = cut.slices(shape[cut.dim], self.groups)
        if cut.dim == 0:
            (found,) = ranges
            rows = _some(self.groups.local_rows(found.stop - found.start, group))
            return [(slice(found.start + rows.start, found.start + rows.stop),)]
        rows = _some(self.groups.local_rows(shape[0], group))
        return [(rows, *[slice(None)] * (cut.dim - 1), found) for found in ranges]

    def reads_part(self, name: str, shape: tuple, config: QuantizationConfig | None) -> bool:
        """True if this rank can read its part alone: quantized by `config`, it has the codes of the full matrix.
        `config` None: it is not quantized.
        """
        cut = self.cuts.get(name)
        if cut is not None and not cut.divides(shape[cut.dim], self.groups):
            return False  # refused, with its reason, where the layer is sliced
        if config is None:
            return True
        if not quantization_wrapper.rows_independent(config, shape[-1]):
            return False
        if cut is None or cut.dim != len(shape) - 1:
            return True
        return quantization_wrapper.columns_independent(config, shape[-1], self._count(cut))

    def num_rows(self, name: str, full: int, part: bool) -> int:
        """Rows of the matrix that is quantized: of this rank's slice if only its `part` was read."""
        cut = None
        if part:
            cut = self.cuts.get(name)
        if cut is None or cut.dim:
            return full
        return sum(rows.stop - rows.start for rows in cut.slices(full, self.groups))

    def _count(self, cut: Slice) -> int:
        return cut.blocks * self.groups.place(cut.group)[1]

    # ---- what is kept

    def parameter(self, name: str, tensor: torch.Tensor, shape: tuple | None = None) -> nn.Parameter:
        """A frozen parameter on meta, of which this rank's part is kept.

        `shape`: the full one, if `tensor` holds only this rank's part, or one row in place of none.
        """
        if shape is None:
            full = tuple(tensor.shape)
        else:
            full = tuple(shape)
        parameter = nn.Parameter(torch.empty(full, dtype=tensor.dtype, device="meta"), requires_grad=False)
        if shape is None:
            cut = self.cuts.get(name)
            if cut is not None and cut.divides(full[cut.dim], self.groups):
                tensor = cut.take(tensor, self.groups)
            self._keep_rows(name, parameter, tensor, len(tensor))
        else:
            self._keep_first(name, parameter, tensor, self.num_rows(name, full[0], True))
        return parameter

    def _keep_rows(self, name: str, parameter: nn.Parameter, tensor: torch.Tensor, num_rows: int) -> None:
        """Keeps a copy of FSDP's rows of `tensor`, this rank's slice with all of its rows."""
        rows = tensor[self.groups.local_rows(num_rows, self.fsdp_group(name))]
        self.kept[parameter] = rows.to(device=self.device, dtype=parameter.dtype, copy=True)

    def _keep_first(self, name: str, parameter: nn.Parameter, tensor: torch.Tensor, num_rows: int) -> None:
        """Keeps `tensor`, read as this rank's rows of `num_rows`; nothing of it if there are none."""
        rows = self.groups.local_rows(num_rows, self.fsdp_group(name))
        self.kept[parameter] = tensor[: rows.stop - rows.start].to(self.device)

    def give(self, name: str, parameter: nn.Parameter, make: Callable[[], torch.Tensor]) -> None:
        """The full value of a parameter on meta, computed when it is taken; not at all if another stage holds it."""
        self.kept.pop(parameter, None)
        if self.is_here(name):
            self.made[parameter] = _Made(make, self.fsdp_group(name))

    def linear(self, name: str, layer: QuantizedLinear, num_rows: int | None) -> None:
        """Moves a new quantized layer to meta and keeps this rank's rows of its slice. `name`: its weight's.

        `num_rows`: of the full weight, if the layer was made of this rank's part only. Raises PlanError if the codes
        cannot be sliced.
        """
        cut = self.cuts.get(name)
        sizes = (layer.out_features, layer.in_features)
        rows = None
        if num_rows is not None:
            rows = self.num_rows(name, num_rows, True)
            self.sizes[layer] = (rows, layer.in_features)
            columns = layer.in_features * (self._count(cut) if cut is not None and cut.dim == 1 else 1)
            sizes = (num_rows, columns)
        elif cut is not None:
            with self._slicing(name):
                slice_quantized(layer, cut, self.groups)
            self.sizes[layer] = (layer.out_features, layer.in_features)
        layer.out_features, layer.in_features = sizes
        self._to_meta(name.rpartition(".")[0], layer, rows)

    def hold_experts(
        self, name: str, module: Any, leaf: str, weight: torch.Tensor, config: QuantizationConfig, hold: Callable
    ) -> None:
        """Quantizes this rank's slice of a 3-D weight by `hold`, and keeps its rows. `name`: the weight's."""
        cut = self.cuts.get(name)
        base = module
        full = fused.shape_of(base, leaf)
        if cut is None:
            hold(module, leaf, weight, config)
        elif cut.group == "ep" or self._slices_before(cut, base, full, config):
            with self._slicing(name):
                check_divides(weight.shape[cut.dim], cut, self.groups)
            hold(module, leaf, cut.take(weight, self.groups), config)
        else:
            hold(module, leaf, weight, config)
            with self._slicing(name):
                expert.slice_parts(getattr(module, leaf), *expert.side_of(base, leaf), self.groups)
        held: QuantizedExperts = getattr(module, leaf)
        self.sizes[held] = (held.num_experts, held.out_features, held.in_features)
        held.num_experts, (held.out_features, held.in_features) = base.num_experts, full
        self._to_meta(name, held, None)

    def _slices_before(self, cut: Slice, base: Any, full: tuple[int, int], config: QuantizationConfig) -> bool:
        """True if slices of the experts' rows or columns can be quantized alone."""
        side = 0 if cut.dim == (2 if base.is_transposed else 1) else 1
        as_linear = Slice(side, cut.blocks, cut.group)
        if not as_linear.divides(full[side], self.groups):
            return False
        if not quantization_wrapper.rows_independent(config, full[1]):
            return False
        return side == 0 or quantization_wrapper.columns_independent(config, full[1], self._count(cut))

    def _slicing(self, name: str):
        return tensor_parallel.refusing(f"--tp_degree {self.groups.dims.tp}", name.rpartition(".")[0])

    def _to_meta(self, name: str, module: nn.Module, num_rows: int | None) -> None:
        for inner, part in module.named_modules(prefix=name):
            for leaf, old in part._parameters.items():
                if old is None or old.is_meta:
                    continue
                old, full = old.detach(), tuple(old.shape)
                if num_rows is not None:
                    full = (num_rows, *full[1:])
                new = nn.Parameter(torch.empty(full, dtype=old.dtype, device="meta"), requires_grad=False)
                if num_rows is None:
                    keep = self._keep_rows
                else:
                    keep = self._keep_first
                keep(f"{inner}.{leaf}", new, old, full[0])
                part._parameters[leaf] = new

    def sliced(self, old: nn.Parameter, new: nn.Parameter, cut: Slice) -> None:
        """`new`, a slice, takes the place of a parameter; what was read or quantized is sliced already."""
        if old in self.kept:
            self.kept[new] = self.kept.pop(old)
        elif old in self.made:
            made = self.made.pop(old)
            self.made[new] = _Made(made.make, made.group, (*made.cuts, cut))

    def has(self, parameter: nn.Parameter) -> bool:
        return parameter in self.kept or parameter in self.made

    def cast(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        """Keeps these parameters in another dtype."""
        for parameter in parameters:
            if parameter in self.kept:
                self.kept[parameter] = self.kept[parameter].to(dtype)

    def forget_all_but(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drops what is kept of parameters that are no longer the model's."""
        self.kept = {p: self.kept[p] for p in parameters if p in self.kept}

    def take(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's part, which is dropped from here."""
        if parameter in self.kept:
            return self.kept.pop(parameter)
        made = self.made.pop(parameter)
        full = made.make()
        for cut in made.cuts:
            full = cut.take(full, self.groups)
        rows = full[self.groups.local_rows(len(full), made.group)]
        return rows.to(device=self.device, dtype=parameter.dtype, copy=True)

    # ---- into the model

    def assign(self, model: PreTrainedModel) -> None:
        """Gives parameters that FSDP does not shard their values; tied ones stay tied, other stages' stay on meta."""
        real: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for leaf, old in list(module._parameters.items()):
                if old is None or not (old in real or self.has(old)):
                    continue
                if old not in real:
                    value = self.take(old).to(self.groups.device)
                    real[old] = nn.Parameter(value, requires_grad=old.requires_grad)
                module._parameters[leaf] = real[old]

    def share_starts(self, model: PreTrainedModel, stages: dict[str, tuple]) -> None:
        """Gives every pipeline stage the initial adapters that were subtracted from the base. Collective.
        `stages`: see pipeline.stages_of.
        """
        group = self.groups.dims.group(self.groups.rank, "pp")
        for name, layer in model.named_modules():
            if getattr(layer, "lora_A", None) is None:
                continue
            owner = stages[f"{name}.lora_A"][0]
            mine = self.groups.coordinate("pp") == owner
            if mine:
                halves = [half.contiguous() for half in layer.start]
            else:
                halves = [torch.zeros(layer.lora_A.shape), torch.zeros(layer.lora_B.shape)]
            for half in halves:
                dist.broadcast(half, group[owner], group=self.groups.process_groups["pp"])
            layer.start = tuple(halves)


def _some(rows: slice) -> slice:
    """Neither files nor quantizers support zero rows: one as a placeholder."""
    if rows.start < rows.stop:
        return rows
    return slice(0, 1)
