"""Quantized linear layers against each method's own library."""

import json

import pytest
import torch

import quantization_wrapper
from finetune.config import TrainConfig
from finetune.engine import Batch
from finetune.parts.trains import Adapter
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.targets import linear_names
from quantization_wrapper import (
    METHODS,
    QuantizationConfig,
    config_for,
    pairs,
    quantize_model,
    quantized_linear,
    weight_bytes,
)
from tests.support import tiny
from tests.support.build import torch_engine
from tests.support.commands import PYTHON, finish

# Every method, width, code book and double quantization there is; group 32 fits the tiny model's rows.
CASES = [
    (name, bits, book, double)
    for name, bits in pairs()
    for book in METHODS[name].quant_types[bits] or (None,)
    for double in ((False, True) if bits in METHODS[name].double_quant else (False,))
]
NAMES = [f"{n}-{b}-{book}{'-double' * d}" for n, b, book, d in CASES]


def reference(name, bits, book, double, weight_OI):
    """The dequantized weight by the method's own library, in fp32."""
    if name == "nf4" and double:
        return None  # a format of ours: its own test holds it to the single one
    if name in ("nf4", "bnb"):
        import bitsandbytes.functional as F

        if bits == 8:
            codes, stats, _ = F.int8_vectorwise_quant(weight_OI.half())
            return F.int8_vectorwise_dequant(codes, stats)
        packed, state = F.quantize_4bit(weight_OI, blocksize=32, quant_type=book, compress_statistics=double)
        return F.dequantize_4bit(packed, state)
    if name == "hqq":
        from hqq.core.quantize import Quantizer

        packed, meta = Quantizer.quantize(
            weight_OI, nbits=bits, group_size=32, axis=1, compute_dtype=torch.float32, device=str(weight_OI.device)
        )
        return Quantizer.dequantize(packed, meta | {"compute_dtype": torch.float32})
    if name == "quanto":
        from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qint2, qint4, qint8, quantize_weight

        if bits == 8:
            return quantize_weight(weight_OI, qint8, 0, AbsmaxOptimizer()(weight_OI, qint8, 0)).dequantize()
        kind = {4: qint4, 2: qint2}[bits]
        scale, shift = MaxOptimizer()(weight_OI, kind, 0, 32)
        theirs = quantize_weight(weight_OI, kind, 0, scale, shift, 32, optimized=False)
        # Its own codes, not packed: to unpack them it would compile an extension first, which takes minutes.
        theirs._data = torch.ops.quanto.quantize_affine(
            weight_OI, bits=bits, axis=0, group_size=32, scale=scale, shift=shift
        )
        return theirs.dequantize()
    import mlx.core as mx
    import numpy as np

    found = mx.quantize(mx.array(weight_OI.cpu().numpy()), group_size=32, bits=bits)
    return torch.from_numpy(np.array(mx.dequantize(*found, group_size=32, bits=bits))).to(weight_OI.device)


@pytest.mark.promise("CLI_12")
@pytest.mark.parametrize(("name", "bits", "book", "double"), CASES, ids=NAMES)
def test_every_method_is_its_reference_its_dense_layer_its_file_and_trains(name, bits, book, double, device, tmp_path):
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = config_for(name, bits, book, 32, double)
    weight = torch.randn(48, 128).to(device)
    layer = quantized_linear(weight, torch.randn(48).to(device), config)
    dense = layer.weight_of(layer.stored(), torch.float32)

    wanted = reference(name, bits, book, double, weight)
    if wanted is not None:  # the same codes and scales, and one multiplication and one addition in the same order
        assert torch.equal(dense, wanted)
    assert (dense - weight).norm() <= quantization_wrapper.WEIGHT_ERROR[bits] * weight.norm()
    assert sum(p.nbytes for p in layer.parameters()) - layer.bias.nbytes == weight_bytes(
        name, bits, 32, double, 48, 128
    )

    x = torch.randn(3, 7, 128).to(device).requires_grad_()
    y = layer(x)
    expected = torch.nn.functional.linear(x, dense, layer.bias)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    (mine,), (theirs,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)  # one product in another order
    assert not any(p.requires_grad for p in layer.parameters())

    other = quantized_linear(torch.randn(48, 128).to(device), torch.zeros(48).to(device), config)
    save_file(layer.state_dict(), tmp_path / "q.safetensors")
    other.load_state_dict(load_file(tmp_path / "q.safetensors"))
    packed = [p for n, p in other.to(torch.bfloat16).named_parameters() if n != "bias"]
    assert all(not p.is_floating_point() for p in packed)  # integer bits are not touched by a dtype policy
    assert torch.equal(other.weight_of(other.stored(), torch.float32), dense)

    losses = twenty_steps(config, device)
    assert losses[-1] < 0.9 * losses[0] and all(map(torch.isfinite, torch.tensor(losses)))


@pytest.mark.promise("CLI_09")
@pytest.mark.parametrize(
    ("name", "bits", "book", "double"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0] == "bnb" and case[1] == 4 else ()) for case in CASES],
    ids=NAMES,
)
def test_a_matrix_quantized_some_rows_at_a_time_is_its_reference_bit_for_bit(name, bits, book, double):
    """Of several blocks each; hqq's solver and the mean of bnb's double quantization are over the full matrix."""
    torch.manual_seed(0)
    shapes = [(900, 640)] + ([(301, 1001)] if name == "bnb" else [])  # the second's blocks cross its rows
    for shape in shapes:
        weight = torch.randn(shape) * 0.02
        weight[:3], weight[5, :32] = 0.0, 0.01
        layer = quantized_linear(weight, None, config_for(name, bits, book, 32, double))
        wanted = reference(name, bits, book, double, weight)
        if wanted is not None:
            assert torch.equal(layer.weight_of(layer.stored(), torch.float32), wanted), shape


@pytest.mark.promise("CLI_09")
@pytest.mark.slow
def test_quantizing_a_matrix_takes_its_result_and_a_few_blocks():
    """Bytes above what was there before. 16 MiB: a block's temporaries of up to 20 bytes per weight, and freed heap."""
    argv = [*PYTHON, "-m", "tests.support.quantizing_peaks"]
    peaks = json.loads(finish(argv).stdout.splitlines()[-1])
    assert peaks.keys() == {f"{name}/{bits}" for name, bits in pairs()}
    for pair, (peak, stored, weights) in peaks.items():
        solver = METHODS[pair.partition("/")[0]].solver_bytes * weights
        assert peak <= stored + solver + 16 * 2**20, (pair, peak / 2**20, stored / 2**20)


def twenty_steps(config, device):
    """Losses of a tiny Llama with adapters on a base stored as `config` says, on one batch."""
    model = tiny.build("llama").requires_grad_(False)
    names = linear_names(model)
    quantize_model(model, config, names, device)
    model.to(device)
    settings = TrainConfig(
        precision="fp32",
        quantization_backend=config.backend,
        use_gradient_checkpointing="false",
        lr=1e-2,
        cache_dequantized="false",
        microbatch_tokens=512,
    )
    add_adapters(model, names, Adapter.of(settings))
    engine = torch_engine(model, settings, torch.device(device))
    engine.verify("auto")
    from finetune.data.collate import microbatches

    rows = tiny.dataset()
    batches = microbatches(rows, range(len(rows)), engine.layout, len(rows), 512, 0)
    assert isinstance(batches[0], Batch)
    return [(r := engine.train_step(batches, 1e-2)).nll / r.num_targets for _ in range(20)]


@pytest.mark.parametrize("weight", [torch.zeros(4, 64), torch.ones(4, 64), torch.randn(1, 64)])
@pytest.mark.parametrize(("name", "bits"), pairs())
def test_flat_weights_and_single_rows_stay_finite(name, bits, weight, device):
    layer = quantized_linear(weight.to(device), None, config_for(name, bits))
    back = layer.weight_of(layer.stored(), torch.float32)
    assert back.isfinite().all() and (back.cpu() - weight).abs().max() <= 0.5 * weight.abs().max()


def test_a_cached_layer_gives_the_same_numbers(device):
    layer = quantized_linear(torch.randn(16, 64).to(device), None, config_for("nf4"))
    x = torch.randn(4, 64).to(device)
    before = layer(x)
    layer.cache(torch.float32)
    assert torch.equal(layer(x), before)


def test_products_run_in_the_configs_compute_dtype(device):
    weight, x = torch.randn(32, 64).to(device), torch.randn(4, 64).to(device)
    plain, low = (
        quantized_linear(weight, None, QuantizationConfig(compute_dtype=dtype)) for dtype in (None, torch.bfloat16)
    )
    assert plain(x).dtype == torch.float32
    assert torch.equal(low(x), torch.nn.functional.linear(x.bfloat16(), low.weight_of(low.stored(), torch.bfloat16)))
