"""Configs, probes and models quantized by name."""

import dataclasses

import pytest
import torch

import quantization_wrapper
from finetune.quantizers.linear import QuantizedLinear
from quantization_wrapper import (
    METHODS,
    QuantizationConfig,
    QuantizationMethod,
    config_for,
    create_quantization_adapter,
    get_recommended_config,
    pairs,
    probe,
    quantize_model,
    replace_linear_with_quantized,
    unsupported,
    weight_bytes,
)


@pytest.mark.parametrize("case", ["hqq", "quanto", "mlx"])
def test_a_row_that_groups_do_not_fill_is_refused_with_the_layers_name(case):
    with pytest.raises(
        ValueError, match=f"q: group_size 64: does not divide a row of 100 columns, which {case} requires"
    ):
        quantize_model(torch.nn.ModuleDict({"q": torch.nn.Linear(100, 8)}), config_for(case))


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


def test_a_layer_may_have_another_method_or_none():
    model = torch.nn.ModuleDict({n: torch.nn.Linear(64, 32) for n in ("a", "b", "c")})
    layers = {"b": {"method": QuantizationMethod.HQQ, "bits": 2}, "c": {"method": "none"}}
    quantize_model(model, QuantizationConfig(layer_configs=layers))
    assert model["a"].names == ("packed", "absmax") and model["b"].names == ("packed", "scale", "zero")
    assert model["b"].packed.shape == (32, 16) and isinstance(model["c"], torch.nn.Linear)


@pytest.mark.promise("Q_03")
def test_configs_say_what_a_method_has():
    assert QuantizationConfig(method=QuantizationMethod.HQQ_4BIT, bits=4, compute_dtype=torch.float16).backend == "hqq"
    assert QuantizationConfig(method="nf4", compute_dtype=torch.float16).compute_dtype is torch.float16
    assert QuantizationConfig(method="bnb_nf4").method is QuantizationMethod.BNB_NF4
    assert [QuantizationConfig(method=m).bits for m in ("bnb_int8", "mlx_int8", "quanto_int2")] == [8, 8, 2]
    assert QuantizationConfig(method="bnb_nf4", block_size=128).group_size == 128
    with pytest.raises(ValueError, match="bits 5: hqq has 4, 8, 3, 2"):
        QuantizationConfig(method=QuantizationMethod.HQQ, bits=5)
    with pytest.raises(ValueError, match="group_size 24: mlx supports powers of two from 32 to 128"):
        QuantizationConfig(method="mlx_int4", group_size=24)
    with pytest.raises(ValueError, match="double_quant true: not supported by hqq at 4 bits"):
        QuantizationConfig(method="hqq", double_quant=True)
    assert get_recommended_config("cpu", bits=4).method is QuantizationMethod.NF4
    assert get_recommended_config("mlx", bits=4).method is QuantizationMethod.MLX
    with pytest.raises(ValueError, match="bits 7"):
        get_recommended_config("cpu", bits=7)


def test_the_older_adapter_object_applies_its_config():
    adapter = create_quantization_adapter(QuantizationConfig(method="quanto_int8"))
    assert adapter.quantize_linear(torch.nn.Linear(64, 8)).packed.dtype == torch.int8
    assert isinstance(adapter.quantize_model(torch.nn.ModuleDict({"a": torch.nn.Linear(64, 8)}))["a"], QuantizedLinear)


@pytest.mark.promise("CLI_11", "CLI_12")
def test_unsupported_pairs_are_reported_with_those_that_exist():
    assert unsupported("nf4", 4, None, 64) is None
    assert "nf4 at 4 bits; bnb at 4/8 bits" in unsupported("quanto", 3, None, 64)


@pytest.mark.parametrize(("name", "bits"), pairs())
def test_every_pair_passes_its_probe_here(name, bits):
    found = probe(name, bits, "cpu")
    assert found["error"] is None and found["product_error"] < 1e-5 and found["slowdown"] > 0
    assert found["bits_per_weight"] == pytest.approx(
        weight_bytes(name, bits, 64, False, 1024, 1024) * 8 / 2**20, abs=1e-3
    )


@pytest.mark.promise("ENV_07")
def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    missing = {**METHODS, "bnb": dataclasses.replace(METHODS["bnb"], package="no_such.package")}
    monkeypatch.setattr(quantization_wrapper, "METHODS", missing)
    assert probe("bnb", 4, "cpu") == {"error": "no_such.package is not installed: pip install bitsandbytes"}
