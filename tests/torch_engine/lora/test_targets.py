"""Which layers get an adapter."""

import pytest

from finetune.errors import PlanError
from finetune.torch_engine.lora.targets import linear_names, target_names
from tests.support import tiny


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
