import dataclasses

import pytest
import torch

import quantization_wrapper
from finetune.quantizers import bnb, nf4
from finetune.quantizers.linear import QuantizedLinear
from quantization_wrapper import (
    METHODS,
    QuantizationConfig,
    QuantizationMethod,
    config_for,
    get_recommended_config,
    probe,
    probe_methods,
    quantize_model,
    quantized_linear,
    replace_linear_with_quantized,
    unsupported,
)

CASES = [
    (name, quant_type, double)
    for name, m in METHODS.items()
    for quant_type in m.quant_types
    for double in (False, True)
]


def one_outlier():
    weight = torch.randn(32, 128) * 1e-3
    weight[3, 70] = 100.0
    return weight


@pytest.mark.parametrize(
    "weight", [torch.randn(96, 192), torch.zeros(8, 64), one_outlier(), torch.randn(5, 64).round()]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_nf4_is_bitsandbytes_nf4_bit_for_bit(weight, dtype):
    ours, theirs = nf4.quantize(weight, 64, False), bnb.quantize(weight, "nf4", 64, False)
    assert torch.equal(ours["packed"], theirs["packed"]) and torch.equal(ours["absmax"], theirs["absmax"])
    columns = weight.shape[1]
    assert torch.equal(
        nf4.dequantize(ours, columns, 64, torch.float32),
        bnb.dequantize(theirs, weight.shape, "nf4", 64, torch.float32),
    )


def test_the_table_of_cells_is_bucketize_at_and_beside_every_middle():
    levels = torch.tensor(nf4.LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(end)) for end in (2.0, -2.0)]
    values = torch.cat([torch.rand(100_000) * 2 - 1, middles, *beside, levels, torch.tensor([0.0, -0.0])])
    wanted = torch.bucketize(values, middles, out_int32=True).to(torch.uint8)
    assert torch.equal(nf4._nearest_levels(values, middles), wanted)


def test_rows_quantize_apart_as_they_do_together():
    weight = torch.randn(12, 200)
    for double in (False, True):
        whole = nf4.quantize(weight, 64, double)
        parts = [nf4.quantize(part, 64, double) for part in (weight[:5], weight[5:])]
        for name, tensor in whole.items():
            assert torch.equal(tensor, torch.cat([p[name] for p in parts]))


@pytest.mark.parametrize("columns", [64, 100, 33, 1, 576])
def test_any_width_keeps_its_shape(columns):
    weight = torch.randn(6, columns)
    for double in (False, True):
        back = nf4.dequantize(nf4.quantize(weight, 64, double), columns, 64, torch.float32)
        assert back.shape == weight.shape
        # NF4's widest gap is 0.30 of a block's largest value (between its first two levels), so 0.16 bounds the rounding.
        assert (back - weight).abs().max() <= 0.16 * weight.abs().max()


def test_double_quantization_costs_little_more_error_and_fewer_bytes():
    weight = torch.randn(64, 1024)
    single, double = nf4.quantize(weight, 64, False), nf4.quantize(weight, 64, True)
    error = [(nf4.dequantize(q, 1024, 64, torch.float32) - weight).norm() for q in (single, double)]
    assert error[1] < 1.02 * error[0]
    assert sum(t.nbytes for t in double.values()) < 0.95 * sum(t.nbytes for t in single.values())


@pytest.mark.parametrize(("name", "quant_type", "double"), CASES)
@pytest.mark.parametrize("shape", [(48, 128), (48, 96)])
def test_a_quantized_layer_is_its_dequantized_one_forward_and_backward(name, quant_type, double, shape):
    config = config_for(name, quant_type, 64, double)
    layer = quantized_linear(torch.randn(shape), torch.randn(shape[0]), config)
    dense = layer.weight_of(layer.stored(), torch.float32)
    x = torch.randn(3, 7, shape[1], requires_grad=True)
    y = layer(x)
    expected = torch.nn.functional.linear(x, dense, layer.bias)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    (mine,), (theirs,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)  # one product in another order
    assert not any(p.requires_grad for p in layer.parameters())


@pytest.mark.parametrize(("name", "quant_type", "double"), CASES)
def test_a_quantized_layer_is_saved_loaded_and_cast_without_change(name, quant_type, double, tmp_path):
    from safetensors.torch import load_file, save_file

    config = config_for(name, quant_type, 64, double)
    layer, other = (quantized_linear(torch.randn(16, 64), None, config) for _ in range(2))
    before = layer.weight_of(layer.stored(), torch.float32)
    save_file(layer.state_dict(), tmp_path / "q.safetensors")
    other.load_state_dict(load_file(tmp_path / "q.safetensors"))
    other.to(torch.bfloat16)  # integer bits are not touched by a dtype policy
    assert torch.equal(other.weight_of(other.stored(), torch.float32), before)
    assert all(not p.is_floating_point() for p in other.parameters())


def test_a_cached_layer_gives_the_same_numbers():
    layer = quantized_linear(torch.randn(16, 64), None, config_for("nf4", None, 64, False))
    x = torch.randn(4, 64)
    before = layer(x)
    layer.cache(torch.float32)
    assert torch.equal(layer(x), before)


def test_a_model_is_quantized_by_name_and_keeps_what_it_skips():
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(64, 32), "lm_head": torch.nn.Linear(64, 8), "b": torch.nn.Linear(64, 4)}
    )
    quantize_model(model, QuantizationConfig(layer_configs={"b": {"group_size": 32}}))
    assert isinstance(model["a"], QuantizedLinear) and isinstance(model["lm_head"], torch.nn.Linear)
    assert model["b"].absmax.shape == (4, 2)
    again = replace_linear_with_quantized(
        torch.nn.ModuleDict({"a": torch.nn.Linear(64, 8)}), QuantizationConfig(), ["a"]
    )
    assert isinstance(again["a"], torch.nn.Linear)


def test_configs_say_which_bits_a_method_has():
    assert (
        QuantizationConfig(method=QuantizationMethod.HQQ_4BIT, bits=4, compute_dtype=torch.float16).backend
        == "hqq"
    )
    assert QuantizationConfig(method="bnb_nf4").method is QuantizationMethod.BNB_NF4
    with pytest.raises(ValueError, match="bits 5: hqq has 8, 4, 3, 2"):
        QuantizationConfig(method=QuantizationMethod.HQQ, bits=5)
    with pytest.raises(ValueError, match="is not in this version"):
        quantized_linear(torch.randn(4, 64), None, QuantizationConfig(method=QuantizationMethod.HQQ))
    assert get_recommended_config("cpu", 4).method is QuantizationMethod.NF4
    with pytest.raises(ValueError, match="bits 7"):
        get_recommended_config("cpu", 7)


def test_pairs_nobody_has_are_told_with_those_that_are():
    assert unsupported("nf4", 4, None, 64) is None
    assert "nf4 at 4 bits; bnb at 4 bits" in unsupported("quanto", 8, None, 64)


def test_every_method_passes_its_probe_here_and_a_missing_package_is_named(monkeypatch):
    assert probe_methods("cpu") == dict.fromkeys(METHODS)
    missing = {**METHODS, "bnb": dataclasses.replace(METHODS["bnb"], package="no_such_package")}
    monkeypatch.setattr(quantization_wrapper, "METHODS", missing)
    assert probe("bnb", "cpu") == "no_such_package is not installed: pip install bitsandbytes"
