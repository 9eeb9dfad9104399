"""Sizes read from config.json and safetensors headers, against real models."""

import json

import pytest

from finetune.errors import PlanError
from finetune.estimate.model_shape import BY_FORMULA, ModelShape, check_tensors, read_headers
from finetune.torch_engine.lora.layers import features
from finetune.torch_engine.lora.targets import linear_names
from tests.support import architectures, tiny


@pytest.mark.parametrize(
    "architecture", sorted(set(tiny.ARCHITECTURES) - {"gpt_neox", "falcon", "olmo2", "cohere", "gpt_oss"})
)
def test_a_config_alone_gives_the_sizes_of_the_real_model(architecture, tmp_path):
    model = tiny.build(architecture)
    shape = ModelShape.from_config(model.config.to_dict())
    assert shape.num_weights == sum(p.numel() for p in model.parameters())
    assert sorted(name for name, _, _ in shape.linears) == sorted(linear_names(model))
    assert shape.expert_weights == sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)


@pytest.mark.parametrize("architecture", sorted(tiny.ARCHITECTURES))
def test_headers_give_the_sizes_of_any_model(architecture, tmp_path):
    model = tiny.build(architecture)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    shape = ModelShape.from_config(config, read_headers(tmp_path.glob("*.safetensors")))
    assert shape.exact and shape.num_weights == sum(p.numel() for p in model.parameters())
    modules = dict(model.named_modules())
    for name, rows, columns in shape.linears:
        assert features(modules[name]) == (columns, rows)
    assert {n for n, _, _ in shape.linears} == set(linear_names(model))


@pytest.mark.parametrize("kind", BY_FORMULA)
def test_weights_that_fit_their_config_are_not_refused(kind, tmp_path):
    kind = {"gemma3": "gemma3_text"}.get(kind, kind)  # whose own config is of two models
    architectures.build(kind).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = read_headers(tmp_path.glob("*.safetensors"))
    check_tensors(config, tensors, "a model")
    with pytest.raises(PlanError, match=r"^a model: .* by its config\. Give a folder whose weights fit"):
        wide = {"hidden_size": 2 * config["hidden_size"]} if "hidden_size" in config else {"n_embd": 99}
        check_tensors(config | wide, tensors, "a model")


def test_shapes_are_read_from_gpt2_and_nested_configs():
    assert ModelShape.from_config({"n_positions": 64, "n_embd": 8, "n_layer": 2}).context_limit == 64
    nested = ModelShape.from_config({"model_type": "x", "text_config": {"hidden_size": 8, "num_hidden_layers": 3}})
    assert (nested.hidden_size, nested.num_layers) == (8, 3)


def test_a_text_config_that_is_not_an_object_is_ignored():
    assert ModelShape.from_config({"model_type": "x", "text_config": "y", "vocab_size": 5}).vocab_size == 5
