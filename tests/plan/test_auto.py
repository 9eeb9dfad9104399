"""The word auto, written out where it is the default, changes no plan."""

from dataclasses import replace

import pytest

from finetune.cli import FlagParser, add_flags, parse_config, parse_overrides
from finetune.config import FIELDS, is_left_open
from finetune.from_python import overrides_of
from finetune.plan.make import make_plan
from finetune.plan.run_plan import RunPlan
from tests.support.commands import ROOT
from tests.support.planned import planned
from tests.support.rows import json_lines

OPEN = [name for name in FIELDS if is_left_open(name, "auto")]
CONFIGS = ROOT / "examples" / "configs"
DEVICES = [
    dict(assume_memory="8GiB"),
    dict(assume_memory="24GiB", assume_world_size=4),
    dict(assume_memory="24GiB", assume_world_size=4, parallel="fsdp"),
]
SETTINGS = [
    *({"train_type": word} for word in ("full", "lora", "qlora")),
    {"max_steps": 20, "optimizer": "lion", "gradient_accumulation_steps": 2},
    {"streaming": True, "max_steps": 20},
    {"lr": "search", "eval_every": "auto", "validation_split": 0.25, "lora_rank": 8, "backend": "cpu"},
    {"validation_split": "auto", "save_every": 5, "cache_dequantized": "false", "overlong": "drop"},
]


@pytest.fixture(scope="module")
def written():
    """{form of writing flags: a function from {flag: value} to overrides}."""
    parser = FlagParser()
    add_flags(parser)

    def said(line):
        raise AssertionError(line)

    return {
        "command line": lambda flags: parse_overrides([f"--{n}={v}" for n, v in flags.items()], parser, said),
        "YAML": lambda flags: parse_config(flags, "flags.yaml"),
        "Python": lambda flags: overrides_of(flags, said),
    }


def plan_of(overrides: dict) -> RunPlan:
    """The plan of a dry run, without what the user wrote."""
    return replace(make_plan({**overrides, "dry_run": True, "output_dir": "outputs/none"}), requested={}, machine=None)


def differing(one: RunPlan, other: RunPlan) -> list[str]:
    """Parts of two plans that differ, in words."""
    settings, others = one.flat_settings(), other.flat_settings()
    found = [f"{n}: {settings[n]} -> {others[n]}" for n in settings if settings[n] != others[n]]
    for name in ("adjustments", "notices", "layouts", "dims", "distribution", "backend"):
        if getattr(one, name) != getattr(other, name):
            found.append(f"{name}: {getattr(one, name)} -> {getattr(other, name)}")
    return found


@pytest.fixture(scope="module")
def cases(tiny_model, rows_file, tmp_path_factory):
    """[(settings, their plan)]: of runs here, on the tiny model, and of models planned from their config.json."""
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    pairs.write_bytes(json_lines(*({"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(40))))
    tiny = {"model_name": str(tiny_model)}
    found = [{**tiny, "dataset": str(rows_file), **settings} for settings in SETTINGS]
    found.append({**tiny, "dataset": str(pairs), "preference": "dpo", "validation_split": 0.1, "num_epochs": 3})
    found.append({})
    for device in DEVICES:
        found += [{"model_name": str(CONFIGS / "llama-3.1-8b"), **device, **kind} for kind in ({}, *SETTINGS[:3])]
    return [(settings, plan_of(settings)) for settings in found]


def test_every_flag_whose_default_is_auto_is_found():
    words = {name for name, f in FIELDS.items() if "auto" in (f.default, f.metadata["unset"])}
    assert {"context_length", "batch_size", "lr", "train_type", "compile", "precision"} < words
    assert set(OPEN) == words | {"backend"}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPEN)
def test_auto_written_out_gives_the_plan_of_the_command_without_it(name, written, cases):
    for number, (settings, plan) in enumerate(cases):
        convert = list(written.values())[number % len(written)]
        if name not in settings:
            assert differing(plan, plan_of(convert({**settings, name: "auto"}))) == [], settings


def test_all_of_them_written_out_together_give_it_too(written, cases):
    for number, (settings, plan) in enumerate(cases):
        convert = list(written.values())[number % len(written)]
        assert differing(plan, plan_of(convert(dict.fromkeys(OPEN, "auto") | settings))) == [], settings


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize(
    "settings", [{}, dict(train_type="full", world_size=4), dict(train_type="qlora", num_epochs=3)]
)
def test_auto_written_out_gives_the_plan_of_a_known_machine(settings, name):
    assert differing(planned(8, **settings), planned(8, **settings | {name: settings.get(name, "auto")})) == []
