"""Experts over ranks: each sliced over a tensor-parallel group, or whole on one rank of an expert-parallel group.

Expert parallelism (Lepikhin et al. 2020, GShard): each rank holds some of the experts and takes rows of its own, so
the rest of the model is data parallel over the group. Tokens travel to their experts and back by all-to-all; an
expert's gradient is then that of the whole group's tokens. Beside it, FSDP2 shards the experts over the data ranks that
hold the same ones.

E experts, F expert size, H hidden size, R rank of an adapter.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.torch_engine.experts import fused
from finetune.torch_engine.experts.fused import Experts, QuantizedExperts
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.slices import LayerSlices, Slice, slice_quantized


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group and from them; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None):
        ctx.splits = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        sent, received, group = ctx.splits
        return _all_to_all(grad, received, sent, group), None, None, None


def _all_to_all(x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


# ---- expert parallelism


def shard_layers(model: PreTrainedModel, groups: ProcessGroups, slices: LayerSlices) -> None:
    """Keeps this rank's experts of every layer. PlanError if the model's experts cannot be reached or divided."""
    if groups.dims.ep == 1:
        return
    said = f"--ep_degree {groups.dims.ep}"
    found = reachable_experts(model, said)
    for name, module in found.items():
        base = fused.unwrapped(module)
        if base.has_post_expert_norm:
            raise PlanError(f"{said}: {name} has a norm after each expert, which is not supported. Use --dp_shards.")
        run = runner(module)
        try:
            slice_experts(name, module, "ep", groups, slices)
        except ValueError as error:
            raise PlanError(f"{said}: {name} cannot be divided: {error}. Use --dp_shards instead.") from None
        dispatched = partial(run_over_ranks, run, groups)
        module.forward = partial(fused.weighted_sum, base, dispatched)
        slices.experts.append(name)


def run_over_ranks(run: Callable, groups: ProcessGroups, inputs: torch.Tensor, counts: list[int] | torch.Tensor):
    """`run` by the ranks that hold the experts: the outputs for this rank's `inputs`, sorted by expert.
    The host learns here how many rows travel where.

    Every rank of the group takes part in every call, forward and backward, with or without tokens.
    """
    group = groups.process_groups["ep"]
    ranks = groups.dims.ep
    ours = torch.as_tensor(counts, device=inputs.device).view(ranks, -1)
    theirs = torch.empty_like(ours)  # [source, expert of this rank]
    dist.all_to_all_single(theirs, ours, group=group)
    sent = ours.sum(1).tolist()
    received = theirs.sum(1).tolist()
    order, back = _by_expert(theirs)
    arrived = _AllToAll.apply(inputs, sent, received, group)
    arrivals = theirs.sum(0)
    outputs = run(arrived[order], arrivals if torch.is_tensor(counts) else arrivals.tolist())
    return _AllToAll.apply(outputs[back], received, sent, group)


def _by_expert(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, its inverse) that sorts rows by expert, which arrive by source and then by expert: `counts`."""
    expert_of_row = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    order = torch.argsort(expert_of_row.repeat_interleave(counts.flatten()), stable=True)
    return order, torch.argsort(order)


# ---- both


def runner(module: Any):
    """Function that computes the experts of a module: adapters over frozen weights, or its own trainable weights."""
    if isinstance(module, Experts):
        return module.run
    return partial(fused.run_trained, module)


def reachable_experts(model: PreTrainedModel, said: str) -> dict[str, nn.Module]:
    """{name: module} of all experts of a model; PlanError if some have no interface, or it has none."""
    unreached = fused.unreached(model)
    found = fused.reachable(model)
    if unreached:
        raise PlanError(f"{said}: transformers has no interface to {unreached[0]}. Use --dp_shards instead.")
    if not found:
        raise PlanError(f"{said}: {type(model).__name__} has no experts held as one parameter. Use --dp_shards.")
    return found


def slice_experts(name: str, module: Any, group: str, groups: ProcessGroups, slices: LayerSlices) -> None:
    """Keeps this rank's part of every tensor of an experts module. ValueError if one does not divide.

    `group`: "ep", whole experts; "tp", rows of the first projection and columns of the last, in every expert.
    """
    base = fused.unwrapped(module)
    path = name
    if base is not module:
        path = f"{name}.base"
    first = fused.weight_names(base)[0]
    halves = _halves(base)
    cuts = _slices(base, group)
    for weight_name in fused.weight_names(base):
        weight = getattr(base, weight_name)
        bias = weight_name + "_bias"
        if isinstance(weight, QuantizedExperts):
            _slice_quantized(weight, *side_of(base, weight_name), group, groups, slices)
        else:
            slices.keep(base, weight_name, cuts[weight_name], groups, path)
        if bias in cuts:
            slices.keep(base, bias, cuts[bias], groups, path)
        elif base.has_bias:
            slices.partial.add(f"{path}.{bias}")
    for weight_name, pair in module.pairs().items() if isinstance(module, Experts) else ():
        if pair is module:
            owner = name
        else:
            owner = f"{name}.base_layer"
        if group == "ep":  # A [E * R, I], B [O, R * E]
            slices.keep(pair, "lora_A", Slice(0, 1, group), groups, owner)
            slices.keep(pair, "lora_B", Slice(1, pair.rank, group), groups, owner)
        elif weight_name == first:
            slices.keep(pair, "lora_B", Slice(0, halves, group), groups, owner)
            slices.partial.add(f"{owner}.lora_A")
        else:
            slices.keep(pair, "lora_A", Slice(1, 1, group), groups, owner)
            slices.partial.add(f"{owner}.lora_B")


def slices_of(model: PreTrainedModel, group: str) -> dict[str, Slice]:
    """{parameter: its Slice} of all experts of a model on meta without adapters. `group`: see slice_experts."""
    return {
        f"{name}.{leaf}": cut
        for name, base in fused.reachable(model).items()
        for leaf, cut in _slices(base, group).items()
    }


def _slices(base: Any, group: str) -> dict[str, Slice]:
    """{weight or bias of a transformers experts module: its Slice}, as it is stored."""
    found = {}
    for weight_name in fused.weight_names(base):
        side, blocks = (None, 1) if group == "ep" else side_of(base, weight_name)
        if side is None:
            dim = 0
        elif base.is_transposed:
            dim = 2 - side
        else:
            dim = 1 + side
        found[weight_name] = Slice(dim, blocks, group)
        if base.has_bias and side != 1:
            found[weight_name + "_bias"] = Slice(0 if side is None else 1, blocks, group)
    return found


def side_of(base: Any, weight_name: str) -> tuple[int, int]:
    """(dim of an expert's [O, I] that tensor parallelism slices, blocks in it)."""
    if weight_name == fused.weight_names(base)[0]:
        return (0, _halves(base))
    return (1, 1)


def _halves(base: Any) -> int:
    """2 if gate and up are one after the other in one tensor."""
    return 2 if base.has_gate and base.is_concatenated else 1


def _slice_quantized(
    weight: QuantizedExperts, side: int, blocks: int, group: str, groups: ProcessGroups, slices: LayerSlices
) -> None:
    if slices.local_shards is not None:
        sizes = slices.local_shards.sizes.get(weight)
        if sizes is not None:  # else another stage's
            weight.num_experts, weight.out_features, weight.in_features = sizes
    elif group == "tp":
        slice_parts(weight, side, blocks, groups)
    else:
        _check_divides(weight.num_experts, groups.dims.ep)
        if len(weight.linears()) == weight.num_experts:
            (mine,) = Slice(0, 1, "ep").slices(weight.num_experts, groups)
            weight.parts = weight.parts[mine]
        else:
            slice_quantized(weight.linears()[0], Slice(0, 1, "ep"), groups)
        weight.num_experts //= groups.dims.ep


def slice_parts(weight: QuantizedExperts, side: int, blocks: int, groups: ProcessGroups) -> None:
    """Slices rows (`side` 0) or columns of every expert over the tensor-parallel group. ValueError if they do not
    divide.
    """
    stacked = len(weight.parts) < weight.num_experts  # rows of all experts in one
    for part in weight.linears():
        experts_in_part = 1
        if stacked:
            experts_in_part = weight.num_experts
        slice_quantized(part, Slice(side, blocks * experts_in_part if side == 0 else 1), groups)
    if side == 0:
        weight.out_features //= groups.dims.tp
    else:
        weight.in_features //= groups.dims.tp


def _check_divides(count: int, ranks: int) -> None:
    if count % ranks:
        raise ValueError(f"{count} experts are not divisible by {ranks}")
