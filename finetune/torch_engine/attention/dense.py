"""Attention of short documents on a CPU by matrix products. Only queries, keys and values are kept for backward.

Probabilities are computed again there: a product and a softmax cost less than the memory of L x L numbers per head.

T tokens of the flat row, N documents of a group, L its padded length, H query heads, K key/value heads, P queries that
share a key (H / K), D head size; that of values may differ. A batch of products is one key/value head of one document:
its queries are P * L rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from finetune.parts.engine_limits import DENSE_CACHED_BYTES


@dataclass(frozen=True)
class Group:
    """N documents padded to length L, M of whose N * L slots hold a token.
    `gather_NL`: each slot's token in the flat row (0 for padding). `slots_M`, `tokens_M`: the slots that hold a token,
    and that token. All made on the host: what a device must count, the host waits for.
    """

    length: int
    gather_NL: torch.Tensor | None  # None: the group is the flat row itself, unpadded
    slots_M: torch.Tensor | None
    tokens_M: torch.Tensor | None
    num_documents: int


@dataclass(frozen=True)
class GroupIndex:
    """Rows of flat [T * H, D] queries and [T * K, D] keys in the order of a group's products.

    `padding`: rows of the queries' order that are no token. `bias_QL`: 0 where a query sees a key, else -inf.
    """

    batches: int
    queries: torch.Tensor
    keys: torch.Tensor
    padding: torch.Tensor
    bias_QL: torch.Tensor


@dataclass(frozen=True)
class Index:
    """The index of each group, and where each flat row of queries and of keys is among the rows of all groups.

    None for a row that no group holds: its output and gradients are left zero.
    """

    groups: tuple[GroupIndex, ...]
    back_to_queries: torch.Tensor
    back_to_keys: torch.Tensor
    held_queries: torch.Tensor | None
    held_keys: torch.Tensor | None


def index_of(
    groups: tuple[Group, ...], num_tokens: int, heads: int, kv_heads: int, window: int | None, dtype: torch.dtype
) -> Index:
    """The order of products for these attention.Groups; the same for every layer of a forward."""
    found = []
    orders: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {heads: [], kv_heads: []}
    for group in groups:
        n = group.num_documents
        length = group.length
        if group.gather_NL is None:
            tokens_NL = torch.arange(n * length)
        else:
            tokens_NL = group.gather_NL
        tokens_NL = tokens_NL.view(n, length)
        real_NL = torch.ones(n * length, dtype=torch.bool)
        if group.slots_M is not None:
            real_NL = torch.zeros_like(real_NL).index_fill_(0, group.slots_M, True)
        real_NL = real_NL.view(n, length)
        per = heads // kv_heads
        heads_KP = torch.arange(heads).view(kv_heads, 1, per, 1)
        queries = (tokens_NL.view(1, n, 1, length) * heads + heads_KP).flatten()
        keys = (tokens_NL.unsqueeze(0) * kv_heads + torch.arange(kv_heads).view(-1, 1, 1)).flatten()
        real_queries = real_NL.view(1, n, 1, length).expand(kv_heads, n, per, length).flatten()
        real_keys = real_NL.unsqueeze(0).expand(kv_heads, n, length).flatten()
        bias_QL = causal_bias(length, window, per, dtype)
        padding = (~real_queries).nonzero().flatten()
        found.append(GroupIndex(kv_heads * n, queries, keys, padding, bias_QL))
        orders[heads].append((queries, real_queries))
        if kv_heads != heads:
            orders[kv_heads].append((keys, real_keys))
    back_q, held_q = _inverse(orders[heads], num_tokens * heads)
    back_k, held_k = _inverse(orders[kv_heads], num_tokens * kv_heads)
    return Index(tuple(found), back_q, back_k, held_q, held_k)


def causal_mask(length: int, window: int | None, device: torch.device | None = None) -> torch.Tensor:
    """Causal (and sliding-window) mask [L, L] bool: True where a query attends to a key."""
    allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if window is None:
        return allowed
    return allowed.triu(1 - window)


def causal_bias(
    length: int, window: int | None, per: int, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """[P * L, L]: 0 where a query sees a key, else -inf; P queries share a key."""
    seen = causal_mask(length, window, device)
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(~seen, float("-inf")).repeat(per, 1)


def _inverse(
    orders: Sequence[tuple[torch.Tensor, torch.Tensor]], num_rows: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(position of each held flat row in the groups' concatenated order, the held rows; None if that is every row)."""
    position = torch.full((num_rows,), -1)
    offset = 0
    for rows, real in orders:
        position[rows[real]] = offset + real.nonzero().flatten()
        offset += len(rows)
    held = position >= 0
    if held.all():
        return (position, None)
    return (position[held], held.nonzero().flatten())


class DenseAttention(torch.autograd.Function):
    """softmax(scaling * q k^T + bias) v per document; queries [1, H, T, D], keys and values [1, K, T, D] -> [1, T, H,
    D].
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: Index, scaling: float):
        ctx.save_for_backward(query, key, value)
        ctx.index = index
        ctx.scaling = scaling
        q, k, v = (_rows(x) for x in (query, key, value))
        parts = []
        for group in index.groups:
            q_BQD, k_BLD, v_BLD = _gather(group, q, k, v)
            out_BQD = q_BQD.new_empty(*q_BQD.shape[:2], v.shape[-1])
            for some in _cached_slices(group):
                probs_BQL = _probabilities(group, q_BQD[some], k_BLD[some], scaling)
                torch.bmm(probs_BQL, v_BLD[some], out=out_BQD[some])
            parts.append(out_BQD.flatten(0, 1))
        out = _scatter(parts, index.back_to_queries, index.held_queries, len(q))
        return out.view(1, query.shape[2], query.shape[1], value.shape[3])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        query, key, value = ctx.saved_tensors
        index = ctx.index
        scaling = ctx.scaling
        q, k, v = (_rows(x) for x in (query, key, value))
        grad = grad.reshape(len(q), -1)
        parts_q = []
        parts_k = []
        parts_v = []
        for group in index.groups:
            q_BQD, k_BLD, v_BLD = _gather(group, q, k, v)
            out_BQD = grad.index_select(0, group.queries).index_fill_(0, group.padding, 0.0)
            out_BQD = out_BQD.view(group.batches, -1, v.shape[-1])
            grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q_BQD, k_BLD, v_BLD))
            for some in _cached_slices(group):
                probs_BQL = _probabilities(group, q_BQD[some], k_BLD[some], scaling)
                torch.bmm(probs_BQL.transpose(1, 2), out_BQD[some], out=grad_v[some])
                grad_BQL = torch.bmm(out_BQD[some], v_BLD[some].transpose(1, 2))
                grad_BQL = torch._softmax_backward_data(grad_BQL, probs_BQL, -1, probs_BQL.dtype)
                torch.bmm(grad_BQL, k_BLD[some], out=grad_q[some])
                torch.bmm(grad_BQL.transpose(1, 2), q_BQD[some], out=grad_k[some])
            parts_q.append(grad_q.mul_(scaling).flatten(0, 1))
            parts_k.append(grad_k.mul_(scaling).flatten(0, 1))
            parts_v.append(grad_v.flatten(0, 1))
        return (
            _heads_first(_scatter(parts_q, index.back_to_queries, index.held_queries, len(q)), query),
            _heads_first(_scatter(parts_k, index.back_to_keys, index.held_keys, len(k)), key),
            _heads_first(_scatter(parts_v, index.back_to_keys, index.held_keys, len(v)), value),
            None,
            None,
        )


def _cached_slices(group: GroupIndex):
    """Slices of the group's products whose probabilities fit in a core's cache."""
    step = max(1, DENSE_CACHED_BYTES // (group.bias_QL.numel() * group.bias_QL.itemsize))
    for start in range(0, group.batches, step):
        yield slice(start, start + step)


def _rows(x_1HTD: torch.Tensor) -> torch.Tensor:
    """[T * H, D], token by token: a view of what a projection gives."""
    return x_1HTD[0].transpose(0, 1).reshape(-1, x_1HTD.shape[-1])


def _heads_first(rows: torch.Tensor, like_1HTD: torch.Tensor) -> torch.Tensor:
    _, heads, tokens, size = like_1HTD.shape
    return rows.view(1, tokens, heads, size).transpose(1, 2)


def _gather(group: GroupIndex, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    ordered = (q.index_select(0, group.queries), k.index_select(0, group.keys), v.index_select(0, group.keys))
    return (x.view(group.batches, -1, x.shape[-1]) for x in ordered)


def _probabilities(group: GroupIndex, q_BQD: torch.Tensor, k_BLD: torch.Tensor, scaling: float) -> torch.Tensor:
    return torch.softmax(torch.baddbmm(group.bias_QL, q_BQD, k_BLD.transpose(1, 2), alpha=scaling), -1)


def _scatter(parts: list[torch.Tensor], back: torch.Tensor, held: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """The groups' rows in flat order; rows that no group holds are zero."""
    rows = (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, back)
    if held is None:
        return rows
    return rows.new_zeros(num_rows, rows.shape[-1]).index_copy_(0, held, rows)
