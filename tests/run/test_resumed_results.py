"""Results and lines of runs that are resumed with other flags, with other held-out rows, or without their log."""

import os
import shutil
import signal
from pathlib import Path

import pytest

import generate
import score
from finetune.errors import PlanError
from finetune.plan.run_plan import RunPlan
from finetune.run import page
from finetune.trained_base import settings_of_run
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
    files = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    run(**flags | dict(load_best="true", resume="auto", score_dataset=EASY, validation_dataset=EASY))
    said = capsys.readouterr().out
    assert "already complete" in said and all(file.read_bytes() == content for file, content in files.items())
    for name in ("validation_dataset", "score_dataset"):
        assert f"note: --{name} is not read by a finished run: score.py measures it" in said


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


def test_a_run_that_began_from_another_folders_checkpoint_begins_there_again(run, tmp_path):
    """Killed before a checkpoint of its own, it began from nothing."""
    run(max_steps=4, save_every=2, keep_last=9)
    copied = shutil.copytree(tmp_path / "out" / "checkpoints" / "step-2", tmp_path / "copied")
    own = tmp_path / "own"
    flags = dict(max_steps=6, output_dir=str(own))
    with pytest.raises(RuntimeError):
        run(**flags, resume=str(copied), on_step=_killed)
    moved = copied.rename(tmp_path / "moved")
    with pytest.raises(PlanError, match="was begun from .*copied, which is gone"):
        run(**flags, resume="auto")
    moved.rename(copied)
    run(**flags, resume="auto")
    assert [event["step"] for event in read_events(own, "step")] == [3, 4, 5, 6]
    whole = tmp_path / "whole"
    run(**flags | dict(output_dir=str(whole)), resume=str(copied))
    like_a_run = shutil.copytree(copied, tmp_path / "backup" / "checkpoints" / "step-2")
    run(**flags | dict(output_dir=str(tmp_path / "third")), resume=str(like_a_run))
    same, *others = (tmp_path / name / "adapter_model.safetensors" for name in ("own", "whole", "third"))
    assert all(same.read_bytes() == other.read_bytes() for other in others)


def _killed(event):
    raise RuntimeError("killed")


def test_the_card_and_the_page_name_the_step_of_the_weights_and_what_was_measured_first(run, tmp_path):
    folder = tmp_path / "out"
    flags = dict(max_steps=4, eval_every=1, validation_dataset=HARD, load_best="true")
    state = run(**flags)
    assert state.best_step < 4
    assert f"| steps | 4; these weights are those of step {state.best_step} |" in (folder / "README.md").read_text()
    assert page.evaluations(page.read_run(folder)).head[1] == "before"
    run(**flags | dict(max_steps=6, validation_dataset=EASY), resume="auto")
    found = page.read_run(folder)
    assert page.evaluations(found).head[1] == "first (step 4)"
    (losses,) = [chart for chart in page.charts_of(found) if chart.title == "Loss"]
    drawn = {line.name: [step for step, _ in line.points] for line in losses.lines}
    assert drawn["held-out rows, other rows before"] == [0, 1, 2, 3, 4] and drawn["held-out rows"] == [4, 5, 6]


def test_an_evaluation_stays_with_the_start_that_says_its_rows(run, tmp_path):
    flags = dict(max_steps=2, load_best="false")
    first = run(**flags, validation_dataset=HARD)
    for rows in (EASY, HARD[:2]):
        run(**flags | dict(max_steps=4), validation_dataset=rows, resume="auto", on_step=stop_at(3), save_every=0)
        shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-3")
    losses = [event["loss"] for event in read_events(tmp_path / "out", "eval") if event["step"] == 2]
    assert losses[0] == first.scores["after"]["loss"] and len(losses) == 2  # of the rows between, none is left


def test_a_signal_between_a_save_and_the_next_step_is_saved_too(run, tmp_path, monkeypatch):
    looked = RunPlan.save_due

    def save_due(plan, state, stopping):
        due = looked(plan, state, stopping)
        if state.step == 2 and state.loss is not None:  # not a look at the steps ahead
            os.kill(os.getpid(), signal.SIGTERM)
        return due

    monkeypatch.setattr(RunPlan, "save_due", save_due)
    assert run(max_steps=4, save_every=0).status == "stopped"
    assert (tmp_path / "out" / "checkpoints" / "step-2" / "manifest.json").is_file()


def test_another_base_is_measured_without_being_compared(run, tmp_path):
    """The same evaluation twice is not a worse one, which would end the run."""
    flags = dict(train_type="qlora", quantization_backend="nf4", group_size=32, validation_dataset=EASY, max_steps=4)
    flags |= dict(eval_every=1, early_stopping=1, load_best="false", lr=1e-2)
    stopped = run(**flags, on_eval=stop_at(1))
    assert stopped.status == "stopped" and stopped.best_step == 1
    run(**flags | dict(quantization_backend="hqq"), resume="auto")
    assert [event["step"] for event in read_events(tmp_path / "out", "eval")][-1] > 1


def test_a_link_to_the_best_weights_leads_to_the_plan_of_their_run(run, tmp_path, monkeypatch):
    run(train_type="qlora", quantization_backend="nf4", group_size=32, validation_dataset=HARD, max_steps=1)
    best = tmp_path / "out" / "best"
    link = tmp_path / "mine"
    link.symlink_to(best)
    monkeypatch.chdir(best)
    for checkpoint in (best, link, Path()):
        assert settings_of_run(checkpoint).quantization_backend == "nf4"


def test_the_evaluation_at_the_end_of_a_run_that_goes_on_is_not_counted(run, tmp_path):
    ended = run(validation_dataset=HARD, eval_every=2, early_stopping=2, load_best="false", max_steps=3)
    assert ended.best_step == 2 and ended.worse_evals == 0


def test_the_result_of_a_finished_run_that_was_moved_is_that_of_its_new_place(run, tmp_path):
    first = run(max_steps=2)
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    run(max_steps=1)
    again = run(max_steps=2, resume=str(moved), output_dir=None)
    assert again.output_dir == str(moved) != first.output_dir


def test_weights_from_before_a_run_went_on_are_not_opened_as_its_result(run, flags, tmp_path):
    folder = tmp_path / "out"
    run(max_steps=2)
    run(max_steps=6, resume="auto", on_step=stop_at(4))
    assert (folder / "adapter_model.safetensors").is_file()  # of step 2
    said = "weights from before the run went on, which did not finish. Give .*step-4, or finish"
    for program, argv in ((score, ["--dataset", flags["dataset"]]), (generate, ["--prompt", "a"])):
        with pytest.raises(PlanError, match=said):
            program.main(["--checkpoint", str(folder), *argv])
    full = dict(train_type="full", lora_rank=None, output_dir=str(tmp_path / "full"))
    run(max_steps=1, **full)
    run(max_steps=4, **full, resume="auto", on_step=stop_at(2))
    with pytest.raises(PlanError, match="went on, which did not finish"):
        run(max_steps=1, model_name=full["output_dir"])
    with pytest.raises(PlanError, match=said):
        run(max_steps=1, adapter=str(folder), model_name=None, lora_rank=None, output_dir=str(tmp_path / "other"))
    run(max_steps=6, resume="auto")
    generate.main(["--checkpoint", str(folder), "--prompt", "a", "--max_new_tokens", "2"])


def test_a_finished_run_without_checkpoints_is_not_begun_again(run, tmp_path, capsys):
    """Nor is one that began from another folder's checkpoint, which may be gone then."""
    folder = tmp_path / "out"
    run(max_steps=4, save_every=2, keep_last=9)
    copied = shutil.copytree(folder / "checkpoints" / "step-2", tmp_path / "copied")
    run(max_steps=4, output_dir=str(tmp_path / "own"), resume=str(copied))
    weights = (folder / "adapter_model.safetensors").read_bytes()
    for place in (folder, tmp_path / "own", copied):
        shutil.rmtree(place / "checkpoints" if place != copied else place)
    for more in (dict(load_best="true", validation_dataset=HARD), dict(max_steps=6)):
        with pytest.raises(PlanError, match="is finished, and has no checkpoint left to go on from"):
            run(**dict(max_steps=4, resume="auto") | more)
    capsys.readouterr()
    for output_dir in (folder, tmp_path / "own"):
        assert run(max_steps=4, resume="auto", output_dir=str(output_dir)).step == 4
        assert "already complete" in capsys.readouterr().out
    assert (folder / "adapter_model.safetensors").read_bytes() == weights


def test_scores_by_another_pattern_are_not_beside_each_other(run, tmp_path):
    flags = dict(validation_dataset=HARD, score_dataset=EASY, score_metric="regex")
    run(**flags, score_pattern="b", max_steps=4, on_step=stop_at(2))
    state = run(**flags, score_pattern="c", max_steps=4, resume="auto")
    assert "loss" in state.scores["before"] and "regex" not in state.scores["before"]
    assert "regex" in state.scores["after"]


def test_the_page_of_other_scored_rows_counts_these_alone(run, tmp_path):
    flags = dict(max_steps=3, eval_every=1, validation_dataset=HARD, eval_samples=2, load_best="false")
    run(**flags, score_dataset=EASY)
    run(**flags | dict(max_steps=4), score_dataset=HARD[:2], resume="auto")
    found = page.read_run(tmp_path / "out")
    assert found.samples and not any("plus" in sample["prompt"] for sample in found.samples)  # as EASY's are
    assert page.evaluations(found).head[:2] == ["measure", "first (step 3)"]


def test_published_weights_of_an_earlier_step_stay_while_the_last_step_is_evaluated(run, tmp_path):
    flags = dict(eval_every=1, save_every=1, validation_dataset=HARD, load_best="true")
    run(**flags, max_steps=4)
    weights = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    stopped = run(**flags, max_steps=5, resume="auto", on_eval=stop_at(5))
    assert stopped.status == "stopped"
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == weights
    assert run(**flags, max_steps=5, resume="auto").status == "finished"
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == weights
