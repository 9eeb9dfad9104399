"""Attention per document against attention under a mask."""

import pytest
import torch

from finetune.torch_engine import attention
from tests.support.engines import CPU


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [(1, 1), (7,), (300, 5, 17), (16, 16, 16), (2, 300, 290)])
def test_document_attention_is_plain_attention_in_each_document(lengths, window):
    torch.manual_seed(0)
    total, heads, kv, size = sum(lengths), 4, 2, 8
    q, k, v = (torch.randn(1, h, total, size, requires_grad=True) for h in (heads, kv, kv))
    positions = torch.cat([torch.arange(n) for n in lengths])
    documents = attention.documents_of(positions, CPU)
    out, _ = attention.document_attention(None, q, k, v, None, sliding_window=window, documents=documents)
    again, _ = attention.document_attention(None, q, k, v, None, sliding_window=window, position_ids=positions[None])
    assert torch.equal(out, again)
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (number[:, None] == number) & (positions[:, None] >= positions)
    if window:
        seen &= positions[:, None] - positions < window
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(wanted.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
