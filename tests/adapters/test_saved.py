"""Adapters as they are saved: the modules that a config names are PEFT's."""

import itertools
import json
import random

import numpy as np
import peft
import pytest
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.numpy import save_file

from finetune.adapters.saved import PREFIX, Targets, open_adapter, read_adapter
from finetune.errors import PlanError

PARTS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.gate")
MODULES = [f"model.layers.{i}.{part}" for i in (0, 1, 11) for part in PARTS]
MODULES += ["lm_head", "model.embed_tokens", "model.language_model.layers.1.mlp.gate", "proj"]
TARGETS = [
    ["q_proj"],
    ["q_proj", "gate"],
    ["model.layers.1.mlp.gate"],
    ["layers.0.mlp.gate_proj"],
    ["lm_head"],
    [],
    r".*q_proj",
    r"q_proj",
    r"model\.layers\.(0|11)\..*",
    "lm_head",
]
EXCLUDED = [None, ["q_proj"], ["model.layers.0.mlp.gate"], r".*\.11\..*"]
LAYERS = [(None, None), ([], None), (0, None), ([0, 11], None), ([1], "layers"), ([1], ["h", "layers"]), ([1], "h")]


def test_the_modules_that_a_config_names_are_those_that_peft_adapts():
    every = list(itertools.product(TARGETS, EXCLUDED, LAYERS))
    for targets, excluded, (layers, pattern) in random.Random(1).sample(every, 150):
        words = dict(target_modules=targets, exclude_modules=excluded)
        if not isinstance(targets, str):  # PEFT has no layers beside a regex
            words |= dict(layers_to_transform=layers, layers_pattern=pattern)
        config = {name: value for name, value in words.items() if value is not None}
        theirs = peft.LoraConfig(**config)
        for module in MODULES:
            assert (module in Targets(config)) == bool(check_target_module_exists(theirs, module)), (config, module)


def an_adapter(folder, modules, **config):
    pairs = {}
    for module in modules:
        pairs[f"{PREFIX}{module}.lora_A.weight"] = np.ones((4, 8), np.float32)
        pairs[f"{PREFIX}{module}.lora_B.weight"] = np.ones((8, 4), np.float32)
    folder.mkdir()
    save_file(pairs, folder / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        dict(target_modules=["q_proj"]),
        dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[0]),
        dict(target_modules=["q_proj", "v_proj"], exclude_modules=["v_proj"]),
        dict(target_modules=r".*\.q_proj"),
        dict(target_modules=5),
    ],
)
def test_a_pair_that_the_config_leaves_out_is_refused(config, tmp_path):
    """PEFT leaves it out, whose model is then another than the one that has all pairs."""
    modules = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]
    folder = an_adapter(tmp_path / "a", modules, **config)
    for read in (open_adapter, read_adapter):
        with pytest.raises(PlanError, match=r"has a pair of model.layers.*, which adapter_config.json leaves out"):
            read(folder)
    named = dict(target_modules=["q_proj"], target_parameters=["self_attn.v_proj.weight"])
    for i, others in enumerate(
        (
            dict(target_modules=["q_proj", "v_proj"]),
            dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[]),
            named,
        )
    ):
        assert len(read_adapter(an_adapter(tmp_path / f"b{i}", modules, **others))[1]) == 4


def test_a_block_s_number_may_be_followed_by_another():
    """LongCat-Flash has such names; which number counts depends on PEFT's version."""
    for layer in (1, 0):
        targets = Targets(dict(target_modules=["q_proj"], layers_to_transform=[layer]))
        assert "model.layers.1.self_attn.0.q_proj" in targets
        assert "model.layers.2.self_attn.3.q_proj" not in targets


def test_adapters_of_tied_ends_are_both_named_by_either():
    targets = Targets(dict(target_modules=["q_proj", "lm_head"], ensure_weight_tying=True))
    assert "model.embed_tokens" in targets and "lm_head" in targets
    assert "model.layers.0.mlp.gate_proj" not in targets


def test_excluded_modules_are_none_of_all_linear_layers():
    targets = Targets(dict(target_modules="all-linear", exclude_modules=["down_proj"]))
    assert "model.layers.0.mlp.up_proj" in targets and "model.layers.0.mlp.down_proj" not in targets


def test_a_regex_that_is_none_is_a_line(tmp_path):
    folder = an_adapter(tmp_path / "a", ["model.layers.0.self_attn.q_proj"], target_modules="(")
    with pytest.raises(PlanError, match="is no regex"):
        open_adapter(folder)
