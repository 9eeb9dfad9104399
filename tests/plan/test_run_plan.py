"""A plan written and read back."""

import json

import train
from backend_manager import Backend
from finetune.cli import read_config
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from tests.support.plans import NOW, adjustment, capabilities, plan_of


def test_the_saved_plan_holds_the_degrees(alone):
    settled = json.loads((alone / "run_plan.json").read_text())["settled"]
    assert (settled["world_size"], settled["dp_degree"], settled["dp_shards"]) == (1, 1, 1)


def test_a_saved_plan_gives_the_same_run(run, tmp_path):
    run(max_steps=3)
    first = json.loads((tmp_path / "out" / "run_plan.json").read_text())
    settled = train.make_plan(
        train.parse_overrides(["--config", str(tmp_path / "out" / "run_plan.json")], train.build_parser())
    )
    again = settled.to_json()["settled"]
    assert {k: v for k, v in again.items() if k != "batch_layout"} == {
        k: v for k, v in first["settled"].items() if k != "batch_layout"
    }  # the layout is settled on the loaded model
    assert first["settled"]["batch_layout"] == "padding_free"


def test_a_saved_plan_settles_to_itself(tmp_path):
    plan = plan_of(train_type="lora", lora_rank=4, dataset="x.jsonl", output_dir="out", save_every=2)
    file = tmp_path / "run_plan.json"
    file.write_text(json.dumps(plan.to_json()))
    again = resolve_plan(read_config(str(file)), Facts(Backend.CPU, capabilities()), NOW)
    assert again.to_json() == plan.to_json() and again.digest() == plan.digest()


def test_changed_records_what_was_proved():
    plan = plan_of().changed({"batch_layout": ("padded", "a document flat sees the one before it")})
    assert plan.settings.batch_layout == "padded"
    assert adjustment(plan, "batch_layout").reason == "a document flat sees the one before it"
