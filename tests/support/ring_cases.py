"""Ring attention on real ranks beside dense attention of the full row in one process."""

import torch

from finetune.distributed.env import RankEnv
from finetune.engine import Batch
from finetune.parts.attention import AttentionPlan
from finetune.parts.parallel_dims import ParallelDims
from finetune.torch_engine.attention import per_document
from finetune.torch_engine.attention.blocks import BlockKernel, tile_size
from finetune.torch_engine.attention.per_document import Scoring
from finetune.torch_engine.attention.varlen import Attention, Kernel
from finetune.torch_engine.parallel import context
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.simulated import Simulated

LENGTHS = (150, 37, 3, 61, 201, 44)  # documents of a row that pads to full chunks
HEADS, KV_HEADS, SIZE = 4, 2, 8
PLAIN = Scoring(SIZE**-0.5, 0.0, None, None, None)
SINKS = "sinks"
VARIANTS = {
    "plain": {},
    "window of 50": {"window": 50},
    "window of 1": {"window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks_H": SINKS},
    "window, softcap and sinks": {"window": 70, "softcap": 2.0, "sinks_H": SINKS},
}


def batch() -> Batch:
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).numpy()[None]
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).numpy()[None]
    return Batch(positions, positions, positions, documents, ())


def inputs(value_size: int = SIZE) -> list[torch.Tensor]:
    """Queries, keys, values, the gradient of outputs and sinks, of the full row."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, HEADS, sum(LENGTHS), SIZE), (1, KV_HEADS, sum(LENGTHS), SIZE)]
    shapes += [(1, KV_HEADS, sum(LENGTHS), value_size), (1, sum(LENGTHS), HEADS, value_size), (HEADS,)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def seen(window: int | None) -> torch.Tensor:
    """[T, T] bool: the keys that each position of the row sees."""
    documents, at = torch.from_numpy(batch().document_ids_BS[0]), torch.arange(sum(LENGTHS))
    ahead = at.unsqueeze(1) - at
    within = (documents.unsqueeze(1) == documents) & (ahead >= 0)
    return within if window is None else within & (ahead < window)


def dense(q, k, v, how) -> torch.Tensor:
    """Attention of the full row under one mask, in fp64: [1, T, H, E]."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * how.scaling
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores.masked_fill(~seen(how.window), float("-inf"))
    if how.sinks_H is not None:
        scores = torch.cat([scores, how.sinks_H.view(1, -1, 1, 1).expand(1, HEADS, sum(LENGTHS), 1)], -1)
    return (torch.softmax(scores, -1)[..., : k.shape[2]] @ v).transpose(1, 2)


def with_gradients(attend, tensors, how) -> list[torch.Tensor]:
    """Outputs, and the gradients of queries, keys, values and sinks."""
    q, k, v, grad, sinks = (x.detach().clone().requires_grad_() for x in tensors)
    how = how._replace(sinks_H=sinks if how.sinks_H is SINKS else None)
    out = attend(q, k, v, how)
    wanted = [q, k, v] + [sinks] * (how.sinks_H is not None)
    return [out, *torch.autograd.grad(out, wanted, grad.detach())]


def ring_over(rank: int, size: int, by_kernel: bool = False, value_size: int = SIZE) -> dict[str, float]:
    """{variant: largest difference from dense attention in fp64, relative to the largest number of its tensor}."""
    groups = ProcessGroups.of(RankEnv(rank, size), ParallelDims(cp=size), torch.device("cpu"))
    attention = reference_attention() if by_kernel else Attention()
    part, layout = context.shard_batch(batch(), groups, 0, attention)
    mine = torch.from_numpy(context.rank_token_indices(part.input_ids_BS.size * size, rank, size))
    real, total = mine < sum(LENGTHS), sum(LENGTHS)
    found, tensors = {}, inputs(value_size)
    for name, change in VARIANTS.items():
        how = PLAIN._replace(**change)
        if by_kernel and (how.softcap or how.sinks_H):
            continue
        expected = with_gradients(dense, [x.double() for x in tensors], how)
        here = [_at(x, mine, dim) for x, dim in zip(tensors[:4], (2, 2, 2, 1), strict=True)]
        own = with_gradients(lambda q, k, v, how: _attend(q, k, v, layout, how), [*here, tensors[4]], how)
        if how.sinks_H is SINKS:
            own[4] = sum(groups.all_gather_group(own[4], "cp"))
        off = 0.0
        for one, full, dim in zip(own, expected, (1, 2, 2, 2, None), strict=False):
            if dim is not None:
                one = one.index_select(dim, real.nonzero().flatten())
                full = full.index_select(dim, mine[mine < total])
            off = max(off, ((one - full).abs().max() / full.abs().max().clamp_min(1.0)).item())
        found[name] = off
    return found


def _attend(q, k, v, layout, how):
    """As a model's attention calls it."""
    options = dict(sliding_window=how.window, softcap=how.softcap, s_aux=how.sinks_H, scaling=how.scaling)
    return context.context_attention(None, q, k, v, None, documents=layout, **options)[0]


def _at(x: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
    """x at these positions of the row; padding repeats the last one."""
    return x.index_select(dim, indices.clamp(max=x.shape[dim] - 1))


# ---- a kernel of blocks, by products


def _mask(bounds, window) -> torch.Tensor:
    documents = [torch.repeat_interleave(torch.arange(len(b) - 1), b.diff().long()) for b in bounds]
    from_end = [b[1:].long()[d] - torch.arange(len(d)) for b, d in zip(bounds, documents, strict=True)]
    after = from_end[0].unsqueeze(1) - from_end[1]
    mask = documents[0].unsqueeze(1) == documents[1]
    for side, limit in zip((-after, after), window, strict=True):
        mask = mask & (side <= limit) if limit >= 0 else mask
    return mask


def _scores(q, k, bounds, window, scaling):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("qhd,khd->hqk", q, k) * scaling).masked_fill(~_mask(bounds, window), float("-inf"))


def reference_forward(q, k, v, bounds, longest, window, scaling):
    assert all(int(b.diff().max()) == n for b, n in zip(bounds, longest, strict=True))
    scores = _scores(q, k, bounds, window, scaling)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


def reference_backward(grad, q, k, v, out, lse, bounds, longest, window, scaling):
    per, (kv_heads, size) = q.shape[1] // k.shape[1], k.shape[1:]
    probs = (_scores(q, k, bounds, window, scaling) - lse.unsqueeze(2)).exp()
    of_probs = torch.einsum("qhd,khd->hqk", grad, v.repeat_interleave(per, 1))
    of_scores = probs * (of_probs - (grad * out).sum(2).t().unsqueeze(2)) * scaling
    of_q = torch.einsum("hqk,khd->qhd", of_scores, k.repeat_interleave(per, 1))
    of_k, of_v = torch.einsum("hqk,qhd->khd", of_scores, q), torch.einsum("hqk,qhd->khd", probs, grad)
    return of_q, *(x.view(len(k), kv_heads, per, size).sum(2) for x in (of_k, of_v))


def reference_kernel() -> BlockKernel:
    return BlockKernel(reference_forward, reference_backward)


def reference_attention() -> Attention:
    kernel = Kernel(reference_kernel, (torch.float32,), on_cpu=True, blocks=reference_kernel)
    return Attention(AttentionPlan("auto", ("reference",)), {"reference": kernel})


# ---- dropout


def dropout_over(rank: int, size: int) -> dict[str, float]:
    """{what: relative difference} of identities that hold if backward draws the masks of forward again."""
    groups = ProcessGroups.of(RankEnv(rank, size), ParallelDims(cp=size), torch.device("cpu"))
    part, layout = context.shard_batch(batch(), groups, 0, Attention())
    mine = torch.from_numpy(context.rank_token_indices(part.input_ids_BS.size * size, rank, size))
    q, k, v, grad, _ = (_at(x, mine, d) if x.ndim == 4 else x for x, d in zip(inputs(), (2, 2, 2, 1, 0), strict=True))
    how, step = PLAIN._replace(dropout=0.3), torch.randn(q.shape, generator=torch.Generator().manual_seed(rank)) * 1e-3

    def out_of(q, k, v):
        torch.manual_seed(7 + rank)
        options = dict(scaling=how.scaling, dropout=how.dropout)
        return context.context_attention(None, q, k, v, None, documents=layout, **options)[0]

    inputs_ = [x.clone().requires_grad_() for x in (q, k, v)]
    out = out_of(*inputs_)
    of_q, _, of_v = torch.autograd.grad(out, inputs_, grad)
    # Outputs are linear in values: their product with the gradient is that of values with theirs, over all ranks.
    sums = groups.sum_scalars([(out * grad).sum().item(), (v * of_v).sum().item()])
    moved = ((out_of(q + step, k, v) - out_of(q - step, k, v)).double() * grad).sum() / 2
    along = (of_q * step).double().sum()
    kept = (out_of(q, k, torch.ones_like(v)) - 1).abs().max()
    return {
        "values": abs(sums[0] - sums[1]) / abs(sums[0]),
        "queries": ((moved - along).abs() / along.abs()).item(),
        "drops": kept.item(),
    }


# ---- peaks


def bytes_of_attention(rank: int, size: int, length: int) -> dict[str, int]:
    """Of one document's attention over `size` ranks, forward and backward: `kept` between them, `peak` of both, beyond
    inputs and their gradients; `tile`: of these, what does not depend on the ranks.
    """
    groups = ProcessGroups.of(RankEnv(rank, size), ParallelDims(cp=size), torch.device("cpu"))
    heads, kv_heads, head_size = 8, 2, 64
    at = torch.arange(length).numpy()[None]
    row = Batch(at, at, at, at * 0, ())
    if size > 1:
        _, layout = context.shard_batch(row, groups, 0, Attention())
        attend = context.context_attention
    else:
        layout = per_document.documents_of(at, "cpu", Attention())
        attend = per_document.document_attention
    shapes = [(1, n, length // size, head_size) for n in (heads, kv_heads, kv_heads)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    grad = torch.randn(1, length // size, heads, head_size)
    with Simulated(torch.device("cpu")) as counted:
        out = attend(None, *tensors, None, documents=layout)[0]
        kept = counted.live
        out.backward(grad)
        peak = counted.peak
    own = sum(x.nbytes for x in tensors)
    return {"kept": kept, "peak": peak - own, "tile": 5 * 4 * heads * tile_size(torch.device("cpu")) ** 2}
