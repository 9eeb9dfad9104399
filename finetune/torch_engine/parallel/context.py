"""Context parallelism: each rank holds a shard of every sequence, and all-gathers keys and values for attention.

A row is split into twice as many chunks as ranks; a rank takes one from the front and one from the back (zigzag), which
balances the work under a causal mask. Attention stays within documents.

T tokens of the row padded to full chunks, C ranks, L tokens per rank (T / C), H heads, K key/value heads, D head size.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface

from finetune.engine import IGNORE_INDEX, Batch
from finetune.errors import PlanError
from finetune.torch_engine.attention import varlen
from finetune.torch_engine.attention.per_document import dense_up_to, fused_attention, scoring_of
from finetune.torch_engine.attention.varlen import Attention
from finetune.torch_engine.device import indices_to_device, to_device
from finetune.torch_engine.parallel.process_groups import ProcessGroups

NAME = "documents_across_ranks"
# torch 2.13 renamed these collectives; the older names still work there, but warn in the middle of a run.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class QueryChunk:
    """Queries of one document within one chunk: their local position, and the tokens of the row they attend to."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class Context:
    """The layout of one row over a context-parallel group. `order_T`: index of each token after the all-gather.

    Where a kernel takes bounds: `keys_U`, the tokens of the row that each piece attends to, one piece
    after the other; `bounds`, first query and first key of each piece, and the end; `longest` of each.
    """

    pieces: tuple[QueryChunk, ...]
    order_T: torch.Tensor
    back_T: torch.Tensor  # inverse permutation of order_T
    group: object
    attention: Attention
    keys_U: torch.Tensor | None = None
    bounds: tuple[torch.Tensor, ...] = ()
    longest: tuple[int, ...] = ()


def rank_token_indices(num_tokens: int, rank: int, num_ranks: int) -> np.ndarray:
    """Indices of the row's tokens that a rank holds, in order; the row length is a multiple of 2 * num_ranks."""
    each = num_tokens // (2 * num_ranks)
    first, last = rank * each, (2 * num_ranks - 1 - rank) * each
    return np.concatenate([np.arange(first, first + each), np.arange(last, last + each)])


def shard_batch(batch: Batch, groups: ProcessGroups, pad_id: int, attention: Attention) -> tuple[Batch, Context]:
    """This rank's shard of a flat batch, and its layout for attention.
    Padding forms a separate document without targets.
    """
    num_ranks, rank = groups.dims.cp, groups.coordinate("cp")
    padding = -batch.input_ids_BS.size % (2 * num_ranks)

    def padded(row_BS, fill):
        return np.concatenate([row_BS.reshape(-1), np.broadcast_to(fill, padding).astype(row_BS.dtype)])

    positions_T = padded(batch.position_ids_BS, np.arange(padding))
    mine_L = rank_token_indices(len(positions_T), rank, num_ranks)
    starts = [*np.flatnonzero(positions_T == 0).tolist(), len(positions_T)]
    order = np.concatenate([rank_token_indices(len(positions_T), r, num_ranks) for r in range(num_ranks)])
    part = Batch(
        padded(batch.input_ids_BS, pad_id)[mine_L][None],
        padded(batch.labels_BS, IGNORE_INDEX)[mine_L][None],
        positions_T[mine_L][None],
        padded(batch.document_ids_BS, -1)[mine_L][None],
        batch.rows,
    )
    back = torch.from_numpy(np.argsort(order))
    pieces = _query_chunks(mine_L, len(positions_T) // (2 * num_ranks), starts)
    indices, device, of_pieces = [back, torch.from_numpy(order)], groups.device, {}
    if attention.takes_bounds(device):
        spans = [(piece.queries, piece.keys) for piece in pieces]
        lengths = [[span.stop - span.start for span in side] for side in zip(*spans, strict=True)]
        bounds = (torch.tensor([0, *side]).cumsum(0).to(torch.int32) for side in lengths)
        of_pieces = {"bounds": tuple(to_device(side, device) for side in bounds), "longest": tuple(map(max, lengths))}
        indices.append(torch.cat([torch.arange(piece.keys.start, piece.keys.stop) for piece in pieces]))
    back_T, order_T, *keys_U = indices_to_device(indices, device)
    context = Context(pieces, back_T, order_T, groups.process_groups["cp"], attention, *keys_U, **of_pieces)
    return part, context


def _query_chunks(mine_L, each: int, starts: list[int]) -> tuple[QueryChunk, ...]:
    found = []
    for offset in (0, each):
        begin, end = int(mine_L[offset]), int(mine_L[offset]) + each
        for document, after in pairwise(starts):
            first, last = max(begin, document), min(end, after)
            if first < last:
                queries = slice(offset + first - begin, offset + last - begin)
                found.append(QueryChunk(queries, slice(document, last)))
    return tuple(found)


class _AllGatherSequence(torch.autograd.Function):
    """All-gather of [L, 2, K, D] to [T, 2, K, D] in row order; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx, x_L, context):
        ctx.context = context
        num_ranks = dist.get_world_size(context.group)
        out = x_L.new_empty(num_ranks * len(x_L), *x_L.shape[1:])
        ALL_GATHER(out, x_L.contiguous(), group=context.group)
        return out[context.order_T]

    @staticmethod
    def backward(ctx, grad_T):
        context = ctx.context
        num_ranks = dist.get_world_size(context.group)
        by_rank = grad_T[context.back_T].contiguous()
        out = grad_T.new_empty(len(by_rank) // num_ranks, *grad_T.shape[1:])
        REDUCE_SCATTER(out, by_rank, group=context.group)
        return out, None


def context_attention(module, query, key, value, attention_mask, documents=None, **scoring):
    """transformers' attention interface: query [1, H, L, D], key and value [1, K, L, D] -> ([1, L, H, D], None)."""
    if not isinstance(documents, Context):
        raise PlanError(
            "--cp_degree: this model does not pass its keyword arguments to attention. Use --dp_shards instead."
        )
    how = scoring_of(query, **scoring)
    if key.shape[-1] == value.shape[-1]:
        both = torch.stack([key[0].transpose(0, 1), value[0].transpose(0, 1)], 1)
        key_T, value_T = _AllGatherSequence.apply(both, documents).unbind(1)
    else:
        key_T, value_T = (_AllGatherSequence.apply(t[0].transpose(0, 1), documents) for t in (key, value))
    kernel = None if documents.keys_U is None else documents.attention.kernel(query, key, value, how)
    if kernel is not None:
        seen = (t.index_select(0, documents.keys_U).transpose(0, 1).unsqueeze(0) for t in (key_T, value_T))
        return varlen.attend(kernel, query, *seen, documents.bounds, documents.longest, how), None
    out, own_products = [], documents.attention.own_products
    for piece in documents.pieces:
        q = query[:, :, piece.queries]
        k, v = (t[piece.keys].transpose(0, 1).unsqueeze(0) for t in (key_T, value_T))
        out.append(_attention(q, k, v, *how, own_products))
    return torch.cat(out, 2).transpose(1, 2), None


def _attention(q, k, v, scaling, dropout, window, softcap, sinks_H, own_products: bool):
    """Causal attention of the last n queries of a document to all its keys up to there: [1, H, n, D]."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    dense = dense_up_to(q) if own_products else 0
    windowed = window is not None and window < num_keys
    square = num_queries == num_keys and not windowed
    fused = softcap is None and sinks_H is None and num_keys > dense
    allowed = None
    if not (square and fused):
        allowed = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
        if windowed:
            allowed = allowed.triu(num_keys - num_queries + 1 - window)
    if fused:
        return fused_attention(q, k, v, allowed, dropout, scaling)
    per = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(per, 1), v.repeat_interleave(per, 1)
    scores = q @ k.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    probs = torch.softmax(scores, -1, dtype=torch.float32)[..., :num_keys].to(q.dtype)
    return (F.dropout(probs, dropout) if dropout else probs) @ v


def register() -> None:
    """Registers NAME for `model.set_attn_implementation`, without a mask function: pieces imply the mask."""
    AttentionInterface.register(NAME, context_attention)
