"""NF4 against bitsandbytes."""

import pytest
import torch

from finetune.quantizers import bnb, nf4
from finetune.quantizers.linear import Format
from quantization_wrapper import weight_bytes


def nf4_format(block=64, double_quant=False):
    return Format(4, block, "nf4", double_quant, torch.float32)


def one_outlier():
    weight = torch.randn(32, 128) * 1e-3
    weight[3, 70] = 100.0
    return weight


@pytest.mark.parametrize(
    "weight", [torch.randn(96, 192), torch.zeros(8, 64), one_outlier(), torch.randn(5, 64).round()]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_nf4_is_bitsandbytes_nf4_bit_for_bit(weight, dtype):
    ours, theirs = nf4.quantize(weight, nf4_format()), bnb.quantize(weight, nf4_format())
    assert torch.equal(ours["packed"], theirs["packed"]) and torch.equal(ours["absmax"], theirs["absmax"])
    assert torch.equal(
        nf4.dequantize(ours, torch.float32, weight.shape, nf4_format()),
        bnb.dequantize(theirs, torch.float32, weight.shape, nf4_format()),
    )


@pytest.mark.parametrize("seed", [1491, 2402, 2528])
def test_values_next_to_a_midpoint_get_bitsandbytes_code(seed):
    """A quotient in place of the product with the reciprocal gives one other code in each of these."""
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(nf4.quantize(weight, nf4_format())["packed"], bnb.quantize(weight, nf4_format())["packed"])


def test_the_lookup_table_is_bucketize_at_and_next_to_every_midpoint():
    levels = torch.tensor(nf4.LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(end)) for end in (2.0, -2.0)]
    values = torch.cat([torch.rand(100_000) * 2 - 1, middles, *beside, levels, torch.tensor([0.0, -0.0])])
    wanted = torch.bucketize(values, middles, out_int32=True).to(torch.uint8)
    assert torch.equal(nf4._nearest_levels(values, middles), wanted)


def test_rows_quantize_apart_as_they_do_together():
    weight = torch.randn(12, 200)
    for double in (False, True):
        fmt = nf4_format(64, double)
        whole = nf4.quantize(weight, fmt)
        parts = [nf4.quantize(part, fmt) for part in (weight[:5], weight[5:])]
        for name, tensor in whole.items():
            assert torch.equal(tensor, torch.cat([p[name] for p in parts]))


@pytest.mark.parametrize("columns", [64, 100, 33, 1, 576])
def test_any_width_keeps_its_shape(columns):
    weight = torch.randn(6, columns)
    for double in (False, True):
        fmt = nf4_format(64, double)
        stored = nf4.quantize(weight, fmt)
        assert sum(t.nbytes for t in stored.values()) == weight_bytes("nf4", 4, 64, double, *weight.shape)
        back = nf4.dequantize(stored, torch.float32, weight.shape, fmt)
        assert back.shape == weight.shape
        # NF4's widest gap, between its first two levels, is 0.30 of a block's largest value: 0.16 bounds rounding.
        assert (back - weight).abs().max() <= 0.16 * weight.abs().max()


def test_double_quantization_costs_little_more_error_and_fewer_bytes():
    weight = torch.randn(64, 1024)
    single, double = (nf4.quantize(weight, nf4_format(64, d)) for d in (False, True))
    error = [(nf4.dequantize(q, torch.float32, weight.shape, nf4_format()) - weight).norm() for q in (single, double)]
    assert error[1] < 1.02 * error[0]
    assert sum(t.nbytes for t in double.values()) < 0.95 * sum(t.nbytes for t in single.values())


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize(("columns", "block"), [(192, 64), (100, 32), (300, 64), (4096, 2048)])
@pytest.mark.parametrize("dtype", nf4.DTYPES, ids=str)
def test_the_librarys_kernel_gives_the_bits_of_plain_torch(dtype, columns, block, double_quant):
    weight, fmt = torch.randn(20, columns), nf4_format(block, double_quant)
    tensors = nf4.quantize(weight, fmt)
    plain = nf4.in_plain_torch(tensors["packed"], nf4._absmax(tensors), block)[:, :columns].to(dtype)
    assert torch.equal(nf4.dequantize(tensors, dtype, weight.shape, fmt), plain)
    rows = {name: tensor[3:9] for name, tensor in tensors.items()}
    assert torch.equal(nf4.dequantize(rows, dtype, weight.shape, fmt), plain[3:9])
