"""Padding-free attention: per-document attention on packed (flat) microbatches, as a transformers attention interface.

Documents of similar length are padded into one batch for attention only: under a causal mask no real token attends to
right padding, so no key mask is needed. The projections around it never see padding.

T tokens of the flat row, N documents of a group, L its padded length, H heads, K key/value heads, D head size.
"""

import itertools
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from finetune.parts.engine_limits import DENSE_ATTENTION_UP_TO, GROUP_WASTE, dense_attention_up_to
from finetune.quantizers.linear import autocasts, without_autocast
from finetune.torch_engine.attention import shared, varlen
from finetune.torch_engine.attention.blocks import BlockKernel, Scoring
from finetune.torch_engine.attention.dense import DenseAttention, Group, Index, causal_bias, causal_mask, index_of
from finetune.torch_engine.attention.varlen import MAX_HEAD_SIZE, Attention
from finetune.torch_engine.device import has_flash_kernels, indices_to_device, to_device, uses_onednn
from finetune.torch_engine.weights.modalities import seeing_towers

NAME = "documents"


def dense_up_to(tensor: torch.Tensor) -> int:
    """Positions up to which matrix products and a softmax beat SDPA for queries like `tensor`; 0: never.
    Other devices have fused kernels for any length.
    """
    if tensor.device.type != "cpu" or tensor.dtype.itemsize not in DENSE_ATTENTION_UP_TO:
        return 0
    return dense_attention_up_to(tensor.dtype.itemsize, uses_onednn())


# Layouts that someone holds, by number: what an operation of a compiled graph is given.
LAYOUTS: WeakValueDictionary = WeakValueDictionary()
NUMBERS = itertools.count(2)


class Documents:
    """Document layout of one flat row, made on the host: bounds for kernels that take them, groups for the others.

    `bounds_N`: first token of each document, and the number of tokens, int32; None where no kernel takes them.
    `attention`: which kernels the plan allows.
    """

    def __init__(self, starts: list[int], num_tokens: int, device: torch.device, attention: Attention):
        self.starts = starts
        self.num_tokens = num_tokens
        self.device = device
        self.attention = attention
        self.lengths = [b - a for a, b in zip(starts, [*starts[1:], num_tokens], strict=True)]
        self.longest = max(self.lengths)
        self.bounds_N = None
        if attention.takes_bounds(device):
            self.bounds_N = to_device(torch.tensor([*starts, num_tokens], dtype=torch.int32), device)
        self.indices: dict = {}  # dense.Index by what it depends on
        self.number = next(NUMBERS)
        LAYOUTS[self.number] = self

    @cached_property
    def grouped(self) -> tuple[tuple[Group, ...], torch.Tensor | None]:
        """(groups, index of each token in the concatenated groups; None if the row is one group)."""
        return _grouped(self.starts, self.lengths, self.num_tokens, self.device)

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.grouped[0]

    @property
    def scatter_T(self) -> torch.Tensor | None:
        return self.grouped[1]


class SharedDocuments(Documents):
    """Documents some of which continue the start of the one before them, see attention/shared.py."""

    def __init__(self, segments: list[shared.Segment], device: torch.device, attention: Attention):
        super().__init__([s.start for s in segments], segments[-1].stop, device, attention)
        self.bounds_N = None  # a kernel's documents see themselves only
        self.layout = shared.Layout(segments, device)


class BoundsOnly:
    """Documents whose bounds are on the device alone: the kernel that takes them is all that attends. `bounds_N`: as
    those of Documents, where empty documents may follow; `longest`: no document is longer.
    """

    def __init__(self, bounds_N: torch.Tensor, longest: int, attention: Attention):
        self.bounds_N = bounds_N
        self.longest = longest
        self.attention = attention


def documents_of(
    position_ids_T: torch.Tensor | np.ndarray, device: torch.device, attention: Attention | None = None
) -> Documents:
    """Document layout of a flat row, from its position ids (numpy or host tensor), which restart in each document, or
    go on from where a document shares the one before it.
    """
    positions = torch.as_tensor(position_ids_T).reshape(-1)
    steps = positions.diff()
    if bool(((steps != 1) & (positions[1:] != 0)).any()):
        segments = shared.segments_of(positions.tolist())
        return SharedDocuments(segments, torch.device(device), attention or Attention())
    starts = (positions == 0).nonzero().flatten().tolist()
    return Documents(starts, len(positions), torch.device(device), attention or Attention())


def _grouped(starts: list[int], lengths: list[int], num_tokens: int, device: torch.device) -> tuple:
    if len(set(lengths)) == 1:
        return (Group(lengths[0], None, None, None, len(lengths)),), None
    order = sorted(range(len(starts)), key=lambda i: -lengths[i])
    shapes = []
    offset = 0
    indices = [torch.empty(num_tokens, dtype=torch.int64)]  # scatter_T, then three of each group
    while order:
        longest = lengths[order[0]]
        members = [i for i in order if lengths[i] * GROUP_WASTE >= longest]
        order = order[len(members) :]
        start_N1 = torch.tensor([starts[i] for i in members]).unsqueeze(1)
        length_N1 = torch.tensor([lengths[i] for i in members]).unsqueeze(1)
        column_L = torch.arange(longest)
        real_NL = column_L < length_N1
        gather_NL = torch.where(real_NL, start_N1 + column_L, 0).flatten()
        slots_M = real_NL.flatten().nonzero().flatten()
        tokens_M = gather_NL[slots_M]
        indices[0][tokens_M] = offset + slots_M
        indices += [gather_NL, slots_M, tokens_M]
        shapes.append((longest, len(members)))
        offset += real_NL.numel()
    scatter_T, *of_groups = indices_to_device(indices, device)
    groups = []
    for i, (length, num_documents) in enumerate(shapes):
        gather_NL, slots_M, tokens_M = of_groups[3 * i : 3 * i + 3]
        groups.append(Group(length, gather_NL, slots_M, tokens_M, num_documents))
    return tuple(groups), scatter_T


class _Gather(torch.autograd.Function):
    """Rows of x at `index`, of which backward copies those at `slots` to the rows `tokens` of x, each one once.
    Flat rows to a group's slots, or all groups' slots back to the flat row.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, slots: torch.Tensor | None, tokens: torch.Tensor):
        ctx.save_for_backward(slots, tokens)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        slots, tokens = ctx.saved_tensors
        if slots is None:
            rows = grad
        else:
            rows = grad.index_select(0, slots)
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, tokens, rows), None, None, None


def _group_attention(
    q_NHLD: torch.Tensor,
    k_NKLD: torch.Tensor,
    v_NKLD: torch.Tensor,
    scaling: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
):
    """Causal attention of N documents padded to one length: [N, L, H, D]."""
    length = q_NHLD.shape[2]
    drops = dropout and q_NHLD.device.type == "cpu"  # SDPA would compute all probabilities too
    windowed = window is not None and window < length
    if softcap is None and sinks_H is None and not drops:
        mask = None
        if windowed:
            mask = causal_mask(length, window, q_NHLD.device)
        return fused_attention(q_NHLD, k_NKLD, v_NKLD, mask, dropout, scaling).transpose(1, 2)
    n, heads, _, size = q_NHLD.shape
    kv = k_NKLD.shape[1]
    per = heads // k_NKLD.shape[1]
    q = q_NHLD.reshape(n * kv, per * length, size)
    k, v = (t.reshape(n * kv, length, size) for t in (k_NKLD, v_NKLD))
    bias = causal_bias(length, window, per, q.dtype, q.device)
    if softcap is None:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scaling)
    else:
        scores = torch.tanh(torch.bmm(q, k.transpose(1, 2)) * (scaling / softcap)) * softcap + bias
    if sinks_H is None:
        probs = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    else:
        sinks = sinks_H.to(scores.dtype).view(1, kv, per, 1, 1).expand(n, -1, -1, length, 1).reshape(n * kv, -1, 1)
        probs = torch.softmax(torch.cat([scores, sinks], -1), -1, dtype=torch.float32)[..., :-1].to(q.dtype)
    out = torch.bmm(F.dropout(probs, dropout) if dropout else probs, v)
    return out.view(n, heads, length, size).transpose(1, 2)


def fused_attention(
    q_NHLD: torch.Tensor,
    k_NKLD: torch.Tensor,
    v_NKLD: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
) -> torch.Tensor:
    """SDPA under `mask`, or a causal one if that is None, by a fused kernel.

    On a GPU only flash kernels take fewer key/value heads, and they take no mask: for others keys and values are
    expanded, or SDPA would compute every score at once, L x L numbers per head.
    """
    per_key = q_NHLD.shape[1] // k_NKLD.shape[1]
    if per_key > 1 and q_NHLD.device.type not in ("cpu", "mps"):
        small = q_NHLD.dtype.itemsize == 2 and max(q_NHLD.shape[3], v_NKLD.shape[3]) <= MAX_HEAD_SIZE
        if mask is not None or not small or not has_flash_kernels(q_NHLD.device):
            k_NKLD = k_NKLD.repeat_interleave(per_key, 1)
            v_NKLD = v_NKLD.repeat_interleave(per_key, 1)
            per_key = 1
    return F.scaled_dot_product_attention(
        q_NHLD,
        k_NKLD,
        v_NKLD,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=per_key > 1,
    )


def scoring_of(
    query: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unread: object,
) -> Scoring:
    """Scoring from the arguments of transformers' attention interface, under its names; `unread`: is_causal and the
    like.
    """
    return Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, dropout, sliding_window, softcap, s_aux)


def document_attention(
    module: nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    documents: Documents | BoundsOnly | None = None,
    position_ids: torch.Tensor | None = None,
    **arguments: Any,
):
    """transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] -> ([1, T, H, D], None)."""
    if attention_mask is not None:  # transformers makes none for NAME: Doge's gate, for example, is one
        raise ValueError("the model adds a mask of its own to attention")
    if documents is None:  # a model that does not forward keyword arguments still passes position ids
        if position_ids is None:
            raise ValueError("the model passes neither documents nor positions on to attention")
        documents = documents_of(position_ids.cpu(), query.device)
    scoring = scoring_of(query, **arguments)
    if autocasts(query):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if documents.bounds_N is not None:
        kernel = documents.attention.kernel(query, key, value, scoring)
        if kernel is not None:
            assert not isinstance(kernel, BlockKernel), "one that gives no log-sum-exp was asked for"
            bounds = (documents.bounds_N,) * 2
            longest = (documents.longest,) * 2
            return varlen.attend(kernel, query, key, value, bounds, longest, scoring), None
    if isinstance(documents, BoundsOnly):
        raise ValueError("no kernel of attention that takes bounds of documents is for this model's layers here")
    if torch.compiler.is_compiling() and not scoring.dropout:
        sinks_H = scoring.sinks_H
        return torch.ops.finetune_attention.groups(
            query, key, value, sinks_H, documents.number, scoring.scaling, scoring.window, scoring.softcap
        ), None
    return grouped_attention(query, key, value, documents, scoring), None


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scoring: Scoring
) -> torch.Tensor:
    """Attention of documents of similar length together: [1, T, H, D]."""
    if isinstance(documents, SharedDocuments):
        if scoring.dropout:
            raise ValueError("prompts are shared, and the model drops attention's probabilities")
        layout = documents.layout
        with without_autocast(query):
            plain = layout.is_plain(query.shape[1], query.itemsize)
            if plain and scoring.softcap is None and scoring.sinks_H is None:
                return shared.PlainAttention.apply(query, key, value, layout, scoring.scaling, scoring.window)
            return shared.SharedAttention.apply(query, key, value, scoring.sinks_H, layout, scoring)
    plain = scoring.softcap is None and scoring.sinks_H is None and not scoring.dropout
    limit = 0
    if plain and documents.attention.own_products:
        limit = dense_up_to(query)
    dense = tuple(group for group in documents.groups if group.length <= limit)
    if dense:
        index = _index(documents, dense, query, key, scoring.window)
        with without_autocast(query):
            out = DenseAttention.apply(query, key, value, index, scoring.scaling)
        if len(dense) == len(documents.groups):
            return out
    outputs = []
    long = [group for group in documents.groups if group.length > limit]
    for group in long:
        parts = []
        for x in (query, key, value):
            x = x.squeeze(0).transpose(0, 1)
            if group.gather_NL is not None:
                x = _Gather.apply(x, group.gather_NL, group.slots_M, group.tokens_M)
            parts.append(x.unflatten(0, (group.num_documents, group.length)).transpose(1, 2))
        q_NHLD, k_NKLD, v_NKLD = parts
        outputs.append(_group_attention(q_NHLD, k_NKLD, v_NKLD, *scoring).flatten(0, 1))
    if documents.scatter_T is None:
        return outputs[0].unsqueeze(0)
    if not dense:
        if len(outputs) == 1:
            flat = outputs[0]
        else:
            flat = torch.cat(outputs)
        return _Gather.apply(flat, documents.scatter_T, None, documents.scatter_T).unsqueeze(0)
    # Each group adds its own rows; those of the others are zero.
    for group, rows in zip(long, outputs, strict=True):
        out = out.index_add(1, group.tokens_M, rows[group.slots_M].unsqueeze(0))
    return out


# ---- to torch.compile, groups are one operation: a graph of them would hold for one set of lengths only

LIBRARY = torch.library.Library("finetune_attention", "DEF")
ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, SymInt documents, float scaling, int? window, float? softcap"
LIBRARY.define(f"groups({ARGUMENTS}) -> Tensor")
LIBRARY.define(f"groups_backward(Tensor grad, {ARGUMENTS}) -> Tensor[]")


@torch.library.impl(LIBRARY, "groups", "CompositeExplicitAutograd")
def _groups(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
):
    scoring = Scoring(scaling, 0.0, window, softcap, sinks)
    with torch.no_grad():
        return grouped_attention(q, k, v, LAYOUTS[documents], scoring).contiguous()


@torch.library.impl(LIBRARY, "groups_backward", "CompositeExplicitAutograd")
def _groups_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
):
    """Computes the attention again: what a graph keeps between its forward and its backward are tensors only."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    scoring = Scoring(scaling, 0.0, window, softcap, None if sinks is None else inputs[3])
    with torch.enable_grad():
        out = grouped_attention(inputs[0], inputs[1], inputs[2], LAYOUTS[documents], scoring)
    return [x.contiguous() for x in torch.autograd.grad(out, inputs, grad)]


@torch.library.register_fake("finetune_attention::groups", lib=LIBRARY)
def _groups_on_meta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
):
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


@torch.library.register_fake("finetune_attention::groups_backward", lib=LIBRARY)
def _groups_backward_on_meta(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
):
    inputs = [q, k, v]
    if sinks is not None:
        inputs.append(sinks)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _keep(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    *tensors, ctx.documents, ctx.scaling, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: torch.Tensor):
    found = torch.ops.finetune_attention.groups_backward(
        grad, *ctx.saved_tensors, ctx.documents, ctx.scaling, ctx.window, ctx.softcap
    )
    return *found, *[None] * (8 - len(found))


torch.library.register_autograd("finetune_attention::groups", _differentiate, setup_context=_keep, lib=LIBRARY)


def _index(
    documents: Documents, groups: tuple[Group, ...], query: torch.Tensor, key: torch.Tensor, window: int | None
) -> Index:
    """The order of the groups' products, made by the first layer that asks."""
    num_tokens = query.shape[2]
    asked = (query.shape[1], key.shape[1], window, query.dtype)
    if asked not in documents.indices:
        documents.indices[asked] = index_of(groups, num_tokens, query.shape[1], key.shape[1], window, query.dtype)
    return documents.indices[asked]


def own_implementation(model: nn.Module) -> str:
    """The model's default attention implementation, for generation with a KV cache and for padded batches."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def use(model: Any, name: str) -> None:
    """Sets the attention implementation of the language model. Towers keep the model's own: they see images whole."""
    towers: list[Any] = [model.get_submodule(tower) for tower in seeing_towers(model)]
    of_towers = [tower.config._attn_implementation for tower in towers]
    model.set_attn_implementation(name)
    if name != own_implementation(model):
        for tower, before in zip(towers, of_towers, strict=True):
            tower.set_attn_implementation(before)


def register() -> None:
    """Registers NAME for `model.set_attn_implementation`. The layout implies the mask: without a mask function of this
    name transformers makes none, nor does it look for documents in the position ids, for which the host would wait.
    """
    AttentionInterface.register(NAME, document_attention)
