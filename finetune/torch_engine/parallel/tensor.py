"""Tensor parallelism by the model's own plan (`base_model_tp_plan` in transformers configs).

Column-parallel linears hold some output rows, row-parallel ones some input columns (Shoeybi et al. 2019, Megatron-LM).
Shards are plain tensors, dense or packed, sliced from the quantized weight, so FSDP can shard them further. Embeddings,
norms and head are replicated; each rank computes the logits of some of the target positions.
"""

import re
import weakref
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from finetune.errors import PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.lora.layers import LoRAEmbedding, LoRALinear
from finetune.torch_engine.parallel.process_groups import ProcessGroups

COLUMN = ("colwise", "colwise_gather_output")
ROW = ("rowwise", "rowwise_split_input")
PARTIAL = "replicated_with_grad_allreduce"  # a norm over a rank's local heads


# ---- collectives in forward and backward


class _CopyToTensorParallelRegion(torch.autograd.Function):
    """Identity in forward, all-reduce in backward (Megatron's copy to the tensor-parallel region)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """All-reduce in forward, identity in backward (Megatron's reduce from the tensor-parallel region)."""

    @staticmethod
    def forward(ctx, x, group):
        out = x.contiguous().clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _GatherFromTensorParallelRegion(torch.autograd.Function):
    """All-gather along the last dimension in forward, local slice in backward (Megatron's gather)."""

    @staticmethod
    def forward(ctx, x, groups):
        ctx.groups = groups
        return groups.tp_all_gather(x, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad[..., ctx.groups.tp_slice(grad.shape[-1])], None


class _ScatterToTensorParallelRegion(torch.autograd.Function):
    """Local slice of the last dimension in forward, all-gather in backward (Megatron's scatter)."""

    @staticmethod
    def forward(ctx, x, groups):
        ctx.groups = groups
        return x[..., groups.tp_slice(x.shape[-1])].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return ctx.groups.tp_all_gather(grad, -1), None


def copy_to_region(tensor: torch.Tensor | None, groups: ProcessGroups):
    """`tensor` as the replicated input of tensor-parallel work: its gradient is all-reduced over the group."""
    if tensor is None or not tensor.requires_grad:
        return tensor
    return _CopyToTensorParallelRegion.apply(tensor, groups.process_groups["tp"])


class _SharedInput:
    """Caches `complete` of the last input, so that linears sharing an input (q, k, v) all-reduce its gradient once."""

    def __init__(self):
        self.of, self.completed = None, None

    def __call__(self, x, groups: ProcessGroups):
        if not x.requires_grad or not torch.is_grad_enabled():
            return x
        if self.of is None or self.of() is not x:
            self.of, self.completed = weakref.ref(x), copy_to_region(x, groups)
        return self.completed


# ---- sharding a model


@dataclass
class TPShards:
    """Result of `split`: {parameter: dim it is sharded along}, and the parameters whose gradients are partial sums."""

    dims: dict = field(default_factory=dict)
    partial: set = field(default_factory=set)


def shard_layers(model, groups: ProcessGroups) -> TPShards:
    """Shards the loaded model in place. Raises PlanError if its TP plan is missing, unsupported or does not divide."""
    if groups.dims.tp == 1:
        return TPShards()
    pieces, shared, said = TPShards(), _SharedInput(), f"--tp_degree {groups.dims.tp}"
    plan = plan_of(model, said)
    head = model.get_output_embeddings()
    outer = {n for n, m in model.named_modules() if isinstance(m, (LoRALinear, LoRAEmbedding))}
    met = set()
    for name, module in list(model.named_modules()):
        kind = next((kind for pattern, kind in plan.items() if re.fullmatch(pattern, name)), None)
        if kind is None or module is head or any(name.startswith(o + ".") for o in outer):
            continue
        met.add(kind)
        if kind == PARTIAL:
            pieces.partial |= {f"{name}.{n}" for n, _ in module.named_parameters()}
        elif kind in COLUMN + ROW:
            try:
                _split_linear(name, module, kind, groups, shared, pieces)
            except ValueError as error:
                raise PlanError(
                    f"{said}: {name} cannot be sharded: {error}. Use --dp_shards instead, a smaller --group_size "
                    "or another quantizer."
                ) from None
        else:
            raise PlanError(f"{said}: {name} is planned as {kind}, which is not supported. Use --dp_shards instead.")
    if not met & set(COLUMN + ROW):
        raise PlanError(
            f"{said}: transformers' TP plan for {type(model).__name__} matches none of its layers. Use "
            "--dp_shards instead."
        )
    return pieces


def plan_of(model, said: str) -> dict[str, str]:
    """{pattern of a full module name: kind} in the config's TP plan, for decoder modules.

    PlanError if there is none.
    """
    config = model.config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise PlanError(
            f"{said}: transformers has no tensor-parallel plan for {config.model_type}. Use --dp_shards instead."
        )
    odd = sorted({kind for kind in plan.values() if kind not in (*COLUMN, *ROW, PARTIAL)})
    if odd:
        what = "experts" if any("expert" in name for name in plan) else f"layers planned as {odd[0]}"
        raise PlanError(f"{said}: {config.model_type} has {what}, which are not supported. Use --dp_shards instead.")
    decoder = model.get_decoder()
    prefix = next((n + "." for n, m in model.named_modules() if m is decoder and n), "")
    return {re.escape(prefix) + re.escape(n).replace(r"\*", r"\d+"): kind for n, kind in plan.items()}


def _split_linear(name: str, module, kind: str, groups: ProcessGroups, shared: _SharedInput, pieces: TPShards) -> None:
    column = kind in COLUMN
    base = module.base if isinstance(module, LoRALinear) else module
    path = f"{name}.base" if base is not module else name
    if isinstance(base, QuantizedLinear):
        dims = _split_quantized(base, 0 if column else 1, groups)
        pieces.dims |= {f"{path}.{n}": dim for n, dim in dims.items()}
    elif isinstance(base, nn.Linear):
        _keep_piece(base, "weight", 0 if column else 1, groups, path, pieces)
        base.out_features, base.in_features = base.weight.shape
    else:
        raise ValueError(f"{type(base).__name__} stores its weight transposed")
    if column:
        _keep_piece(base, "bias", 0, groups, path, pieces)
    if base is not module:
        _split_adapter(module, column, groups, name, pieces)
    forward = _column if column else _row
    module.forward = partial(forward, module, groups, kind, shared)


def _split_adapter(layer: LoRALinear, column: bool, groups: ProcessGroups, name: str, pieces: TPShards) -> None:
    layer.row_square_O = None
    if column:
        cut, partly = {"lora_B": 0, "lora_magnitude_vector": 0}, ("lora_A",)
    else:
        layer.pieces, layer.mask_piece = groups.dims.tp, groups.tp_slice(layer.in_features)
        cut, partly = {"lora_A": 1}, ("lora_B", "lora_magnitude_vector")
        layer.across = lambda square_O: groups.all_reduce(square_O, "tp")
    for leaf, dim in cut.items():
        _keep_piece(layer, leaf, dim, groups, name, pieces)
    pieces.partial |= {f"{name}.{leaf}" for leaf in partly if getattr(layer, leaf) is not None}
    layer.in_features, layer.out_features = layer.lora_A.shape[1], layer.lora_B.shape[0]


def _keep_piece(module, leaf: str, dim: int, groups: ProcessGroups, path: str, pieces: TPShards) -> None:
    old = getattr(module, leaf)
    if old is None:
        return
    if old.shape[dim] % groups.dims.tp:
        raise ValueError(f"its {old.shape[dim]} {('rows', 'columns')[dim]} are not divisible by {groups.dims.tp}")
    index = (slice(None),) * dim + (groups.tp_slice(old.shape[dim]),)
    setattr(module, leaf, nn.Parameter(old.detach()[index].clone(), requires_grad=old.requires_grad))
    pieces.dims[f"{path}.{leaf}"] = dim


def _split_quantized(layer: QuantizedLinear, dim: int, groups: ProcessGroups) -> dict[str, int]:
    """Shards packed codes and scales; {tensor: dim} of the sharded ones. ValueError if no split gives the exact weight.

    Which tensors extend along the inputs depends on the method: candidate splits are tried and the weights compared.
    """
    sizes = (layer.out_features, layer.in_features)
    if sizes[dim] % groups.dims.tp:
        raise ValueError(f"its {sizes[dim]} {('rows', 'columns')[dim]} are not divisible by {groups.dims.tp}")
    index = (slice(None),) * dim + (groups.tp_slice(sizes[dim]),)
    wanted = layer.weight_of(layer.stored(), torch.float32)[index]
    shape = tuple(wanted.shape)
    dequantize = partial(
        layer.dequantize.func, shape=shape, **{k: v for k, v in layer.dequantize.keywords.items() if k != "shape"}
    )
    stored = dict(zip(layer.names, layer.stored(), strict=True))
    even = [n for n, t in stored.items() if t.ndim > dim and t.shape[dim] % groups.dims.tp == 0]
    ways = [chosen for size in range(len(even), 0, -1) for chosen in combinations(even, size)]
    for chosen in ways:  # two values per row may belong to the full row or to each half of it
        tensors = {
            n: t.detach()[(slice(None),) * dim + (groups.tp_slice(t.shape[dim]),)].clone()
            if n in chosen
            else t.detach()
            for n, t in stored.items()
        }
        try:
            same = torch.equal(dequantize(tensors, torch.float32), wanted)
        except (RuntimeError, ValueError):
            same = False
        if same:
            break
    else:
        what = ("rows", "columns")[dim]
        raise ValueError(f"{sizes[dim]} {what} split into {groups.dims.tp} shards would share scales across shards")
    for n, tensor in tensors.items():
        setattr(layer, n, nn.Parameter(tensor, requires_grad=False))
    layer.dequantize, (layer.out_features, layer.in_features) = dequantize, shape
    if layer.cached is not None:
        layer.cached = layer.cached[index].clone()
    return dict.fromkeys(chosen, dim)


# ---- forwards of the linears


def _column(module, groups: ProcessGroups, kind: str, shared: _SharedInput, x):
    out = type(module).forward(module, shared(x, groups))
    return _GatherFromTensorParallelRegion.apply(out, groups) if kind == "colwise_gather_output" else out


def _row(module, groups: ProcessGroups, kind: str, _, x):
    if kind == "rowwise_split_input":
        x = _ScatterToTensorParallelRegion.apply(x, groups)
    if isinstance(module, nn.Linear):
        out, bias = F.linear(x, module.weight), module.bias
    else:
        out, bias = module.product(x, None), (module.base if isinstance(module, LoRALinear) else module).bias
    out = _ReduceFromTensorParallelRegion.apply(out, groups.process_groups["tp"])
    return out if bias is None else out + bias.to(out.dtype)
