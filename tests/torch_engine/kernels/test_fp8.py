"""Products of frozen weights in fp8: near the exact ones by rows and by columns, whatever their scales are."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from finetune.torch_engine.kernels import e4m3, fp8
from finetune.torch_engine.kernels.fp8 import FrozenFp8, Switch, scaled

CPU = torch.device("cpu")
# Each factor is rounded to three bits beside the first, by 2^-4 of it at most; and so is their product by both, and by
# the rounding of a result in 16 bits. Relative to the lengths of row and column (Cauchy and Schwarz).
BOUND = 2 * 2**-4 + 2**-8 + 2**-8


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


def assert_near(found, rows, weight, bias=None):
    """Each number of rows W^T (+ b) within what rounding allows, whatever the sizes of row and column are."""
    rows, weight = rows.float(), weight.float()
    lengths = rows.norm(dim=1)[:, None] * weight.norm(dim=1)[None]
    bias = torch.zeros(len(weight)) if bias is None else bias.float()
    apart = (found.float() - (rows @ weight.t() + bias)).abs()
    assert (apart <= BOUND * lengths + bias.abs() * 2**-7).all(), (apart / lengths).max()


def test_this_device_multiplies_in_fp8():
    assert fp8.product_error(CPU) is None
    assert "RuntimeError" in fp8.product_error(torch.device("meta")) or "NotImplemented" in fp8.product_error(
        torch.device("meta")
    )


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_forward_and_backward_are_near_the_exact_products(size):
    """Rows, and rows and columns of the weight, differ in size by powers of ten: each has its own scale."""
    rows = random(5, 64) * torch.logspace(-3, 3, 5)[:, None].bfloat16()
    weight = random(48, 64) * torch.logspace(-3, 3, 48)[:, None].bfloat16() * size
    bias = random(48)
    found = FrozenFp8(Switch()).forward(scaled(rows), weight, bias)
    assert found.dtype == torch.bfloat16
    assert_near(found, rows, weight, bias)
    turned = random(48, 64) * torch.logspace(-3, 3, 64)[None].bfloat16() * size
    grad = random(5, 48)
    assert_near(FrozenFp8(Switch()).backward(grad, turned), grad, turned.t())


def test_rows_of_zeros_and_the_largest_numbers_stay_finite():
    rows = torch.zeros(3, 64).bfloat16()
    rows[1] = torch.finfo(torch.bfloat16).max / 4
    weight = torch.zeros(32, 64).bfloat16()
    weight[1, 2] = 1.0
    found = FrozenFp8(Switch()).forward(scaled(rows), weight, None)
    assert found.isfinite().all() and not found[0].any() and found[1, 1] > 1e37


def test_a_matrix_that_is_divided_in_parts_is_the_one_divided_at_once(monkeypatch):
    weight = random(70, 48)
    for turned in (weight, weight.t()):
        scale = e4m3.scale_of(turned)
        assert torch.equal(scale, turned.abs().amax(1, keepdim=True).float() / e4m3.LARGEST)
        at_once = (turned / scale).clamp(-e4m3.LARGEST, e4m3.LARGEST).to(e4m3.E4M3)
        for count in (1, 500, 2**18):
            monkeypatch.setattr(e4m3, "AT_ONCE", count)
            found = e4m3.rounded(turned, scale)
            assert found.is_contiguous() and torch.equal(found.float(), at_once.float())


def test_scales_are_those_of_the_first_use():
    """A frozen weight does not change: they are computed once."""
    product = FrozenFp8(Switch())
    weight = random(32, 64)
    product.forward(scaled(random(4, 64)), weight, None)
    product.backward(random(4, 32), weight)
    known = product.of_rows, product.of_columns
    product.forward(scaled(random(4, 64)), weight, None)
    product.backward(random(4, 32), weight)
    assert product.of_rows is known[0] and product.of_columns is known[1]
    assert product.of_rows.shape == (32, 1) and product.of_columns.shape == (64, 1)


IN_THE_INTERPRETER = """
import torch
from finetune.torch_engine.kernels import e4m3, fp8_triton

for rows, columns in ((5, 100), (64, 96), (3, 3000), (70, 64)):
    for dtype in (torch.float32, torch.float16):  # the interpreter cuts bf16 off
        x = torch.randn(rows, columns).to(dtype)
        x[0] = 0
        scale = e4m3.scale_of(x)
        values, scales = fp8_triton.scaled(x)
        assert torch.equal(scales, scale)
        turned = e4m3.scale_of(x.t())
        pairs = [(values, e4m3.rounded(x, scale)), (fp8_triton.divided(x, scale), e4m3.rounded(x, scale))]
        pairs.append((fp8_triton.divided(x.t(), turned), e4m3.rounded(x.t(), turned)))
        for found, wanted in pairs:
            assert found.is_contiguous() and found.shape == wanted.shape
            size = wanted.float().abs()
            near = (found.float() - wanted.float()).abs() <= size / 8 + e4m3.SMALLEST
            carried = torch.frexp(size).mantissa == 0.5  # the interpreter rounds up to a power of two, and halves it
            assert (near | carried).all() and near.float().mean() > 0.9
print("equal")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with CUDA builds of torch"
)
def test_the_kernels_round_as_torch_does_within_a_step():
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    environment = {**os.environ, **interpret}
    done = subprocess.run([sys.executable, "-c", IN_THE_INTERPRETER], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
