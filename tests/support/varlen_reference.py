"""The signature of torch.nn.attention.varlen.varlen_attn on any device, under one mask over all tokens."""

import torch

from finetune.parts.attention import AttentionPlan
from finetune.torch_engine.attention.varlen import Attention, Kernel

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """Causal windows are aligned to the last query and the last key of a document, as FlashAttention's are."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_q.diff().max()) == max_q and int(cu_seq_k.diff().max()) == max_k
    assert enable_gqa or query.shape[1] == key.shape[1]
    documents = [torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff().long()) for cu in (cu_seq_q, cu_seq_k)]
    from_end = [cu[1:].long()[d] - torch.arange(len(d)) for cu, d in zip((cu_seq_q, cu_seq_k), documents, strict=True)]
    ahead = from_end[0][:, None] - from_end[1][None]  # key's position minus the query's
    seen = documents[0][:, None] == documents[1][None]
    for side, limit in zip((-ahead, ahead), window_size, strict=True):
        seen = seen & (side <= limit) if limit >= 0 else seen
    per_key = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(per_key, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, k) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(~seen, float("-inf")), -1), v)


def by_bounds(
    query, key, value, bounds_q, bounds_k, longest_q, longest_k, *, scale=None, window_size=(-1, 0), enable_gqa=False
):
    """The same of self-attention from tensors alone: bounds may be repeated, and none is read by the host."""
    at = torch.arange(len(query), device=query.device)
    document = torch.searchsorted(bounds_q[1:], at.to(bounds_q.dtype), right=True)
    behind = at[:, None] - at[None]
    seen = (document[:, None] == document[None]) & (behind >= 0)
    if window_size[0] >= 0:
        seen = seen & (behind <= window_size[0])
    per_key = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(per_key, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, k) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(~seen, float("-inf")), -1), v)


def attention(kernel=varlen_attn) -> Attention:
    """A plan's attention whose one kernel is this reference."""
    return Attention(AttentionPlan("auto", ("reference",)), {"reference": Kernel(lambda: kernel, DTYPES, on_cpu=True)})


# ---- as one operation of torch, as a kernel on a GPU is

LIBRARY = torch.library.Library("finetune_tests", "DEF")
ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor bounds, SymInt longest, float scale"
LIBRARY.define(f"varlen({ARGUMENTS}) -> Tensor")
LIBRARY.define(f"varlen_backward(Tensor grad, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)")


@torch.library.impl(LIBRARY, "varlen", "CompositeExplicitAutograd")
def _varlen(q, k, v, bounds, longest, scale):
    with torch.no_grad():
        return _attention(q, k, v, bounds, longest, scale).contiguous()


def _attention(q, k, v, bounds, longest, scale):
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=True)


@torch.library.impl(LIBRARY, "varlen_backward", "CompositeExplicitAutograd")
def _varlen_backward(grad, q, k, v, bounds, longest, scale):
    rows = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = _attention(*rows, bounds, longest, scale)
    return tuple(x.contiguous() for x in torch.autograd.grad(out, rows, grad))


@torch.library.register_fake("finetune_tests::varlen", lib=LIBRARY)
def _(q, k, v, bounds, longest, scale):
    return q.new_empty(q.shape)


@torch.library.register_fake("finetune_tests::varlen_backward", lib=LIBRARY)
def _(grad, q, k, v, bounds, longest, scale):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]


def _differentiate(ctx, grad):
    return *torch.ops.finetune_tests.varlen_backward(grad, *ctx.saved_tensors, *ctx.rest), None, None, None


torch.library.register_autograd("finetune_tests::varlen", _differentiate, setup_context=_keep, lib=LIBRARY)


def operation(q, k, v, bounds_q, bounds_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
    """The reference as one operation to whoever traces it; `longest_q` is a number, as kernels take it."""
    assert window_size == (-1, 0), window_size
    return torch.ops.finetune_tests.varlen(q, k, v, bounds_q, longest_q, scale)
