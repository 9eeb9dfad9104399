"""Tensor parallelism by the model's own plan (`base_model_tp_plan` in transformers configs).

Column-parallel linears hold some output rows, row-parallel ones some input columns (Shoeybi et al. 2019, Megatron-LM).
Norms are replicated; embedding and head are sharded by rows of the vocabulary (vocabulary.py).
"""

import contextlib
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.experts import fused
from finetune.torch_engine.lora.layers import LoRAEmbedding, LoRALinear
from finetune.torch_engine.parallel import expert
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.slices import LayerSlices, Slice
from finetune.torch_engine.weights.interfaces import HeldShards

COLUMN = ("colwise", "colwise_gather_output")
ROW = ("rowwise", "rowwise_split_input")
PARTIAL = "replicated_with_grad_allreduce"  # a norm over a rank's local heads


# ---- collectives in forward and backward


class _CopyToTensorParallelRegion(torch.autograd.Function):
    """Identity in forward, all-reduce in backward (Megatron's copy to the tensor-parallel region)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """All-reduce in forward, identity in backward (Megatron's reduce from the tensor-parallel region)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None):
        out = x.contiguous().clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return grad, None


class _GatherFromTensorParallelRegion(torch.autograd.Function):
    """All-gather along the last dimension in forward, local slice in backward (Megatron's gather)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: ProcessGroups):
        ctx.groups = groups
        return groups.tp_all_gather(x, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return grad[..., ctx.groups.tp_slice(grad.shape[-1])], None


class _ScatterToTensorParallelRegion(torch.autograd.Function):
    """Local slice of the last dimension in forward, all-gather in backward (Megatron's scatter)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: ProcessGroups):
        ctx.groups = groups
        return x[..., groups.tp_slice(x.shape[-1])].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return ctx.groups.tp_all_gather(grad, -1), None


def copy_to_region(tensor: torch.Tensor | None, groups: ProcessGroups):
    """`tensor` as the replicated input of tensor-parallel work: its gradient is all-reduced over the group."""
    if tensor is None or not tensor.requires_grad:
        return tensor
    return _CopyToTensorParallelRegion.apply(tensor, groups.process_groups["tp"])


def reduce_from_region(tensor: torch.Tensor, groups: ProcessGroups, group: str = "tp") -> torch.Tensor:
    """The sum over a group of partial results, of which every rank goes on to compute the same."""
    return _ReduceFromTensorParallelRegion.apply(tensor, groups.process_groups[group])


class Shared(Protocol):
    """Input shared by several linears: a SharedInput, or a SequenceRegion in its place."""

    def __call__(self, x: torch.Tensor, groups: ProcessGroups) -> torch.Tensor: ...
    def reduce(self, partial_sum: torch.Tensor, groups: ProcessGroups) -> torch.Tensor: ...


class SharedInput:
    """Caches `complete` of the last input, so that linears sharing an input (q, k, v) all-reduce its gradient once.
    `reduce`: of row-parallel outputs. sequence.SequenceRegion does both another way.
    """

    def __init__(self):
        self.of = None
        self.completed = None

    def __call__(self, x: torch.Tensor, groups: ProcessGroups):
        if not x.requires_grad or not torch.is_grad_enabled():
            return x
        if self.of is None or self.of() is not x:
            self.of = weakref.ref(x)
            self.completed = copy_to_region(x, groups)
        return self.completed

    def reduce(self, partial_sum: torch.Tensor, groups: ProcessGroups):
        return reduce_from_region(partial_sum, groups)


# ---- sharding a model


def shard_layers(
    model: PreTrainedModel, groups: ProcessGroups, local_shards: HeldShards | None = None, shared: Shared | None = None
) -> LayerSlices:
    """Shards the loaded model in place. Raises PlanError if its TP plan is missing, unsupported or does not divide.
    `local_shards`: holds this rank's slices already, and the parameters are on meta. `shared`: see SharedInput.
    """
    pieces = LayerSlices(local_shards=local_shards)
    flag = f"--tp_degree {groups.dims.tp}"
    shared = shared or SharedInput()
    if groups.dims.tp == 1:
        return pieces
    for name, module in fused.reachable(model).items():
        _split_experts(name, module, groups, shared, pieces, flag)
    met = set()
    for name, kind in kinds_of(model, flag).items():
        module = model.get_submodule(name)
        met.add(kind)
        if kind == PARTIAL:
            pieces.partial |= {f"{name}.{n}" for n, _ in module.named_parameters()}
        elif kind in COLUMN + ROW:
            with refusing(flag, name):
                _split_linear(name, module, kind, groups, shared, pieces)
        else:
            raise PlanError(f"{flag}: {name} is planned as {kind}, which is not supported. Use --dp_shards instead.")
    if not met & set(COLUMN + ROW) and not fused.reachable(model):
        raise PlanError(
            f"{flag}: transformers' TP plan for {type(model).__name__} matches none of its layers. Use "
            "--dp_shards instead."
        )
    return pieces


@contextlib.contextmanager
def refusing(flag: str, name: str):
    """Context in which a ValueError means that a layer cannot be sliced: raises PlanError."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"{flag}: {name} cannot be sharded: {error}. Use --dp_shards instead, a smaller --group_size "
            "or another quantizer."
        ) from None


def kinds_of(model: PreTrainedModel, flag: str) -> dict[str, str]:
    """{module: its kind in the plan}, adapters by the layer that they wrap. PlanError as `plan_of`."""
    plan = plan_of(model, flag)
    head = model.get_output_embeddings()
    found: dict[str, str] = {}
    outer = {n for n, m in model.named_modules() if isinstance(m, (LoRALinear, LoRAEmbedding))}
    for name, module in model.named_modules():
        kind = next((kind for pattern, kind in plan.items() if re.fullmatch(pattern, name)), None)
        if kind is not None and module is not head and not any(name.startswith(o + ".") for o in outer):
            found[name] = kind
    return found


def slices_of(model: PreTrainedModel, degree: int) -> dict[str, Slice]:
    """{parameter: its Slice} of a model on meta without adapters. PlanError as `plan_of`."""
    found = expert.slices_of(model, "tp")
    for name, kind in kinds_of(model, f"--tp_degree {degree}").items():
        if kind in COLUMN:
            found |= {f"{name}.weight": Slice(0), f"{name}.bias": Slice(0)}
        elif kind in ROW:
            found[f"{name}.weight"] = Slice(1)
    return found


def plan_of(model: PreTrainedModel, flag: str) -> dict[str, str]:
    """{pattern of a full module name: kind} in the config's TP plan, for decoder modules.
    PlanError if there is none.
    """
    config = model.config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan and fused.reachable(model):
        plan = {}  # everything but the experts is replicated
    elif not plan:
        raise PlanError(
            f"{flag}: transformers has no tensor-parallel plan for {config.model_type}. Use --dp_shards instead."
        )
    plan = {name: kind for name, kind in plan.items() if ".experts" not in name}  # by their own structure
    if fused.has_experts(model):
        expert.reachable_experts(model, flag)
    odd = sorted({kind for kind in plan.values() if kind not in (*COLUMN, *ROW, PARTIAL)})
    if odd:
        raise PlanError(
            f"{flag}: {config.model_type} has layers planned as {odd[0]}, which are not supported. Use --dp_shards "
            "instead."
        )
    plan = shared_experts_plan(plan) | plan
    decoder = model.get_decoder()
    prefix = next((n + "." for n, m in model.named_modules() if m is decoder and n), "")
    return {re.escape(prefix) + re.escape(n).replace(r"\*", r"\d+"): kind for n, kind in plan.items()}


def shared_experts_plan(plan: dict[str, str]) -> dict[str, str]:
    """The plan of a dense MLP for the shared experts of the same model, which some configs leave out."""
    found: dict[str, str] = {}
    for name, kind in plan.items():
        owner, _, leaf = name.rpartition(".")
        if leaf in ("gate_proj", "up_proj", "down_proj") and "shared" not in owner:
            found |= {f"{owner}.{shared}.{leaf}": kind for shared in ("shared_expert", "shared_experts")}
    return found


def _split_experts(
    name: str, module: Any, groups: ProcessGroups, shared: Shared, pieces: LayerSlices, flag: str
) -> None:
    base = fused.unwrapped(module)
    if base.has_post_expert_norm:
        raise PlanError(f"{flag}: {name} has a norm after each expert, which is not supported. Use --dp_shards.")
    run = expert.runner(module)
    with refusing(flag, name):
        expert.slice_experts(name, module, "tp", groups, pieces)
    run = partial(run, last_bias=groups.coordinate("tp") == 0)
    module.forward = partial(_experts, base, run, groups, shared)


def _split_linear(
    name: str, module: Any, kind: str, groups: ProcessGroups, shared: Shared, pieces: LayerSlices
) -> None:
    column = kind in COLUMN
    cut = Slice(0 if column else 1)
    base = module
    path = name
    if isinstance(module, LoRALinear):
        base = module.base
        path = f"{name}.base"
    if isinstance(base, QuantizedLinear):
        pieces.slices |= {f"{path}.{n}": cut for n in pieces.slice_quantized(base, cut, groups)}
    elif isinstance(base, nn.Linear):
        pieces.keep(base, "weight", cut, groups, path)
        base.out_features, base.in_features = base.weight.shape
    else:
        raise ValueError(f"{type(base).__name__} stores its weight transposed")
    if column:
        pieces.keep(base, "bias", Slice(0), groups, path)
    if base is not module:
        split_adapter(module, column, groups, name, pieces)
    forward = _column if column else _row
    module.forward = partial(forward, module, groups, kind, shared)


def split_adapter(
    layer: LoRALinear, column: bool, groups: ProcessGroups, name: str, pieces: LayerSlices, size: int | None = None
) -> None:
    """Slices the adapter of a linear. `size`: see Slice."""
    layer.row_square_O = None
    if column:
        cut = {"lora_B": 0, "lora_magnitude_vector": 0}
        partly: tuple[str, ...] = ("lora_A",)
    else:
        layer.pieces, layer.mask_piece = groups.dims.tp, groups.tp_slice(layer.in_features)
        cut = {"lora_A": 1}
        partly = ("lora_B", "lora_magnitude_vector")
        layer.across = lambda square_O: groups.all_reduce(square_O, "tp")
    for leaf, dim in cut.items():
        pieces.keep(layer, leaf, Slice(dim, size=size), groups, name)
    pieces.partial |= {f"{name}.{leaf}" for leaf in partly if getattr(layer, leaf) is not None}
    layer.in_features = layer.lora_A.shape[1]
    layer.out_features = layer.lora_B.shape[0]


# ---- forwards of the linears


def _column(module: Any, groups: ProcessGroups, kind: str, shared: Shared, x: torch.Tensor):
    out = type(module).forward(module, shared(x, groups))
    if kind == "colwise_gather_output":
        return _GatherFromTensorParallelRegion.apply(out, groups)
    return out


def _experts(
    base: Any,
    run: Callable,
    groups: ProcessGroups,
    shared: Shared,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
):
    weights = copy_to_region(top_k_weights, groups)
    out = fused.weighted_sum(base, run, shared(hidden, groups), top_k_index, weights)
    return reduce_from_region(out, groups)


def _row(module: Any, groups: ProcessGroups, kind: str, shared: Shared, x: torch.Tensor):
    if kind == "rowwise_split_input":
        x = _ScatterToTensorParallelRegion.apply(x, groups)
    if isinstance(module, LoRALinear) and module.off:
        layer = module.base
    else:
        layer = module
    if isinstance(layer, nn.Linear):
        out = F.linear(x, layer.weight)
    else:
        out = layer.product(x, None)
    out = shared.reduce(out, groups)
    if layer.bias is None:
        return out
    return out + layer.bias.to(out.dtype)
