import dataclasses
import json
import re

import peft
import pytest
import torch
from safetensors.torch import save_file

import quantization_wrapper
from finetune.config import TrainConfig
from finetune.data.collate import microbatches
from finetune.errors import PlanError
from finetune.torch_engine.engine import TorchEngine
from finetune.torch_engine.lora import factors
from finetune.torch_engine.lora.adapters import add_adapters, attach_adapter, merge_adapters
from finetune.torch_engine.lora.init import residual_init
from finetune.torch_engine.lora.layers import adapter_parameters, layers
from finetune.torch_engine.lora.peft_format import disk_name, peft_config, to_disk
from finetune.torch_engine.lora.targets import linear_names, target_names
from finetune.torch_engine.save import write_model_folder
from finetune.torch_engine.weights import load_dense
from tests.support import tiny

SETTINGS = dataclasses.replace(TrainConfig(), train_type="lora", precision="fp32", lora_rank=4, lora_alpha=8.0)
KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
IDS = torch.arange(3, 35).view(2, 16)


def adapted(architecture="llama", targets="all", model=None, **changes):
    """A tiny model with adapters whose B is not zero, so that they matter."""
    settings = dataclasses.replace(SETTINGS, **changes)
    model = (model or tiny.build(architecture)).requires_grad_(False)
    add_adapters(model, target_names(model, targets, settings.use_dora), settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if name.endswith(("lora_B", "lora_embedding_A")):
                parameter.normal_(std=0.1, generator=generator)
            elif name.endswith("lora_magnitude_vector"):
                parameter.mul_(1.1)
    return model, settings


def write(model, settings, folder):
    folder.mkdir(exist_ok=True)
    tensors = to_disk(model, adapter_parameters(model), settings)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(model, settings, "base")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "mixtral", "gpt_neox", "qwen3", "gpt_oss"])
def test_peft_reloads_our_adapter_to_the_same_logits(architecture, kind, tmp_path):
    model, settings = adapted(architecture, **KINDS[kind])
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.build(architecture), tmp_path / "a").eval()
    with torch.no_grad():
        # 1e-5: PEFT adds the adapter's product in another order.
        torch.testing.assert_close(theirs(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
        assert (tiny.build(architecture)(input_ids=IDS).logits - model(input_ids=IDS).logits).abs().max() > 1e-3


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
    mine = {disk_name(n): p.grad for n, p in model.named_parameters() if "lora_" in n}
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            key = name.replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
            torch.testing.assert_close(mine[key], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_averages_to_no_dropout(kind):
    model, _ = adapted("llama", lora_dropout=0.5, **KINDS[kind])
    layer = layers(model)["model.layers.0.self_attn.q_proj"]
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
        merge_adapters(model)
        assert not layers(model)
        torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_a_quantized_base_is_one_on_its_dequantized_weights(kind):
    model, dense = tiny.build(), tiny.build()
    names = linear_names(model)
    quantization_wrapper.quantize_model(model, quantization_wrapper.config_for("nf4"), names)
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
    attach_adapter(other, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(other(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_an_adapter_that_peft_made_is_attached_too(tmp_path):
    theirs = peft.get_peft_model(tiny.build(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    theirs.save_pretrained(tmp_path)
    other = tiny.build()
    attach_adapter(other, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(other(input_ids=IDS).logits, theirs.eval()(input_ids=IDS).logits)


def test_an_adapter_this_version_does_not_read_is_refused(tmp_path):
    model, settings = adapted()
    write(model, settings, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": {"q_proj": 2}}))
    with pytest.raises(PlanError, match="rank_pattern"):
        attach_adapter(tiny.build(), tmp_path / "a")


def test_initial_adapters_do_not_depend_on_which_others_there_are_and_change_nothing():
    one, _ = adapted(targets="q_proj")
    every, _ = adapted(targets="all")
    name = "model.layers.1.self_attn.q_proj"
    assert torch.equal(layers(one)[name].lora_A, layers(every)[name].lora_A)
    for init in ("default", "gaussian"):
        model = tiny.build().requires_grad_(False)
        before = model(input_ids=IDS).logits
        settings = dataclasses.replace(SETTINGS, init_lora_weights=init)
        add_adapters(model, target_names(model, "all"), settings)
        assert torch.equal(model(input_ids=IDS).logits, before)


def test_targets_by_word_name_and_regex():
    model = tiny.build()
    assert len(target_names(model, "all")) == 14 and not any("lm_head" in n for n in linear_names(model))
    assert {n.rpartition(".")[2] for n in target_names(model, "default")} == {"q_proj", "v_proj"}
    assert {n.rpartition(".")[2] for n in target_names(tiny.build("gpt2"), "default")} == {"c_attn"}
    assert len(target_names(model, "q_proj, layers.0.mlp.up_proj")) == 3
    assert target_names(model, r".*layers\.1\..*(q|k)_proj") == [f"model.layers.1.self_attn.{x}_proj" for x in "qk"]
    for wish in ("nope", r".*nope(", r".*nope.*"):
        with pytest.raises(PlanError, match="--lora_target_modules"):
            target_names(model, wish)


def test_routers_and_the_head_get_no_adapter_and_experts_get_one():
    for architecture in ("mixtral", "qwen3_moe", "gpt_oss"):
        model = tiny.build(architecture)
        linear = {n.rpartition(".")[2] for n in linear_names(model)}
        assert linear == {"q_proj", "k_proj", "v_proj", "o_proj"}
        leaves = {n.rpartition(".")[2] for n in target_names(model, "all")}
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


# ---- embeddings and the head


OUTER = {
    "llama": "embed_tokens,lm_head,q_proj",
    "llama_tied": "embed_tokens",
    "gemma3": "embed_tokens,v_proj",  # multiplies in the embedding's own forward
    "gpt2": "wte,c_attn",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", OUTER)
def test_peft_reloads_adapted_embeddings_and_heads_to_the_same_logits(architecture, kind, tmp_path):
    model, settings = adapted(architecture, OUTER[architecture], **KINDS[kind])
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.build(architecture), tmp_path / "a").eval()
    other = tiny.build(architecture)
    attach_adapter(other, tmp_path / "a")
    with torch.no_grad():
        mine = model(input_ids=IDS).logits
        assert (tiny.build(architecture)(input_ids=IDS).logits - mine).abs().max() > 1e-3
        torch.testing.assert_close(theirs(input_ids=IDS).logits, mine, rtol=1e-5, atol=1e-5)
        assert torch.equal(other(input_ids=IDS).logits, mine)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_embeddings_and_head_are_pefts(kind, tmp_path):
    model, settings = adapted("llama", "embed_tokens,lm_head", **KINDS[kind])
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.build("llama"), tmp_path / "a", is_trainable=True)
    for m in (model, theirs):
        m(input_ids=IDS, labels=IDS).loss.backward()
    mine = {disk_name(n): p.grad for n, p in adapter_parameters(model).items()}
    compared = 0
    for name, parameter in theirs.named_parameters():
        key = re.sub(r"\.default(?=\.weight$|$)", "", name).replace("magnitude_vector.weight", "magnitude_vector")
        if key in mine:
            torch.testing.assert_close(mine[key], parameter.grad, rtol=1e-4, atol=1e-6)
            compared += 1
    assert compared == len(mine) == (6 if kind == "dora" else 4)


@pytest.mark.parametrize("side", ["embed_tokens", "lm_head"])
def test_with_tied_weights_an_adapter_changes_its_own_side_only(side, tmp_path):
    """As PEFT's does. Merging unties: the model then holds two tables."""
    model, _ = adapted("llama_tied", side)
    twin = tiny.build("llama_tied")
    layer = model.get_input_embeddings() if side == "embed_tokens" else model.get_output_embeddings()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        table = torch.nn.Parameter(layer.merged_weight())
        twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.clone())
        (twin.get_input_embeddings() if side == "embed_tokens" else twin.lm_head).weight = table
        torch.testing.assert_close(twin(input_ids=IDS).logits, logits, rtol=1e-5, atol=1e-5)
        merge_adapters(model)
        torch.testing.assert_close(model(input_ids=IDS).logits, logits, rtol=1e-5, atol=1e-5)
        assert model.lm_head.weight is not model.get_input_embeddings().weight
        write_model_folder(model, tmp_path, torch.float32)
        again = load_dense(tmp_path, torch.float32)
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_an_adapter_of_pefts_with_the_embedding_saved_beside_it_is_attached(tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"], init_lora_weights=False)
    theirs = peft.get_peft_model(tiny.build(), config).eval()
    theirs.save_pretrained(tmp_path, save_embedding_layers=True)
    other = tiny.build(seed=1)
    state = {k: v for k, v in tiny.build().state_dict().items() if "embed" not in k and "head" not in k}
    other.load_state_dict(state, strict=False)
    attach_adapter(other, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(other(input_ids=IDS).logits, theirs(input_ids=IDS).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere"])
def test_an_adapted_heads_loss_in_chunks_is_the_models_own_with_its_gradients(architecture, kind):
    model, settings = adapted(
        architecture,
        "lm_head,q_proj",
        **KINDS[kind],
        lr=1e-3,
        model=tiny.build(architecture, tie_word_embeddings=False),
    )
    built = TorchEngine(model, settings, torch.device("cpu"))
    built.verify("auto")
    assert (built.head is None) == (kind == "dora") and built.layout == "padding_free"
    one = microbatches(tiny.dataset(), [2], "padding_free", 1, 10**6, pad_id=0)[0]
    labels = torch.from_numpy(one.labels_BS.copy())
    mine = built.nll(one)
    logits = model(input_ids=torch.from_numpy(one.input_ids_BS)).logits
    theirs = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")  # -100: no target
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
    wanted = list(adapter_parameters(model).values())
    for one, other in zip(torch.autograd.grad(mine, wanted), torch.autograd.grad(theirs, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # sums over a document in another order


# ---- starts that change the base


def started(init, architecture="llama", quantize=None, targets="all", **changes):
    settings = dataclasses.replace(SETTINGS, init_lora_weights=init, **changes)
    model = tiny.build(architecture).requires_grad_(False)
    names = target_names(model, targets)
    starts = residual_init(model, names, settings, quantize, None, torch.device("cpu"))
    if quantize:
        quantization_wrapper.quantize_model(model, quantize, linear_names(model))
    add_adapters(model, names, settings, starts)
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


def test_loftq_loses_less_than_pissa_and_than_quantization_alone():
    weight = tiny.build().model.layers[0].mlp.up_proj.weight.detach()
    config = quantization_wrapper.config_for("nf4")

    def stored(w):
        layer = quantization_wrapper.quantized_linear(w, None, config)
        return layer.weight_of(layer.stored(), torch.float32)

    def lost(init, scaling=2.0):
        a, b = factors.factors(weight, init, 8, scaling, 0, "x", stored)
        product = scaling * (b @ a)
        return (stored(weight - product) + product - weight).norm()

    assert lost("loftq") < (stored(weight) - weight).norm() and lost("loftq") < lost("pissa")


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
    assert to_disk(model, adapter_parameters(model), dataclasses.replace(SETTINGS, init_lora_weights="pissa"))
