"""Attention per document against attention under a mask."""

import pytest
import torch

from finetune.torch_engine.attention import per_document
from tests.support.devices import tolerance
from tests.support.engines import CPU
from tests.support.processor import use_exact_onednn


@pytest.mark.parametrize("matmul", ["blas", "onednn"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [(1, 1), (7,), (300, 5, 17), (16, 16, 16), (2, 300, 290), (600, 8, 30), (520, 520)])
def test_document_attention_is_plain_attention_in_each_document(lengths, window, matmul, device):
    """oneDNN's products serve documents of up to 512 tokens in fp32, SDPA the others, also in one row."""
    if matmul == "onednn":
        use_exact_onednn()
    torch.manual_seed(0)
    total, heads, kv, size = sum(lengths), 4, 2, 8
    q, k, v = (torch.randn(1, h, total, size).to(device).requires_grad_() for h in (heads, kv, kv))
    positions = torch.cat([torch.arange(n) for n in lengths])
    documents = per_document.documents_of(positions, device)
    out, _ = per_document.document_attention(None, q, k, v, None, sliding_window=window, documents=documents)
    again, _ = per_document.document_attention(
        None, q, k, v, None, sliding_window=window, position_ids=positions[None].to(device)
    )
    assert torch.equal(out, again)
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (number[:, None] == number) & (positions[:, None] >= positions)
    if window:
        seen &= positions[:, None] - positions < window
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen.to(device), enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=tolerance(device, 1e-6))
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(wanted.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=tolerance(device, 1e-5))


@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_by_products_in_16_bits_is_that_of_fp32_to_their_rounding(dtype, kv):
    """A sum of some 40 products of numbers near 1, each rounded to 8 or 11 bits."""
    torch.manual_seed(0)
    lengths, heads, size = (40, 3, 38), 4, 16
    q, k, v = (torch.randn(1, h, sum(lengths), size).to(dtype).requires_grad_() for h in (heads, kv, kv))
    positions = torch.cat([torch.arange(n) for n in lengths])
    results = []
    for x in ((q, k, v), tuple(t.detach().float().requires_grad_() for t in (q, k, v))):
        out, _ = per_document.document_attention(None, *x, None, documents=per_document.documents_of(positions, CPU))
        results.append([out, *torch.autograd.grad(out.float().sin().sum(), x)])
    assert per_document.dense_up_to(q) == 1024 and per_document.dense_up_to(q.float()) == 0
    allowed = 4 * torch.finfo(dtype).eps
    for a, b in zip(*results, strict=True):
        assert (a.float() - b).abs().max() <= allowed * max(1.0, b.abs().max())


def test_attention_by_products_keeps_queries_keys_and_values_and_no_probabilities():
    q, k, v = (torch.randn(1, 4, 300, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    kept = []
    documents = per_document.documents_of(torch.arange(300), CPU)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        per_document.document_attention(None, q, k, v, None, documents=documents)
    assert sum(kept) == 3 * 4 * 300 * 8


def test_values_of_another_head_size_are_attended_to(device):
    """As in DeepSeek's latent attention."""
    use_exact_onednn()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 30, size).to(device).requires_grad_() for size in (12, 12, 8))
    documents = per_document.documents_of(torch.cat([torch.arange(19), torch.arange(11)]), device)
    out, _ = per_document.document_attention(None, q, k, v, None, documents=documents)
    number = torch.repeat_interleave(torch.arange(2), torch.tensor([19, 11]))
    seen = (number[:, None] == number) & torch.ones(30, 30, dtype=torch.bool).tril()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen.to(device)).transpose(1, 2)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
