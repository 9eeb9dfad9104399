"""Adapters added, attached, merged."""

import dataclasses
import json
import random

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import export
from finetune.adapters.patterns import PREFIX
from finetune.errors import PlanError
from finetune.parts.trains import Adapter
from finetune.torch_engine.lora import saved_modules
from finetune.torch_engine.lora.adapters import add_adapters, attach_adapter
from finetune.torch_engine.lora.layers import layers
from finetune.torch_engine.lora.targets import target_names
from tests.support import tiny
from tests.support.adapters import IDS, KINDS, SETTINGS, adapted, write
from tests.support.runs import steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_is_attached_to_the_same_logits(kind, tmp_path, device):
    model, settings = adapted("llama", **KINDS[kind], device=device)
    write(model, settings, tmp_path / "a")
    other = tiny.build().to(device)
    attach_adapter(other, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(other(input_ids=IDS.to(device)).logits, model(input_ids=IDS.to(device)).logits)


def test_an_adapter_that_peft_made_is_attached_too(tmp_path):
    theirs = peft.get_peft_model(tiny.build(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    theirs.save_pretrained(tmp_path)
    other = tiny.build()
    attach_adapter(other, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(other(input_ids=IDS).logits, theirs.eval()(input_ids=IDS).logits)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("use_rslora", [False, True], ids=["", "rslora"])
@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_and_scales_by_layer_are_peft_s(tmp_path, seed, use_rslora, use_dora):
    """Patterns as PEFT finds them: the first whose end of a name, or regex, is the layer's."""
    drawn = random.Random(seed)
    patterns = ["q_proj", r"layers\.1\.mlp\.up_proj", "model.layers.0.self_attn.v_proj", ".*down_proj", "proj"]
    ranks = {name: drawn.randint(1, 12) for name in drawn.sample(patterns, 3)}
    alphas = {name: drawn.choice([1, 3.5, 64]) for name in drawn.sample(patterns, 3)}
    torch.manual_seed(seed)
    how = dict(rank_pattern=ranks, alpha_pattern=alphas, use_rslora=use_rslora, use_dora=use_dora)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **how)
    theirs = peft.get_peft_model(tiny.build(), config).eval()
    theirs.save_pretrained(tmp_path)
    other = tiny.build()
    attach_adapter(other, tmp_path)
    with torch.no_grad():
        expected = theirs(input_ids=IDS).logits
        torch.testing.assert_close(other(input_ids=IDS).logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "named",
    [
        dict(target_parameters=["gate_up_proj"], alpha_pattern={"gate_up_proj": 32}),
        dict(target_parameters=["gate_up_proj", "down_proj"], alpha_pattern={"down_proj": 32}),
        dict(target_parameters=["experts.gate_up_proj", "down_proj"], rank_pattern={"down_proj": 2}),
        dict(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_experts_are_adapted_by_the_names_that_peft_writes(tmp_path, named):
    """PEFT makes parameters of gate_proj, up_proj and down_proj, and patterns for the twofold rank of the first two."""
    torch.manual_seed(0)
    named = {"target_modules": [], **named}
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **named)
    theirs = peft.get_peft_model(tiny.build("qwen3_moe"), config).eval()
    theirs.save_pretrained(tmp_path)
    other = tiny.build("qwen3_moe")
    attach_adapter(other, tmp_path)
    with torch.no_grad():
        expected = theirs(input_ids=IDS).logits
        assert not torch.allclose(tiny.build("qwen3_moe")(input_ids=IDS).logits, expected, atol=1e-3)
        torch.testing.assert_close(other(input_ids=IDS).logits, expected, atol=2e-5, rtol=1e-4)


def test_experts_one_by_one_are_said_to_be_of_another_layout(tmp_path):
    """Adapters of transformers 4, which PEFT converts."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(tiny.build("qwen3_moe"), config).save_pretrained(tmp_path)
    saved = tmp_path / "adapter_config.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"target_modules": ["down_proj"]}))
    name = f"{PREFIX}model.layers.0.mlp.experts.0.down_proj.lora_"
    pair = {f"{name}A.weight": torch.ones(4, 32), f"{name}B.weight": torch.ones(64, 4)}
    save_file(pair, tmp_path / "adapter_model.safetensors")
    with pytest.raises(PlanError, match=r"experts.0.down_proj, which this base has not, whose .* Load it with peft"):
        attach_adapter(tiny.build("qwen3_moe"), tmp_path)


def test_an_adapter_of_a_router_is_refused(tmp_path):
    """PEFT adapts its weight beside experts; it gives more than a product."""
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(tiny.build("qwen3_moe"), config).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"adapts model\.layers\.\d\.mlp\.gate, a Qwen3MoeTopKRouter, which is not"):
        attach_adapter(tiny.build("qwen3_moe"), tmp_path)


def test_a_rank_that_the_weights_do_not_have_is_refused(tmp_path):
    model, settings = adapted()
    write(model, settings, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": {"q_proj": 3}}))
    with pytest.raises(PlanError, match="rank_pattern gives model.layers.0.self_attn.q_proj the rank 3, which"):
        attach_adapter(tiny.build(), tmp_path / "a")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("init_lora_weights", word) for word in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")),
        ("alora_invocation_tokens", [1, 2]),
        ("lora_bias", True),
        ("use_qalora", True),
        ("arrow_config", {"top_k": 1}),
    ],
)
def test_an_adapter_that_is_more_than_its_product_is_refused(tmp_path, key, value):
    """As it is saved, peft changes the base or the inputs beside it."""
    model, settings = adapted()
    write(model, settings, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(PlanError, match=rf"adapter_config.json: {key}.* which is not supported"):
        attach_adapter(tiny.build(), tmp_path)


@pytest.mark.parametrize(
    "change, config, said",
    [
        (lambda t: t | {"model.norm.weight": torch.ones(64)}, {}, "holds model.norm.weight, which is neither"),
        (
            lambda t: t | {"base_model.model.model.layers.0.mlp.up_proj.lora_B.bias": torch.ones(96)},
            {},
            "up_proj.lora_B.bias, which is neither an adapter's nor its base's",
        ),
        (
            lambda t: t,
            {"modules_to_save": ["lm_head"]},
            "modules_to_save has lm_head, and adapter_model.safetensors no",
        ),
    ],
)
def test_an_adapter_with_more_or_fewer_weights_than_are_read_is_refused(change, config, said, tmp_path):
    write(*adapted(), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    file = file.with_name("adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(PlanError, match=said):
        attach_adapter(tiny.build("llama"), tmp_path / "adapter")


def test_initial_adapters_do_not_depend_on_which_others_there_are_and_change_nothing():
    one, _ = adapted(targets="q_proj")
    every, _ = adapted(targets="all")
    name = "model.layers.1.self_attn.q_proj"
    assert torch.equal(layers(one)[name].lora_A, layers(every)[name].lora_A)
    for init in ("default", "gaussian"):
        model = tiny.build().requires_grad_(False)
        before = model(input_ids=IDS).logits
        settings = dataclasses.replace(SETTINGS, init_lora_weights=init)
        add_adapters(model, target_names(model, "all"), Adapter.of(settings))
        assert torch.equal(model(input_ids=IDS).logits, before)


@pytest.mark.parametrize("side", ["embed_tokens", "lm_head"])
def test_with_tied_weights_an_adapter_changes_its_own_side_only(side, device):
    """As PEFT's does."""
    model, _ = adapted("llama_tied", side, device=device)
    twin = tiny.build("llama_tied").to(device)
    layer = model.get_input_embeddings() if side == "embed_tokens" else model.get_output_embeddings()
    with torch.no_grad():
        logits = model(input_ids=IDS.to(device)).logits
        table = torch.nn.Parameter(layer.merged_weight())
        twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.clone())
        (twin.get_input_embeddings() if side == "embed_tokens" else twin.lm_head).weight = table
        torch.testing.assert_close(twin(input_ids=IDS.to(device)).logits, logits, rtol=1e-5, atol=1e-5)


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


def test_embeddings_and_head_train_from_the_command_line_and_merge(run, tmp_path, capsys):
    run(
        lora_target_modules="embed_tokens,lm_head,q_proj",
        max_steps=4,
        use_dora=True,
        lora_dropout=0.0,
        loraplus_lr_ratio=4.0,
    )
    losses = [s["loss"] for s in steps(tmp_path / "out")]
    assert losses[-1] < losses[0]
    argv = ["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged"), "--verify", "logits"]
    export.main(argv)
    off = float(capsys.readouterr().out.rpartition("logits within ")[2].split()[0])
    assert off < 1e-5


@pytest.mark.parametrize("architecture", ["llama_tied", "gpt2"])
@pytest.mark.parametrize("is_head", [True, False])
def test_hidden_states_keep_their_dtype_where_tied_embeddings_train_under_either_name(architecture, is_head):
    """Named as the head they were in fp32 in training, and in bf16 in score.py; GPT-2 did not run."""
    model = tiny.build(architecture).to(torch.bfloat16)
    embeddings = model.get_input_embeddings()
    end = model.get_output_embeddings() if is_head else embeddings
    saved_modules.unfreeze(model, [name for name, module in model.named_modules() if module is end], torch.bfloat16)
    assert embeddings.weight.dtype == torch.float32
    assert embeddings(torch.tensor([[1, 5, 7]])).dtype == torch.bfloat16
