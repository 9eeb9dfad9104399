"""What a resumed run takes over, and what it refuses to change."""

import json
from pathlib import Path

import pytest

from backend_manager import Backend
from finetune.errors import PlanError
from finetune.parts.plan_base import SavedRun
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from finetune.plan.resume import (
    changed_settings,
    check_resumed,
    inherited_from_checkpoint,
    merge_saved,
    without_repeated_rows,
)
from tests.support.plans import capabilities, plan_of
from tests.support.runs import copy_up_to, rewrite_json
from train import fine_tune


def test_a_changed_dataset_or_flag_is_refused_on_resume(uninterrupted, tmp_path, rows_file):
    folder = copy_up_to(uninterrupted, 5, tmp_path / "out")
    with pytest.raises(PlanError, match="--lr: 0.005 -> 0.1"):
        fine_tune(resume=str(folder), lr=0.1)
    with pytest.raises(PlanError, match="4 -> 8 rows per step"):
        fine_tune(resume=str(folder), batch_size=4)
    other = tmp_path / "other.jsonl"
    other.write_text(rows_file.read_text().replace("plus", "and"))

    def edit(plan):
        for part in ("requested", "settled"):
            plan[part]["dataset"] = str(other)

    (folder / "run_plan.json").unlink()
    rewrite_json(folder / "checkpoints" / "step-5", "run_plan.json", edit)
    with pytest.raises(PlanError, match=r"the dataset .*\.jsonl differs from the one that checkpoint"):
        fine_tune(resume=str(folder))

    def held_out_otherwise(plan):  # as by an earlier version
        for part in ("requested", "settled"):
            plan[part] |= {"dataset": str(rows_file), "validation_split": 0.25}

    rewrite_json(folder / "checkpoints" / "step-5", "run_plan.json", held_out_otherwise)
    with pytest.raises(PlanError, match=r"or held out other rows of it by --validation_split 0.25"):
        fine_tune(resume=str(folder))


def saved(**overrides):
    return plan_of(dataset="x", output_dir="o", **overrides).to_json()


def test_a_resumed_run_takes_its_flags_from_the_saved_one_and_may_train_longer():
    old = saved(lr=1e-3, max_steps=10)
    plan = plan_of(**merge_saved({"max_steps": 20}, old))
    assert plan.settings.lr == 1e-3
    assert check_resumed(plan, old).notices[-1] == "max_steps: 10 -> 20 since the saved run"


def test_what_the_loaded_model_decided_is_no_change_and_layers_stay_compiled():
    old = saved()
    old["settled"] |= {"attention": "groups", "batch_layout": "padding_free"}
    plan = plan_of(**merge_saved({}, old))
    assert check_resumed(plan, old).notices == plan.notices
    caps = capabilities(Backend.CUDA, supports_bfloat16=True)
    old["settled"] |= {"backend": "cuda", "compile": "true"}

    def resumed(num_devices=1, **now):
        inherited = inherited_from_checkpoint(old, "cuda", now)
        return resolve_plan({"dataset": "x"}, Facts(Backend.CUDA, caps, inherited=inherited, num_devices=num_devices))

    assert resumed().memory.compiles is True and resumed(num_devices=2).memory.compiles is False
    assert resumed(compile="auto", num_epochs=old["settled"]["num_epochs"]).memory.compiles is True
    longer = resumed(max_steps=200)
    assert longer.memory.compiles is None and "compile" not in changed_settings(longer, old)


def test_a_resumed_run_refuses_what_would_change_it_and_names_old_and_new():
    old = saved(lr=1e-3)
    with pytest.raises(PlanError, match="--lr: 0.001 -> 0.01"):
        check_resumed(plan_of(**merge_saved({"lr": 1e-2}, old)), old)


def test_a_resumed_run_may_split_its_rows_differently_but_not_change_their_number():
    old = saved(batch_size=4, gradient_accumulation_steps=2)
    same = merge_saved({"batch_size": 8, "gradient_accumulation_steps": 1}, old)
    plan = plan_of(**same)
    assert check_resumed(plan, old).notices == plan.notices
    with pytest.raises(PlanError, match="8 -> 16 rows per step"):
        check_resumed(plan_of(**merge_saved({"batch_size": 8}, old)), old)


@pytest.mark.parametrize("asked", [{}, {"batch_size": "auto"}, {"batch_size": "auto", "dataset_samples": 3}])
@pytest.mark.parametrize("accumulation", [None, 1, 2])
def test_rows_that_were_left_to_the_plan_are_the_saved_ones_if_the_command_is_repeated(asked, accumulation):
    """Also fewer than the default: memory ran out on a step of more."""
    asked = {**asked, "gradient_accumulation_steps": accumulation}
    old = saved(**asked)
    old["settled"] |= {"batch_size": 3, "microbatch_tokens": 1536}
    asked |= {"dataset": "x", "output_dir": "o"}
    facts = Facts(Backend.CPU, capabilities(), inherited=inherited_from_checkpoint(old, "cpu", asked))
    plan = check_resumed(resolve_plan(merge_saved(asked, old), facts), old)
    assert (plan.steps.batch_size, plan.steps.microbatch_tokens) == (3, 1536)


def test_accumulation_that_is_changed_divides_the_saved_rows_where_their_number_was_left_to_the_plan():
    old = saved(gradient_accumulation_steps=1)
    asked = {"gradient_accumulation_steps": 2}
    facts = Facts(Backend.CPU, capabilities(), inherited=inherited_from_checkpoint(old, "cpu", asked))
    plan = check_resumed(resolve_plan(merge_saved(asked, old), facts), old)
    assert plan.steps.batch_size == old["settled"]["batch_size"] // 2


def test_a_command_that_torchrun_repeats_keeps_its_rows_per_step_on_other_ranks():
    """Started by hand, the same value is one for each rank; another value is always the user's word."""
    old = SavedRun(Path("o"), saved(batch_size=2, gradient_accumulation_steps=1), None)
    command = dict(batch_size=2, gradient_accumulation_steps=1, lr=1e-3)
    assert without_repeated_rows(command, old, "torchrun") == dict(lr=1e-3)
    for launcher in (None, "srun"):
        assert without_repeated_rows(command, old, launcher) == command
    assert without_repeated_rows(command | dict(batch_size=4), old, "torchrun") == dict(lr=1e-3, batch_size=4)


@pytest.mark.parametrize("asked", [None, "auto"])
def test_a_resumed_run_keeps_the_precision_it_settled(plain_run, tmp_path, asked):
    plain_run(max_steps=2, save_every=1, precision=asked)
    file = tmp_path / "out" / "run_plan.json"
    # As a machine of the other kind would have settled.
    other = {"bf16": "fp32", "fp32": "bf16"}[json.loads(file.read_text())["settled"]["precision"]]

    def edit(plan):
        plan["settled"]["precision"] = other

    rewrite_json(tmp_path / "out" / "checkpoints" / "step-2", "run_plan.json", edit)
    assert fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=3).step == 3
    assert json.loads(file.read_text())["settled"]["precision"] == other


def test_dense_copies_that_a_single_process_settled_on_are_dropped_over_shards():
    old = saved(cache_dequantized="auto")
    old["settled"]["cache_dequantized"] = "true"
    facts = Facts(Backend.CPU, capabilities(), inherited=inherited_from_checkpoint(old, "cpu"))
    plan = resolve_plan({**merge_saved({}, old), "world_size": 2}, facts)
    assert plan.settings.cache_dequantized == "false" and plan.dims.shards == 2
    with pytest.raises(PlanError, match="--cache_dequantized true"):
        resolve_plan({**merge_saved({"cache_dequantized": "true"}, old), "world_size": 2}, facts)


def test_a_resumed_run_multiplies_as_the_saved_one_did_where_this_processor_can():
    fast = capabilities(onednn_speed=2.2)
    old = saved()
    for settled, caps, used in (("blas", fast, "blas"), (None, fast, "blas"), ("onednn", capabilities(), "blas")):
        before = {**old, "settled": {k: v for k, v in old["settled"].items() if k != "cpu_matmul"}}
        before["settled"] |= {"cpu_matmul": settled} if settled else {}
        facts = Facts(Backend.CPU, caps, inherited=inherited_from_checkpoint(before, "cpu"))
        plan = check_resumed(resolve_plan(merge_saved({}, before), facts), before)
        assert plan.settings.cpu_matmul == used
