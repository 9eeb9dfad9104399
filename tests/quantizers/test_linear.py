import dataclasses

import pytest
import torch

import quantization_wrapper
from finetune.config import TrainConfig
from finetune.engine import Batch
from finetune.quantizers import bnb, mlx, nf4, packing
from finetune.quantizers.linear import Format, QuantizedLinear
from finetune.torch_engine.engine import TorchEngine
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.targets import linear_names
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
    quantized_linear,
    replace_linear_with_quantized,
    unsupported,
    weight_bytes,
)
from tests.support import tiny

# Every method, width, code book and double quantization there is; group 32 fits the tiny model's rows.
CASES = [
    (name, bits, book, double)
    for name, bits in pairs()
    for book in METHODS[name].quant_types[bits] or (None,)
    for double in ((False, True) if bits in METHODS[name].double_quant else (False,))
]
NAMES = [f"{n}-{b}-{book}{'-double' * d}" for n, b, book, d in CASES]
DEVICES = ["cpu"] + [name for name in ("cuda", "mps", "xpu") if getattr(torch, name).is_available()]


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
        # NF4's widest gap is 0.30 of a block's largest value (between its first two levels), so 0.16 bounds the rounding.
        assert (back - weight).abs().max() <= 0.16 * weight.abs().max()


def test_double_quantization_costs_little_more_error_and_fewer_bytes():
    weight = torch.randn(64, 1024)
    single, double = (nf4.quantize(weight, nf4_format(64, d)) for d in (False, True))
    error = [(nf4.dequantize(q, torch.float32, weight.shape, nf4_format()) - weight).norm() for q in (single, double)]
    assert error[1] < 1.02 * error[0]
    assert sum(t.nbytes for t in double.values()) < 0.95 * sum(t.nbytes for t in single.values())


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "bits", "book", "double"), CASES, ids=NAMES)
def test_every_method_is_its_reference_its_dense_layer_its_file_and_trains(name, bits, book, double, device, tmp_path):
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = config_for(name, bits, book, 32, double)
    weight = torch.randn(48, 128, device=device)
    layer = quantized_linear(weight, torch.randn(48, device=device), config)
    dense = layer.weight_of(layer.stored(), torch.float32)

    wanted = reference(name, bits, book, double, weight)
    if wanted is not None:  # the same codes and scales, and one multiplication and one addition in the same order
        assert torch.equal(dense, wanted)
    assert (dense - weight).norm() <= quantization_wrapper.WEIGHT_ERROR[bits] * weight.norm()
    assert sum(p.nbytes for p in layer.parameters()) - layer.bias.nbytes == weight_bytes(
        name, bits, 32, double, 48, 128
    )

    x = torch.randn(3, 7, 128, device=device, requires_grad=True)
    y = layer(x)
    expected = torch.nn.functional.linear(x, dense, layer.bias)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    (mine,), (theirs,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)  # one product in another order
    assert not any(p.requires_grad for p in layer.parameters())

    other = quantized_linear(torch.randn(48, 128, device=device), torch.zeros(48, device=device), config)
    save_file(layer.state_dict(), tmp_path / "q.safetensors")
    other.load_state_dict(load_file(tmp_path / "q.safetensors"))
    packed = [p for n, p in other.to(torch.bfloat16).named_parameters() if n != "bias"]
    assert all(not p.is_floating_point() for p in packed)  # integer bits are not touched by a dtype policy
    assert torch.equal(other.weight_of(other.stored(), torch.float32), dense)

    losses = twenty_steps(config, device)
    assert losses[-1] < 0.9 * losses[0] and all(map(torch.isfinite, torch.tensor(losses)))


def twenty_steps(config, device):
    """Losses of a tiny Llama with adapters on a base stored as `config` says, one batch again and again."""
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
    add_adapters(model, names, settings)
    engine = TorchEngine(model, settings, torch.device(device))
    engine.verify("auto")
    from finetune.data.collate import microbatches

    rows = tiny.dataset()
    batches = microbatches(rows, range(len(rows)), engine.layout, len(rows), 512, 0)
    assert isinstance(batches[0], Batch)
    return [(r := engine.train_step(batches, 1e-2)).nll / r.num_targets for _ in range(20)]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_affine_format_has_the_bits_of_mx_quantize(bits, group, dtype):
    import mlx.core as mx
    import numpy as np

    weight = torch.randn(64, 256).to(dtype)
    weight[0], weight[1], weight[2], weight[3] = 0, 1, weight[2].abs(), -weight[3].abs()
    weight[4, 5], weight[5], weight[6] = 1e4, 1e-9, weight[6].round()
    theirs = mx.array(weight.float().numpy()).astype(
        {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}[dtype]
    )
    packed, scales, biases = mx.quantize(theirs, group_size=group, bits=bits)
    fmt = Format(bits, group, "affine", False, dtype)
    ours = mlx.quantize(weight, fmt)
    assert np.array_equal(np.array(packed).view(np.int32), ours["packed"].view(torch.int32).numpy())
    for name, wanted in (("scales", scales), ("biases", biases)):
        found = packing.as_scales(ours[name], dtype).float().numpy()
        assert np.array_equal(found, np.array(wanted.astype(mx.float32)))
    back = mx.dequantize(packed, scales, biases, group_size=group, bits=bits)
    mine = mlx.dequantize(ours, dtype, weight.shape, fmt).float().numpy()
    assert np.array_equal(mine, np.array(back.astype(mx.float32)))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_come_back_from_their_bits(bits):
    codes = torch.randint(0, 2**bits, (5, 64), dtype=torch.uint8)
    packed = packing.pack(codes, bits)
    assert packed.shape == (5, 8 * bits) and torch.equal(packing.unpack(packed, bits), codes)


@pytest.mark.parametrize("case", ["hqq", "quanto", "mlx"])
def test_a_row_that_groups_do_not_fill_is_refused_with_the_layers_name(case):
    with pytest.raises(
        ValueError, match=f"q: group_size 64: does not divide a row of 100 columns, which {case} requires"
    ):
        quantize_model(torch.nn.ModuleDict({"q": torch.nn.Linear(100, 8)}), config_for(case))


@pytest.mark.parametrize("weight", [torch.zeros(4, 64), torch.ones(4, 64), torch.randn(1, 64)])
@pytest.mark.parametrize(("name", "bits"), pairs())
def test_flat_weights_and_single_rows_stay_finite(name, bits, weight):
    layer = quantized_linear(weight, None, config_for(name, bits))
    back = layer.weight_of(layer.stored(), torch.float32)
    assert back.isfinite().all() and (back - weight).abs().max() <= 0.5 * weight.abs().max()


def test_a_cached_layer_gives_the_same_numbers():
    layer = quantized_linear(torch.randn(16, 64), None, config_for("nf4"))
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


def test_a_layer_may_have_another_method_or_none():
    model = torch.nn.ModuleDict({n: torch.nn.Linear(64, 32) for n in ("a", "b", "c")})
    layers = {"b": {"method": QuantizationMethod.HQQ, "bits": 2}, "c": {"method": "none"}}
    quantize_model(model, QuantizationConfig(layer_configs=layers))
    assert model["a"].names == ("packed", "absmax") and model["b"].names == ("packed", "scale", "zero")
    assert model["b"].packed.shape == (32, 16) and isinstance(model["c"], torch.nn.Linear)


def test_products_run_in_the_configs_compute_dtype():
    weight, x = torch.randn(32, 64), torch.randn(4, 64)
    plain, low = (
        quantized_linear(weight, None, QuantizationConfig(compute_dtype=dtype)) for dtype in (None, torch.bfloat16)
    )
    assert plain(x).dtype == torch.float32
    assert torch.equal(low(x), torch.nn.functional.linear(x.bfloat16(), low.weight_of(low.stored(), torch.bfloat16)))


def test_configs_say_what_a_method_has():
    assert QuantizationConfig(method=QuantizationMethod.HQQ_4BIT, bits=4, compute_dtype=torch.float16).backend == "hqq"
    assert QuantizationConfig(method="bnb_nf4").method is QuantizationMethod.BNB_NF4
    assert [QuantizationConfig(method=m).bits for m in ("bnb_int8", "mlx_int8", "quanto_int2")] == [8, 8, 2]
    assert QuantizationConfig(method="bnb_nf4", block_size=128).group_size == 128
    with pytest.raises(ValueError, match="bits 5: hqq has 4, 8, 3, 2"):
        QuantizationConfig(method=QuantizationMethod.HQQ, bits=5)
    with pytest.raises(ValueError, match="group_size 24: mlx has powers of two from 32 to 128"):
        QuantizationConfig(method="mlx_int4", group_size=24)
    with pytest.raises(ValueError, match="double_quant true: not supported by hqq at 4 bits"):
        QuantizationConfig(method="hqq", double_quant=True)
    assert get_recommended_config("cpu", 4).method is QuantizationMethod.NF4
    assert get_recommended_config("mlx", 4).method is QuantizationMethod.MLX
    with pytest.raises(ValueError, match="bits 7"):
        get_recommended_config("cpu", 7)


def test_the_older_adapter_object_applies_its_config():
    adapter = create_quantization_adapter(QuantizationConfig(method="quanto_int8"))
    assert adapter.quantize_linear(torch.nn.Linear(64, 8)).packed.dtype == torch.int8
    assert isinstance(adapter.quantize_model(torch.nn.ModuleDict({"a": torch.nn.Linear(64, 8)}))["a"], QuantizedLinear)


def test_pairs_nobody_has_are_told_with_those_that_are():
    assert unsupported("nf4", 4, None, 64) is None
    assert "nf4 at 4 bits; bnb at 4/8 bits" in unsupported("quanto", 3, None, 64)


@pytest.mark.parametrize(("name", "bits"), pairs())
def test_every_pair_passes_its_probe_here(name, bits):
    found = probe(name, bits, "cpu")
    assert found["error"] is None and found["product_error"] < 1e-5 and found["slowdown"] > 0
    assert found["bits_per_weight"] == pytest.approx(
        weight_bytes(name, bits, 64, False, 1024, 1024) * 8 / 2**20, abs=1e-3
    )


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    missing = {**METHODS, "bnb": dataclasses.replace(METHODS["bnb"], package="no_such.package")}
    monkeypatch.setattr(quantization_wrapper, "METHODS", missing)
    assert probe("bnb", 4, "cpu") == {"error": "no_such.package is not installed: pip install bitsandbytes"}
