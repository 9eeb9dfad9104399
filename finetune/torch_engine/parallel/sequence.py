"""Sequence parallelism beside tensor parallelism (Korthikanti et al. 2022, section 4.2.2): between the attention and
the MLP of the layers each rank of a tensor-parallel group has S / tp positions of the hidden states.

An all-gather before column-parallel linears and a reduce-scatter after row-parallel ones take the place of an
all-reduce. Norms and residual sums compute their positions only. Positions that the degree does not divide are filled
up with zeros.

B rows, S positions, H hidden size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.torch_engine.experts import fused
from finetune.torch_engine.parallel.fsdp import decoder_layers
from finetune.torch_engine.parallel.process_groups import ALL_GATHER, REDUCE_SCATTER, ProcessGroups
from finetune.torch_engine.parallel.slices import LayerSlices
from finetune.torch_engine.parallel.tensor import ROW, kinds_of

# ---- collectives along the positions, the second to last dimension


def _filled(x: torch.Tensor, groups: ProcessGroups):
    """x [B, S, H] with as many positions as the degree divides, as [S, B, H]."""
    x_SBH = x.transpose(0, -2)
    missing = -x.shape[-2] % groups.dims.tp
    if missing:
        x_SBH = torch.cat([x_SBH, x_SBH.new_zeros(missing, *x_SBH.shape[1:])])
    return x_SBH.contiguous()


def _all_gather(x: torch.Tensor, length: int, groups: ProcessGroups):
    x_SBH = x.transpose(0, -2).contiguous()
    out_SBH = x_SBH.new_empty(len(x_SBH) * groups.dims.tp, *x_SBH.shape[1:])
    ALL_GATHER(out_SBH, x_SBH, group=groups.process_groups["tp"])
    return out_SBH[:length].transpose(0, -2)


def _reduce_scatter(x: torch.Tensor, _: int, groups: ProcessGroups):
    x_SBH = _filled(x, groups)
    out_SBH = x_SBH.new_empty(len(x_SBH) // groups.dims.tp, *x_SBH.shape[1:])
    REDUCE_SCATTER(out_SBH, x_SBH, group=groups.process_groups["tp"])
    return out_SBH.transpose(0, -2)


def _slice(x: torch.Tensor, _: int, groups: ProcessGroups):
    return _filled(x, groups).chunk(groups.dims.tp)[groups.coordinate("tp")].transpose(0, -2).contiguous()


class _Positions(torch.autograd.Function):
    """`there(x, length, groups)` in forward and `back` of the gradient in backward; rows have `length` positions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, length: int, groups: ProcessGroups, there: Callable, back: Callable):
        ctx.length = length
        ctx.groups = groups
        ctx.back = back
        return there(x, length, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return ctx.back(grad, ctx.length, ctx.groups), *[None] * 4


def gather(x: torch.Tensor, length: int, groups: ProcessGroups):
    """All positions, for tensor-parallel work, whose gradients are partial sums."""
    return _Positions.apply(x, length, groups, _all_gather, _reduce_scatter)


def reduce_scatter(partial_sum: torch.Tensor, groups: ProcessGroups):
    """This rank's positions of the sums."""
    return _Positions.apply(partial_sum, partial_sum.shape[-2], groups, _reduce_scatter, _all_gather)


def split(x: torch.Tensor, groups: ProcessGroups):
    """This rank's positions of what every rank has."""
    return _Positions.apply(x, x.shape[-2], groups, _slice, _all_gather)


def join(x: torch.Tensor, length: int, groups: ProcessGroups):
    """All positions, for what every rank computes alike."""
    return _Positions.apply(x, length, groups, _all_gather, _slice)


class SequenceRegion:
    """Takes the place of tensor.SharedInput. `length`: positions of the row whose layer is computed."""

    def __init__(self):
        self.length = 0

    def __call__(self, x: torch.Tensor, groups: ProcessGroups):
        return x

    def reduce(self, partial_sum: torch.Tensor, groups: ProcessGroups):
        return reduce_scatter(partial_sum, groups)


# ---- sharding a model


def shard_sequences(
    model: PreTrainedModel, groups: ProcessGroups, region: SequenceRegion, pieces: LayerSlices, mine: range
) -> None:
    """Splits the hidden states of a model whose layers are tensor parallel; `mine`: numbers of this stage's layers.
    PlanError for layers that it cannot be used with.
    """
    said = "--sequence_parallel true"
    if fused.has_experts(model):
        raise PlanError(f"{said}: mixtures of experts exchange tokens of full rows. Use false.")
    kinds = kinds_of(model, said)
    rows = {name for name, kind in kinds.items() if kind in ROW}
    layers = decoder_layers(model)
    names = {module: name for name, module in model.named_modules()}
    for number, layer in enumerate(layers):
        prefix = names[layer]
        blocks = {leaf: m for leaf, m in layer.named_children() if any(r.startswith(f"{prefix}.{leaf}.") for r in rows)}
        if not blocks:
            raise PlanError(f"{said}: {prefix} has no attention or MLP that is sharded. Use false.")
        _refuse_replicated(said, prefix, blocks, kinds)
        inside = tuple(f"{prefix}.{leaf}." for leaf in blocks)
        own = (f"{prefix}.{leaf}" for leaf, _ in layer.named_parameters())
        pieces.partial |= {name for name in own if not name.startswith(inside)}
        pieces.partial |= {f"{r}{base}.bias" for r in rows if r.startswith(inside) for base in ("", ".base")}
        if number not in mine:
            continue
        for block in blocks.values():
            block.forward = partial(_block, block.forward, region, groups)
        layer.forward = partial(_layer, said, layer, region, groups, number == mine.start, number == mine.stop - 1)


def _refuse_replicated(said: str, prefix: str, blocks: dict, kinds: dict) -> None:
    """Raises PlanError for linears that every rank computes in full between sharded ones."""
    for leaf, block in blocks.items():
        for name, module in block.named_modules(prefix=f"{prefix}.{leaf}"):
            outer = any(name.startswith(f"{known}.") for known in kinds)
            if isinstance(module, nn.Linear) and name not in kinds and not outer:
                raise PlanError(f"{said}: {name} is replicated by transformers' tensor-parallel plan. Use false.")


def _block(forward: Callable, region: SequenceRegion, groups: ProcessGroups, *args: Any, **kwargs: Any):
    if args:
        return forward(gather(args[0], region.length, groups), *args[1:], **kwargs)
    hidden = gather(kwargs.pop("hidden_states"), region.length, groups)
    return forward(hidden_states=hidden, **kwargs)


def _layer(
    said: str,
    layer: Any,
    region: SequenceRegion,
    groups: ProcessGroups,
    first: bool,
    last: bool,
    hidden: torch.Tensor,
    *args: Any,
    **kwargs: Any,
):
    positions = kwargs.get("position_ids")
    if positions is None:
        raise PlanError(f"{said}: this model does not pass positions to its layers. Use false.")
    region.length = positions.shape[-1]
    # Of its class now: FSDP2 makes it a subclass later, and transformers recomputes in the outermost class's forward.
    out = type(layer).forward(layer, split(hidden, groups) if first else hidden, *args, **kwargs)
    if not last:
        return out
    if isinstance(out, tuple):
        return join(out[0], region.length, groups), *out[1:]
    return join(out, region.length, groups)
