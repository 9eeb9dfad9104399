"""NF4 against bitsandbytes, on a device in few operations, and without what its kernel needs."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quantization_wrapper
from finetune.quantizers import bnb, mlx, nf4, packing
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
def test_the_librarys_kernel_gives_the_bits_of_plain_torch(dtype, columns, block, double_quant, device):
    weight, fmt = torch.randn(20, columns).to(device), nf4_format(block, double_quant)
    tensors = nf4.quantize(weight, fmt)
    plain = nf4.in_plain_torch(tensors["packed"], nf4._absmax(tensors), block)[:, :columns].to(dtype)
    assert torch.equal(nf4.dequantize(tensors, dtype, weight.shape, fmt), plain)
    rows = {name: tensor[3:9] for name, tensor in tensors.items()}
    assert torch.equal(nf4.dequantize(rows, dtype, weight.shape, fmt), plain[3:9])


class Launches(TorchDispatchMode):
    """Operations that a device would be given."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(r.alias_info is None for r in func._schema.returns):  # no view
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", [nf4, mlx])
def test_a_device_quantizes_a_large_weight_in_some_hundred_launches(method):
    """Blocks of a CPU cache's size would be 11,000."""
    weight = torch.empty(14336, 4096, dtype=torch.bfloat16, device="meta")
    with Launches() as launches:
        stored = method.quantize(weight, nf4_format())
    assert sum(tensor.nbytes for tensor in stored.values()) < 0.6 * weight.numel() and len(launches.names) < 250


@pytest.mark.parametrize("method", [nf4, mlx])
def test_a_plan_quantizes_experts_of_any_size_in_a_few_operations(method):
    """All experts of a layer of DeepSeek-V3: in a device's blocks 10,000 operations."""
    weight = torch.empty(256 * 4096, 7168, dtype=torch.bfloat16, device="meta")
    with packing.one_block_on_meta(), Launches() as launches:
        stored = method.quantize(weight, nf4_format())
    assert sum(tensor.nbytes for tensor in stored.values()) < 0.6 * weight.numel() and len(launches.names) < 60
    assert packing.block_of(weight.device) == packing.DEVICE_BLOCK


def test_dequantization_is_one_operation_on_a_device_and_to_a_compiler():
    weight = torch.randn(6, 100)
    for double in (False, True):
        fmt = nf4_format(double_quant=double)
        stored = nf4.quantize(weight, fmt)
        wanted = nf4.dequantize(stored, torch.bfloat16, weight.shape, fmt)
        arguments = stored["packed"], stored["absmax"], stored.get("absmax_range"), 100, 64, torch.bfloat16
        assert torch.equal(torch.ops.finetune.nf4_dequantize(*arguments), wanted)
        torch.library.opcheck(torch.ops.finetune.nf4_dequantize, arguments)
        with Launches() as launches:
            found = nf4.dequantize({n: t.to("meta") for n, t in stored.items()}, torch.bfloat16, weight.shape, fmt)
        assert found.shape == weight.shape and launches.names.count("finetune::nf4_dequantize") == 1
        assert set(launches.names) <= {"finetune::nf4_dequantize", "aten::_to_copy"}


FAKE_TRITON = """
import subprocess
def cdiv(a, b): return -(-a // b)
def next_power_of_2(n): return 1 << (n - 1).bit_length()
class jit:
    def __init__(self, function): pass
    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            raise subprocess.CalledProcessError(1, ["gcc", "main.c"])
        return launch
"""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (FAKE_TRITON, "CalledProcessError"),
        ("raise ImportError('libtriton.so: undefined symbol')", "undefined symbol"),
        (None, "installed"),
    ],
    ids=["no compiler", "another version", "no triton"],
)
def test_without_a_compiler_plain_torch_dequantizes_and_says_why(tmp_path, source, why):
    """Triton compiles when it first runs: it needs a C compiler and Python's headers, which not every image has."""
    if source is None and importlib.util.find_spec("triton"):
        pytest.skip("triton is installed")
    if source is not None:
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "__init__.py").write_text(source)
        (tmp_path / "triton" / "language.py").write_text("constexpr = int")
    code = (
        "import torch; from finetune.quantizers import nf4\n"
        "print(nf4.triton_error(torch.device('meta'), torch.bfloat16)); print(nf4.kernel_of('meta'))"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    error, kernel = done.stdout.splitlines()
    assert why in error and kernel == f"plain torch (our Triton kernel: {error})", done.stderr


def test_a_probe_says_in_which_types_a_quantizer_is_wrong(monkeypatch):
    found = quantization_wrapper.probe("nf4", 4, "cpu")
    assert found["error"] is None and found["failed"] == {}
    plain = nf4.dequantize

    def wrong_in_fp16(tensors, dtype, shape, fmt):
        return plain(tensors, dtype, shape, fmt) * (1.1 if dtype == torch.float16 else 1.0)

    monkeypatch.setattr(nf4, "dequantize", wrong_in_fp16)
    found = quantization_wrapper.probe("nf4", 4, "cpu")
    assert found["error"] is None and list(found["failed"]) == ["fp16"] and "product error" in found["failed"]["fp16"]
