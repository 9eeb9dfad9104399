"""Sequence parallelism beside tensor parallelism (Korthikanti et al. 2022, section 4.2.2): between the attention and
the MLP of the layers each rank of a tensor-parallel group has S / tp positions of the hidden states.

An all-gather before column-parallel linears and a reduce-scatter after row-parallel ones take the place of an
all-reduce. Norms and residual sums compute their positions only. Positions that the degree does not divide are filled
up with zeros.

B rows, S positions, H hidden size.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from finetune.errors import PlanError
from finetune.torch_engine.experts import fused
from finetune.torch_engine.loss import REDUCE_SCATTER
from finetune.torch_engine.parallel.fsdp import decoder_layers
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.slices import LayerSlices
from finetune.torch_engine.parallel.tensor import ROW, kinds_of

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# ---- collectives along the positions, the second to last dimension


def _filled(x, groups: ProcessGroups):
    """x [B, S, H] with as many positions as the degree divides, as [S, B, H]."""
    x_SBH, missing = x.transpose(0, -2), -x.shape[-2] % groups.dims.tp
    if missing:
        x_SBH = torch.cat([x_SBH, x_SBH.new_zeros(missing, *x_SBH.shape[1:])])
    return x_SBH.contiguous()


def _all_gather(x, length: int, groups: ProcessGroups):
    x_SBH = x.transpose(0, -2).contiguous()
    out_SBH = x_SBH.new_empty(len(x_SBH) * groups.dims.tp, *x_SBH.shape[1:])
    ALL_GATHER(out_SBH, x_SBH, group=groups.process_groups["tp"])
    return out_SBH[:length].transpose(0, -2)


def _reduce_scatter(x, groups: ProcessGroups):
    x_SBH = _filled(x, groups)
    out_SBH = x_SBH.new_empty(len(x_SBH) // groups.dims.tp, *x_SBH.shape[1:])
    REDUCE_SCATTER(out_SBH, x_SBH, group=groups.process_groups["tp"])
    return out_SBH.transpose(0, -2)


def _slice(x, groups: ProcessGroups):
    return _filled(x, groups).chunk(groups.dims.tp)[groups.coordinate("tp")].transpose(0, -2).contiguous()


class _Gather(torch.autograd.Function):
    """All-gather before tensor-parallel work, reduce-scatter of its partial gradients in backward."""

    @staticmethod
    def forward(ctx, x, length, groups):
        ctx.groups = groups
        return _all_gather(x, length, groups)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.groups), None, None


class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatter of partial sums, all-gather in backward."""

    @staticmethod
    def forward(ctx, x, groups):
        ctx.groups, ctx.length = groups, x.shape[-2]
        return _reduce_scatter(x, groups)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.length, ctx.groups), None


class _Split(torch.autograd.Function):
    """This rank's positions of what every rank has, all-gather in backward."""

    @staticmethod
    def forward(ctx, x, groups):
        ctx.groups, ctx.length = groups, x.shape[-2]
        return _slice(x, groups)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.length, ctx.groups), None


class _Join(torch.autograd.Function):
    """All-gather for what every rank computes alike, this rank's positions in backward."""

    @staticmethod
    def forward(ctx, x, length, groups):
        ctx.groups = groups
        return _all_gather(x, length, groups)

    @staticmethod
    def backward(ctx, grad):
        return _slice(grad, ctx.groups), None, None


class SequenceRegion:
    """Takes the place of tensor.SharedInput. `length`: positions of the row whose layer is computed."""

    def __init__(self):
        self.length = 0

    def __call__(self, x, groups: ProcessGroups):
        return x

    def reduce(self, partial_sum, groups: ProcessGroups):
        return _ReduceScatter.apply(partial_sum, groups)


# ---- sharding a model


def shard_sequences(model, groups: ProcessGroups, region: SequenceRegion, pieces: LayerSlices, mine: range) -> None:
    """Splits the hidden states of a model whose layers are tensor parallel; `mine`: numbers of this stage's layers.
    PlanError for layers that it cannot be used with.
    """
    said = "--sequence_parallel true"
    if fused.has_experts(model):
        raise PlanError(f"{said}: mixtures of experts exchange tokens of full rows. Use false.")
    kinds = kinds_of(model, said)
    rows = {name for name, kind in kinds.items() if kind in ROW}
    layers, names = decoder_layers(model), {module: name for name, module in model.named_modules()}
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
        ends = number == mine.start, number == mine.stop - 1
        layer.forward = partial(_layer, said, layer, region, groups, *ends)


def _refuse_replicated(said: str, prefix: str, blocks: dict, kinds: dict) -> None:
    """Raises PlanError for linears that every rank computes in full between sharded ones."""
    for leaf, block in blocks.items():
        for name, module in block.named_modules(prefix=f"{prefix}.{leaf}"):
            outer = any(name.startswith(f"{known}.") for known in kinds)
            if isinstance(module, nn.Linear) and name not in kinds and not outer:
                raise PlanError(f"{said}: {name} is replicated by transformers' tensor-parallel plan. Use false.")


def _block(forward, region: SequenceRegion, groups: ProcessGroups, *args, **kwargs):
    if args:
        return forward(_Gather.apply(args[0], region.length, groups), *args[1:], **kwargs)
    hidden = _Gather.apply(kwargs.pop("hidden_states"), region.length, groups)
    return forward(hidden_states=hidden, **kwargs)


def _layer(
    said: str, layer, region: SequenceRegion, groups: ProcessGroups, first: bool, last: bool, hidden, *args, **kwargs
):
    positions = kwargs.get("position_ids")
    if positions is None:
        raise PlanError(f"{said}: this model does not pass positions to its layers. Use false.")
    region.length = positions.shape[-1]
    # Of its class now: FSDP2 makes it a subclass later, and transformers recomputes in the outermost class's forward.
    out = type(layer).forward(layer, _Split.apply(hidden, groups) if first else hidden, *args, **kwargs)
    if not last:
        return out
    if isinstance(out, tuple):
        return _Join.apply(out[0], region.length, groups), *out[1:]
    return _Join.apply(out, region.length, groups)
