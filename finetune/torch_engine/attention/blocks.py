"""Attention of a block of queries to a block of keys, by parts that are merged: outputs and their log-sum-exp.

Of each query, `out` is normalized over the keys seen so far and `lse` is the log of the sum of their exponentials, as
in FlashAttention (Dao et al. 2022); backward computes a block's probabilities again from the final lse. A kernel that
takes bounds does both where it can; elsewhere tiles of some hundred positions go through matrix products.

L positions of this rank, H heads, K key/value heads, P queries that share a key (H / K), D head size, E that of values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from finetune.parts.engine_limits import ATTENTION_TILE, DEVICE_ATTENTION_TILE

CAUSAL = (-1, 0)  # a kernel's window: all keys before a query, none after it


@dataclass(frozen=True)
class Block:
    """Local positions of queries and of keys, each a run of the row. `ahead`: the first query's position in the row
    minus the first key's.
    """

    queries: slice
    keys: slice
    ahead: int

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start

    def trimmed(self, window: int | None) -> "Block | None":
        """The block without queries that see none of its keys and keys that no query sees; None if nothing is left."""
        first_query = max(0, -self.ahead)
        first_key = 0
        queries = self.num_queries
        keys = min(self.num_keys, self.ahead + self.num_queries)
        if window is not None:
            first_key = max(0, self.ahead + first_query - window + 1)
            queries = min(queries, window + keys - 1 - self.ahead)
        if first_query >= queries or first_key >= keys:
            return None
        return Block(
            slice(self.queries.start + first_query, self.queries.start + queries),
            slice(self.keys.start + first_key, self.keys.start + keys),
            self.ahead + first_query - first_key,
        )

    def tiles(self, window: int | None, size: int) -> "Iterator[Block]":
        """Tiles of at most `size` x `size` positions in which a query sees a key."""
        for i in range(0, self.num_queries, size):
            for j in range(0, self.num_keys, size):
                queries = slice(self.queries.start + i, min(self.queries.stop, self.queries.start + i + size))
                keys = slice(self.keys.start + j, min(self.keys.stop, self.keys.start + j + size))
                tile = replace(self, queries=queries, keys=keys, ahead=self.ahead + i - j).trimmed(window)
                if tile is not None:
                    yield tile

    def unseen(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """[queries, keys] bool: True where a query does not see a key; None if each sees all."""
        last = self.ahead + self.num_queries - 1
        if self.ahead >= self.num_keys - 1 and (window is None or last < window):
            return None
        rows, columns = (torch.arange(n, device=device) for n in (self.num_queries, self.num_keys))
        ahead = rows.unsqueeze(1) + self.ahead - columns
        if window is None:
            return ahead < 0
        return (ahead < 0) | (ahead >= window)


class Scoring(NamedTuple):
    """Settings of a layer's attention scores: scale, dropout, sliding window, softcap, and sinks per head."""

    scaling: float
    dropout: float
    window: int | None
    softcap: float | None
    sinks_H: torch.Tensor | None


class BlockKernel(NamedTuple):
    """`forward(q, k, v, bounds, longest, window, scaling) -> (out [N, H, E], lse [H, N])` and `backward(grad, q, k, v,
    out, lse, bounds, longest, window, scaling) -> (dq, dk, dv)`; queries [N, H, D], keys and values [M, K, D].
    `window`: keys that a query sees before and after the one that it is aligned to, the last to the last; -1: all.
    """

    forward: Callable
    backward: Callable


def asks_for_grouped_heads() -> bool:
    """True if torch's varlen attention, which is imported, takes `enable_gqa`; that of 2.11 groups heads without it."""
    return any(a.name == "enable_gqa" for a in torch.ops.torch_attn._varlen_attn.default._schema.arguments)


def torch_kernel() -> BlockKernel:
    """torch's varlen operators, whose backward takes the lse of a whole row."""
    import torch.nn.attention.varlen  # noqa: F401  registers them

    ops = torch.ops.torch_attn
    is_asked = asks_for_grouped_heads()

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: tuple[torch.Tensor, torch.Tensor],
        longest: tuple[int, int],
        window: tuple[int, int],
        scaling: float,
    ):
        grouped = {}
        if is_asked:
            grouped = {"enable_gqa": q.shape[1] != k.shape[1]}
        return ops._varlen_attn(q, k, v, *bounds, *longest, window == CAUSAL, scaling, list(window), **grouped)[:2]

    def backward(
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        bounds: tuple[torch.Tensor, torch.Tensor],
        longest: tuple[int, int],
        window: tuple[int, int],
        scaling: float,
    ):
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # a random state, of dropout
        return ops._varlen_attn_backward(
            grad, q, k, v, out, lse, *bounds, *longest, window == CAUSAL, unused, scaling, list(window)
        )

    return BlockKernel(forward, backward)


class _ByKernel(torch.autograd.Function):
    """A kernel's forward and backward in one piece, for its trial."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: BlockKernel, *arguments: tuple):
        out, lse = kernel.forward(q, k, v, *arguments)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel = kernel
        ctx.arguments = arguments
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return *ctx.kernel.backward(grad, *ctx.saved_tensors, *ctx.arguments), *[None] * 5


def as_kernel_of_bounds(load: Callable[[], BlockKernel]) -> Callable:
    """Block kernel wrapped as a kernel over documents, the form that varlen.trial compares with matmuls."""

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds_q: torch.Tensor,
        bounds_k: torch.Tensor,
        longest_q: int,
        longest_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        kernel: BlockKernel,
    ):
        return _ByKernel.apply(q, k, v, kernel, (bounds_q, bounds_k), (longest_q, longest_k), window_size, scale)

    return partial(run, kernel=load())


# ---- what is known of each query so far


class Merged:
    """Outputs [H, L, E] in fp32 and lse [H, L] of this rank's queries over the keys seen so far."""

    def __init__(self, q_HLD: torch.Tensor, size: int):
        self.out = q_HLD.new_zeros(*q_HLD.shape[:2], size, dtype=torch.float32)
        self.lse = q_HLD.new_full(q_HLD.shape[:2], float("-inf"), dtype=torch.float32)

    def scale_to(self, queries: slice, lse_HN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs of these queries, to be added to; their lse with that of more keys, 0 if they have seen none)."""
        before = self.lse[:, queries]
        out = self.out[:, queries]
        total = torch.logaddexp(before, lse_HN)
        finite = total.masked_fill(total == float("-inf"), 0.0)
        out.mul_((before - finite).exp().unsqueeze(2))
        before.copy_(total)
        return out, finite

    def add(self, queries: slice, out_NHE: torch.Tensor, lse_HN: torch.Tensor) -> None:
        """Merges the outputs of these queries over further keys."""
        out, total = self.scale_to(queries, lse_HN)
        out.add_(out_NHE.transpose(0, 1) * (lse_HN - total).exp().unsqueeze(2))

    def add_sinks(self, sinks_H: torch.Tensor) -> None:
        """Adds a key without a value to every query, with a score per head."""
        self.scale_to(slice(None), sinks_H.float().unsqueeze(1).expand_as(self.lse))


# ---- tiles by matrix products


def tile_size(device: torch.device) -> int:
    return ATTENTION_TILE if device.type == "cpu" else DEVICE_ATTENTION_TILE


class Scores(NamedTuple):
    """Scores of a tile [K, P * n, m] in fp32, tanh(scores / softcap), and the scaled dropout mask of probabilities."""

    scores: torch.Tensor
    capped: torch.Tensor | None
    kept: torch.Tensor | None


def _rows(x_HLD: torch.Tensor, rows: slice, kv_heads: int) -> torch.Tensor:
    """[K, P * n, D]: these rows of the heads that share a key."""
    some = x_HLD[:, rows]
    return some.reshape(kv_heads, -1, some.shape[2])


def _scores(q_BD: torch.Tensor, k_BD: torch.Tensor, tile: Block, scoring: Scoring, seed: int | None) -> Scores:
    scores = torch.bmm(q_BD, k_BD.transpose(1, 2)).float().mul_(scoring.scaling)
    capped = None
    if scoring.softcap is not None:
        capped = torch.tanh(scores / scoring.softcap)
        scores = capped * scoring.softcap
    unseen = tile.unseen(scoring.window, scores.device)
    if unseen is not None:
        scores.view(-1, tile.num_queries, tile.num_keys).masked_fill_(unseen, float("-inf"))
    kept = None
    if seed is not None:
        generator = torch.Generator(scores.device).manual_seed(seed)
        kept = torch.rand(scores.shape, generator=generator, device=scores.device) >= scoring.dropout
        kept = kept / (1 - scoring.dropout)
    return Scores(scores, capped, kept)


def add_tile(
    merged: Merged, q_HLD: torch.Tensor, kv_KLD: torch.Tensor, tile: Block, scoring: Scoring, seed: int | None = None
) -> None:
    """Merges attention to a tile of keys and values, which are one beside the other."""
    size = q_HLD.shape[2]
    kv_heads = kv_KLD.shape[0]
    q_BD = _rows(q_HLD, tile.queries, kv_heads)
    kv_BD = kv_KLD[:, tile.keys]
    found = _scores(q_BD, kv_BD[..., :size], tile, scoring, seed)
    lse_HN = torch.logsumexp(found.scores, 2).view(-1, tile.num_queries)
    out_HNE, total_HN = merged.scale_to(tile.queries, lse_HN)
    probs = found.scores.sub_(total_HN.reshape(kv_heads, -1, 1)).exp_()
    if found.kept is not None:
        probs = probs * found.kept
    out_HNE.add_(torch.bmm(probs.to(q_HLD.dtype), kv_BD[..., size:]).view_as(out_HNE))


class Gradients(NamedTuple):
    """Inputs of backward for every query: gradient, log-sum-exp and delta, the last two in fp32 per head; and the fp32
    tensor where it accumulates the queries' gradients.
    """

    grad_HLE: torch.Tensor
    lse_HL: torch.Tensor
    delta_HL: torch.Tensor
    of_queries_HLD: torch.Tensor


def add_tile_backward(
    to: Gradients,
    q_HLD: torch.Tensor,
    kv_KLD: torch.Tensor,
    of_kv_KLD: torch.Tensor,
    tile: Block,
    scoring: Scoring,
    seed: int | None = None,
) -> None:
    """Adds a tile's gradients to those of queries and to `of_kv_KLD`, in fp32."""
    size = q_HLD.shape[2]
    kv_heads = kv_KLD.shape[0]
    dtype = q_HLD.dtype
    q_BD = _rows(q_HLD, tile.queries, kv_heads)
    grad_BE = _rows(to.grad_HLE, tile.queries, kv_heads)
    kv_BD = kv_KLD[:, tile.keys]
    of_kv = of_kv_KLD[:, tile.keys]
    lse, delta = (x[:, tile.queries].reshape(kv_heads, -1, 1) for x in (to.lse_HL, to.delta_HL))
    found = _scores(q_BD, kv_BD[..., :size], tile, scoring, seed)
    probs = found.scores.sub_(lse).exp_()
    of_probs = torch.bmm(grad_BE, kv_BD[..., size:].transpose(1, 2)).float()
    dropped = probs
    if found.kept is not None:
        dropped = probs * found.kept
        of_probs = of_probs * found.kept
    of_kv[..., size:] += torch.bmm(dropped.to(dtype).transpose(1, 2), grad_BE)
    of_scores = probs.mul_(of_probs.sub_(delta)).mul_(scoring.scaling)
    if found.capped is not None:
        of_scores.mul_(1 - found.capped.square())
    of_scores = of_scores.to(dtype)
    of_q = to.of_queries_HLD[:, tile.queries]
    of_q += torch.bmm(of_scores, kv_BD[..., :size]).view_as(of_q)
    of_kv[..., :size] += torch.bmm(of_scores.transpose(1, 2), q_BD)
