"""The output folder: whose it is, what is kept in it, and which checkpoint a resume takes."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from finetune.checkpoint.lock import Lock
from finetune.checkpoint.output_dir import with_own_folder
from finetune.checkpoint.saved_run import find_saved_run
from finetune.checkpoint.store import steps_of, verify_checkpoint
from finetune.errors import CheckpointDamagedError, OutputDirInUseError, PlanError, StorageError
from finetune.model_files.digest import sampled_digest
from finetune.model_files.files import find_model
from finetune.system.files import WRITING
from finetune.system.owned_files import LIST, OwnedFiles, read_list
from tests.support.commands import command, refused, wait_for_steps
from tests.support.plans import plan_of
from tests.support.runs import copy_up_to, read_events, resign, rewrite_json, steps
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
    with pytest.raises(PlanError, match="holds config.json, which is not of a run"):
        plain_run(output_dir=str(folder), overwrite=True, max_steps=1)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_the_folder_of_the_rows_is_no_output_dir(plain_run, rows_file, tmp_path):
    """A run there was saved, and could not go on: its own files were rows to read, and refused as such."""
    folder = tmp_path / "rows"
    folder.mkdir()
    shutil.copy(rows_file, folder / "rows.jsonl")
    for dry_run in (True, False):
        with pytest.raises(PlanError, match="--output_dir .*rows: is the folder of --dataset, .* Give another"):
            plain_run(dataset=str(folder), output_dir=str(folder), max_steps=1, dry_run=dry_run)
    assert [p.name for p in folder.iterdir()] == ["rows.jsonl"]
    plain_run(dataset=str(folder), output_dir=str(folder / "out"), max_steps=1)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("flag", "place"),
    [
        ("adapter", "out"),
        ("adapter", "link"),
        ("adapter", "out/best"),
        ("adapter", "out/checkpoints/step-2"),
        ("teacher", "out"),
        ("dataset", "out/samples.jsonl"),
    ],
)
def test_overwrite_never_removes_what_the_run_reads(plain_run, rows_file, tmp_path, flag, place, dry_run):
    """The adapter was gone, and the run that was to go on from it failed for want of it."""
    plain_run(max_steps=2, validation_dataset=str(rows_file), eval_every=1, save_every=1)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    value = str(tmp_path / place)
    with pytest.raises(PlanError, match=f"--{flag} {value}: is of the run in .*Give another --output_dir"):
        columns = {"columns": "question=prompt,answer=answer"} if flag == "dataset" else {}
        plain_run(**{flag: value} | columns, overwrite=True, max_steps=1, dry_run=dry_run)
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before


def test_overwrite_takes_rows_that_lie_in_the_folder_and_no_run_wrote(plain_run, rows_file, tmp_path):
    plain_run(max_steps=1)
    rows = shutil.copy(rows_file, tmp_path / "out" / "rows.jsonl")
    plain_run(max_steps=2, dataset=rows, overwrite=True)
    assert os.path.isfile(rows)


def test_a_run_resumed_at_an_older_step_keeps_the_newer_ones_aside(plain_run, tmp_path, capsys):
    plain_run(max_steps=6, save_every=1, keep_last=6)
    out = tmp_path / "out"
    (out / "train_state.json").unlink()
    fine_tune(resume=str(out / "checkpoints" / "step-2"), keep_last=2)
    said = capsys.readouterr().out
    for step in (3, 4, 5, 6):
        assert f"step-{step} is kept aside as checkpoints/aside-step-{step}: this run continues from step 2" in said
        assert verify_checkpoint(out / "checkpoints" / f"aside-step-{step}").step == step
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


def test_what_a_killed_run_left_goes_and_what_only_looks_like_it_stays(plain_run, tmp_path):
    out, mine = (
        tmp_path / "out",
        [".notes", ".writing-1-x", ".tmp-step-3-44", ".trash-step-1-4-5", "checkpoints/.tmp-x"],
    )
    (out / "checkpoints").mkdir(parents=True)
    for name in mine:
        (out / name).write_text("mine")
    plain_run(max_steps=1)
    list_id, _ = read_list(out)
    left = [out / f".writing-{list_id}-latest", out / f"checkpoints/.tmp-{list_id}-step-2"]
    left[0].write_text("")
    left[1].mkdir()
    fine_tune(resume=str(out), max_steps=2)
    assert not any(path.exists() for path in left) and all((out / name).read_text() == "mine" for name in mine)


def test_what_a_kill_leaves_of_the_first_list_is_removed(plain_run, tmp_path):
    """No list names the id of its temporary name yet."""
    out = tmp_path / "out"
    out.mkdir()
    left = out / f"{WRITING}{OwnedFiles(out, '').id}-{LIST}"
    left.write_text('{"id"')
    plain_run(max_steps=1)
    assert not left.exists() and (out / LIST).exists()


@pytest.mark.parametrize("name", ["stacks/rank-0.txt", "reference_log_probs.json"])
def test_a_run_owns_no_file_that_its_kind_never_writes(plain_run, tmp_path, name):
    plain_run(max_steps=1)
    file = tmp_path / "out" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(PlanError, match=f"holds {name}, which is not of a run"):
        plain_run(max_steps=1, overwrite=True)
    assert file.read_text() == "mine"


WRITTEN_BY_OTHERS = (
    *("adapter_model.safetensors", "adapter_config.json", "metrics.jsonl", "tokenizer.json", "all_config.yaml"),
    *("best/adapter_model.safetensors", "checkpoints/latest", "stacks/rank-0.txt", ".written.json", ".lock"),
)


@pytest.mark.parametrize("name", [*WRITTEN_BY_OTHERS, "checkpoints/step-7"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that_no_run_wrote_is_refused_by_name_and_stays(plain_run, tmp_path, name, overwrite):
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(PlanError, match=f"holds {name}, which is not of a run"):
        plain_run(max_steps=1, overwrite=overwrite)
    others = [p for p in (tmp_path / "out").rglob("*") if p.is_file() and p != file]
    assert file.read_text() == "mine" and others == []


@pytest.mark.parametrize("make", [lambda p: p.symlink_to("x"), os.mkfifo, Path.mkdir], ids=["link", "pipe", "folder"])
def test_a_resumed_run_replaces_no_link_and_no_pipe(plain_run, tmp_path, make):
    plain_run(max_steps=1)
    file = tmp_path / "out" / "adapter_config.json"
    file.unlink()
    make(file)
    mode = os.lstat(file).st_mode
    with pytest.raises(PlanError, match="holds adapter_config.json, which is a (link|pipe|folder) and never replaced"):
        fine_tune(resume=str(tmp_path / "out"), max_steps=2)
    assert os.lstat(file).st_mode == mode


def contents(folder: Path) -> dict:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*mine*") if p.is_file()}


@pytest.mark.parametrize("older", [False, True], ids=["listed", "made before there were lists"])
def test_overwrite_removes_what_runs_wrote_and_nothing_else(plain_run, rows_file, tmp_path, older):
    out, flags = tmp_path / "out", dict(validation_dataset=str(rows_file), eval_every=2)
    plain_run(max_steps=4, save_every=1, keep_last=3, **flags)
    if older:
        (out / ".written.json").unlink()
    for name in ("mine.txt", "best/mine.txt", "checkpoints/mine.txt", "checkpoints/mine/x-mine", "stacks/mine"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(name)
    before = contents(out)
    with pytest.raises(PlanError, match="holds another run"):
        plain_run(max_steps=1)
    plain_run(max_steps=1, overwrite=True)
    assert contents(out) == before and [p.name for p in steps_of(out)] == ["step-1"]
    assert not (out / "best" / "adapter_model.safetensors").exists()


def test_a_checkpoint_with_a_file_of_the_users_is_not_rotated_away(plain_run, tmp_path):
    plain_run(max_steps=2, save_every=1, keep_last=2)
    out = tmp_path / "out"
    (out / "checkpoints/step-1/notes.txt").write_text("mine")
    fine_tune(resume=str(out), max_steps=5, save_every=1, keep_last=1)
    assert [p.name for p in steps_of(out)] == ["step-5", "step-1"]
    assert (out / "checkpoints/step-1/notes.txt").read_text() == "mine"
    with pytest.raises(PlanError, match="holds checkpoints/step-1, which is not of a run"):
        plain_run(max_steps=1, overwrite=True)


def test_a_run_made_before_there_were_lists_resumes(uninterrupted, tmp_path):
    folder = copy_up_to(uninterrupted, 5, tmp_path / "out")
    (folder / ".written.json").unlink()
    fine_tune(resume="auto", output_dir=str(folder))
    assert steps(folder) == steps(uninterrupted)
    assert {"adapter_model.safetensors", "tokenizer.json", "run_plan.json"} <= read_list(folder)[1]


PLAN = {
    "requested": {"lr": 0.001},
    "settled": {"batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": -1, "num_epochs": 1},
    "adjustments": [],
}


@pytest.mark.parametrize(
    ("plan", "fact"),
    [
        ([], ": content is list, must be an object."),
        (5, ": content is int, must be an object."),
        ({}, ": requested is missing."),
        (PLAN | {"requested": []}, ": requested is list, must be an object."),
        (PLAN | {"settled": "x"}, ": settled is str, must be an object."),
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
    found = find_saved_run("auto", str(tmp_path))
    assert found.saved_plan["requested"] == {"lr": 0.001, "lora_rank": 8, "use_dora": True}
    assert type(found.saved_plan["requested"]["lora_rank"]) is int
    saved["requested"]["lr"] = 0.01
    (tmp_path / "run_plan.json").write_text(json.dumps(saved))
    with pytest.raises(PlanError, match="run_plan.json: lr: gives --lr a second value. Give it once."):
        find_saved_run("auto", str(tmp_path))


@pytest.mark.parametrize("name", ["step-by-step", "step-3"])
def test_only_a_step_folder_under_checkpoints_is_one_of_the_runs_checkpoints(
    uninterrupted, tmp_path, name, monkeypatch
):
    root = tmp_path / "checkpoints" / name if name == "step-by-step" else tmp_path / name
    copy_up_to(uninterrupted, 3, root)
    step = root / "checkpoints" / "step-3"
    for resume, step_folder in ((root, None), (step, step)):
        found = find_saved_run(str(resume), None)
        assert (found.output_dir, found.step_folder, found.is_outside) == (root, step_folder, False)
    monkeypatch.chdir(step)
    assert find_saved_run(".", None).step_folder == step


def test_resume_of_a_folder_without_a_checkpoint_is_refused_and_never_a_start_at_step_0(plain_run, tmp_path):
    plain_run(max_steps=2)
    out = tmp_path / "out"
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(PlanError, match="has no checkpoint to resume from"):  # it finished, but can't train longer
        fine_tune(resume=str(out), max_steps=4)
    (out / "train_state.json").unlink()
    before = (out / "adapter_model.safetensors").read_bytes()
    assert "has no checkpoint to resume from" in refused({"resume": out})
    assert (out / "adapter_model.safetensors").read_bytes() == before


def test_a_step_folder_copied_elsewhere_resumes_as_that_step_in_a_folder_that_is_named(uninterrupted, tmp_path, capsys):
    backup = shutil.copytree(uninterrupted / "checkpoints" / "step-5", tmp_path / "backup" / "mine")
    before = sorted(p.name for p in backup.iterdir())
    assert "is a checkpoint outside of a run's folder. Give the --output_dir" in refused({"resume": backup})
    fine_tune(resume=str(backup), output_dir=str(tmp_path / "out"))
    assert "at step 5 of 12" in capsys.readouterr().out
    assert steps(tmp_path / "out") == steps(uninterrupted)[5:]
    assert sorted(p.name for p in backup.iterdir()) == before
    with pytest.raises(PlanError, match="holds another run"):
        fine_tune(resume=str(backup), output_dir=str(tmp_path / "out"))


@pytest.mark.parametrize("damage", ["lost", "cut", "a flag changed", "batch_size changed"])
def test_the_plan_of_a_resume_is_that_of_the_checkpoint_whatever_became_of_the_one_above(
    uninterrupted, tmp_path, damage, capsys
):
    folder = copy_up_to(uninterrupted, 5, tmp_path / "out")
    file = folder / "run_plan.json"
    text = file.read_text()
    changed = {
        "cut": text[: len(text) // 2],
        "a flag changed": text.replace('"lora_dropout": 0.1', '"lora_dropout": 0.3'),
        "batch_size changed": text.replace('"batch_size": 2', '"batch_size": 6'),
    }
    file.unlink() if damage == "lost" else file.write_text(changed[damage])
    assert damage == "lost" or file.read_text() != text
    fine_tune(resume=str(folder))
    assert "the plan of the checkpoint is used" in capsys.readouterr().out
    assert steps(folder) == steps(uninterrupted)


def test_what_a_resumed_run_asked_for_stays_if_it_is_killed_before_its_first_save(uninterrupted, tmp_path):
    folder = copy_up_to(uninterrupted, 12, tmp_path / "out")
    fine_tune(resume=str(folder), num_epochs=3, save_every=100)
    for name in ("step-18", "step-17", "step-16"):
        shutil.rmtree(folder / "checkpoints" / name, ignore_errors=True)
    (folder / "train_state.json").unlink()
    assert fine_tune(resume="auto", output_dir=str(folder)).step == 18


def test_overwrite_deletes_checkpoints_behind_a_link_and_rotation_never_the_one_just_saved(plain_run, tmp_path):
    big, out = tmp_path / "big", tmp_path / "out"
    big.mkdir()
    (big / "notes.txt").write_text("mine")
    out.mkdir()
    (out / "checkpoints").symlink_to(big)
    plain_run(max_steps=6, save_every=1)
    plain_run(max_steps=3, save_every=1, overwrite=True)
    assert sorted(p.name for p in big.iterdir()) == ["latest", "notes.txt", "step-2", "step-3"]
    assert [p.name for p in steps_of(out)] == ["step-3", "step-2"]


def test_a_checkpoint_of_a_newer_format_is_skipped_and_kept(uninterrupted, tmp_path, capsys):
    folder = copy_up_to(uninterrupted, 3, tmp_path / "out")
    manifest = folder / "checkpoints" / "step-3" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    fine_tune(resume="auto", output_dir=str(folder))
    said = capsys.readouterr().out
    assert "format version 2 is newer" in said and "step-3 is kept aside as checkpoints/aside-step-3" in said
    assert (folder / "checkpoints" / "aside-step-3" / "optimizer.safetensors").is_file()
    assert steps(folder) == steps(uninterrupted)


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (lambda file: file.unlink(), "no longer holds 5 steps from 1 to 5"),
        (lambda file: os.truncate(file, file.stat().st_size // 5), "no longer holds "),
        (lambda file: file.write_bytes(file.read_bytes().replace(b'"step": 3', b'"step": \xff')), "holds step 3:"),
    ],
    ids=["deleted", "cut", "damaged"],
)
def test_lost_lines_of_metrics_are_named_on_resume_and_no_torn_line_stays(
    uninterrupted, tmp_path, capsys, damage, fact
):
    folder = copy_up_to(uninterrupted, 5, tmp_path / "out")
    damage(folder / "metrics.jsonl")
    fine_tune(resume=str(folder))
    assert fact in capsys.readouterr().out
    found = steps(folder)  # every line is JSON
    assert [step for step in steps(uninterrupted) if step in found] == found
    assert [step["step"] for step in found][-7:] == list(range(6, 13))


@pytest.mark.parametrize(
    "change", [os.remove, lambda file: shutil.copy(file, f"{file}.2") and os.replace(f"{file}.2", file)]
)
def test_a_log_that_is_removed_or_replaced_while_the_run_goes_on_is_written_again(plain_run, tmp_path, capsys, change):
    file = tmp_path / "out" / "metrics.jsonl"
    plain_run(max_steps=4, on_step=lambda event: event["step"] in (2, 4) and change(file))
    assert [event["step"] for event in steps(tmp_path / "out")] == [1, 2, 3, 4]
    assert read_events(tmp_path / "out", "end")[-1]["status"] == "finished"
    assert capsys.readouterr().out.count("metrics.jsonl was removed or replaced while the run went on") == 2


def test_a_folder_that_is_gone_is_said_to_be_and_no_checkpoint_in_it_intact(plain_run, tmp_path):
    with pytest.raises(StorageError, match="is gone: it was moved or removed while the run went on") as caught:
        plain_run(
            max_steps=2, save_model=False, on_step=lambda event: shutil.rmtree(tmp_path / "out", ignore_errors=True)
        )
    assert "intact" not in str(caught.value)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_link_in_the_output_dir_is_not_followed(plain_run, tmp_path, name):
    mine = tmp_path / "mine.txt"
    mine.write_text("kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(mine)
    with pytest.raises(PlanError, match="is a link"):
        plain_run(max_steps=1)
    assert mine.read_text() == "kept"


def test_an_empty_folder_of_the_users_stays_when_the_run_is_refused(plain_run, tmp_path):
    (tmp_path / "out").mkdir(mode=0o700)
    with pytest.raises(PlanError):
        plain_run(dataset=str(tmp_path / "absent.jsonl"))
    with pytest.raises(PlanError):
        plain_run(max_steps=1, score_dataset=None, dataset_samples=1, batch_size=4, validation_split=0.9)
    assert (tmp_path / "out").is_dir() and not list((tmp_path / "out").iterdir())


def test_runs_started_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(dataset="x")
    names = [with_own_folder(plan).settings.output_dir for _ in range(3)]
    assert names == [plan.settings.output_dir, plan.settings.output_dir + "-2", plan.settings.output_dir + "-3"]
    assert all((tmp_path / name).is_dir() for name in names)


def test_a_lock_file_that_its_owner_removed_after_it_was_opened_is_not_a_lock(tmp_path, monkeypatch):
    """A run that is refused removes .lock; another had opened it before and locks the removed file."""
    real = fcntl.flock

    def remove_first(handle, how):
        monkeypatch.undo()
        (tmp_path / "out" / ".lock").unlink()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    first = Lock(tmp_path / "out")
    with pytest.raises(OutputDirInUseError):
        Lock(tmp_path / "out")
    first.release()


def test_a_file_is_not_a_run(rows_file):
    assert refused({"resume": rows_file}).startswith(f"--resume {rows_file}: is a file.")


def drop(*keys):
    def edit(content):
        for key in keys:
            content.pop(key)

    return edit


def put(key, value):
    def edit(content):
        content[key] = value

    return edit


@pytest.mark.parametrize(
    ("name", "edit", "fact"),
    [
        ("train_state.json", lambda content: 5, "content is int, must be an object"),
        ("train_state.json", drop("identity"), "identity is missing"),
        ("train_state.json", drop("engine"), "engine is missing"),
        ("train_state.json", lambda content: content["engine"].pop("counts") and None, "engine.counts is missing"),
        ("train_state.json", put("step", "five"), "step is str, must be an integer"),
        ("train_state.json", put("metrics_bytes", [5]), "metrics_bytes is list, must be an integer"),
        ("run_plan.json", put("settled", None), "settled is NoneType, must be an object"),
    ],
)
def test_a_checkpoints_file_that_this_tool_cannot_have_written_is_skipped(uninterrupted, tmp_path, name, edit, fact):
    folder = copy_up_to(uninterrupted, 2, tmp_path / "out")
    shutil.rmtree(folder / "checkpoints" / "step-1", ignore_errors=True)
    rewrite_json(folder / "checkpoints" / "step-2", name, edit)
    with pytest.raises(CheckpointDamagedError, match=f"step-2/{name}: {fact}"):
        fine_tune(resume=str(folder))


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (lambda text: "5", "content is int"),
        (lambda text: "[" * 100_000, "nested too deeply"),
        (lambda text: text.replace('"step": 2', '"step": "2"'), "step is str, must be an integer"),
        (lambda text: text.replace('"format_version": 1', '"format_version": null'), "format_version is NoneType"),
        (lambda text: json.dumps(json.loads(text) | {"files": {}}), "does not name run_plan.json"),
        (lambda text: text.replace("optimizer.safetensors", "x" * 5000), "does not name optimizer.safetensors"),
    ],
)
def test_a_manifest_that_this_tool_cannot_have_written_is_one_line(uninterrupted, tmp_path, content, fact):
    folder = copy_up_to(uninterrupted, 2, tmp_path / "out")
    shutil.rmtree(folder / "checkpoints" / "step-1", ignore_errors=True)
    manifest = folder / "checkpoints" / "step-2" / "manifest.json"
    manifest.write_text(content(manifest.read_text()))
    with pytest.raises(CheckpointDamagedError, match=fact):
        fine_tune(resume=str(folder))


def rewrite_tensors(step_folder, name, edit):
    arrays = edit(load_file(step_folder / name))
    save_file(arrays, step_folder / name)
    resign(step_folder, name)


def transposed(arrays):
    first = next(key for key, value in arrays.items() if value.ndim == 2 and value.shape[0] != value.shape[1])
    return arrays | {first: np.ascontiguousarray(arrays[first].T)}


@pytest.mark.parametrize(
    ("name", "edit", "fact"),
    [
        ("optimizer.safetensors", lambda arrays: {}, "has no moments"),
        ("optimizer.safetensors", transposed, "its weight"),
        (
            "optimizer.safetensors",
            lambda arrays: {key: value for key, value in arrays.items() if not key.endswith("exp_avg_sq")},
            "has exp_avg; adamw has exp_avg, exp_avg_sq",
        ),
        (
            "optimizer.safetensors",
            lambda arrays: {k: v.astype("f8") for k, v in arrays.items()},
            "is .*64, must be float32",
        ),
        (
            "optimizer.safetensors",
            lambda arrays: {k: v.astype("f2") for k, v in arrays.items()},
            "is .*16, must be float32",
        ),
        ("rng.safetensors", lambda arrays: {}, "host is missing"),
        ("rng.safetensors", lambda arrays: {"host": arrays["host"][:100]}, "host is uint8"),
        ("rng.safetensors", lambda arrays: {"host": np.full_like(arrays["host"], 255)}, "rng.safetensors: "),
    ],
)
def test_state_that_no_run_can_have_saved_is_damage_whatever_its_digest(uninterrupted, tmp_path, name, edit, fact):
    folder = copy_up_to(uninterrupted, 2, tmp_path / "out")
    rewrite_tensors(folder / "checkpoints" / "step-2", name, edit)
    with pytest.raises(CheckpointDamagedError, match=fact):
        fine_tune(resume=str(folder))


@pytest.mark.parametrize("count", [0, -1, 2**60, 10**400, float("nan"), float("inf")])
def test_a_number_of_steps_that_no_run_can_have_taken_is_damage_whatever_its_digest(uninterrupted, tmp_path, count):
    folder = copy_up_to(uninterrupted, 2, tmp_path / "out")

    def edit(content):
        content["engine"]["counts"] = dict.fromkeys(content["engine"]["counts"], count)

    rewrite_json(folder / "checkpoints" / "step-2", "train_state.json", edit)
    with pytest.raises(CheckpointDamagedError, match="engine.counts has no step of"):
        fine_tune(resume=str(folder))


def test_every_changed_byte_of_the_base_is_noticed(uninterrupted, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    files = find_model(str(model))
    saved, weights = files.digest, model / "model.safetensors"
    content, rng = weights.read_bytes(), random.Random(0)
    for _ in range(20):
        changed = bytearray(content)
        changed[rng.randrange(len(content) // 2, len(content))] ^= 1 << rng.randrange(8)
        weights.write_bytes(changed)
        assert not find_model(str(model)).matches(saved)
    weights.write_bytes(content)
    assert find_model(str(model)).matches(saved)
    earlier = sampled_digest(files.folder, files.weight_files)  # in checkpoints of earlier versions
    assert find_model(str(model)).matches(earlier) and len(earlier) == 64


def test_a_disk_too_small_for_the_checkpoints_is_said_before_the_first_step(plain_run, monkeypatch, capsys):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    plain_run(max_steps=1, keep_last=3)
    said = capsys.readouterr().out
    assert "0.00 GiB free; 3 checkpoints and one being written take" in said
    assert said.index("GiB free") < said.index("step     1/1")


@pytest.mark.slow
def test_a_folder_that_is_moved_away_is_not_made_again(flags, tmp_path):
    """The run ends at its next save with a line; what it saved is where the user moved it."""
    long = flags | {"max_steps": 2000, "num_epochs": 1000, "save_every": 20, "output_dir": tmp_path / "out"}
    process = subprocess.Popen(command(long), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for_steps(tmp_path / "out", 2, process)
    (tmp_path / "out").rename(tmp_path / "moved")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 74 and f"{tmp_path / 'out'}: was moved or replaced while the run went on" in err
    assert not list(tmp_path.glob("out/*.safetensors")) and not list(tmp_path.glob("out/checkpoints/*"))
    assert (tmp_path / "moved" / "run_plan.json").is_file()


HOLDS = """
import os, sys, time
from pathlib import Path
from finetune.checkpoint.lock import Lock
lock = Lock(Path(sys.argv[1]))
child = os.fork()
if not child:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


def test_a_forked_child_that_outlives_a_killed_run_does_not_hold_its_folder(tmp_path):
    """The workers of a reward's ProcessPoolExecutor outlive an out-of-memory kill."""
    run = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    child = int(run.stdout.readline())
    try:
        with pytest.raises(OutputDirInUseError):
            Lock(tmp_path / "out")
        run.kill()
        run.wait()
        Lock(tmp_path / "out").release()
        os.kill(child, 0)  # it is still there
    finally:
        run.kill()
        os.kill(child, signal.SIGKILL)


def test_a_lock_that_is_released_is_free_whoever_has_it_open(tmp_path):
    lock = Lock(tmp_path / "out")
    with open(os.dup(lock.handle.fileno())):
        lock.release()
        Lock(tmp_path / "out").release()
