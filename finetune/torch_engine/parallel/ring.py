"""Ring attention (Liu et al. 2023): keys and values travel around the ranks that share a row.

Each rank computes its queries with the keys and values of one rank at a time, while the next ones arrive; outputs are
merged by their log-sum-exp. In backward they travel once more, their gradients one step behind them, and these end
at the rank that holds the keys. So a rank holds keys and values of its own positions and of one other rank's.

L positions per rank, H heads, K key/value heads, D head size, E that of values.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from finetune.torch_engine.attention import blocks
from finetune.torch_engine.attention.blocks import Block, BlockKernel, Gradients, Merged, Scoring

# tags of messages
KEYS = 0
GRADIENTS = 1


class RowLayout(Protocol):
    """The interface of a Context: one row over a context-parallel group."""

    @property
    def chunk(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def group(self) -> dist.ProcessGroup | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def bounds(self) -> tuple[torch.Tensor, int] | None: ...
    def blocks(self, source: int, window: int | None, /) -> tuple[Block, ...]: ...
    def across(self, source: int, window: int | None, /) -> tuple[Block, ...]: ...
    def bounds_of_one(self, length: int, /) -> torch.Tensor: ...


class Message:
    """`tensor` on its way to the next rank of the group, and the previous rank's on its way here."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup | None, tag: int):
        members = dist.get_process_group_ranks(group)
        index = dist.get_rank(group)
        self.sent = tensor
        self.received = torch.empty_like(tensor)
        after = members[(index + 1) % len(members)]
        before = members[index - 1]
        sends = dist.P2POp(dist.isend, tensor, after, group, tag)
        self.works = dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, self.received, before, group, tag)])

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


def around(kv_KLD: torch.Tensor, context: RowLayout) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank in the group, its keys and values), this rank's first. The next ones arrive while the caller computes."""
    for step in range(context.num_ranks):
        message = None
        if step < context.num_ranks - 1:
            message = Message(kv_KLD, context.group, KEYS)
        yield (context.rank - step) % context.num_ranks, kv_KLD
        if message is not None:
            kv_KLD = message.wait()


class RingAttention(torch.autograd.Function):
    """Attention of queries [1, H, L, D] to the keys and values [1, K, L, .] of all ranks: [1, L, H, E]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor | None,
        context: RowLayout,
        scoring: Scoring,
        kernel: BlockKernel | None,
    ):
        q_HLD = query[0]
        kv_KLD = torch.cat([key[0], value[0]], -1)
        # Masks of dropout are drawn again in backward.
        if scoring.dropout:
            ctx.seed = int(torch.randint(2**31, ()))
        else:
            ctx.seed = None
        merged = Merged(q_HLD, value.shape[-1])
        for source, arrived_KLD in around(kv_KLD, context):
            if kernel is not None:
                _add_by_kernel(kernel, merged, q_HLD, arrived_KLD, source, context, scoring)
                continue
            for number, tile in _tiles(context, source, scoring.window):
                blocks.add_tile(merged, q_HLD, arrived_KLD, tile, scoring, _seed(ctx.seed, number))
        if sinks_H is not None:
            merged.add_sinks(sinks_H)
        out_LHE = merged.out.transpose(0, 1).to(query.dtype, memory_format=torch.contiguous_format)
        ctx.save_for_backward(query, key, value, sinks_H, out_LHE, merged.lse)
        ctx.context = context
        ctx.scoring = scoring
        ctx.kernel = kernel
        return out_LHE.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad_1LHE: torch.Tensor):
        query, key, value, sinks_H, out_LHE, lse_HL = ctx.saved_tensors
        context = ctx.context
        scoring = ctx.scoring
        q_HLD = query[0]
        kv_KLD = torch.cat([key[0], value[0]], -1)
        grad_LHE = grad_1LHE[0].to(query.dtype)
        delta_HL = (grad_LHE.float() * out_LHE.float()).sum(2).t().contiguous()
        of_queries = q_HLD.new_zeros(q_HLD.shape, dtype=torch.float32)
        to = Gradients(grad_LHE.transpose(0, 1), lse_HL, delta_HL, of_queries)
        own: torch.Tensor | None = None
        message = None
        for source, arrived_KLD in around(kv_KLD, context):
            of_kv = torch.zeros_like(arrived_KLD, dtype=torch.float32)
            if ctx.kernel is not None:
                _add_by_kernel_backward(ctx.kernel, to, out_LHE, q_HLD, arrived_KLD, of_kv, source, context, scoring)
            else:
                for number, tile in _tiles(context, source, scoring.window):
                    seed = _seed(ctx.seed, number)
                    blocks.add_tile_backward(to, q_HLD, arrived_KLD, of_kv, tile, scoring, seed)
            if own is None:
                own = of_kv
                continue
            if message is not None:
                of_kv += message.wait()
            message = Message(of_kv, context.group, GRADIENTS)
        assert own is not None, "a rank has keys of its own"
        if message is not None:
            own += message.wait()
        of_key, of_value = own.to(key.dtype).unsqueeze(0).split([key.shape[-1], value.shape[-1]], -1)
        of_sinks = None
        if sinks_H is not None:
            of_sinks = -((sinks_H.float().unsqueeze(1) - lse_HL).exp() * delta_HL).sum(1).to(sinks_H.dtype)
        return of_queries.to(query.dtype).unsqueeze(0), of_key, of_value, of_sinks, None, None, None


def _tiles(context: RowLayout, source: int, window: int | None) -> Iterator[tuple[int, blocks.Block]]:
    """(number within the row's attention, tile) of each tile of a rank's keys that this rank's queries see."""
    number = source << 20
    for block in context.blocks(source, window):
        for tile in block.tiles(window, blocks.tile_size(context.device)):
            yield number, tile
            number += 1


def _seed(seed: int | None, number: int) -> int | None:
    if seed is None:
        return None
    return seed + (number << 31)


# ---- by a kernel: this rank's documents in one call, then a block per pair of chunks


def _calls(context: RowLayout, source: int, scoring: Scoring) -> Iterator[tuple]:
    """(queries, keys, (bounds, longest, window, scaling)) of each call of a kernel for a rank's keys."""
    window = scoring.window
    if source == context.rank:
        assert context.bounds is not None, "a kernel takes bounds"
        bounds, longest = context.bounds
        everything = slice(0, 2 * context.chunk)
        if window is None:
            left = -1
        else:
            left = window - 1
        yield everything, everything, ((bounds, bounds), (longest, longest), (left, 0), scoring.scaling)
    for block in context.across(source, window):
        lengths = block.num_queries, block.num_keys
        if window is None:
            left = -1
        else:
            left = window - 1 - block.ahead + block.num_keys - block.num_queries
        both = tuple(context.bounds_of_one(n) for n in lengths)
        yield block.queries, block.keys, (both, lengths, (left, -1), scoring.scaling)


def _tokens_first(x: torch.Tensor, rows: slice) -> torch.Tensor:
    return x[:, rows].transpose(0, 1)


def _add_by_kernel(
    kernel: BlockKernel,
    merged: Merged,
    q_HLD: torch.Tensor,
    kv_KLD: torch.Tensor,
    source: int,
    context: RowLayout,
    scoring: Scoring,
) -> None:
    size = q_HLD.shape[2]
    for queries, keys, more in _calls(context, source, scoring):
        kv = _tokens_first(kv_KLD, keys)
        merged.add(queries, *kernel.forward(_tokens_first(q_HLD, queries), kv[..., :size], kv[..., size:], *more))


def _add_by_kernel_backward(
    kernel: BlockKernel,
    to: Gradients,
    out_LHE: torch.Tensor,
    q_HLD: torch.Tensor,
    kv_KLD: torch.Tensor,
    of_kv_KLD: torch.Tensor,
    source: int,
    context: RowLayout,
    scoring: Scoring,
) -> None:
    size = q_HLD.shape[2]
    for queries, keys, more in _calls(context, source, scoring):
        kv = _tokens_first(kv_KLD, keys)
        lse = to.lse_HL[:, queries].contiguous()
        q = _tokens_first(q_HLD, queries)
        grad = _tokens_first(to.grad_HLE, queries)
        found = kernel.backward(grad, q, kv[..., :size], kv[..., size:], out_LHE[queries], lse, *more)
        of_q, of_k, of_v = (x.transpose(0, 1) for x in found)
        to.of_queries_HLD[:, queries] += of_q
        of_kv_KLD[:, keys, :size] += of_k
        of_kv_KLD[:, keys, size:] += of_v
