"""Embedding and head sharded by rows of the vocabulary over the tensor-parallel group (Shoeybi et al. 2019, section 3).

Each rank looks up the tokens whose rows it has, and the sum over ranks is the embedding. Of the head it computes the
logits of its rows: the loss exchanges maxima and sums (loss.VocabularyShard), and whoever asks the model itself for
logits gets them gathered.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.torch_engine.lora.layers import LoRAEmbedding, LoRALinear
from finetune.torch_engine.loss import VocabularyShard
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.slices import LayerSlices, Slice, locate
from finetune.torch_engine.parallel.tensor import copy_to_region, reduce_from_region, split_adapter


class GatherVocabulary(torch.autograd.Function):
    """All-gather of logits along the vocabulary in forward, this rank's slice in backward."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, cut: Slice, groups: ProcessGroups):
        ctx.cut = cut
        ctx.groups = groups
        return cut.all_gather(logits, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        (rows,) = ctx.cut.slices(grad.shape[-1], ctx.groups)
        return grad[..., rows], None, None


def ends_of(model: PreTrainedModel) -> tuple[str, str] | None:
    """Names of the embedding and of the head, if both can be sharded: plain lookups and products, with or without
    adapters.
    """
    names = {module: name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if embedding not in names or head not in names:
        return None
    if isinstance(_base(embedding), nn.Embedding) and type(_base(head)) is nn.Linear:
        return names[embedding], names[head]
    return None


def _base(module: Any):
    if isinstance(module, (LoRALinear, LoRAEmbedding)):
        return module.base
    return module


def slices_of(model: PreTrainedModel) -> dict[str, Slice]:
    """{parameter: its Slice} of embedding and head of a model on meta without adapters."""
    ends = ends_of(model)
    if ends is None:
        return {}
    modules: list[Any] = [model.get_submodule(name) for name in ends]
    return {
        f"{name}.{leaf}": Slice(0, size=len(module.weight))
        for name, module in zip(ends, modules, strict=True)
        for leaf, _ in module.named_parameters(recurse=False)
    }


def shard_ends(model: PreTrainedModel, groups: ProcessGroups, pieces: LayerSlices) -> VocabularyShard | None:
    """Shards embedding and head in place; what the loss needs to know of it. None if they stay replicated."""
    ends = ends_of(model)
    if groups.dims.tp == 1 or ends is None:
        return None
    name, head_name = ends
    embedding = model.get_submodule(name)
    head: Any = model.get_submodule(head_name)
    tied = _base(embedding).weight is _base(head).weight
    embedding_over_ranks(name, embedding, groups, pieces)
    if not tied:
        size = len(_base(head).weight)
    else:
        size = _base(embedding).num_embeddings
    cut = Slice(0, size=size)
    base = _base(head)
    path = _path(head_name, head)
    if tied:
        base.weight = _base(embedding).weight
        pieces.slices[f"{path}.weight"] = cut
    else:
        pieces.keep(base, "weight", cut, groups, path)
    pieces.keep(base, "bias", cut, groups, path)
    base.out_features = len(base.weight)
    if base is not head:
        split_adapter(head, True, groups, head_name, pieces, size)
    head.forward = partial(_logits, head, groups, Slice(-1, size=size))
    (rows,) = cut.slices(size, groups)
    return VocabularyShard(rows.start, rows.stop, size, -(-size // groups.dims.tp), groups)


def _path(name: str, module: Any) -> str:
    if _base(module) is module:
        return name
    return f"{name}.base"


def embedding_over_ranks(name: str, embedding: Any, groups: ProcessGroups, pieces: LayerSlices) -> None:
    """`num_embeddings` stays that of the full vocabulary."""
    base = _base(embedding)
    cut = Slice(0, size=base.num_embeddings)
    pieces.keep(base, "weight", cut, groups, _path(name, embedding))
    (rows,) = cut.slices(base.num_embeddings, groups)
    if base.padding_idx is not None:  # its row gets no gradient
        here = rows.start <= base.padding_idx < rows.stop
        if here:
            base.padding_idx = base.padding_idx - rows.start
        else:
            base.padding_idx = None
    if base is not embedding:
        embedding.row_square_O = None
        embedding.across = partial(groups.all_reduce, group="tp")
        pieces.keep(embedding, "lora_embedding_A", Slice(1, size=base.num_embeddings), groups, name)
        leaves = "lora_embedding_B", "lora_magnitude_vector"
        pieces.partial |= {f"{name}.{leaf}" for leaf in leaves if getattr(embedding, leaf) is not None}
    embedding.forward = partial(_embed, embedding, rows, groups)


# ---- forwards


def _embed(embedding: Any, rows: slice, groups: ProcessGroups, ids: torch.Tensor):
    here, elsewhere = locate(ids, rows)
    found = type(embedding).forward(embedding, here)
    return reduce_from_region(found.masked_fill(elsewhere[..., None], 0.0), groups)


def _logits(head: Any, groups: ProcessGroups, cut: Slice, hidden: torch.Tensor):
    logits = type(head).forward(head, copy_to_region(hidden, groups))
    return GatherVocabulary.apply(logits, cut, groups)
