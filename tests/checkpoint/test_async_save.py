"""Saves that a thread writes while steps go on: the bytes of one that waits, one at a time, and every way they end."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from finetune.checkpoint.store import newest_checkpoint, steps_of
from finetune.errors import NonFiniteError, StorageError
from tests.support import ranks, sharded_checkpoint_cases
from tests.support.held_saves import HeldSaves
from tests.support.runs import read_events, steps
from train import fine_tune

OF_THE_FOLDER = {"output_dir", "async_save", "save_every", "metrics_bytes", "reason"}


@pytest.fixture
def held(tmp_path, monkeypatch):
    return HeldSaves(tmp_path / "out", monkeypatch)


def contents(step: Path) -> dict:
    """{file: its bytes, or its JSON without what names the folder or the form of the save}."""
    found = {}
    for file in sorted(step.iterdir()):
        found[file.name] = file.read_bytes()
        if file.suffix == ".json":
            found[file.name] = without(json.loads(file.read_bytes()))
    for name in ("run_plan.json", "train_state.json"):
        del found["manifest.json"]["files"][name]
    del found["manifest.json"]["run_id"]
    return found


def without(content):
    if isinstance(content, dict):
        return {k: without(v) for k, v in content.items() if k not in OF_THE_FOLDER}
    if isinstance(content, list):
        return [without(v) for v in content if not (isinstance(v, dict) and v.get("setting") in OF_THE_FOLDER)]
    return content


FULL = dict(train_type="full", lora_rank=None, lora_dropout=None)


@pytest.mark.parametrize(
    ("changes", "every"),
    [({}, 1), (FULL, 2), pytest.param(FULL | {"optimizer": "adamw_8bit"}, 2, marks=pytest.mark.slow)],
    ids=["lora", "full", "8-bit moments"],
)
def test_what_a_thread_writes_after_later_steps_are_the_bytes_of_a_save_that_waits(run, held, tmp_path, changes, every):
    flags = dict(max_steps=7, keep_last=9) | changes
    run(**flags, save_every=every, async_save="true")
    run(**flags, save_every=1, async_save="false", output_dir=str(tmp_path / "waited"))
    assert held.steps == [*range(every, 7, every)] and held.most == 1
    assert [int(f.name[5:]) for f in reversed(steps_of(tmp_path / "out"))] == [*held.steps, 7]
    for step in steps_of(tmp_path / "out"):
        assert contents(step) == contents(tmp_path / "waited/checkpoints" / step.name), step.name
    saved = [e["step"] for e in read_events(tmp_path / "out", "save")]
    assert saved == [*held.steps, 7]


def test_a_run_resumed_from_a_save_beside_steps_is_bitwise_the_uninterrupted_one(run, held, uninterrupted, tmp_path):
    def end_the_run(step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    held.at_last = end_the_run
    state = run(save_every=5, keep_last=9, async_save="true")
    out = tmp_path / "out"
    assert (state.status, state.exit_code) == ("stopped", 143) and held.steps == [5]
    assert [f.name for f in steps_of(out)] == [f"step-{state.step}", "step-5"] and state.step > 5
    for folder in steps_of(out)[:-1]:
        folder.rename(tmp_path / folder.name)
    assert fine_tune(resume="auto", output_dir=str(out), save_every=0).step == 12
    assert steps(out) == steps(uninterrupted)


def test_a_signal_at_a_save_that_has_begun_waits_for_it_and_saves_nothing_else(run, tmp_path, monkeypatch):
    out, real, sent = tmp_path / "out", os.mkdir, []

    def mkdir(path, *args, **options):
        in_thread = threading.current_thread() is not threading.main_thread()
        if in_thread and str(path).endswith("-step-5") and not sent:
            sent.append(path)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # the main thread has reached the end of its step, or takes one more
        return real(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    state = run(save_every=5, keep_last=9, async_save="true")
    assert (
        state.exit_code == 143 and f"step-{state.step}" == steps_of(out)[0].name and steps_of(out)[-1].name == "step-5"
    )
    assert not list(out.glob("checkpoints/.tmp-*"))
    assert [e["step"] for e in read_events(out, "save")] == sorted({5, state.step})


def failing(step: int, error: OSError, monkeypatch) -> None:
    """fsync fails from the save of this step on, in threads."""
    real = os.fsync

    def fsync(handle):
        if threading.current_thread() is not threading.main_thread():
            found = re.search(r"\.tmp-.*-step-(\d+)", os.readlink(f"/proc/self/fd/{handle}"))
            if found and int(found[1]) >= step:
                raise error
        return real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_save_that_fails_ends_the_run_and_earlier_checkpoints_are_intact(run, uninterrupted, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(6, OSError(28, "No space left on device"), patch)
        with pytest.raises(StorageError, match=r"step-6: No space left on device .* Earlier checkpoints are intact"):
            run(save_every=3, async_save="true")
    out = tmp_path / "out"
    assert newest_checkpoint(out)[0].step == 3
    end = read_events(out, "end")[-1]
    assert (end["exit_code"], end["status"]) == (74, "failed") and 6 <= end["step"] < 9
    assert fine_tune(resume="auto", output_dir=str(out)).step == 12
    assert steps(out) == steps(uninterrupted) and not list(out.glob("checkpoints/.*"))


def test_a_run_that_ends_by_another_error_finishes_the_save_that_goes_on(run, tmp_path, monkeypatch):
    real = os.fsync

    def slow(handle):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)  # many files: the steps after it are over long before
        return real(handle)

    monkeypatch.setattr(os, "fsync", slow)
    with pytest.raises(NonFiniteError, match=r"step-1\b"):
        run(save_every=1, async_save="true", lr=1e30, lr_scheduler="constant", apply_gradient_clipping=False)
    assert newest_checkpoint(tmp_path / "out")[0].step == read_events(tmp_path / "out", "save")[-1]["step"] == 1


@pytest.mark.parametrize("changes", [{}, FULL], ids=["lora", "full"])
def test_the_copy_takes_the_bytes_that_were_predicted(run, tmp_path, changes):
    run(save_every=2, max_steps=5, async_save="true", **changes)
    (start,), last = read_events(tmp_path / "out", "start"), read_events(tmp_path / "out", "step")[-1]
    predicted = start["predicted_memory_bytes"]["items"]["snapshot"]
    assert predicted > 0 and last["memory_bytes"]["items"]["snapshot"] == predicted
    run(save_every=2, max_steps=3, async_save="false", output_dir=str(tmp_path / "waits"), **changes)
    (start,) = read_events(tmp_path / "waits", "start")
    assert "snapshot" not in start["predicted_memory_bytes"]["items"]


@pytest.mark.slow
def test_ranks_write_beside_steps_what_they_held_and_one_that_cannot_ends_all_with_one_line(tmp_path):
    found = ranks.run(2, sharded_checkpoint_cases.beside_steps, tmp_path / "ranks", folder=str(tmp_path))
    for entry in found:
        for layout in ("FSDP2 2", "TP 2", "PP 2", "DDP 2"):
            assert entry[layout]["ended"] == [None, 2] and entry[layout]["loss"] == found[0][layout]["loss"], entry
        assert entry["code"] == 74 and "too large" in entry["error"] and entry["error"] == found[0]["error"]
    assert all(found[0][layout]["same"] for layout in ("FSDP2 2", "TP 2", "PP 2", "DDP 2"))
    assert found[0]["left"] == ["latest", "step-2"]
