"""Models loaded for training: quantized while streamed, refused if they do not fit their config."""

import dataclasses
import sys

import pytest
import torch

import quantization_wrapper
from finetune.config import TrainConfig
from finetune.errors import PlanError
from finetune.estimate.memory import loading_bytes
from finetune.parts.parts import Parts
from finetune.system.threads import Pool
from finetune.torch_engine.lora.targets import linear_names
from finetune.torch_engine.weights.stream import load_dense
from tests.support import cases, tiny
from tests.support.build import load_model
from tests.support.engines import CPU
from tests.support.planned import SMALL
from tests.support.stored_quantized import edited, theirs_of


@pytest.mark.parametrize("flag", ["tp_degree", "pp_degree"])
def test_a_model_that_transformers_has_no_plan_for_is_refused_before_its_weights_are_read(tmp_path, flag):
    tiny.build("gpt2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    settings = dataclasses.replace(TrainConfig(), precision="fp32", train_type="lora", **{flag: 2})
    with pytest.raises(PlanError, match=f"--{flag} 2: transformers has no .* Use --dp_shards instead.$"):
        load_model(tmp_path, settings, cases.DEVICE)


QLORA = TrainConfig(
    train_type="qlora",
    precision="fp32",
    quantization_backend="nf4",
    quant_type="nf4",
    group_size=32,
    cache_dequantized="false",
)


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


def test_missing_and_misshapen_weights_are_refused_and_extra_ones_reported(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    edited(tmp_path, lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}))
    lines = []
    load_model(tmp_path, QLORA, CPU, say=lines.append)
    assert lines == [
        "  note: 1 tensors of layers past the last that config.json counts, such as model.layers.9.mlp.up_proj.weight: "
        "not trained; full folders that are saved keep them as they are"
    ]
    edited(tmp_path, lambda t: t.update({name: t[name][:5].clone()}))
    with pytest.raises(PlanError, match=rf"{name} is \[5, 64\] in its files, \[96, 64\] by its config"):
        load_dense(tmp_path, torch.float32)
    edited(tmp_path, lambda t: t.pop(name))
    with pytest.raises(PlanError, match=f"lacks 1 weights that its config requires, such as {name}"):
        load_dense(tmp_path, torch.float32)


def test_a_weight_under_two_names_is_refused(tmp_path):
    """transformers takes one of them, whichever comes last."""
    tiny.build("llama").save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    edited(tmp_path, lambda t: t.update({name.removeprefix("model."): torch.zeros_like(t[name])}))
    with pytest.raises(PlanError, match=rf"layers.0.mlp.up_proj.weight and .* are both the weight {name}. Remove one"):
        load_dense(tmp_path, torch.float32)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_reported(tmp_path):
    tiny.build("llama_tied").save_pretrained(tmp_path)
    edited(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    lines = []
    load_model(tmp_path, QLORA, CPU, say=lines.append)
    assert lines == [
        "  note: lm_head.weight differs in its files from the weight that config.json ties it to: both are kept"
    ]


def test_groups_that_do_not_fill_a_row_are_refused_with_the_flag(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    import dataclasses

    settings = dataclasses.replace(QLORA, quantization_backend="mlx", quant_type="affine", group_size=64)
    with pytest.raises(
        PlanError, match="--quantization_backend mlx: .*down_proj.weight: group_size 64: does not divide"
    ):
        load_model(tmp_path, settings, CPU)


def in_a_pool(frame) -> bool:
    """True if the thread of this innermost frame was started by a pool."""
    while frame is not None and frame.f_code is not Pool._work.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.promise("CLI_09")
def test_with_low_memory_one_weight_at_a_time_is_unquantized_as_predicted(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    used, predicted = [], []

    def count(frame, event, arg):
        if event == "return" and frame.f_code is Pool.submit.__code__:
            used[-1] = max(used[-1], sum(map(in_a_pool, sys._current_frames().values())))

    for low_memory in (False, True):
        settings = dataclasses.replace(QLORA, low_memory=low_memory, loading_workers=8)
        used.append(0)
        sys.setprofile(count)
        try:
            load_model(tmp_path, settings, CPU)
        finally:
            sys.setprofile(None)
        predicted.append(loading_bytes(Parts(settings), SMALL))
    assert used[0] > 1 and used[1] == 1
    widest = max(rows * columns for _, rows, columns in SMALL.linears)
    assert predicted[0] - predicted[1] >= 7 * 2 * widest  # 7 matrices less, of 16 bits at least
