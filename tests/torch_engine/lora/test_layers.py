"""Adapted layers: gradients against PEFT's, dropout, norms."""

import re

import peft
import pytest
import torch

import quantization_wrapper
from finetune.torch_engine.lora.layers import adapter_parameters, layers
from finetune.torch_engine.lora.peft_format import disk_name
from finetune.torch_engine.lora.targets import linear_names
from tests.support import tiny
from tests.support.adapters import IDS, KINDS, adapted, write
from tests.support.cells import each_alone
from tests.support.engines import engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_pefts(kind, dropout, tmp_path, device):
    model, settings = adapted("llama", lora_dropout=dropout, **KINDS[kind], device=device)
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.build("llama"), tmp_path / "a", is_trainable=True).to(device)
    if dropout == 0.0:
        model.train(), theirs.train()
    else:
        model.eval(), theirs.eval()  # PEFT draws other masks; compared is that dropout is off
    for m in (model, theirs):
        m(input_ids=IDS.to(device), labels=IDS.to(device)).loss.backward()
    mine = {disk_name(n): p.grad for n, p in model.named_parameters() if "lora_" in n}
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            key = name.replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
            torch.testing.assert_close(mine[key], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_averages_to_no_dropout(kind, device):
    model, _ = adapted("llama", lora_dropout=0.5, **KINDS[kind], device=device)
    layer = layers(model)["model.layers.0.self_attn.q_proj"]
    x = torch.randn(1, 64).to(device)
    layer.eval()
    expected = layer(x)
    layer.train()
    torch.manual_seed(0)
    mean = layer(x.expand(20000, 64)).mean(0)
    assert (mean - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_a_quantized_base_is_one_on_its_dequantized_weights(kind, device):
    model, dense = tiny.build().to(device), tiny.build().to(device)
    names = linear_names(model)
    quantization_wrapper.quantize_model(model, quantization_wrapper.config_for("nf4"), names)
    with torch.no_grad():
        for name in names:
            layer = model.get_submodule(name)
            dense.get_submodule(name).weight.copy_(layer.weight_of(layer.stored(), torch.float32))
    for m in (model, dense):
        adapted(model=m, **KINDS[kind], device=device)
        m(input_ids=IDS.to(device), labels=IDS.to(device)).loss.backward()
    for (name, mine), (_, theirs) in zip(trainable(model), trainable(dense), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7, msg=name)


def trainable(model):
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


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


def test_frozen_weights_are_the_same_bits_after_training(device):
    model, _ = adapted(device=device)
    before = tiny.base_tensors_digest(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model(input_ids=IDS.to(device), labels=IDS.to(device)).loss.backward()
        optimizer.step()
    assert tiny.base_tensors_digest(model) == before


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_embeddings_and_head_are_pefts(kind, tmp_path, device):
    model, settings = adapted("llama", "embed_tokens,lm_head", **KINDS[kind], device=device)
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.build("llama"), tmp_path / "a", is_trainable=True).to(device)
    for m in (model, theirs):
        m(input_ids=IDS.to(device), labels=IDS.to(device)).loss.backward()
    mine = {disk_name(n): p.grad for n, p in adapter_parameters(model).items()}
    compared = 0
    for name, parameter in theirs.named_parameters():
        key = re.sub(r"\.default(?=\.weight$|$)", "", name).replace("magnitude_vector.weight", "magnitude_vector")
        if key in mine:
            torch.testing.assert_close(mine[key], parameter.grad, rtol=1e-4, atol=1e-6)
            compared += 1
    assert compared == len(mine) == (6 if kind == "dora" else 4)


@pytest.mark.parametrize(("precision", "dora"), each_alone(["bf16_autocast", "fp16_autocast", "bf16"], [False, True]))
def test_dropout_runs_under_every_precision(plain_run, precision, dora):
    assert plain_run(precision=precision, lora_dropout=0.1, use_dora=dora, max_steps=2, train_type="qlora").step == 2


def test_dora_norms_come_from_what_is_stored_not_from_rounded_copies(device):
    built = engine(train_type="qlora", use_dora=True, device=device)
    layer = next(iter(layers(built.model).values()))
    before = layer.weight_norm()
    layer.base.cache(torch.bfloat16)
    layer.row_square_O = None
    assert torch.equal(layer.weight_norm(), before)
