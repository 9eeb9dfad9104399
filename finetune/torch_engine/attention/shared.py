"""Attention of answers that share a prompt: the prompt's tokens are in a flat row once, and each answer's see them.

A segment of the row is a run of positions. One that starts at 0 is a document of its own. One that starts at position
p > 0 is a branch: it continues the first p tokens of the last document before it, whose other tokens it does not see.
Plain scores of a branch, over its prompt and itself, go through one softmax. With soft caps, sinks or long documents
the two are computed apart and merged by their log-sum-exp, as parts of a row over ranks are (blocks.py). No scores are
kept for backward.

T tokens, N segments of a group padded to L, H heads, K key/value heads, P queries that share a key, D head size, E that
of values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from finetune.torch_engine.attention.blocks import (
    Block,
    Gradients,
    Merged,
    Scoring,
    add_tile,
    add_tile_backward,
    tile_size,
)
from finetune.torch_engine.attention.dense import causal_bias, causal_mask

LONG = 768  # tokens: longer segments go through tiles, whose scores are smaller than L x L
MOST_PLAIN_BYTES = 32 * 2**20  # bytes of a segment's scores: with more it is not computed by whole rows of them
SCORES_BYTES = 4 * 2**20  # of scores at a time, where a segment has less
WASTE = 1.5  # the longest segment of a group divided by the shortest


@dataclass(frozen=True)
class Segment:
    """A run of the row. `after`: tokens of the document at `root` that a branch continues; 0: a document."""

    start: int
    stop: int
    after: int = 0
    root: int = 0

    @property
    def length(self) -> int:
        return self.stop - self.start


def segments_of(positions: list[int]) -> list[Segment]:
    """Segments of a flat row, by its position ids."""
    starts = [i for i, p in enumerate(positions) if not i or p != positions[i - 1] + 1]
    found = []
    root = 0
    for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
        if positions[start] == 0:
            root = start
        found.append(Segment(start, stop, positions[start], root))
    return found


@dataclass(frozen=True)
class Part:
    """Segments of similar length, N of them padded to L, that continue one prompt, or are documents of their own.

    `index_NL`: their tokens; padding repeats the last. `real_NL`: False at padding. `prompt`: tokens that all of them
    see, None of documents.
    """

    index_NL: torch.Tensor
    real_NL: torch.Tensor
    prompt: slice | None = None

    @property
    def real(self) -> torch.Tensor:
        """[N * L] bool: False at padding."""
        return self.real_NL.flatten()

    @property
    def tokens(self) -> torch.Tensor:
        """The segments' tokens, without padding."""
        return self.index_NL.flatten()[self.real]

    def sliced(self, size: int) -> "Iterator[Part]":
        """Parts of at most `size` segments."""
        for i in range(0, len(self.index_NL), size):
            yield Part(self.index_NL[i : i + size], self.real_NL[i : i + size], self.prompt)


def parts_of(segments: list[Segment], device: torch.device, prompt: slice | None = None) -> Iterator[Part]:
    """The segments by similar length, longest first."""
    left = sorted(segments, key=lambda s: -s.length)
    column = torch.arange(left[0].length if left else 0)
    while left:
        longest = left[0].length
        together = [s for s in left if s.length * WASTE >= longest]
        left = left[len(together) :]
        starts = torch.tensor([[s.start] for s in together])
        lengths = torch.tensor([[s.length] for s in together])
        index = starts + torch.minimum(column[:longest], lengths - 1)
        yield Part(index.to(device), (column[:longest] < lengths).to(device), prompt)


@dataclass(frozen=True)
class Layout:
    """Segments of a row as either function computes them, made when it first asks."""

    segments: list[Segment]
    device: torch.device

    @cached_property
    def groups(self) -> tuple[Part, ...]:
        """Short segments, which see themselves here."""
        return tuple(parts_of([s for s in self.segments if s.length <= LONG], self.device))

    @cached_property
    def tiles(self) -> tuple[Block, ...]:
        """Long segments, and branches with the prompts that they continue."""
        found = [Block(slice(s.start, s.stop), slice(s.start, s.stop), 0) for s in self.segments if s.length > LONG]
        for segment in self.segments:
            if segment.after:
                keys = slice(segment.root, segment.root + segment.after)
                found.append(Block(slice(segment.start, segment.stop), keys, segment.after))
        return tuple(found)

    def is_plain(self, heads: int, width: int) -> bool:
        """True if each segment's scores, of `width` bytes, are few enough for PlainAttention."""
        most = max(segment.length * (segment.after + segment.length) for segment in self.segments)
        return heads * width * most <= MOST_PLAIN_BYTES

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Segments by their prompt: documents, and the branches of each."""
        by_prompt: dict[tuple[int, int] | None, list[Segment]] = {}
        for segment in self.segments:
            key = None
            if segment.after:
                key = (segment.root, segment.root + segment.after)
            by_prompt.setdefault(key, []).append(segment)
        found: list[Part] = []
        for prompt, members in by_prompt.items():
            found += parts_of(members, self.device, slice(*prompt) if prompt else None)
        return tuple(found)


def merged_tiles(tiles: tuple[Block, ...], window: int | None) -> list[Block]:
    """The tiles, those of neighbouring branches of one prompt as one where no window tells their queries apart."""
    if window is not None:
        return list(tiles)
    found: list[Block] = []
    for tile in tiles:
        last = found[-1] if found else None
        joins = (
            last is not None and tile.ahead > 0 and last.keys == tile.keys and last.queries.stop == tile.queries.start
        )
        if last is not None and joins:
            found[-1] = Block(slice(last.queries.start, tile.queries.stop), tile.keys, tile.ahead)
        else:
            found.append(tile)
    return found


class SharedAttention(torch.autograd.Function):
    """Queries [1, H, T, D], keys and values [1, K, T, ...] -> [1, T, H, E]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor | None,
        layout: Layout,
        scoring: Scoring,
    ):
        q_HTD = query[0].contiguous()
        kv_KTD = torch.cat([key[0], value[0]], -1)
        scoring = scoring._replace(sinks_H=None, dropout=0.0)
        merged = Merged(q_HTD, value.shape[-1])
        for group in layout.groups:
            _add_group(merged, q_HTD, kv_KTD, group, scoring)
        for tile in _tiles(layout, scoring, query.device):
            add_tile(merged, q_HTD, kv_KTD, tile, scoring)
        if sinks_H is not None:
            merged.add_sinks(sinks_H)
        out_HTE = merged.out.to(query.dtype)
        ctx.save_for_backward(q_HTD, kv_KTD, out_HTE, merged.lse, sinks_H)
        ctx.layout = layout
        ctx.scoring = scoring
        return out_HTE.transpose(0, 1).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        q_HTD, kv_KTD, out_HTE, lse_HT, sinks_H = ctx.saved_tensors
        grad_HTE = grad[0].transpose(0, 1).contiguous()
        delta_HT = (grad_HTE.float() * out_HTE.float()).sum(-1)
        to = Gradients(grad_HTE, lse_HT, delta_HT, torch.zeros_like(q_HTD, dtype=torch.float32))
        of_kv_KTD = torch.zeros_like(kv_KTD, dtype=torch.float32)
        for group in ctx.layout.groups:
            _add_group_backward(to, q_HTD, kv_KTD, of_kv_KTD, group, ctx.scoring)
        for tile in _tiles(ctx.layout, ctx.scoring, q_HTD.device):
            add_tile_backward(to, q_HTD, kv_KTD, of_kv_KTD, tile, ctx.scoring)
        size = q_HTD.shape[2]
        of_sinks = None
        if sinks_H is not None:  # a sink's probability is exp(sink - lse), and its value zero
            of_sinks = -((sinks_H.float()[:, None] - lse_HT).exp() * delta_HT).sum(1).to(sinks_H.dtype)
        of_q, of_k, of_v = (
            x.to(q_HTD.dtype).unsqueeze(0) for x in (to.of_queries_HLD, of_kv_KTD[..., :size], of_kv_KTD[..., size:])
        )
        return of_q, of_k, of_v, of_sinks, None, None


def _tiles(layout: Layout, scoring: Scoring, device: torch.device):
    for block in merged_tiles(layout.tiles, scoring.window):
        yield from block.tiles(scoring.window, tile_size(device))


# ---- plain scores: each query's over its prompt and its own segment in one row, by one softmax


class PlainAttention(torch.autograd.Function):
    """The same without soft caps and sinks: probabilities in the dtype of the inputs, computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        scaling: float,
        window: int | None,
    ):
        ctx.save_for_backward(query, key, value)
        ctx.layout = layout
        ctx.scaling = scaling
        ctx.window = window
        q = query[0]
        k = key[0]
        v = value[0]
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for part in _sliced(layout, q):
            rows = _Rows(part, q, k, scaling, window)
            values_p, values_o = rows.of_keys(v)
            found = torch.matmul(rows.own_probs(), values_o)
            if values_p is not None:
                found += rows.to_prompt(torch.bmm(rows.prompt_probs(), values_p))
            rows.put(out, found)
        return out.transpose(0, 1).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        query, key, value = ctx.saved_tensors
        q = query[0]
        k = key[0]
        v = value[0]
        grad_HTE = grad[0].transpose(0, 1)
        of_q = torch.empty_like(q)
        of_k, of_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        for part in _sliced(ctx.layout, q):
            rows = _Rows(part, q, k, ctx.scaling, ctx.window, exact=True)
            values_p, values_o = rows.of_keys(v)
            upstream = rows.of_queries(grad_HTE).masked_fill(rows.padding, 0.0)
            flat = upstream.flatten(1, 2)
            of_probs = torch.matmul(upstream, values_o.transpose(-1, -2))
            if values_p is not None:
                to_prompt = rows.to_prompt(torch.bmm(flat, values_p.transpose(1, 2)))
                of_probs = torch.cat([to_prompt, of_probs], -1)
            of_scores = torch._softmax_backward_data(of_probs.float(), rows.probs, -1, torch.float32).to(q.dtype)
            rows.probs = rows.probs.to(q.dtype)
            of_prompt, of_own = rows.split(of_scores)
            found = torch.matmul(of_own, rows.own_keys)
            rows.add(of_k, torch.matmul(of_own.transpose(-1, -2), rows.queries) * ctx.scaling)
            rows.add(of_v, torch.matmul(rows.own_probs().transpose(-1, -2), upstream))
            if rows.prompt_keys is not None:
                of_prompt = of_prompt.flatten(1, 2)
                found += rows.to_prompt(torch.bmm(of_prompt, rows.prompt_keys))
                of_k[:, part.prompt] += torch.bmm(of_prompt.transpose(1, 2), rows.queries.flatten(1, 2)) * ctx.scaling
                of_v[:, part.prompt] += torch.bmm(rows.prompt_probs().transpose(1, 2), flat)
            rows.put(of_q, found * ctx.scaling)
        return (of_q.unsqueeze(0), of_k.to(k.dtype).unsqueeze(0), of_v.to(v.dtype).unsqueeze(0), None, None, None)


class _Rows:
    """Probabilities [K, N, P * L, prompt + L] of a part's queries, and what they are made of. `exact`: in fp32, as
    backward needs them: in 16 bits they do not sum to one, and a gradient that all keys share would not cancel.
    """

    def __init__(
        self, part: Part, q: torch.Tensor, k: torch.Tensor, scaling: float, window: int | None, exact: bool = False
    ):
        self.part = part
        self.kv_heads = k.shape[0]
        n, length = part.index_NL.shape
        self.per = q.shape[0] // self.kv_heads
        self.padding = ~part.real_NL.repeat(1, self.per).view(1, n, -1, 1)
        self.queries = self.of_queries(q)
        self.prompt_keys, self.own_keys = self.of_keys(k)
        bias = causal_bias(length, window, self.per, q.dtype, q.device)
        scores = torch.matmul(self.queries, self.own_keys.transpose(-1, -2)) * scaling + bias
        if self.prompt_keys is not None:
            to_prompt = torch.bmm(self.queries.flatten(1, 2), self.prompt_keys.transpose(1, 2)) * scaling
            to_prompt = self.to_prompt(to_prompt)
            if window is not None:
                to_prompt += _window_bias(self.prompt_keys.shape[1], length, window, self.per, q)
            scores = torch.cat([to_prompt, scores], -1)
        self.probs = torch.softmax(scores, -1, dtype=torch.float32 if exact else None)

    def of_queries(self, x_HTD: torch.Tensor) -> torch.Tensor:
        """[K, N, P * L, D] of the part's tokens."""
        n, length = self.part.index_NL.shape
        rows = x_HTD[:, self.part.index_NL.flatten()].view(self.kv_heads, self.per, n, length, -1)
        return rows.transpose(1, 2).reshape(self.kv_heads, n, self.per * length, -1)

    def of_keys(self, x_KTD: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """([K, prompt, D] of the prompt, [K, N, L, D] of the part's tokens)."""
        n, length = self.part.index_NL.shape
        own = x_KTD[:, self.part.index_NL.flatten()].view(self.kv_heads, n, length, -1)
        if self.part.prompt is None:
            return None, own
        return x_KTD[:, self.part.prompt], own

    def to_prompt(self, rows: torch.Tensor) -> torch.Tensor:
        """[K, N, P * L, ...] of [K, N * P * L, ...]."""
        return rows.unflatten(1, (len(self.part.index_NL), -1))

    def split(self, of_all: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(part of the prompt, part of the own segment)."""
        own = self.part.index_NL.shape[1]
        return of_all[..., :-own], of_all[..., -own:]

    def own_probs(self) -> torch.Tensor:
        return self.split(self.probs)[1]

    def prompt_probs(self) -> torch.Tensor:
        """[K, N * P * L, prompt]."""
        return self.split(self.probs)[0].flatten(1, 2)

    def put(self, out_HTD: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows of queries to their tokens."""
        n, length = self.part.index_NL.shape
        found = rows.view(self.kv_heads, n, self.per, length, -1).transpose(1, 2).reshape(len(out_HTD), n * length, -1)
        out_HTD[:, self.part.tokens] = found[:, self.part.real]

    def add(self, to_KTD: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds rows of keys to their tokens, each of which is in one part."""
        to_KTD[:, self.part.tokens] += rows.flatten(1, 2)[:, self.part.real].float()


def _window_bias(prompt: int, length: int, window: int, per: int, like: torch.Tensor) -> torch.Tensor:
    """[P * L, prompt]: -inf where a prompt's token is before the window of a segment's."""
    at = prompt + torch.arange(length, device=like.device)
    unseen = at[:, None] - torch.arange(prompt, device=like.device) >= window
    return (
        torch.zeros(unseen.shape, dtype=like.dtype, device=like.device)
        .masked_fill_(unseen, float("-inf"))
        .repeat(per, 1)
    )


def _sliced(layout: Layout, q: torch.Tensor) -> Iterator[Part]:
    """The layout's parts, as many segments at a time as have SCORES_BYTES of scores."""
    for part in layout.parts:
        length = part.index_NL.shape[1]
        keys = length + (part.prompt.stop - part.prompt.start if part.prompt else 0)
        yield from part.sliced(max(1, SCORES_BYTES // (len(q) * length * keys * q.itemsize)))


# ---- segments of similar length together


def _of_group(x_HTD: torch.Tensor, index_NL: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[N * K, P * L, D]: the rows of a group's segments, by the key that their heads share."""
    n, length = index_NL.shape
    rows = x_HTD[:, index_NL.flatten()].unflatten(1, (n, length))  # [H, N, L, D]
    return rows.unflatten(0, (kv_heads, -1)).permute(2, 0, 1, 3, 4).reshape(n * kv_heads, -1, x_HTD.shape[2])


def _scores(
    q: torch.Tensor, k: torch.Tensor, index_NL: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scores [N * K, P * L, L] in fp32, tanh(scores / softcap)). Padding repeats a segment's last token, which no
    query before it sees.
    """
    length = index_NL.shape[1]
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scoring.scaling)
    capped = None
    if scoring.softcap is not None:
        capped = torch.tanh(scores / scoring.softcap)
        scores = capped * scoring.softcap
    unseen = ~causal_mask(length, scoring.window, q.device)
    scores.unflatten(1, (-1, length)).masked_fill_(unseen, float("-inf"))
    return scores, capped


def _add_group(merged: Merged, q_HTD: torch.Tensor, kv_KTD: torch.Tensor, group: Part, scoring: Scoring) -> None:
    """Sets outputs and log-sum-exp of the group's tokens, which have seen nothing yet."""
    kv_heads = kv_KTD.shape[0]
    size = q_HTD.shape[2]
    index_NL = group.index_NL
    q = _of_group(q_HTD, index_NL, kv_heads)
    kv = _of_group(kv_KTD, index_NL, kv_heads)
    scores, _ = _scores(q, kv[..., :size], index_NL, scoring)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    out = torch.bmm(scores.sub_(lse).exp_().to(q.dtype), kv[..., size:])
    real = group.real
    tokens = group.tokens
    merged.out[:, tokens] = _to_heads(out, index_NL, kv_heads)[:, real].float()
    merged.lse[:, tokens] = _to_heads(lse, index_NL, kv_heads)[:, real, 0]


def _add_group_backward(
    to: Gradients, q_HTD: torch.Tensor, kv_KTD: torch.Tensor, of_kv_KTD: torch.Tensor, group: Part, scoring: Scoring
) -> None:
    kv_heads = kv_KTD.shape[0]
    size = q_HTD.shape[2]
    dtype = q_HTD.dtype
    index_NL = group.index_NL
    q, grad = (_of_group(x, index_NL, kv_heads) for x in (q_HTD, to.grad_HLE))
    kv = _of_group(kv_KTD, index_NL, kv_heads)
    lse, delta = (_of_group(x.unsqueeze(2), index_NL, kv_heads) for x in (to.lse_HL, to.delta_HL))
    real = group.real
    tokens = group.tokens
    padding = ~group.real_NL[:, None, None].expand(-1, kv_heads, len(q_HTD) // kv_heads, -1)
    grad.view(*padding.shape, -1).masked_fill_(padding.unsqueeze(-1), 0.0)
    delta.view(*padding.shape, 1).masked_fill_(padding.unsqueeze(-1), 0.0)
    scores, capped = _scores(q, kv[..., :size], index_NL, scoring)
    probs = scores.sub_(lse).exp_()
    of_probs = torch.bmm(grad, kv[..., size:].transpose(1, 2)).float()
    of_v = torch.bmm(probs.to(dtype).transpose(1, 2), grad)
    of_scores = probs.mul_(of_probs.sub_(delta)).mul_(scoring.scaling)
    if capped is not None:
        of_scores.mul_(1 - capped.square())
    of_scores = of_scores.to(dtype)
    of_q = torch.bmm(of_scores, kv[..., :size])
    of_k = torch.bmm(of_scores.transpose(1, 2), q)
    to.of_queries_HLD[:, tokens] += _to_heads(of_q, index_NL, kv_heads)[:, real].float()
    n, length = index_NL.shape
    of_kv = torch.cat([of_k, of_v], -1).view(n, kv_heads, length, -1).transpose(0, 1).reshape(kv_heads, n * length, -1)
    of_kv_KTD[:, tokens] += of_kv[:, real].float()


def _to_heads(rows: torch.Tensor, index_NL: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[H, N * L, ...] of [N * K, P * L, ...]."""
    n, length = index_NL.shape
    split = rows.view(n, kv_heads, -1, length, rows.shape[-1])
    return split.permute(1, 2, 0, 3, 4).reshape(-1, n * length, rows.shape[-1])
