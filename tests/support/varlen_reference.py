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


def attention(kernel=varlen_attn) -> Attention:
    """A plan's attention whose one kernel is this reference."""
    return Attention(AttentionPlan("auto", ("reference",)), {"reference": Kernel(lambda: kernel, DTYPES, on_cpu=True)})
