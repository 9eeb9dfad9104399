"""Slices of a layer's tensors over a tensor-parallel or an expert-parallel group, dense or packed.

Slices are plain tensors, cut from the quantized weight, so FSDP can shard them further.
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn

from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.weights.interfaces import HeldShards

ROWS_OF_WEIGHTS = 2**19  # dequantized at a time where slices of codes are compared: blocks that are mapped, and freed


@dataclass(frozen=True)
class Slice:
    """Slicing of a tensor along `dim` over a group: "tp" or "ep".

    The dimension consists of `blocks` equal blocks, such as gate and up in one tensor, and every rank holds a slice of
    each. `size`: of the full dimension, if slices may differ in size by one, as a vocabulary's do.
    """

    dim: int
    blocks: int = 1
    group: str = "tp"
    size: int | None = None

    def divides(self, size: int, groups: ProcessGroups) -> bool:
        return self.size is not None or size % (self.blocks * groups.place(self.group)[1]) == 0

    def full_size(self, size: int, groups: ProcessGroups) -> int:
        """The full dimension, of which this rank's slices are `size` long."""
        if self.size is None:
            return size * groups.place(self.group)[1]
        return self.size

    def slices(self, size: int, groups: ProcessGroups) -> list[slice]:
        """This rank's slices of a dimension of `size`, one per block."""
        (index, count), block = groups.place(self.group), size // self.blocks
        if self.size is not None:
            return [slice(size * index // count, size * (index + 1) // count)]
        each = block // count
        starts = range(index * each, size, block)
        return [slice(start, start + each) for start in starts]

    def take(self, tensor: torch.Tensor, groups: ProcessGroups) -> torch.Tensor:
        """A copy of this rank's part of a full tensor."""
        index, count = groups.place(self.group)
        if self.size is not None:
            (rows,) = self.slices(tensor.shape[self.dim], groups)
            return tensor.narrow(self.dim, rows.start, rows.stop - rows.start).clone()
        parts = tensor.unflatten(self.dim, (self.blocks, count, -1)).select(self.dim + 1, index)
        return parts.flatten(self.dim, self.dim + 1).clone()

    def all_gather(self, shard: torch.Tensor, groups: ProcessGroups) -> torch.Tensor:
        """The full tensor of these shards. Collective."""
        if self.size is not None:
            return self._all_gather_uneven(shard, groups)
        shards = [s.unflatten(self.dim, (self.blocks, -1)) for s in groups.all_gather_group(shard, self.group)]
        return torch.stack(shards, self.dim + 1).flatten(self.dim, self.dim + 2)

    def _all_gather_uneven(self, shard: torch.Tensor, groups: ProcessGroups) -> torch.Tensor:
        assert self.size is not None, "even slices are gathered by blocks"
        count = groups.place(self.group)[1]
        longest = -(-self.size // count)
        own = shard.shape[self.dim]
        if own < longest:
            shard = torch.cat([shard, torch.zeros_like(shard.narrow(self.dim, 0, 1))], self.dim)
        shards = groups.all_gather_group(shard, self.group)
        sizes = [self.size * (i + 1) // count - self.size * i // count for i in range(count)]
        return torch.cat([s.narrow(self.dim, 0, n) for s, n in zip(shards, sizes, strict=True)], self.dim)


def locate(ids: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(index of each id among these rows of the vocabulary, 0 if elsewhere; True for ids elsewhere)."""
    elsewhere = (ids < rows.start) | (ids >= rows.stop)
    return (ids - rows.start).masked_fill(elsewhere, 0), elsewhere


@dataclass
class LayerSlices:
    """{parameter: its Slice}, and the parameters whose gradients are partial sums on each tensor-parallel rank.

    `experts`: names of the modules whose experts are sliced over the expert-parallel group. `local_shards`: holds this
    rank's part of every tensor already, and the parameters are on meta in their full shapes.
    """

    slices: dict = field(default_factory=dict)
    partial: set = field(default_factory=set)
    experts: list = field(default_factory=list)
    local_shards: HeldShards | None = None

    def keep(self, module: Any, leaf: str, cut: Slice, groups: ProcessGroups, path: str) -> None:
        """Replaces a parameter by this rank's slice of it. ValueError if it does not divide."""
        old = getattr(module, leaf, None)
        if old is None:
            return
        check_divides(old.shape[cut.dim], cut, groups)
        new = nn.Parameter(cut.take(old.detach(), groups), requires_grad=old.requires_grad)
        if self.local_shards is not None:
            self.local_shards.sliced(old, new, cut)
        setattr(module, leaf, new)
        self.slices[f"{path}.{leaf}"] = cut

    def slice_quantized(self, layer: QuantizedLinear, cut: Slice, groups: ProcessGroups) -> list[str]:
        """Slices a quantized layer, see slice_quantized. If ranks read only their part, the codes are sliced already
        and only the sizes change.
        """
        if self.local_shards is None:
            return slice_quantized(layer, cut, groups)
        layer.out_features, layer.in_features = self.local_shards.sizes[layer]
        return list(layer.names)


def slice_quantized(layer: QuantizedLinear, cut: Slice, groups: ProcessGroups) -> list[str]:
    """Slices packed codes and scales; names of the sliced tensors. ValueError if no slices give the exact weight.

    Which tensors extend along the inputs depends on the method: candidates are tried and the weights compared.
    """
    sizes = [layer.out_features, layer.in_features]
    check_divides(sizes[cut.dim], cut, groups)
    count = groups.place(cut.group)[1]
    shape = tuple(n // count if i == cut.dim else n for i, n in enumerate(sizes))
    dequantize = partial(
        layer.dequantize.func, shape=shape, **{k: v for k, v in layer.dequantize.keywords.items() if k != "shape"}
    )
    stored = {n: t.detach() for n, t in zip(layer.names, layer.stored(), strict=True)}
    even = [n for n, t in stored.items() if t.ndim > cut.dim and cut.divides(t.shape[cut.dim], groups)]
    ways = [chosen for size in range(len(even), 0, -1) for chosen in combinations(even, size)]
    for chosen in ways:  # two values per row may belong to the full row or to each half of it
        tensors = {n: cut.take(t, groups) if n in chosen else t for n, t in stored.items()}
        try:
            same = _gives_slice(layer, stored, dequantize, tensors, cut, groups)
        except (RuntimeError, ValueError):
            same = False
        if same:
            break
    else:
        what = ("rows", "columns")[cut.dim]
        raise ValueError(f"{sizes[cut.dim]} {what} split into {count} shards would share scales across shards")
    for n, tensor in tensors.items():
        setattr(layer, n, nn.Parameter(tensor, requires_grad=False))
    layer.dequantize, (layer.out_features, layer.in_features) = dequantize, shape
    if layer.cached is not None:
        layer.cached = cut.take(layer.cached, groups)
    return list(chosen)


def _gives_slice(
    layer: QuantizedLinear, stored: dict, dequantize: partial, tensors: dict, cut: Slice, groups: ProcessGroups
) -> bool:
    """True if `dequantize(tensors)` is this rank's slice of the layer's weight, to the bit. Some rows at a time where
    every tensor has its own values of each row.
    """

    def by_rows(held: dict, rows: int) -> bool:
        return all(t.ndim == 2 and len(t) == rows for t in held.values())

    full = layer.out_features
    part = dequantize.keywords["shape"][0]
    if not (by_rows(stored, full) and by_rows(tensors, part)):
        wanted = cut.take(layer.dequantize(stored, torch.float32), groups)
        return torch.equal(dequantize(tensors, torch.float32), wanted)
    step = max(1, ROWS_OF_WEIGHTS // layer.in_features)
    if cut.dim == 0:
        starts = [r.start for r in cut.slices(full, groups)]
    else:
        starts = [0]
    each = part // len(starts)
    for block, first in enumerate(starts):
        for at in range(0, each, step):
            size = min(step, each - at)
            here = slice(block * each + at, block * each + at + size)
            there = slice(first + at, first + at + size)
            wanted = layer.dequantize({n: t[there] for n, t in stored.items()}, torch.float32)
            if cut.dim != 0:
                wanted = cut.take(wanted, groups)
            if not torch.equal(dequantize({n: t[here] for n, t in tensors.items()}, torch.float32), wanted):
                return False
    return True


def check_divides(size: int, cut: Slice, groups: ProcessGroups) -> None:
    """Raises ValueError if a dimension of `size` is not divisible into this many slices."""
    if not cut.divides(size, groups):
        what = ("rows", "columns", "columns")[cut.dim]
        raise ValueError(f"its {size} {what} are not divisible by {cut.blocks * groups.place(cut.group)[1]}")
