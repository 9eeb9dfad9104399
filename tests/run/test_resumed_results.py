"""What a run says and keeps where it is resumed with other flags, other held-out rows, or without its log."""

import os
import shutil
import signal

import pytest

from tests.run.test_best_of_continued import EASY, HARD, best_step
from tests.support.runs import read_events
from train import fine_tune


@pytest.fixture
def run(flags):
    """A run of rows that are learned at once; what is evaluated is given."""
    base = {k: v for k, v in flags.items() if k != "dataset"} | dict(dataset=EASY * 2, lr=5e-3, eval_samples=0)
    return lambda **changes: fine_tune(**(base | changes))


def stop_at(step):
    def on_step(event):
        if event["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_step


def test_what_was_measured_before_of_other_rows_is_not_beside_what_was_measured_after(run, tmp_path, capsys):
    folder = tmp_path / "out"
    run(max_steps=2, validation_dataset=EASY)
    state = run(max_steps=4, validation_dataset=HARD, resume="auto")
    assert state.scores["before"] is None and state.scores["after"]["loss"] > 0
    card = (folder / "README.md").read_text()
    assert "before training" not in card and "after training" in card
    table = capsys.readouterr().out.rpartition("eval  step 4")[2]
    assert "after" in table and "before" not in table.partition("lowest")[0]


def test_the_last_evaluation_is_not_named_the_one_before_training(run, tmp_path):
    stopped = run(max_steps=4, on_step=stop_at(2))
    assert stopped.status == "stopped"
    state = run(max_steps=4, validation_dataset=HARD, resume="auto")
    assert state.scores["before"] is None and state.scores["after"]["loss"] > 0
    assert "before training" not in (tmp_path / "out" / "README.md").read_text()


def test_a_finished_run_does_what_another_flag_asks_of_its_end(run, tmp_path, capsys):
    folder = tmp_path / "out"
    flags = dict(max_steps=4, validation_dataset=HARD, eval_every=1, save_every=1)
    run(**flags)
    better = best_step(folder)
    assert better < 4  # HARD is worse with each step
    again = run(**flags, load_best="true", resume="auto")
    assert "already complete" not in capsys.readouterr().out.rpartition("resumed from")[2]
    best, top = (folder / at / "adapter_model.safetensors" for at in ("best", "."))
    assert again.best_step == better and best.read_bytes() == top.read_bytes()
    run(**flags, load_best="true", resume="auto")
    assert "already complete" in capsys.readouterr().out
    run(**flags, load_best="true", resume="auto", score_dataset=EASY)
    last = read_events(folder, "eval")[-1]
    assert last["of_step"] == better and last["num_scored"] == len(EASY)


def test_a_finished_run_that_kept_no_weights_makes_them_once_asked_to(run, tmp_path):
    run(max_steps=2, save_model="false")
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert run(max_steps=2, save_model="true", resume="auto").step == 2
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_each_step_stands_once_in_a_log_that_was_begun_anew(run, tmp_path):
    folder = tmp_path / "out"
    run(max_steps=6, on_step=stop_at(3), save_every=1, keep_last=9)
    (folder / "metrics.jsonl").unlink()
    run(max_steps=6, resume="auto")
    early = shutil.copytree(folder / "checkpoints" / "step-3", tmp_path / "step-3")
    shutil.rmtree(folder / "checkpoints" / "step-6")
    run(max_steps=6, resume=str(folder / "checkpoints" / early.name))
    assert [event["step"] for event in read_events(folder, "step")] == [4, 5, 6]
