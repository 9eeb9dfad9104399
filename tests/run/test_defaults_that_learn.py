"""--lr search, --early_stopping and --load_best on real runs: what they leave behind, to the bit."""

import itertools
import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from finetune.errors import PlanError
from finetune.run import lr_search, samples
from finetune.run.lr_search import rungs_of
from tests.support.runs import read_events
from train import fine_tune

SEARCH = {"lr": "search", "validation_split": 0.25, "num_epochs": 12, "batch_size": 2, "lora_dropout": 0.1}


@pytest.fixture
def rows(tmp_path):
    """32 rows, most of them of one kind, so that a rate can be too low."""
    file = tmp_path / "rows.jsonl"
    made = [{"prompt": f"What is {i}? ", "completion": f"It is {i % 4}."} for i in range(32)]
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


@pytest.fixture
def learn(tiny_model, rows, tmp_path):
    def call(name, **overrides):
        base = dict(model_name=str(tiny_model), dataset=str(rows), output_dir=str(tmp_path / name), backend="cpu")
        same = dict(train_type="lora", lora_rank=4, context_length=64, precision="fp32", log_to="stdout")
        return tmp_path / name, fine_tune(**same | base | overrides)

    return call


def weights_of(folder):
    return load_file(folder / "adapter_model.safetensors")


def assert_same_weights(one, other):
    one, other = weights_of(one), weights_of(other)
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def settled(folder):
    return json.loads((folder / "run_plan.json").read_text())["settled"]


@pytest.mark.parametrize("backend", ["cpu", pytest.param("mlx", marks=pytest.mark.slow)])
def test_a_searched_run_is_to_the_bit_the_run_with_the_rate_it_chose(learn, backend, capsys):
    searched, _ = learn("searched", **SEARCH, search_budget=0.26, backend=backend)
    said = capsys.readouterr().out
    assert re.search(r"lr search: [345] rates for \d+ steps each", said)
    assert re.search(r"the least validation loss of [357] trials", said)
    assert "search_budget: not read" not in said
    rate = settled(searched)["lr"]
    given, _ = learn("given", **SEARCH | {"lr": rate}, backend=backend)
    assert_same_weights(searched, given)
    losses = [[e["loss"] for e in read_events(f) if e["event"] == "step"] for f in (searched, given)]
    assert losses[0] == losses[1] and len(losses[0]) == 144


@pytest.mark.slow
def test_a_search_is_not_repeated_by_a_resumed_run(learn, capsys):
    whole, _ = learn("whole", **SEARCH)
    stopped, _ = learn("stopped", **SEARCH, save_every=5)
    capsys.readouterr()
    for step in (144, 140):  # as if it had been killed after an earlier save
        folder = stopped / "checkpoints" / f"step-{step}"
        if step == 144:
            (folder / "manifest.json").write_text("damaged")
    fine_tune(resume="auto", output_dir=str(stopped))
    assert "lr search:" not in capsys.readouterr().out
    assert_same_weights(whole, stopped)


@pytest.mark.parametrize("at", [1, 20, 50])  # steps of the trials
def test_a_search_that_a_signal_ends_is_the_resumed_runs(at, learn, monkeypatch, capsys):
    """Killed once more before the first checkpoint, what was found is kept."""
    flags = SEARCH | {"num_epochs": 6, "search_budget": 0.9, "eval_samples": 0}
    whole, _ = learn("whole", **flags)
    steps = itertools.count(1)
    step_of = lr_search.Data.step

    def step(*args):
        if next(steps) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_of(*args)

    with monkeypatch.context() as patched:
        patched.setattr(lr_search.Data, "step", step)
        folder, stopped = learn("stopped", **flags)
    assert stopped.status == "stopped" and stopped.step == 0
    assert "ended by a signal" in capsys.readouterr().out
    with pytest.raises(RuntimeError):
        fine_tune(resume="auto", output_dir=str(folder), on_step=_killed)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    capsys.readouterr()
    fine_tune(resume="auto", output_dir=str(folder))
    assert "search_budget: not read" not in capsys.readouterr().out
    assert settled(folder)["lr"] == settled(whole)["lr"]
    assert_same_weights(whole, folder)


def _killed(event):
    raise RuntimeError("killed")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            dict(train_type="full", lora_rank=None, lora_dropout=None),
            "--lr search: undoes trials of adapters only. Use auto",
        ),
        (dict(world_size=2), "--lr search: tries rates before a single process's first step. Use auto."),
        (dict(validation_split=0.0), "--lr search: compares rates by validation rows. Add --validation_dataset"),
    ],
)
def test_a_search_that_cannot_be_is_refused(learn, flags, line):
    with pytest.raises(PlanError) as error:
        learn("refused", **SEARCH | flags)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("total", [120, 400, 5000])
def test_trials_cost_at_most_their_budget(total):
    rungs = rungs_of(1e-3, total, 4, 200, 0.25)
    first, more = rungs.steps
    trained = first * len(rungs.rates) + 2 * more
    assert min(first, more or first) >= 4 and trained + rungs.trials * rungs.rows / 3 / 4 <= 0.25 * total
    assert trained >= 0.1 * total


def test_too_short_a_run_is_not_searched(learn, capsys):
    folder, _ = learn("short", **SEARCH | {"num_epochs": 1})
    assert "12 steps are too few for a search" in capsys.readouterr().out
    assert settled(folder)["lr"] < 0.006  # the rule's


# ---- early stopping


# A rate at which this model is worse after its best evaluation, so that the run ends early.
WORSENS = dict(validation_split=0.25, num_epochs=30, batch_size=4, lr=0.05, eval_every=6, early_stopping=2)


def evaluations(folder):
    return [(e["step"], e["loss"]) for e in read_events(folder) if e["event"] == "eval"]


def test_a_run_ends_where_validation_stops_improving_and_its_best_weights_are_published(learn, capsys):
    folder, state = learn("early", **WORSENS)
    found = evaluations(folder)
    best = min(found[1:-1], key=lambda pair: pair[1])
    assert state.status == "finished" and state.step == best[0] + 12 < 180
    assert found[-2][0] == state.step and found[-1] == (state.step, best[1])  # the best weights, scored again
    assert state.best_step == best[0]
    # The second of the last step is of other weights, and says so, as its samples do.
    of_steps = [event.get("of_step") for event in read_events(folder, "eval")]
    assert of_steps == [None] * (len(found) - 1) + [best[0]]
    assert [line.get("of_step") for line in samples.read(folder)] == [of for of in of_steps for _ in range(4)]
    assert_same_weights(folder, folder / "best")
    assert f"ends at step {state.step} of 180: 2 evaluations in a row" in capsys.readouterr().out
    fine_tune(resume="auto", output_dir=str(folder))
    assert "already complete" in capsys.readouterr().out


@pytest.mark.slow
def test_without_load_best_the_last_weights_are_published(learn):
    folder, state = learn("last", **WORSENS, load_best="false")
    last = folder / "checkpoints" / f"step-{state.step}" / "adapter_model.safetensors"
    assert all(np.array_equal(a, weights_of(folder)[n]) for n, a in load_file(last).items())


@pytest.mark.slow
def test_a_run_that_improves_to_its_end_publishes_its_last_weights(learn):
    folder, state = learn("better", **WORSENS | {"lr": 1e-4, "num_epochs": 6})
    assert state.step == 36 and state.best_step == 36
    assert len(evaluations(folder)) == 1 + 5 + 1


@pytest.mark.slow
def test_an_early_end_is_the_same_after_a_kill(learn):
    whole, _ = learn("whole", **WORSENS)
    killed, state = learn("killed", **WORSENS, save_every=3)
    (killed / "checkpoints" / f"step-{state.step}" / "manifest.json").write_text("damaged")
    (killed / "train_state.json").unlink()
    fine_tune(resume="auto", output_dir=str(killed))
    assert_same_weights(whole, killed)
    assert evaluations(whole) == evaluations(killed)


@pytest.mark.slow
def test_a_kill_between_the_last_checkpoint_and_the_result_changes_nothing(learn):
    whole, _ = learn("whole", **WORSENS)
    killed, state = learn("killed", **WORSENS)
    for name in ("train_state.json", "adapter_model.safetensors", "manifest.json"):
        (killed / name).unlink()
    again = fine_tune(resume="auto", output_dir=str(killed))
    assert again.step == state.step == again.total_steps
    assert_same_weights(whole, killed)
