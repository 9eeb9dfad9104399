"""The best weights of a run that goes on: with more steps, after a signal, and where other rows are held out."""

import json
import os
import signal

import pytest

from tests.support.runs import read_events
from train import fine_tune

HARD = [{"prompt": f"say {number}", "completion": "qqq zzz yyy"} for number in range(4)]
EASY = [{"prompt": f"what is {number} plus 1?", "completion": f"b{number}"} for number in range(4)]


@pytest.fixture
def run(flags):
    """A run whose rows are learned at once, and whose held-out rows HARD are worse with each step after the first."""
    base = {k: v for k, v in flags.items() if k != "dataset"}
    more = dict(dataset=EASY * 2, validation_dataset=HARD, lr=5e-3, eval_every=1, save_every=1, eval_samples=0)
    return lambda **changes: fine_tune(**(base | more | changes))


def evaluated(folder) -> dict:
    """{step: loss} of the weights of each step."""
    return {e["step"]: e["loss"] for e in read_events(folder, "eval") if "of_step" not in e}


def best_step(folder) -> int:
    return json.loads((folder / "best" / "manifest.json").read_text())["step"]


def test_a_finished_run_that_goes_on_has_the_evaluations_and_the_best_of_one_that_did_not_stop(run, tmp_path):
    folder = tmp_path / "out"
    flags = dict(lr=0.02, lr_scheduler="constant", warmup_steps=0, load_best="true")
    whole = run(max_steps=8, **flags)
    wanted = evaluated(folder)
    assert 0 < whole.best_step < 8, wanted
    assert run(max_steps=whole.best_step, overwrite=True, **flags).best_step == best_step(folder) == whole.best_step
    on = run(max_steps=8, resume="auto", **flags)
    assert evaluated(folder) == wanted
    assert on.best_step == best_step(folder) == whole.best_step


def test_what_better_weights_replaced_is_not_named_as_the_best(run, tmp_path, capsys):
    folder = tmp_path / "out"
    run(max_steps=4, validation_dataset=EASY, keep_last=9)
    losses = evaluated(folder)
    assert best_step(folder) == 4 and losses[4] < losses[3] < losses[2]  # which is what replaces the earlier ones
    capsys.readouterr()
    state = run(max_steps=6, validation_dataset=EASY, resume=str(folder / "checkpoints" / "step-2"))
    said = "best/ has the weights of step 4, and not those of step 2: the best is found anew from here"
    assert said in capsys.readouterr().out
    assert state.best_step == best_step(folder) > 2


def test_a_loss_of_other_rows_is_no_best(run, tmp_path, capsys):
    folder = tmp_path / "out"
    run(max_steps=3, validation_dataset=EASY)
    capsys.readouterr()
    state = run(max_steps=5, resume="auto", early_stopping=9)
    losses = evaluated(folder)
    assert losses[4] > losses[2]  # of other rows
    assert state.best_step == best_step(folder) >= 3 and state.best_loss == losses[state.best_step]
    assert f"from {losses[2]:.4f}" not in capsys.readouterr().out  # as over-fitting


def test_a_run_that_a_signal_stops_at_its_early_end_ends_there(run, tmp_path):
    folder = tmp_path / "out"
    whole = run(max_steps=8, early_stopping=2)
    assert whole.step < 8
    events = [evaluated(folder), [e["loss"] for e in read_events(folder, "step")]]

    def stop(event):
        if event["step"] == whole.step:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = run(max_steps=8, early_stopping=2, overwrite=True, on_step=stop)
    assert stopped.status == "stopped" and stopped.step == whole.step
    assert run(max_steps=8, early_stopping=2, resume="auto").step == whole.step
    assert [evaluated(folder), [e["loss"] for e in read_events(folder, "step")]] == events
    assert run(max_steps=8, early_stopping=0, resume="auto").step == 8  # asked to go on


def test_the_evaluation_that_ends_a_run_counts_once(run, tmp_path):
    """Where the last weights are the result, it is taken again at their publication."""
    ended = run(max_steps=8, early_stopping=2, load_best="false")
    assert ended.worse_evals == 2
    assert run(max_steps=8, early_stopping=3, load_best="false", resume="auto").step == ended.step + 1


def test_a_run_that_a_signal_stops_after_its_best_evaluation_does_not_take_it_again(run, tmp_path):
    """Twice it would count as an evaluation without a better loss."""
    folder = tmp_path / "out"
    flags = dict(max_steps=4, validation_dataset=EASY, early_stopping=3)
    run(**flags)
    whole = [(e["step"], e["loss"]) for e in read_events(folder, "eval")]

    def stop(event):
        if event["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = run(**flags, overwrite=True, on_eval=stop)
    assert stopped.status == "stopped" and stopped.best_step == best_step(folder) == 2
    run(**flags, resume="auto")
    assert [(e["step"], e["loss"]) for e in read_events(folder, "eval")] == whole
