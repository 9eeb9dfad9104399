"""Recipes: YAML and dotted overrides, strictly read."""

from pathlib import Path

import pytest

from finetune.errors import PlanError
from recursive import recipe
from recursive.config import CHOICES, RANGES
from recursive.recipe import KEYS, flat, of_flat, read_arguments, read_recipe

CHAT = {
    "data_paths": ("data/alpaca-512",),
    "global_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "epochs": 10,
    "eval_interval": 1,
    "lr": 3e-4,
    "lr_min_ratio": 0.1,
    "lr_warmup_steps": 1000,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "puzzle_emb_weight_decay": 0.1,
    "puzzle_emb_lr": 1e-2,
    "seed": 0,
    "ema": True,
    "ema_rate": 0.999,
    "freeze_weights": False,
    "arch.hidden_size": 384,
    "arch.L_layers": 4,
    "arch.num_heads": 12,
    "arch.expansion": 4.0,
    "arch.rope_theta": 1e4,
    "arch.rms_norm_eps": 1e-5,
    "arch.forward_dtype": "bfloat16",
    "arch.H_cycles": 1,
    "arch.L_cycles": 1,
    "arch.halt_max_steps": 1,
    "arch.loss_type": "softmax_cross_entropy",
}


@pytest.mark.promise("TR_03")
def test_the_defaults_of_cfg_chat_are_the_documented_ones():
    values = flat(of_flat(read_recipe("cfg_chat")))
    assert {key: values[key] for key in CHAT} == CHAT


def test_every_shipped_recipe_is_read_and_known():
    names = sorted(path.stem for path in recipe.CONFIGS.glob("*.yaml"))
    assert {"cfg_chat", "cfg_chat_fast", "cfg_chat_fp32", "cfg_chat_recursive", "cfg_puzzle"} <= set(names)
    for name in names:
        assert of_flat(read_recipe(name)).arch.hidden_size >= 128
        assert name in recipe.usage()
    fast, fp32 = (of_flat(read_recipe(f"cfg_chat_{name}")) for name in ("fast", "fp32"))
    assert fast.arch.loss_type == "stablemax_cross_entropy" and not fast.ema
    assert (fp32.arch.forward_dtype, fp32.arch.halt_max_steps, fp32.grad_clip_norm) == ("float32", 4, 1.0)


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("lr=3e-4", "lr", 3e-4),
        ("ema=True", "ema", True),
        ("data_paths=[data/a,data/b]", "data_paths", ("data/a", "data/b")),
        ("data_paths=['x y']", "data_paths", ("x y",)),
        ("+arch.seq_len=512", "arch.seq_len", 512),
        ("arch.loss.loss_type=stablemax_cross_entropy", "arch.loss_type", "stablemax_cross_entropy"),
        ("grad_clip_norm=null", "grad_clip_norm", None),
        ("arch.plain=true", "arch.plain", True),
    ],
)
def test_an_override_has_its_keys_type(argument, key, value):
    assert read_arguments([argument, " "])[1] == {key: value}


@pytest.mark.promise("TR_03")
def test_each_key_changes_the_settings_and_is_saved(tmp_path):
    import yaml

    others = {int: 7, float: 0.25, bool: None, str: "word"}
    before = recipe.defaults()
    for key, kind in KEYS.items():
        kinds = [k for k in (int, float, bool, str) if k is kind or k in getattr(kind, "__args__", ())]
        value = others.get(kinds[0] if kinds else str)
        value = not before[key] if kinds == [bool] else value
        if key in CHOICES:
            value = next(word for word in CHOICES[key] if word != before[key])
        if key in RANGES:
            value = next(v for v in (RANGES[key][0] + 1, 0.5, RANGES[key][0]) if RANGES[key][0] <= v <= RANGES[key][1])
        word = "[a]" if kind == tuple[str, ...] else str(value)
        (given,) = read_arguments([f"{key}={word}"])[1].items()
        changed = of_flat({key: given[1]})
        assert flat(changed)[key] == given[1] and given[0] == key
        (tmp_path / "x.yaml").write_text(recipe.as_yaml(changed))
        assert read_recipe(str(tmp_path / "x.yaml"))[key] == given[1]
        assert yaml.safe_load((tmp_path / "x.yaml").read_text())


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("lr: [1]\n", "is not a single value"),
        ("lrr: 1\n", "Nearest: lr"),
        ("defaults:\n  - model: big\n", "is not 'arch: NAME'"),
        ("defaults:\n  - arch: trm_chatt\n", "no such recipe. Use one of"),
        ("lr: 1\nlr: 2\n", "given twice"),
        ("- 1\n", "contains list"),
        ("lr: {a\n", "Fix the YAML"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(tmp_path, monkeypatch, text, fact):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    with pytest.raises(PlanError, match="mine.yaml|arch") as found:
        read_recipe("mine.yaml")
    assert fact in str(found.value)


def test_defaults_that_are_no_list_are_named(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: 3\n")
    with pytest.raises(PlanError, match="defaults: 3 is not a list"):
        read_recipe(str(tmp_path / "mine.yaml"))
