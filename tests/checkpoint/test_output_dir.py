"""The output folder: whose it is, what is kept in it, and which checkpoint a resume takes."""

import json
import os
import shutil
from pathlib import Path

import pytest

from finetune.checkpoint.output_dir import find_saved_run
from finetune.checkpoint.store import Lock, steps_of
from finetune.errors import CheckpointDamagedError, OutputDirInUseError, PlanError
from finetune.metrics import read_events
from tests.support.commands import refused
from tests.support.runs import copy_up_to, steps
from train import fine_tune


def test_a_damaged_newest_checkpoint_falls_back_with_a_line_and_all_damaged_is_76(uninterrupted, tmp_path, capsys):
    folder = copy_up_to(uninterrupted, 3, tmp_path / "out")
    (folder / "checkpoints" / "step-3" / "optimizer.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointDamagedError, match="step-3.*optimizer"):
        fine_tune(resume=str(folder / "checkpoints" / "step-3"))
    fine_tune(resume="auto", output_dir=str(folder))
    said = capsys.readouterr().out
    assert "skipped a damaged checkpoint" in said and "at step 2 of 12" in said
    assert steps(folder) == steps(uninterrupted)
    folder = copy_up_to(uninterrupted, 1, tmp_path / "again")
    (folder / "checkpoints" / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointDamagedError) as error:
        fine_tune(resume=str(folder))
    assert error.value.exit_code == 76


def test_resume_auto_without_a_run_starts_a_new_one(run, tmp_path):
    assert run(resume="auto", max_steps=2).step == 2


def test_a_folder_that_holds_a_run_needs_resume_or_overwrite(run, tmp_path):
    run(max_steps=2)
    with pytest.raises(PlanError, match="holds another run. Use --resume auto to continue it, or --overwrite"):
        run(max_steps=2)
    assert run(max_steps=1, overwrite=True).step == 1
    assert len(read_events(tmp_path / "out", "step")) == 1


def test_a_second_run_in_one_folder_is_refused_while_the_first_lives(run, tmp_path):
    lock = Lock(tmp_path / "out")
    with pytest.raises(OutputDirInUseError, match=f"pid {os.getpid()}"):
        run(max_steps=1)
    lock.release()
    assert run(max_steps=1).step == 1


def test_overwrite_never_touches_a_folder_that_holds_a_model(plain_run, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(PlanError, match="is the model's own folder"):
        plain_run(model_name=str(folder), output_dir=str(folder), overwrite=True, max_steps=1)
    with pytest.raises(PlanError, match="holds a model that was not written by this tool"):
        plain_run(output_dir=str(folder), overwrite=True, max_steps=1)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_run_resumed_at_an_older_step_drops_the_newer_ones(plain_run, tmp_path, capsys):
    plain_run(max_steps=6, save_every=1, keep_last=6)
    out = tmp_path / "out"
    (out / "train_state.json").unlink()
    fine_tune(resume=str(out / "checkpoints" / "step-2"), keep_last=2)
    assert "dropped step-6, step-5, step-4, step-3" in capsys.readouterr().out
    assert [p.name for p in steps_of(out)] == ["step-6", "step-5"]
    assert [e["step"] for e in read_events(out, "step")] == [1, 2, 3, 4, 5, 6]


def test_the_state_of_a_finished_run_is_removed_first_when_it_is_extended(plain_run, tmp_path, monkeypatch):
    plain_run(max_steps=2)
    real = Path.replace

    def full_disk(self, target):
        if Path(target).name == "run_plan.json":
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError):
        fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=4)
    monkeypatch.undo()
    assert fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=4).step == 4


def test_a_users_hidden_files_stay_and_ours_are_removed(plain_run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".notes.2024").write_text("mine")
    (out / ".writing-1-x").write_text("")
    (out / ".tmp-abc").mkdir()
    plain_run(max_steps=1)
    assert (out / ".notes.2024").exists() and not (out / ".writing-1-x").exists() and not (out / ".tmp-abc").exists()


PLAN = {
    "requested": {"lr": 0.001},
    "settled": {"batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": -1, "num_epochs": 1},
    "adjustments": [],
}


@pytest.mark.parametrize(
    ("plan", "fact"),
    [
        ([], ": contains list, must contain an object."),
        (5, ": contains int, must contain an object."),
        ({}, ": 'requested' is missing."),
        (PLAN | {"requested": []}, ": 'requested' is list, must be an object."),
        (PLAN | {"settled": "x"}, ": 'settled' is str, must be an object."),
        (PLAN | {"settled": PLAN["settled"] | {"batch_size": "x"}}, ": settled batch_size x: not an integer."),
        (PLAN | {"settled": PLAN["settled"] | {"precision": 5}}, ": settled precision: is int 5, must be a string."),
        (PLAN | {"settled": {}}, ": 'settled' has no batch_size."),
        (PLAN | {"requested": {"lora_rnk": 4}}, ": unknown key 'lora_rnk'. Nearest: lora_rank."),
        (PLAN | {"requested": {"lora_rank": "many"}}, ": lora_rank many: not an integer."),
        (PLAN | {"requested": {"lora_rank": [4]}}, ": lora_rank [4]: not an integer."),
        (PLAN | {"requested": {"dataset": 5}}, ": dataset: is int 5, must be a string."),
        (PLAN | {"requested": {"optimizer": "adamm"}}, ": optimizer adamm: not one of "),
    ],
)
def test_a_run_plan_edited_by_hand_is_one_line_with_file_and_key(tmp_path, plan, fact):
    file = tmp_path / "run_plan.json"
    file.write_text(json.dumps(plan))
    assert refused({"resume": tmp_path}).startswith(f"{file}{fact}")


def test_requested_values_of_a_saved_plan_are_converted_as_those_of_a_config_file(tmp_path):
    saved = PLAN | {"requested": {"learning-rate": "1e-3", "lora_rank": 8.0, "use_dora": "yes"}}
    (tmp_path / "run_plan.json").write_text(json.dumps(saved))
    found = find_saved_run(str(tmp_path), None)
    assert found.saved_plan["requested"] == {"lr": 0.001, "lora_rank": 8, "use_dora": True}
    assert type(found.saved_plan["requested"]["lora_rank"]) is int


@pytest.mark.parametrize("name", ["step-by-step", "step-3"])
def test_only_a_step_folder_under_checkpoints_is_a_checkpoint(tmp_path, name, monkeypatch):
    root = tmp_path / "checkpoints" / name if name == "step-by-step" else tmp_path / name
    step = root / "checkpoints" / "step-3"
    step.mkdir(parents=True)
    (root / "run_plan.json").write_text(json.dumps(PLAN))
    assert (find_saved_run(str(root), None).output_dir, find_saved_run(str(root), None).step_folder) == (root, None)
    assert (find_saved_run(str(step), None).output_dir, find_saved_run(str(step), None).step_folder) == (root, step)
    monkeypatch.chdir(step)
    assert find_saved_run(".", None).step_folder == step


def test_a_file_is_not_a_run(rows_file):
    assert refused({"resume": rows_file}).startswith(f"--resume {rows_file}: is a file.")
