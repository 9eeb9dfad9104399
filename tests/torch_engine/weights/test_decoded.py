"""Folders stored as fp8, mxfp4, GPTQ, AWQ and compressed-tensors: decoded as their libraries do, and trained."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from finetune.errors import PlanError
from finetune.model_files.files import find_model
from finetune.torch_engine.weights import decoded as D
from finetune.torch_engine.weights.stream import load_dense
from tests.support import architectures, tiny
from tests.support.decoded_folders import METHODS, RNG, codes, stored, words
from train import fine_tune

# ---- formulas


def test_fp8_blocks_are_decoded_as_transformers_does():
    weight = torch.randn(256, 384, generator=RNG).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=RNG) + 0.5
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    assert torch.equal(D.scaled(weight, scale), theirs)


def test_a_last_block_that_is_cut_has_its_own_scale():
    weight, scale = torch.ones(130, 200), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = D.scaled(weight, scale, blocks=(128, 128))
    assert (found[:128, :128] == 1).all() and (found[:128, 128:] == 2).all()
    assert (found[128:, :128] == 3).all() and (found[128:, 128:] == 4).all()


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.rand(6), torch.rand(6, 1), torch.rand(6, 4)])
def test_scales_of_a_tensor_a_row_and_a_group(scale):
    weight = codes(7, 6, 64) - 64
    each = scale.reshape(1, 1) if scale.ndim == 0 else scale.reshape(6, -1)
    expected = weight.float() * each.repeat_interleave(64 // each.shape[1], 1)
    assert torch.equal(D.scaled(weight, scale), expected)


def test_mxfp4_is_decoded_as_transformers_does():
    blocks = codes(8, 3, 64, 2, 16).to(torch.uint8)
    scales = (codes(4, 3, 64, 2) + 120).to(torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(D.mxfp4(blocks, scales), theirs)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
def test_gptq(bits, older, in_order):
    rows, columns, group = 64, 32, 16
    q, scales = codes(bits, rows, columns), torch.rand(rows // group, columns, generator=RNG)
    zeros = codes(bits, rows // group, columns).clamp(1 if older else 0)
    g_idx = torch.arange(rows, dtype=torch.int32) // group
    if not in_order:
        g_idx = g_idx[torch.randperm(rows, generator=RNG)]
    expected = (scales[g_idx.long()] * (q - zeros[g_idx.long()])).t()
    stored = words(q, bits, 0), words(zeros - int(older), bits, 1), scales
    found = D.gptq(*stored, *(() if in_order else (g_idx,)), bits=bits, older=older)
    assert torch.equal(found, expected)


def test_awq():
    rows, columns, group = 32, 64, 16
    q, zeros = codes(4, rows, columns), codes(4, rows // group, columns)
    scales = torch.rand(rows // group, columns, generator=RNG)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ: the column that goes to each place of a word
    placed = [t.unflatten(1, (-1, 8))[..., order].flatten(1) for t in (q, zeros)]
    expected = (scales.repeat_interleave(group, 0) * (q - zeros.repeat_interleave(group, 0))).t()
    assert torch.equal(D.awq(words(placed[0], 4, 1), words(placed[1], 4, 1), scales), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_of_compressed_tensors(bits):
    q = codes(bits, 6, 64) - 2 ** (bits - 1)
    scale = torch.rand(6, 4, generator=RNG)
    packed = words(q + 2 ** (bits - 1), bits, 1)
    found = D.packed_rows(packed, scale, torch.tensor([6, 64]), bits=bits)
    assert torch.equal(found, q * scale.repeat_interleave(16, 1))


def test_packed_integers_are_those_of_the_library():
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    q = (codes(4, 6, 64) - 8).to(torch.int8)
    packed = library.pack_to_int32(q, 4)
    assert torch.equal(D.packed_rows(packed, torch.ones(6, 1), torch.tensor([6, 64]), bits=4), q.float())


def test_columns_ordered_by_activation_and_zero_points():
    q, zero = codes(4, 6, 64) - 8, codes(4, 6, 4) - 8
    scale, order = torch.rand(6, 4, generator=RNG), torch.randperm(64, generator=RNG) % 4
    expected = (q - zero[:, order]) * scale[:, order]
    packed = words(q + 8, 4, 1)
    stored_zero = words(torch.nn.functional.pad(zero + 8, (0, 0, 0, 2)), 4, 0)  # packed along rows
    found = D.packed_rows(packed, scale, torch.tensor([6, 64]), stored_zero, order.to(torch.int32))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("scale", "blocks"), [((60, 5), ()), ((3, 7), ()), ((2, 2), (64, 64)), ((0, 2), ())])
def test_scales_that_do_not_fit_are_refused(scale, blocks):
    with pytest.raises(ValueError, match="its scales are"):
        D.scaled(torch.ones(96, 256), torch.ones(*scale), blocks=blocks)


def test_blocks_of_any_declared_size():
    found = D.scaled(torch.ones(100, 300), torch.tensor([[1.0, 2.0, 3.0]]), blocks=(100, 110))
    assert (found[:, :110] == 1).all() and (found[:, 110:220] == 2).all() and (found[:, 220:] == 3).all()


# ---- folders


@pytest.mark.parametrize("method", METHODS)
def test_a_stored_folder_is_read_as_what_it_decodes_to(method, tmp_path):
    expected = stored(tmp_path / "model", method)
    model = load_dense(tmp_path / "model", torch.float32)
    found = dict(model.named_parameters())
    assert expected and all(torch.equal(found[n], t.to(D.DTYPE).float()) for n, t in expected.items())


def edited(change):
    """An edit of one stored tensor: change(tensor) is another, or None for none."""

    def edit(tensors, name):
        tensor = tensors.pop(name)
        found = change(tensor)
        if found is not None:
            tensors[name] = found.contiguous()

    return edit


def in_first(value):
    def change(tensor):
        flat = tensor.clone().flatten()
        flat[0] = value
        return flat.reshape(tensor.shape)

    return change


AT = "model.layers.1.mlp.down_proj"
EXPERTS = "model.layers.1.mlp.experts.down_proj"
LAST = "model.layers.1.mlp.down_proj.weight"
# What is done to a tensor of a stored folder: (method, tensor, change, what the line says of it).
ODD = [
    *(
        (m, f"{AT}.{part}", lambda t: None, f"{part} is missing")
        for m, part in (
            ("gptq", "qzeros"),
            ("gptq", "scales"),
            ("awq", "qzeros"),
            ("awq", "scales"),
            ("pack-quantized in groups", "weight_scale"),
            ("pack-quantized in groups", "weight_zero_point"),
            ("pack-quantized in groups", "weight_g_idx"),
            ("pack-quantized in groups", "weight_shape"),
            ("compressed-tensors", "weight_shape"),
            ("int-quantized", "weight_zero_point"),
        )
    ),
    ("mxfp4", f"{EXPERTS}_scales", lambda t: None, "_scales is missing"),
    *(
        (m, f"{AT}.{part}", lambda t: t[:-1], f"{part} is [")
        for m, part in (
            ("gptq", "qzeros"),
            ("gptq", "scales"),
            ("gptq", "g_idx"),
            ("awq", "qzeros"),
            ("awq", "scales"),
            ("pack-quantized in groups", "weight_scale"),
            ("pack-quantized in groups", "weight_zero_point"),
            ("pack-quantized in groups", "weight_g_idx"),
            ("compressed-tensors", "weight_scale"),
            ("int-quantized", "weight_scale"),
            ("int-quantized", "weight_zero_point"),
        )
    ),
    *(
        (m, f"{AT}.{part}", lambda t: t[: len(t) // 2], f"{part} is [")
        for m, part in (("compressed-tensors", "weight_scale"), ("int-quantized", "weight_scale"), ("gptq", "scales"))
    ),
    *(
        (m, f"{AT}.{part}", lambda t: t[:1, :1], f"{part} is [1, 1]")
        for m, part in (
            ("compressed-tensors", "weight_scale"),
            ("int-quantized", "weight_scale"),
            ("pack-quantized in groups", "weight_scale"),
            ("pack-quantized in groups", "weight_zero_point"),
        )
        if m != "compressed-tensors"
    ),
    ("pack-quantized in groups", f"{AT}.weight_scale", lambda t: t.t(), "weight_scale is ["),
    ("gptq", f"{AT}.scales", lambda t: t.t(), "scales is ["),
    ("gptq", f"{AT}.g_idx", lambda t: t[:1], "g_idx is [1]"),
    ("fp8", f"{LAST}_scale_inv", lambda t: t[:, :1].repeat(1, 2), "weight_scale_inv is ["),
    ("mxfp4", f"{EXPERTS}_scales", lambda t: t[:1], "_scales is ["),
    *(
        (m, f"{AT}.{part}", lambda t: t.to(torch.int32), f"{part} is I32, must be F32")
        for m, part in (
            ("gptq", "scales"),
            ("awq", "scales"),
            ("compressed-tensors", "weight_scale"),
            ("int-quantized", "weight_scale"),
            ("fp8", "weight_scale_inv"),
        )
    ),
    *(
        (m, f"{AT}.{part}", lambda t: t.to(torch.int16), f"{part} is I16, must be I32")
        for m, part in (
            ("gptq", "qweight"),
            ("gptq", "qzeros"),
            ("awq", "qweight"),
            ("compressed-tensors", "weight_packed"),
            ("pack-quantized in groups", "weight_zero_point"),
            ("gptq", "g_idx"),
        )
    ),
    ("fp8", LAST, lambda t: t.view(torch.uint8), "down_proj.weight is U8, must be F8_E4M3"),
    ("fp8", LAST, lambda t: t.view(torch.float8_e5m2), "down_proj.weight is F8_E5M2, must be F8_E4M3"),
    ("int-quantized", LAST, lambda t: t.view(torch.uint8), "down_proj.weight is U8, must be I8"),
    ("int-quantized", LAST, lambda t: t.view(torch.float8_e4m3fn), "down_proj.weight is F8_E4M3, must be I8"),
    ("mxfp4", f"{EXPERTS}_scales", lambda t: t.to(torch.int32), "_scales is I32, must be U8"),
    *(
        (m, f"{AT}.{part}", in_first(float(value)), f"{part} has numbers that are not finite")
        for m, part in (
            ("gptq", "scales"),
            ("awq", "scales"),
            ("fp8", "weight_scale_inv"),
            ("int-quantized", "weight_scale"),
            ("pack-quantized in groups", "weight_scale"),
        )
        for value in ("nan", "inf")
    ),
    ("fp8", LAST, in_first(float("nan")), "down_proj.weight has numbers that are not finite"),
    ("gptq", f"{AT}.g_idx", in_first(99), "names groups that its"),
    ("gptq", f"{AT}.g_idx", in_first(-1), "names groups that its"),
    ("pack-quantized in groups", f"{AT}.weight_g_idx", in_first(99), "names groups that its"),
    ("pack-quantized in groups", f"{AT}.weight_g_idx", in_first(-1), "names groups that its"),
    ("compressed-tensors", f"{AT}.weight_shape", in_first(5), "its weight_shape is [5,"),
]


@pytest.mark.parametrize("number", range(len(ODD)))
def test_a_stored_tensor_that_differs_from_what_config_json_announces_is_refused_by_name(number, tmp_path):
    method, name, change, fact = ODD[number]
    stored(tmp_path / "model", method)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    edited(change)(tensors, name)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(PlanError) as error:
        load_dense(tmp_path / "model", torch.float32)
    text = str(error.value)
    assert fact in text and "model.layers.1.mlp." in text and "\n" not in text, text


def test_columns_ordered_by_activation_need_their_order(tmp_path):
    """desc_act without g_idx; with one group only, there is no order to lose."""
    for size, refused in ((32, True), (-1, False)):
        folder = tmp_path / str(size)
        stored(folder, "gptq")
        tensors = load_file(folder / "model.safetensors")
        for name in [n for n in tensors if n.endswith("g_idx")]:
            del tensors[name]
            if size == -1:
                head = name.removesuffix(".g_idx")
                tensors |= {f"{head}.{n}": tensors[f"{head}.{n}"][:1].contiguous() for n in ("scales", "qzeros")}
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= {"desc_act": True, "group_size": size}
        (folder / "config.json").write_text(json.dumps(config))
        if refused:
            with pytest.raises(PlanError, match="g_idx is missing, and config.json announces it"):
                load_dense(folder, torch.float32)
        else:
            load_dense(folder, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("train_type", ["lora", "qlora", "full"])
@pytest.mark.parametrize("method", METHODS)
def test_a_stored_folder_trains(method, train_type, tmp_path, capsys):
    stored(tmp_path / "model", method)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, architectures.QUESTIONS)))
    flags = dict(model_name=str(tmp_path / "model"), dataset=str(tmp_path / "rows.jsonl"), train_type=train_type)
    state = fine_tune(**flags, max_steps=3, batch_size=4, lr=1e-3, output_dir=str(tmp_path / "out"))
    how = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]["quant_method"]
    assert state.step == 3 and f"weights stored as {how} are decoded to 16 bits" in capsys.readouterr().out
    if train_type == "full":
        assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq, at 3 bits"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"quant_method": "awq", "version": "gemv"}, "in the version 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": "4"}, "at '4' bits"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": ["x"]}, "config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 3}}},
            },
            "at 3 bits",
        ),
    ],
)
def test_what_is_not_decoded_is_refused_with_the_reason(how, said, tmp_path):
    tiny.build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=said):
        find_model(str(tmp_path))
