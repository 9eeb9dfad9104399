"""Initial adapters: gaussian, eva, pissa, olora, loftq."""

import dataclasses
import json

import peft
import pytest
import torch
import transformers

import generate
import quantization_wrapper
from finetune.errors import PlanError
from finetune.parts.trains import Adapter
from finetune.torch_engine.lora.adapters import add_adapters, attach_adapter
from finetune.torch_engine.lora.init import residual_init
from finetune.torch_engine.lora.layers import adapter_parameters, layers
from finetune.torch_engine.lora.peft_format import to_disk
from finetune.torch_engine.lora.targets import linear_names, target_names
from tests.support import tiny
from tests.support.adapters import IDS, KINDS, SETTINGS, write
from tests.support.cells import slow
from tests.support.runs import WHOLE_STATE, copy_up_to, read_events, same_files, steps
from train import fine_tune


@pytest.mark.parametrize("init", [*slow("gaussian"), "eva"])
def test_other_starts_of_the_adapter_train_and_peft_reads_them(run, tiny_model, tmp_path, init):
    run(init_lora_weights=init, max_steps=3, train_type="qlora")
    first = read_events(tmp_path / "out", "step")[0]["loss"]
    run(max_steps=1, train_type="qlora", output_dir=str(tmp_path / "plain"), lora_dropout=0.0)
    assert first == pytest.approx(read_events(tmp_path / "plain", "step")[0]["loss"], rel=1e-5)  # B is zero
    peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "out")


def test_what_starts_from_what_quantization_loses_needs_quantization(run):
    with pytest.raises(PlanError, match="--init_lora_weights loftq: starts from what quantization loses"):
        run(init_lora_weights="loftq")


@pytest.mark.parametrize(
    ("init", "train_type"),
    [("pissa", "lora"), ("loftq", "qlora"), *slow(("olora", "qlora"), ("pissa", "qlora"), ("olora", "lora"))],
)
def test_starts_that_change_the_base_resume_bitwise_and_load_on_the_original(
    run, tiny_model, tmp_path, init, train_type
):
    flags = dict(
        init_lora_weights=init, train_type=train_type, precision="fp32", save_every=1, keep_last=9, max_steps=4
    )
    run(**flags)
    whole = tmp_path / "out"
    cut = copy_up_to(whole, 2, tmp_path / "cut")
    fine_tune(resume=str(cut))
    assert steps(cut) == steps(whole)
    same_files(cut / "checkpoints" / "step-4", whole / "checkpoints" / "step-4", WHOLE_STATE)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    theirs = peft.PeftModel.from_pretrained(model, whole).eval()
    ids = torch.arange(3, 19)[None]
    mine = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    attach_adapter(mine, whole)
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, mine(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    generate.main(["--checkpoint", str(whole), "--prompt", "What is 2?", "--max_new_tokens", "2", "--device", "cpu"])


def started(init, architecture="llama", quantize=None, targets="all", **changes):
    settings = dataclasses.replace(SETTINGS, init_lora_weights=init, **changes)
    model = tiny.build(architecture).requires_grad_(False)
    names = target_names(model, targets)
    starts = residual_init(model, names, Adapter.of(settings), quantize, None, torch.device("cpu"))
    if quantize:
        quantization_wrapper.quantize_model(model, quantize, linear_names(model))
    add_adapters(model, names, Adapter.of(settings), starts)
    return model, settings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_start_changes_no_logit_and_what_it_learns_is_plain_lora_on_the_original(init, architecture, kind, tmp_path):
    model, settings = started(init, architecture, **KINDS[kind])
    with torch.no_grad():
        # 1e-5: what is taken out of a weight comes back through two other products.
        original = tiny.build(architecture)(input_ids=IDS).logits
        torch.testing.assert_close(model(input_ids=IDS).logits, original, rtol=1e-5, atol=1e-5)
        generator = torch.Generator().manual_seed(0)
        for parameter in adapter_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        mine = model(input_ids=IDS).logits
        write(model, settings, tmp_path / "a")
        config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
        assert config["r"] == 8 and config["init_lora_weights"] is True
        theirs = peft.PeftModel.from_pretrained(tiny.build(architecture), tmp_path / "a").eval()
        # 1e-4: B A - B_0 A_0 is a difference of numbers larger than itself.
        torch.testing.assert_close(theirs(input_ids=IDS).logits, mine, rtol=1e-4, atol=1e-4)
        assert (mine - original).abs().max() > 1e-2


def test_starts_are_pefts():
    theirs = {}
    for init in ("pissa", "olora"):
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=init)
        theirs[init] = peft.get_peft_model(tiny.build(), config).base_model.model.model.layers[0].self_attn.q_proj
    for init, layer in theirs.items():
        model, _ = started(init, targets="q_proj")
        mine = layers(model)["model.layers.0.self_attn.q_proj"]
        one, other = (
            b @ a for a, b in ((mine.lora_A, mine.lora_B), (layer.lora_A.default.weight, layer.lora_B.default.weight))
        )
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)  # the SVD is a randomised one
        torch.testing.assert_close(mine.base.weight, layer.base_layer.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_on_a_quantized_base_the_start_is_nearer_to_the_original_than_quantization_alone(init):
    config = quantization_wrapper.config_for("nf4")
    model, _ = started(init, quantize=config, lora_rank=16)
    dense = tiny.build()
    for name, layer in layers(model).items():
        weight = dense.get_submodule(name).weight
        alone = quantization_wrapper.quantized_linear(weight.detach(), None, config)
        lost = (alone.weight_of(alone.stored(), torch.float32) - weight).norm()
        assert (layer.merged_weight() - weight).norm() < lost, name


def test_a_rank_above_the_weights_own_starts_the_rest_as_lora_does():
    for init in ("pissa", "olora"):
        model, _ = started(init, lora_rank=80, targets="k_proj")  # k_proj is [32, 64]
        layer = layers(model)["model.layers.0.self_attn.k_proj"]
        assert layer.lora_A.shape == (80, 64) and not layer.lora_B[:, 32:].any() and layer.lora_A[32:].any()
        with torch.no_grad():
            torch.testing.assert_close(
                model(input_ids=IDS).logits, tiny.build()(input_ids=IDS).logits, rtol=1e-5, atol=1e-5
            )


def test_a_start_from_a_tied_head_is_refused():
    with pytest.raises(PlanError, match="--init_lora_weights pissa: changes the weights of lm_head"):
        started("pissa", "llama_tied", targets="lm_head")
    model, _ = started("pissa", "llama", targets="lm_head,embed_tokens")
    assert to_disk(
        model, adapter_parameters(model), Adapter.of(dataclasses.replace(SETTINGS, init_lora_weights="pissa"))
    )
