import dataclasses
import json

import peft
import pytest
import torch
from safetensors.torch import save_file

import quantization_wrapper
from finetune.errors import PlanError
from finetune.settings import Settings
from finetune.torch_engine import adapters
from tests import tiny

SETTINGS = dataclasses.replace(Settings(), train_type="lora", precision="fp32", lora_rank=4, lora_alpha=8.0)
KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
IDS = torch.arange(3, 35).view(2, 16)


def adapted(architecture="llama", targets="all", model=None, **changes):
    """A tiny model with adapters whose B is not zero, so that they matter."""
    settings = dataclasses.replace(SETTINGS, **changes)
    model = (model or tiny.build(architecture)).requires_grad_(False)
    adapters.add(model, adapters.target_names(model, targets, settings.use_dora), settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapters.adapter_parameters(model).items():
            if name.endswith(("lora_B", "lora_embedding_A")):
                parameter.normal_(std=0.1, generator=generator)
            elif name.endswith("lora_magnitude_vector"):
                parameter.mul_(1.1)
    return model, settings


def write(model, settings, folder):
    folder.mkdir(exist_ok=True)
    tensors = adapters.to_disk(model, adapters.adapter_parameters(model), settings)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapters.peft_config(model, settings, "base")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "mixtral", "gpt_neox", "qwen3", "gpt_oss"])
def test_peft_reloads_our_adapter_to_the_same_logits(architecture, kind, tmp_path):
    model, settings = adapted(architecture, **KINDS[kind])
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.build(architecture), tmp_path / "a").eval()
    with torch.no_grad():
        # 1e-5: PEFT adds the adapter's product in another order.
        torch.testing.assert_close(
            theirs(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-5
        )
        assert (
            tiny.build(architecture)(input_ids=IDS).logits - model(input_ids=IDS).logits
        ).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_pefts(kind, dropout, tmp_path):
    model, settings = adapted("llama", lora_dropout=dropout, **KINDS[kind])
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.build("llama"), tmp_path / "a", is_trainable=True)
    if dropout == 0.0:
        model.train(), theirs.train()
    else:
        model.eval(), theirs.eval()  # masks are drawn otherwise; that dropout is off here is what is compared
    for m in (model, theirs):
        m(input_ids=IDS, labels=IDS).loss.backward()
    mine = {adapters.disk_name(n): p.grad for n, p in model.named_parameters() if "lora_" in n}
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            key = name.replace(".default", "").replace(
                "lora_magnitude_vector.weight", "lora_magnitude_vector"
            )
            torch.testing.assert_close(mine[key], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_averages_to_no_dropout(kind):
    model, _ = adapted("llama", lora_dropout=0.5, **KINDS[kind])
    layer = adapters.layers(model)["model.layers.0.self_attn.q_proj"]
    x = torch.randn(1, 64)
    layer.eval()
    expected = layer(x)
    layer.train()
    torch.manual_seed(0)
    mean = layer(x.expand(20000, 64)).mean(0)
    assert (mean - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_merged_is_the_adapter(architecture, kind):
    model, _ = adapted(architecture, **KINDS[kind])
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        adapters.merge(model)
        assert not adapters.layers(model)
        torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_a_quantized_base_is_one_on_its_dequantized_weights(kind):
    model, dense = tiny.build(), tiny.build()
    names = adapters.linear_names(model)
    quantization_wrapper.quantize_model(model, quantization_wrapper.config_for("nf4", None, 64, False), names)
    with torch.no_grad():
        for name in names:
            layer = model.get_submodule(name)
            dense.get_submodule(name).weight.copy_(layer.weight_of(layer.stored(), torch.float32))
    for m in (model, dense):
        adapted(model=m, **KINDS[kind])
        m(input_ids=IDS, labels=IDS).loss.backward()
    for (name, mine), (_, theirs) in zip(trainable(model), trainable(dense), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7, msg=name)


def trainable(model):
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_is_attached_to_the_same_logits(kind, tmp_path):
    model, settings = adapted("llama", **KINDS[kind])
    write(model, settings, tmp_path / "a")
    other = tiny.build()
    adapters.attach(other, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(other(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_an_adapter_that_peft_made_is_attached_too(tmp_path):
    theirs = peft.get_peft_model(
        tiny.build(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )
    theirs.save_pretrained(tmp_path)
    other = tiny.build()
    adapters.attach(other, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(other(input_ids=IDS).logits, theirs.eval()(input_ids=IDS).logits)


def test_an_adapter_this_version_does_not_read_is_refused(tmp_path):
    model, settings = adapted()
    write(model, settings, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": {"q_proj": 2}}))
    with pytest.raises(PlanError, match="rank_pattern"):
        adapters.attach(tiny.build(), tmp_path / "a")


def test_initial_adapters_do_not_depend_on_which_others_there_are_and_change_nothing():
    one, _ = adapted(targets="q_proj")
    every, _ = adapted(targets="all")
    name = "model.layers.1.self_attn.q_proj"
    assert torch.equal(adapters.layers(one)[name].lora_A, adapters.layers(every)[name].lora_A)
    for init in ("default", "gaussian"):
        model = tiny.build().requires_grad_(False)
        before = model(input_ids=IDS).logits
        settings = dataclasses.replace(SETTINGS, init_lora_weights=init)
        adapters.add(model, adapters.target_names(model, "all"), settings)
        assert torch.equal(model(input_ids=IDS).logits, before)


def test_targets_by_word_name_and_regex():
    model = tiny.build()
    assert len(adapters.target_names(model, "all")) == 14 and not any(
        "lm_head" in n for n in adapters.linear_names(model)
    )
    assert {n.rpartition(".")[2] for n in adapters.target_names(model, "default")} == {"q_proj", "v_proj"}
    assert {n.rpartition(".")[2] for n in adapters.target_names(tiny.build("gpt2"), "default")} == {"c_attn"}
    assert len(adapters.target_names(model, "q_proj, layers.0.mlp.up_proj")) == 3
    assert adapters.target_names(model, r".*layers\.1\..*(q|k)_proj") == [
        f"model.layers.1.self_attn.{x}_proj" for x in "qk"
    ]  # fmt: skip
    for wish in ("nope", r".*nope(", r".*nope.*"):
        with pytest.raises(PlanError, match="--lora_target_modules"):
            adapters.target_names(model, wish)


def test_routers_and_the_head_get_no_adapter_and_experts_get_one():
    for architecture in ("mixtral", "qwen3_moe", "gpt_oss"):
        model = tiny.build(architecture)
        linear = {n.rpartition(".")[2] for n in adapters.linear_names(model)}
        assert linear == {"q_proj", "k_proj", "v_proj", "o_proj"}
        leaves = {n.rpartition(".")[2] for n in adapters.target_names(model, "all")}
        assert leaves == linear | {"gate_up_proj", "down_proj"}


def test_a_frozen_layer_keeps_its_input_once_and_gets_no_weight_gradient():
    model, _ = adapted(targets="q_proj,k_proj,v_proj")
    layer = model.model.layers[0].self_attn
    saved = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    x = torch.randn(16, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = sum(p(x).sum() for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    assert saved.count(x.untyped_storage().data_ptr()) == 3  # three references, one storage: no copy
    out.backward()
    assert layer.q_proj.base.weight.grad is None


def test_frozen_weights_are_the_same_bits_after_training():
    model, _ = adapted()
    before = tiny.base_tensors_digest(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert tiny.base_tensors_digest(model) == before
