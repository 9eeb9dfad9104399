"""A resumed run is bitwise the uninterrupted one."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from finetune.checkpoint.store import newest_checkpoint, owned_files, steps_of, verify_checkpoint
from tests.support.cells import but_slow
from tests.support.commands import command, finish
from tests.support.runs import WHOLE_STATE, copy_up_to, losses, resign, same_files, steps
from train import fine_tune


@pytest.mark.slow
def test_the_same_number_of_ranks_resumes_bitwise(base, tmp_path):
    flags = "--lora_dropout 0.1 --world_size 2 --batch_size 2 --save_every 5 --keep_last 9"
    code, _, err = finish(command(base, flags, output_dir=tmp_path / "whole"))
    assert code == 0, err
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for later in steps_of(tmp_path / "part")[:-1]:
        shutil.rmtree(later)
    (tmp_path / "part" / "train_state.json").unlink()
    code, out, err = finish(command(base, flags, "--resume auto", output_dir=tmp_path / "part"))
    assert code == 0 and "at step 5 of 12" in out, err
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    one, two = (newest_checkpoint(tmp_path / name)[0].folder for name in ("whole", "part"))
    same_files(one, two, WHOLE_STATE)


def test_the_same_run_twice_is_the_same_bits(run, uninterrupted, tmp_path):
    run(save_every=1, keep_last=12)
    assert steps(tmp_path / "out") == steps(uninterrupted)
    same_files(tmp_path / "out" / "checkpoints" / "step-12", uninterrupted / "checkpoints" / "step-12", WHOLE_STATE)


def test_a_run_in_fp8_resumes_bitwise_and_is_not_proved_again(run, tmp_path, capsys):
    """It goes on as was decided, exact or not: adapters have moved since, and rounding with them."""
    flags = {"precision": "bf16", "frozen_products": "fp8", "max_steps": 6, "save_every": 1, "keep_last": 6}
    run(**flags, output_dir=str(tmp_path / "whole"))
    said = capsys.readouterr().out
    assert "frozen_products: fp8 (the loss is off by" in said and "time of a step" not in said  # of which are no rates
    copy_up_to(tmp_path / "whole", 3, tmp_path / "part")
    run(**flags, output_dir=str(tmp_path / "part"), resume="auto")
    assert "frozen_products: fp8 (as the run began)" in capsys.readouterr().out
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    same_files(*(tmp_path / name / "checkpoints" / "step-6" for name in ("part", "whole")), WHOLE_STATE)


def test_a_run_that_is_resumed_in_fp8_proves_it_there(run, tmp_path, capsys):
    """It was taken for one that had begun in fp8, and was not proved."""
    flags = {"precision": "bf16", "output_dir": str(tmp_path / "out")}
    run(**flags, max_steps=2)
    run(**flags, max_steps=3, frozen_products="fp8", resume="auto")
    said = capsys.readouterr().out
    assert "frozen_products: exact -> fp8 since the saved run" in said
    assert "frozen_products: fp8 (the loss is off by" in said


# The first step, both sides of the end of the first epoch, and the last but one.
@pytest.mark.parametrize("step", but_slow([1, 6, 7, 11], [6, 11]))
def test_a_run_resumed_at_any_step_is_bitwise_the_uninterrupted_one(uninterrupted, tmp_path, step):
    folder = copy_up_to(uninterrupted, step, tmp_path / "out")
    state = fine_tune(resume="auto", output_dir=str(folder))
    assert state.step == 12 and state.status == "finished"
    assert steps(folder) == steps(uninterrupted)
    same_files(folder / "checkpoints" / "step-12", uninterrupted / "checkpoints" / "step-12", WHOLE_STATE)
    same_files(folder, uninterrupted, ["adapter_model.safetensors", "adapter_config.json"])


def break_rng(folder):
    arrays = verify_checkpoint(folder).tensors("rng.safetensors")
    torch.manual_seed(1)
    rewrite(folder, "rng.safetensors", {**arrays, "host": torch.get_rng_state().numpy()})


def break_cursor(folder):
    edit_state(folder, index=0, epoch=0)


def break_optimizer(folder):
    arrays = verify_checkpoint(folder).tensors("optimizer.safetensors")
    rewrite(folder, "optimizer.safetensors", {k: np.zeros_like(v) for k, v in arrays.items()})


def break_schedule(folder):
    edit_state(folder, step=3)


def edit_state(folder, **changes):
    content = json.loads((folder / "train_state.json").read_text())
    (folder / "train_state.json").write_text(json.dumps({**content, **changes}))
    resign(folder, "train_state.json")


def rewrite(folder, name, arrays):
    save_file(arrays, folder / name)
    resign(folder, name)


CONTROLS = [break_rng, break_cursor, break_optimizer, break_schedule]


@pytest.mark.parametrize("control", but_slow(CONTROLS, CONTROLS[:1]))
def test_a_resume_that_lost_one_part_of_the_state_is_detected(uninterrupted, tmp_path, control):
    folder = copy_up_to(uninterrupted, 5, tmp_path / "out")
    control(folder / "checkpoints" / "step-5")
    fine_tune(resume="auto", output_dir=str(folder))
    mine, theirs = steps(folder), steps(uninterrupted)
    assert [s["loss"] for s in mine[5:12]] != [s["loss"] for s in theirs[5:12]]


@pytest.mark.parametrize("train_type", but_slow(["full", "qlora"], ["full"]))
def test_other_train_types_resume_bitwise_too(run, tmp_path, train_type):
    flags = dict(train_type=train_type, save_every=1, keep_last=12, max_steps=6)
    if train_type == "full":
        flags |= dict(lora_rank=None, lora_dropout=None)
    run(output_dir=str(tmp_path / "whole"), **flags)
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for n in (4, 5, 6):
        shutil.rmtree(folder / "checkpoints" / f"step-{n}")
    (folder / "train_state.json").unlink()
    fine_tune(resume=str(folder))
    assert steps(folder) == steps(tmp_path / "whole")
    last = "checkpoints/step-6"
    weights = "model.safetensors" if train_type == "full" else "adapter_model.safetensors"
    same_files(folder / last, tmp_path / "whole" / last, [weights, "optimizer.safetensors"])


def test_a_finished_run_is_already_complete_and_writes_nothing(uninterrupted, tmp_path, capsys):
    folder = shutil.copytree(uninterrupted, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
    state = fine_tune(resume="auto", output_dir=str(folder))
    assert state.status == "finished" and "already complete" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"} == before


def test_half_a_report_that_a_kill_left_in_a_finished_run_is_removed_and_nobody_else_s(uninterrupted, tmp_path, capsys):
    folder = shutil.copytree(uninterrupted, tmp_path / "out")
    own, other = f".writing-{owned_files(folder).id}-report.html", ".writing-1234-report.html"
    for name in (own, other):
        (folder / name).write_text("<html>")
    fine_tune(resume="auto", output_dir=str(folder))
    assert "already complete" in capsys.readouterr().out
    assert not (folder / own).exists() and (folder / other).exists()


def test_a_finished_run_continues_to_a_larger_total_and_says_so(uninterrupted, tmp_path, capsys):
    folder = shutil.copytree(uninterrupted, tmp_path / "out")
    state = fine_tune(resume=str(folder), num_epochs=3)
    said = capsys.readouterr().out
    assert state.step == 18 and [s["step"] for s in steps(folder)] == list(range(1, 19))
    assert "total steps: 12 -> 18; the schedule is that of the new total" in said
