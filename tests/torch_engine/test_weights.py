"""Weights streamed from files: the same model as transformers', from any storage, with little memory beside it."""

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import quantization_wrapper
from finetune.config import TrainConfig
from finetune.errors import PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.load import load_model, load_trained
from finetune.torch_engine.lora.targets import linear_names
from finetune.torch_engine.weights import empty_model, load_dense, load_weights
from tests.support import tiny

CPU = torch.device("cpu")
QLORA = TrainConfig(
    train_type="qlora",
    precision="fp32",
    quantization_backend="nf4",
    quant_type="nf4",
    group_size=32,
    cache_dequantized="false",
)


def theirs_of(folder, dtype, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **options).eval()


def same_tensors(one, other):
    """Whether all weights and buffers, those that are never saved too, are equal bit for bit and type for type."""
    for mine, theirs in (
        (one.state_dict(), other.state_dict()),
        (dict(one.named_buffers()), dict(other.named_buffers())),
    ):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_streamed_model_is_transformers_own_bit_for_bit(architecture, dtype, tmp_path):
    """save_pretrained writes the experts of MoE models one by one, as published checkpoints have them."""
    tiny.build(architecture).save_pretrained(tmp_path, max_shard_size="50KB")
    ours, theirs = load_dense(tmp_path, dtype), theirs_of(tmp_path, dtype)
    same_tensors(ours, theirs)
    assert ours.config._attn_implementation == theirs.config._attn_implementation
    ids = torch.arange(3, 20)[None]
    assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama_tied", "gpt2", "qwen2"])
def test_a_base_streamed_to_4_bits_is_one_quantized_after_loading(architecture, source, tmp_path):
    tiny.build(architecture).to(source).save_pretrained(tmp_path)
    ours = load_model(tmp_path, QLORA, CPU)
    dense = theirs_of(tmp_path, torch.float32).requires_grad_(False)
    names = linear_names(dense)
    quantization_wrapper.quantize_model(dense, quantization_wrapper.config_for("nf4", group_size=32), names)
    for name in names:
        mine, theirs = ours.get_submodule(name).base, dense.get_submodule(name)
        assert all(torch.equal(a, b) for a, b in zip(mine.stored(), theirs.stored(), strict=True))
        assert (mine.bias is None) == (theirs.bias is None)
        assert mine.bias is None or torch.equal(mine.bias, theirs.bias)
    ids = torch.arange(3, 20)[None]
    assert torch.equal(ours(input_ids=ids).logits, dense(input_ids=ids).logits)


def test_any_number_of_workers_loads_the_same(tmp_path):
    tiny.build("qwen2").save_pretrained(tmp_path)
    states = []
    for workers in (1, 2, 7):
        model = empty_model(tmp_path, torch.float32)
        config = quantization_wrapper.config_for("hqq", group_size=32)
        quantized = {f"{n}.weight": config for n in linear_names(model)}
        load_weights(model, tmp_path, torch.float32, CPU, quantized, workers)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][k], s[k]) for s in states[1:] for k in states[0])


def test_models_built_in_several_threads_at_once_leave_torch_as_it_was(tmp_path):
    import threading

    tiny.build("llama").save_pretrained(tmp_path)
    register, built = torch.nn.Module.register_parameter, []
    threads = [threading.Thread(target=lambda: built.append(load_dense(tmp_path, torch.float32))) for _ in range(4)]
    for thread in threads:
        thread.start()
    beside = [torch.nn.Linear(2, 2) for _ in range(200)]  # made meanwhile, by another thread
    for thread in threads:
        thread.join()
    assert len(built) == 4 and torch.nn.Module.register_parameter is register
    assert not any(layer.weight.is_meta for layer in beside)


def edited(folder, change):
    """Rewrites model.safetensors of a folder after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_load_from_either_name(tied, tmp_path):
    model = tiny.build("llama_tied")
    model.save_pretrained(tmp_path)
    edited(tmp_path, lambda t: t.update({tied: t.pop("model.embed_tokens.weight")}))
    ours = load_dense(tmp_path, torch.float32)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert torch.equal(ours.lm_head.weight, model.lm_head.weight)


def test_missing_and_misshapen_weights_are_refused_and_extra_ones_told(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    edited(tmp_path, lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}))
    lines = []
    load_model(tmp_path, QLORA, CPU, say=lines.append)
    assert lines == [
        "  note: 1 tensors in its files are not part of the model, such as model.layers.9.mlp.up_proj.weight: ignored"
    ]
    edited(tmp_path, lambda t: t.update({name: t[name][:5].clone()}))
    with pytest.raises(PlanError, match=rf"{name} is \[5, 64\] in its files, \[96, 64\] by its config"):
        load_dense(tmp_path, torch.float32)
    edited(tmp_path, lambda t: t.pop(name))
    with pytest.raises(PlanError, match=f"lacks 1 weights that its config requires, such as {name}"):
        load_dense(tmp_path, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.int8, torch.float8_e4m3fn])
def test_a_tensor_that_is_no_weight_is_refused_by_its_type(dtype, tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    edited(tmp_path, lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(PlanError, match=f"{name} has dtype .* but no scales"):
        load_dense(tmp_path, torch.float32)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_told(tmp_path):
    tiny.build("llama_tied").save_pretrained(tmp_path)
    edited(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    lines = []
    load_model(tmp_path, QLORA, CPU, say=lines.append)
    assert lines == [
        "  note: lm_head.weight differs in its files from the weight that config.json ties it to: both are kept"
    ]


def test_a_tensor_in_two_files_is_refused(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, last = (sorted(set(index["weight_map"].values()))[i] for i in (0, -1))
    one, other = load_file(tmp_path / first), load_file(tmp_path / last)
    save_file(other | {next(iter(one)): torch.zeros(1)}, tmp_path / last)
    with pytest.raises(PlanError, match=f"is in {first} and in {last}"):
        load_dense(tmp_path, torch.float32)


def test_groups_that_do_not_fill_a_row_are_refused_with_the_flag(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    import dataclasses

    settings = dataclasses.replace(QLORA, quantization_backend="mlx", quant_type="affine", group_size=64)
    with pytest.raises(
        PlanError, match="--quantization_backend mlx: .*down_proj.weight: group_size 64: does not divide"
    ):
        load_model(tmp_path, settings, CPU)


# ---- folders stored quantized


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory, make_tokenizer):
    folder = tmp_path_factory.mktemp("stored") / "dense"
    tokenizer = make_tokenizer(folder, bos=False)
    tiny.build("llama", vocab_size=len(tokenizer)).to(torch.bfloat16).save_pretrained(folder)
    return folder


BNB = {
    "bnb nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bnb nf4 double": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "bnb fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb int8": dict(load_in_8bit=True),
}


def stored_folder(kind, dense_folder, folder):
    """The tiny model as another program stores it quantized: mlx-lm's convert, or transformers with bitsandbytes."""
    import shutil

    if kind.startswith("mlx"):
        from mlx_lm import convert

        bits = int(kind.split()[1])
        convert(str(dense_folder), mlx_path=str(folder), quantize=True, q_bits=bits, q_group_size=32)
        return folder
    theirs_of(
        dense_folder, torch.bfloat16, quantization_config=transformers.BitsAndBytesConfig(**BNB[kind])
    ).save_pretrained(folder)
    for file in dense_folder.glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("kind", [*BNB, "mlx 4", "mlx 3", "mlx 8"])
def test_a_folder_stored_quantized_is_trained_on_as_it_is(kind, dense_folder, rows_file, tmp_path):
    from finetune.model_files.files import find_model
    from train import fine_tune

    folder = stored_folder(kind, dense_folder, tmp_path / "stored")
    files = find_model(str(folder))
    assert files.stored["quantization_backend"] == kind.split()[0]
    model = load_model(
        folder, TrainConfig(train_type="qlora", precision="fp32", cache_dequantized="false", **files.stored), CPU
    )
    layer = model.model.layers[0].self_attn.q_proj.base
    assert isinstance(layer, QuantizedLinear)
    ours = layer.weight_of(layer.stored(), torch.float32)
    if kind.startswith("mlx"):
        import mlx.core as mx
        import numpy as np
        from mlx_lm import load

        q = load(str(folder))[0].model.layers[0].self_attn.q_proj
        found = mx.dequantize(q.weight, q.scales, q.biases, group_size=q.group_size, bits=q.bits)
        theirs = torch.from_numpy(np.array(found.astype(mx.float32)))
    else:
        q = theirs_of(folder, torch.float32).model.layers[0].self_attn.q_proj
        import bitsandbytes.functional as F

        state = getattr(q.weight, "quant_state", None)
        theirs = (
            F.dequantize_4bit(q.weight.data, state) if state else F.int8_vectorwise_dequant(q.weight.data, q.weight.SCB)
        )
        theirs = theirs.float()
    # bitsandbytes dequantizes to the type it was quantized from, bf16 here; ours to the type asked for
    assert (ours - theirs).abs().max() <= (0 if kind.startswith("mlx") else 2**-8) * theirs.abs().max()

    state = fine_tune(
        model_name=str(folder),
        dataset=str(rows_file),
        max_steps=3,
        precision="fp32",
        output_dir=str(tmp_path / "out"),
        lr=1e-3,
    )
    assert state.status == "finished" and state.loss > 0
    settled = json.loads((tmp_path / "out" / "run_plan.json").read_text())["settled"]
    assert (settled["train_type"], settled["quantization_backend"]) == ("qlora", kind.split()[0])

    import export

    export.main(["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")])
    merged = theirs_of(tmp_path / "merged", torch.float32)
    used = load_trained(tmp_path / "out", files, CPU, torch.float32)
    ids = torch.arange(3, 20)[None]
    # merged into weights of the config's type, bf16
    torch.testing.assert_close(merged(input_ids=ids).logits, used(input_ids=ids).logits, rtol=0, atol=0.02)


ATTENTION = "model.layers.0.self_attn.q_proj"
DAMAGED = {  # what is done to a tensor of a stored folder, and what is said
    ("bnb nf4", "weight.absmax", None): "weight.absmax is missing next to the weight",
    ("bnb nf4", "weight.quant_state.bitsandbytes__nf4", None): "bitsandbytes__nf4 is missing next to",
    ("bnb nf4 double", "weight.nested_absmax", None): "cannot be converted from its files",
    ("bnb nf4", "weight.absmax", 3): "it has 3 scales, but its shape",
    ("bnb nf4", "weight", 100): "its codes have 100 bytes, but its shape",
    ("bnb int8", "SCB", None): "has dtype I8 but no scales|SCB is missing next to",
    ("bnb int8", "SCB", 3): "it has 3 scales for 64 rows",
    ("mlx 4", "scales", None): "scales is missing next to the weight",
    ("mlx 4", "biases", None): "biases is missing next to the weight",
    ("mlx 4", "scales", 3): "its codes have 64 rows, its scales",
}


@pytest.mark.parametrize("case", DAMAGED, ids=[f"{k}-{p}-{n}" for k, p, n in DAMAGED])
def test_a_stored_folder_with_a_part_missing_or_cut_is_one_line(case, dense_folder, tmp_path):
    from finetune.model_files.files import find_model

    kind, part, rows = case
    folder, name = stored_folder(kind, dense_folder, tmp_path / "stored"), f"{ATTENTION}.{part}"
    edited(folder, lambda t: t.pop(name) if rows is None else t.update({name: t[name][:rows].clone()}))
    how = find_model(str(folder)).stored
    settings = TrainConfig(train_type="qlora", precision="fp32", cache_dequantized="false", **how)
    with pytest.raises(PlanError, match=DAMAGED[case]) as error:
        load_model(folder, settings, CPU)
    assert "\n" not in str(error.value) and str(error.value).endswith(("save the model again.", "its config.json."))


def test_a_config_that_claims_what_the_files_are_not_is_refused(dense_folder, tmp_path):
    import shutil

    from finetune.model_files.files import find_model

    folder = tmp_path / "claimed"
    shutil.copytree(dense_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for claim, said in (
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "but its files hold plain ones"),
        ({"bits": "4", "group_size": 64}, "has bits '4' and group_size 64; MLX's affine format has"),
        ({"bits": 4, "group_size": 0}, "has bits 4 and group_size 0; MLX's"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": claim}))
        with pytest.raises(PlanError, match=said):
            find_model(str(folder))


def test_blocks_of_another_size_than_stored_are_refused(dense_folder, rows_file, tmp_path):
    from train import fine_tune

    folder = stored_folder("bnb nf4", dense_folder, tmp_path / "stored")
    with pytest.raises(PlanError, match="--group_size 128: .* quantizing again would lose more"):
        fine_tune(model_name=str(folder), dataset=str(rows_file), group_size=128, dry_run=True)


def test_a_stored_base_is_not_expanded(dense_folder, tmp_path):
    import expand

    folder = stored_folder("bnb fp4", dense_folder, tmp_path / "stored")
    with pytest.raises(PlanError, match="is prequantized .bnb at 4 bits., but layers can be copied only unquantized"):
        expand.main(["--model_name", str(folder), "--output_dir", str(tmp_path / "out"), "--num_new_blocks", "1"])


def test_what_cannot_be_done_with_a_stored_base_is_told(dense_folder, rows_file, tmp_path):
    from train import fine_tune

    folder = stored_folder("bnb nf4", dense_folder, tmp_path / "stored")
    flags = dict(model_name=str(folder), dataset=str(rows_file), dry_run=True)
    with pytest.raises(PlanError, match="--train_type full: .* only adapters train"):
        fine_tune(**flags, train_type="full")
    with pytest.raises(PlanError, match="--quantization_backend hqq: .* quantizing again would lose more"):
        fine_tune(**flags, quantization_backend="hqq")
    with pytest.raises(PlanError, match="--init_lora_weights eva: starts from unquantized weights"):
        fine_tune(**flags, init_lora_weights="eva")
