"""Pages of logs that are made up here: what they show of scores, curves, samples and ends."""

import math
import os
import re
import urllib.parse
from dataclasses import replace
from pathlib import Path

import pytest

import report
from backend_manager import package_version
from finetune.errors import PlanError
from finetune.parts.train_state import TrainState
from finetune.run import page, samples
from finetune.run.intervals import number_behind, wilson
from finetune.run.metrics import Summary
from finetune.run.report import best_lines
from tests.support.pages import Reader
from tests.support.rows import json_lines

needs_pygal = pytest.mark.skipif(package_version("pygal") is None, reason="pygal is not installed")
NEEDED = {"batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 40, "num_epochs": 1}


def a_run(folder: Path, *events: dict, samples: tuple = (), requested: dict | None = None, **settled) -> Path:
    """An output folder with this log, whose events get times in their order."""
    folder.mkdir()
    timed = [{"time": 1.8e9 + i, **event} for i, event in enumerate(events)]
    (folder / "metrics.jsonl").write_bytes(json_lines(*timed))
    (folder / "samples.jsonl").write_bytes(json_lines(*samples))
    plan = {"requested": requested or {}, "settled": {**NEEDED, **settled}, "adjustments": []}
    (folder / "run_plan.json").write_bytes(json_lines(plan))
    return folder


def started(**values) -> dict:
    return {"event": "start", "step": 0, **values}


def steps(*losses: float, **values) -> list[dict]:
    return [{"event": "step", "step": i, "loss": loss, **values} for i, loss in enumerate(losses, 1)]


def evaluated(step: int, loss: float, **values) -> dict:
    return {"event": "eval", "step": step, "loss": loss, "num_targets": 90, **values}


def ended(status: str = "finished", exit_code: int = 0, step: int = 40) -> dict:
    return {"event": "end", "status": status, "exit_code": exit_code, "step": step, "wall_s": 3.0}


def words_of(*folders: Path) -> str:
    """The text of the page of these runs, spaces as one."""
    text = re.sub(r"<style>.*?</style>", "", page.page_of(list(folders)), flags=re.DOTALL)
    return re.sub(r"\s+", " ", " ".join(Reader(text).words))


# ---- scores


def test_the_interval_is_wilson_s():
    for fraction, number in ((44 / 48, 48), (0.0, 8), (1.0, 1), (0.5, 1000)):
        for bound in wilson(fraction, number):  # its definition: |p - bound| is 1.96 standard errors at the bound
            error = math.sqrt(bound * (1 - bound) / number)
            assert bound == pytest.approx(fraction, abs=1e-6) or abs(fraction - bound) == pytest.approx(
                1.96 * error, 1e-3
            )
    assert wilson(44 / 48, 48) == pytest.approx((0.8045, 0.9671), abs=1e-4)


def test_every_score_has_its_number_of_rows_and_interval(tmp_path):
    scores = dict(exact_match=44 / 48, numeric=0.0, num_scored=48)
    one = a_run(
        tmp_path / "one", started(), evaluated(0, 2.0, **scores | {"exact_match": 0.0}), evaluated(40, 0.1, **scores)
    )
    for said in (words_of(one), words_of(one, one)):
        assert "91.7% of 48 (80.4% to 96.7%)" in said and "0.0% of 48 (0.0% to 7.4%)" in said
        assert not re.search(r"\d% (?!of |to |interval)", said), "a score without its number of rows"
    assert "exact match, n = 48" in words_of(one) and "one (1), n = 48" in words_of(one, one)


@needs_pygal
def test_scores_of_a_head_s_scored_rows_have_theirs_and_are_compared_on_the_same_rows(tmp_path):
    scores = dict(accuracy=0.25, num_rows=24, num_scored=12, score_accuracy=1 / 3, score_macro_f1=0.25)
    scores["score_macro_f1_interval"] = [0.1, 0.5]
    evaluations = (evaluated(0, 2.0, **scores), evaluated(40, 1.0, **scores))
    one, two = (
        a_run(tmp_path / name, started(facts={"scored_sha256": name}), *evaluations, ended()) for name in ("one", "two")
    )
    assert "33.3% of 12 (13.8% to 60.9%)" in words_of(one) and "25.0% of 12 (10.0% to 50.0%)" in words_of(one)
    (chart,) = [chart for chart in page.charts_of(page.read_run(one)) if chart.title == "Scores"]
    assert [line.name for line in chart.lines] == [
        "accuracy, n = 24",
        *(f"score {n}, n = 12" for n in ("accuracy", "macro f1")),
    ]
    assert "Not comparable: the scores are of 2 different lists of rows" in words_of(one, two)


def test_the_number_of_rows_of_an_older_log_follows_from_the_rows_that_are_right():
    events = [{"numeric": 0.0, "right": {"numeric": []}}, {"numeric": 2 / 7, "right": {"numeric": [1, 4]}}]
    assert number_behind("numeric", events) == 7
    assert number_behind("numeric", events[:1]) is None and number_behind("choice", events) is None
    assert number_behind("rewards/accuracies", [{"num_rows": 5, "num_scored": 3}]) == 5


# ---- samples


def sample(step: int, name: str, right: bool, **more) -> dict:
    answer = name if right else f"not {name}"
    return {
        "step": step,
        "source": f"{name}.csv",
        "prompt": f"ask {name}",
        "expected": name,
        "answer": answer,
        "right": right,
        **more,
    }


def test_every_sample_that_ends_wrong_comes_before_those_that_end_right(tmp_path):
    drawn = [sample(step, name, step > 0) for step in (0, 40) for name in ("ant", "bee", "cat", "dog")]
    wrong = [sample(40, f"wrong{i}", False, picked="wrong") for i in range(10)]
    run = a_run(tmp_path / "run", started(), evaluated(0, 2.0), evaluated(40, 0.1), samples=(*drawn, *wrong))
    prompts = page.prompts(page.read_run(run))
    assert [p["prompt"] for p in prompts] == [f"ask wrong{i}" for i in range(10)]
    few = a_run(tmp_path / "few", started(), evaluated(0, 2.0), samples=(*drawn, *wrong[:2]))
    names = [p["expected"] for p in page.prompts(page.read_run(few))]
    assert names == ["wrong0", "wrong1", "ant", "bee", "cat", "dog"]
    assert "6 held-out prompts were answered, 2 of them not as expected at the end (shown first)." in words_of(few)


def test_the_worst_and_the_best_answers_of_steps_over_the_run_are_shown(tmp_path):
    def rewarded(step: int) -> dict:
        answers = [{"source": "a:1", "prompt": "ask", "answer": f"<b>{n}", "reward": n / 3} for n in (step, step + 100)]
        return {"event": "step", "step": step, "loss": 0.0, "reward": 0.5, "answers": answers}

    run = a_run(tmp_path / "run", started(), *(rewarded(step) for step in range(1, 101)))
    found = page.sampled_answers(page.read_run(run))
    assert found.rows[0] == ["1, worst", "0.3333", "ask", "<b>1"]
    assert found.rows[-1] == ["100, best", "66.67", "ask", "<b>200"]
    assert len(found.rows) <= 2 * page.MOST_REWARDED
    assert "<b>200" in words_of(run) and "worst and the best" in words_of(run)
    assert not page.sampled_answers(page.read_run(a_run(tmp_path / "other", started()))).rows


# ---- curves


def drawn(title: str, *folders: Path) -> str:
    """The SVG of the chart with this title."""
    text = page.page_of(list(folders))
    (found,) = re.findall(rf"<figure><figcaption>{title}(?:, [^<]*)?</figcaption>(<svg.*?</svg>)", text, re.DOTALL)
    return found


def labels_on(svg: str, axis: str) -> list[str]:
    part = re.search(rf'class="axis {axis}[ "].*?(?=class="axis [xy]|class="series|$)', svg, re.DOTALL)
    assert part
    return re.findall(r"<text[^>]*>([^<]*)</text>", part[0])


@needs_pygal
def test_two_evaluations_are_points_and_three_are_a_curve(tmp_path):
    held_out = [evaluated(step, 2.0 - step / 20) for step in (0, 10, 20)]
    two = drawn("Loss", a_run(tmp_path / "two", *steps(2.0, 1.5, 1.2), held_out[0], held_out[2]))
    three = drawn("Loss", a_run(tmp_path / "three", *steps(2.0, 1.5, 1.2), *held_out))
    lines = [len(re.findall(r'<path[^>]*class="[^"]*\bline\b[^"]*reactive', svg)) for svg in (two, three)]
    assert lines == [1, 2]
    assert [svg.count('class="dot reactive') for svg in (two, three)] == [2, 3]


@needs_pygal
def test_the_loss_axis_shows_both_ends_and_is_logarithmic_over_a_decade(tmp_path):
    losses = [8.0 * 0.9**i for i in range(60)]
    far = drawn("Loss", a_run(tmp_path / "far", *steps(*losses)))
    assert labels_on(far, "y") == [page.number(losses[-1]), "0.1", "1", "8"] and "on a logarithmic axis" in far
    near = drawn("Loss", a_run(tmp_path / "near", *steps(2.0, 1.9, 1.37)))
    assert labels_on(near, "y") == ["1.37", "1.6", "1.8", "2"] and "logarithmic" not in near
    below = drawn("Loss", a_run(tmp_path / "below", *steps(2.0, -1.0, 0.001)))  # of some preference losses
    assert labels_on(below, "y")[0] == "-1" and "logarithmic" not in below


def test_settings_say_who_set_them_beside_their_default(tmp_path):
    run = a_run(tmp_path / "run", started(), requested={"lora_rank": 3, "max_steps": 40}, lora_rank=3, lr=0.25)
    found = page.other_settings(page.read_run(run))
    assert found.head == ["setting", "value", "default", "set by"]
    by_name = {row[0]: row[1:] for row in found.rows}
    assert by_name["lora_rank"] == ["3", page.format_value(page.DEFAULTS["lora_rank"]), "you"]
    assert by_name["lr"][0] == "0.25" and by_name["lr"][2] == "the plan"
    assert [row[3] for row in found.rows] == sorted((row[3] for row in found.rows), reverse=True)  # "you" first


# ---- comparisons


def digests(**facts: str) -> dict:
    return started(facts=facts)


def test_a_comparison_names_the_runs_that_were_scored_on_other_rows(tmp_path):
    scores = evaluated(40, 0.1, exact_match=0.5, num_scored=4)
    a = a_run(tmp_path / "a", digests(scored_sha256="1", held_out_sha256="3"), scores)
    b = a_run(tmp_path / "b", digests(scored_sha256="2", held_out_sha256="3"), scores)
    c = a_run(tmp_path / "c", digests(scored_sha256="1", held_out_sha256="3"), scores)
    old = a_run(tmp_path / "old", started(), evaluated(40, 0.1))
    without = a_run(tmp_path / "without", digests(held_out_sha256="3"), evaluated(40, 0.1))
    said = "the scores are of 2 different lists of rows (other rows, or another order), one each for a, c; b."
    assert said in words_of(a, b, c) and "losses of held-out rows are of" not in words_of(a, b, c)
    assert "ot comparable" not in words_of(a, c, without) and "compare with care" not in words_of(a, c, without)
    other = a_run(tmp_path / "other", digests(held_out_sha256="4"), evaluated(40, 0.1))
    assert "losses of held-out rows are of 2 different lists of tokens" in words_of(a, other)
    assert "Which rows the losses of held-out rows are of is not in the log of old" in words_of(a, old)


def test_runs_by_rewards_are_compared_by_their_rewards(tmp_path):
    a = a_run(tmp_path / "a", started(), *steps(0.0, 0.0, reward=0.1875, reward_best=0.5, entropy=2.0))
    b = a_run(tmp_path / "b", started(), *steps(0.0, 0.0, reward=0.8125, reward_best=0.875, entropy=1.0))
    plain = a_run(tmp_path / "plain", started(), *steps(2.0, 1.0))
    said = words_of(a, b, plain)
    assert "last training reward" in said and "0.1875" in said and "0.8125" in said
    assert "Reward, training" in said and "Entropy, training" in said
    assert "last training reward" not in words_of(plain, plain)


def test_a_comparison_links_to_the_runs_own_pages(tmp_path, capsys):
    one = a_run(tmp_path / "a b", started(), *steps(2.0, 1.0))
    two = a_run(tmp_path / "javascript:x", started(), *steps(2.0, 1.0))
    bare = a_run(tmp_path / "bare", started(), *steps(2.0, 1.0))
    assert report.main([str(one)]) == 0 and report.main([str(two)]) == 0
    (tmp_path / "pages").mkdir()
    file = tmp_path / "pages" / "all.html"
    assert report.main([str(one), str(two), str(bare), "--output", str(file)]) == 0
    found = Reader(file.read_text())
    links = [value for name, value in found.attributes if name == "href" and not value.startswith("#")]
    assert links == ["../a%20b/report.html", "../javascript%3Ax/report.html"]
    assert all((file.parent / urllib.parse.unquote(link)).is_file() for link in links)
    assert not [v for n, v in Reader(page.page_of([one, two])).attributes if n == "href" and v[0] != "#"]  # live


def test_cells_of_wide_tables_carry_their_column_s_name_for_narrow_screens(tmp_path):
    scores = evaluated(40, 0.1, exact_match=0.5, num_scored=4)
    one = a_run(tmp_path / "a", started(), *steps(2.0, 1.0), scores)
    text = page.page_of([one, one])
    first = re.search(r'<div class="scroll stack".*?</table>', text, re.DOTALL)
    assert first
    head = re.findall(r'scope="col">([^<]*)<', first[0])
    assert head[:2] == ["run", "outcome"] and "exact match" in head
    assert re.findall(r'data-label="([^"]*)"', first[0]) == head[1:] * 2
    assert "@media (max-width:640px)" in text


# ---- preferences


def pairs(accuracy: float, margin: float, num_rows: int = 10) -> dict:
    return {"rewards/accuracies": accuracy, "rewards/margins": margin, "rewards/chosen": margin, "num_rows": num_rows}


@needs_pygal
def test_held_out_accuracy_and_margins_of_preferences_are_curves_of_their_own(tmp_path):
    evaluations = [evaluated(step, 0.6, **pairs(step / 40, step / 10)) for step in (0, 20, 40)]
    run = a_run(tmp_path / "run", started(), *steps(0.7, 0.6, **pairs(0.5, 0.1, 2)), *evaluations)
    accuracies = drawn("Rewards: accuracies", run)
    assert "accuracies, held-out, n = 10 from 0 at step 0 to 1 at step 40" in accuracies
    assert "accuracies, training from 0.5 at step 1" in accuracies
    assert "margins, held-out from 0 at step 0 to 4 at step 40" in drawn("Rewards: margins", run)
    assert "chosen, held-out" in drawn("Rewards", run)
    assert "100.0% of 10 (72.2% to 100.0%)" in words_of(run)
    assert "run (1), n = 10 from 0 at step 0" in drawn("Rewards/accuracies, held-out", run, run)


def test_a_run_without_held_out_rows_shows_means_of_its_steps_and_says_so(tmp_path):
    early = steps(*[0.7] * 10, **pairs(0.25, 0.0, 4))
    late = [step | {"step": step["step"] + 10} for step in steps(*[0.5] * 10, **pairs(0.75, 1.0, 4))]
    said = words_of(a_run(tmp_path / "run", started(), *early, *late))
    assert "No rows are held out: these are of training rows" in said
    assert "training rows, mean first 2 steps last 2 steps loss 0.7 0.5" in said
    assert "rewards/accuracies 25.0% of 8 75.0% of 8 rewards/margins 0 1" in said


def test_losses_of_files_and_rewards_of_functions_are_no_fractions_whatever_their_names_end_in(tmp_path):
    """The loss of val.json was 262.3 %, as there is a score of the name json."""
    names = {"loss/val.json": 2.623, "loss/org/choice": 2.5, "rewards/rewards.py:accuracy": 3.7}
    said = words_of(a_run(tmp_path / "run", started(), evaluated(0, 2.6, **names), evaluated(40, 2.6, **names)))
    assert all(f"{name} {value:g} {value:g}" in said for name, value in names.items()) and "%" not in said


# ---- rewards


@needs_pygal
def test_a_run_from_rewards_shows_first_and_last_rewards_and_charts_of_one_unit_each(tmp_path):
    def measured(reward: float, answers: int) -> dict:
        numbers = {"reward": reward, "completions/mean_length": 9.0, "completions/clipped_ratio": 0.5}
        return {**numbers, "num_answers": answers, "num_rows": 1}

    early = steps(*[1e-9] * 10, **measured(0.25, 4))
    late = [step | {"step": step["step"] + 10} for step in steps(*[0.0] * 10, **measured(0.75, 4))]
    late[-1] |= measured(0.25, 12)
    scored = evaluated(20, 1.0, exact_match=0.5, num_scored=4)
    settled = {"reward": ["exact"], "reward_loss": "dapo", "train_type": "lora", "model_name": "m"}
    run = a_run(tmp_path / "run", started(), *early, *late, scored, **settled)
    said = words_of(run)
    assert "dapo with lora of m" in said
    assert "training rows, mean first 2 steps last 2 steps reward 0.25 0.375" in said
    assert "Loss, near 0 by its definition" in said
    assert "from 9 at step 1" in drawn("Length of the answers", run)
    assert "from 0.5 at step 1" in drawn("Answers cut off", run) and "Completions" not in said


def test_a_rollout_that_several_steps_learn_from_counts_once(tmp_path):
    def learned(step: int, reward: float, answers: int) -> dict:
        pair = [{"source": "a:1", "prompt": "ask", "answer": "a", "reward": reward}] * 2
        facts = {"reward": reward, "frac_reward_zero_std": 0.5, "completions/mean_length": 9.0, "answers": pair}
        return {"event": "step", "step": step, "loss": 0.0, "num_answers": answers, "num_rows": 8, **facts}

    rewards = [0.0, 0.25] + [1.0] * 8 + [0.5] * 10
    log = [learned(3 * i + j, reward, 4 * (j == 1)) for i, reward in enumerate(rewards) for j in (1, 2, 3)]
    settled = {"reward": ["exact"], "reward_loss": "dapo"}
    run = page.read_run(a_run(tmp_path / "run", started(), *log[2:], **settled))  # begins with the last of a rollout
    assert page.trained(run).rows[0] == ["reward", "0.25", "0.5"]
    assert page.trained(run).head[1:] == ["first 1 rollout", "last 1 rollout"]
    assert [row[0] for row in page.sampled_answers(run).rows][:2] == ["4, worst", "4, best"]
    assert not any(name.startswith("60") for name, *_ in page.sampled_answers(run).rows)


def test_the_last_evaluation_of_a_run_that_was_interrupted_is_not_the_one_after_it(tmp_path):
    events = [started(), *steps(2.0, 1.0), evaluated(0, 2.0), evaluated(20, 0.5)]
    assert page.evaluations(page.read_run(a_run(tmp_path / "a", *events, ended()))).head[-1] == "after"
    stopped = page.evaluations(page.read_run(a_run(tmp_path / "b", *events, ended("stopped", 130, 30))))
    assert stopped.head == ["measure", "before", "last (step 20)"]


# ---- the outcome on top


def badge(folder: Path) -> tuple[str, str, str]:
    """(color, word, what follows up to the model's facts) of a page's badge."""
    found = re.search(r'<strong class="status (\w+)">([^<]*)</strong>([^·<]*)', page.page_of([folder]))
    assert found
    color, word, reason = found.groups()
    return color, word, " ".join(reason.split())


FALLING = steps(*[2.0 * 0.9**i for i in range(20)])
ROSE = [evaluated(0, 2.0), evaluated(20, 0.8), evaluated(40, 1.0)]
OUTCOMES = [
    ("good", "finished", "", [*FALLING, evaluated(0, 2.0), evaluated(40, 0.5), ended()]),
    ("good", "finished", "validation loss 1.0% above its best: 0.5 at step 20, 0.505 at step 40",
     [*FALLING, evaluated(20, 0.5), evaluated(40, 0.505), ended()]),
    ("bad", "over-fitted", "validation loss 25.0% above its best: 0.8 at step 20, 1 at step 40",
     [*FALLING, *ROSE, ended()]),
    ("bad", "worse than before training", "validation loss 100.0% above its best: 1 at step 0, 2 at step 40",
     [*FALLING, evaluated(0, 1.0), evaluated(40, 2.0), ended()]),
    ("bad", "diverged", "", [*steps(*[1.0 + i for i in range(20)]), ended()]),
    ("bad", "diverged", "after step 9, exit code 66", [*FALLING, ended("failed", 66, 9)]),
    ("bad", "loss not finite", "after step 9, exit code 65", [*FALLING, ended("failed", 65, 9)]),
    ("bad", "loss not finite", "at step 40", [*FALLING, {"event": "step", "step": 40, "loss": None}, ended()]),
    ("bad", "out of memory", "after step 1, exit code 71", [*steps(2.0), ended("failed", 71, 1)]),
    ("bad", "failed", "after step 1, exit code 1", [*steps(2.0), ended("failed", 1, 1)]),
    ("bad", "interrupted", "by SIGINT at step 7", [*FALLING, ended("stopped", 130, 7)]),
    ("bad", "interrupted", "by a signal at step 7", [*FALLING, ended("stopped", 0, 7)]),
    ("running", "running", "or killed: its log has no end", [*FALLING]),
    ("running", "running", "or killed: its log has no end", [*FALLING, ended("stopped", 130, 7), started()]),
]  # fmt: skip


@pytest.mark.parametrize(("color", "word", "reason", "events"), OUTCOMES, ids=lambda value: str(value)[:24])
def test_the_badge_says_what_the_log_shows(tmp_path, color, word, reason, events):
    run = a_run(tmp_path / "run", started(), *events)
    assert badge(run) == (color, word, reason)
    assert page.results([("run", page.read_run(run))], {}).rows[0][1] == word


def test_a_run_that_early_stopping_ended_is_no_plain_finish(tmp_path):
    events = [
        *FALLING,
        evaluated(0, 2.0),
        evaluated(10, 0.5),
        evaluated(20, 0.505),
        evaluated(30, 0.51),
        ended(step=30),
    ]
    early = a_run(tmp_path / "early", started(), *events, early_stopping=2)
    assert badge(early) == ("careful", "stopped early", "no better validation loss than 0.5, of step 10")
    assert badge(a_run(tmp_path / "late", started(), *events, early_stopping=3))[1] == "finished"
    assert badge(a_run(tmp_path / "all", started(total_steps=30), *events, early_stopping=2))[1] == "finished"
    assert badge(a_run(tmp_path / "left", started(total_steps=40), *events, early_stopping=2))[1] == "stopped early"


def test_the_best_weights_are_not_called_so_where_the_untrained_model_was_better(tmp_path):
    events = (started(), *steps(1.0), evaluated(0, 1.1195), evaluated(2, 1.1527), evaluated(4, 1.1428), ended(step=4))
    run = page.read_run(a_run(tmp_path / "o", *events))
    assert page.evaluations(run).head == ["measure", "before", "best trained (step 4)", "after"]
    summary = Summary(before={"loss": 1.1195}, best={"step": 4, "loss": 1.1428}, best_folder="best")
    (line,) = best_lines(TrainState(step=4), summary)
    assert line.startswith(
        "lowest validation loss after step 0, which had a lower one (1.1195): step 4, its weights (those"
    )
    (line,) = best_lines(TrainState(step=4), replace(summary, before={"loss": 1.2}))
    assert line.startswith("lowest validation loss: step 4")


def test_the_published_weights_of_an_earlier_step_are_evaluated_on_a_row_of_their_own(tmp_path):
    """A second evaluation of the last step took the place of what this step gave: the curve was flat where it rose."""
    given = [evaluated(0, 6.1), evaluated(2, 5.25), evaluated(4, 5.875), evaluated(4, 5.25, of_step=2)]
    lines = [dict(source="a:1", prompt="p", expected="e", step=4, answer=text) for text in ("worse", "better")]
    lines[1]["of_step"] = 2
    settled = dict(early_stopping=1, load_best="true")
    events = (started(total_steps=20), *steps(5.0, 5.0, 4.9, 4.9), *given, ended(step=4))
    run = page.read_run(a_run(tmp_path / "o", *events, samples=tuple(lines), **settled))
    assert run.points("eval", "loss") == [(0, 6.1), (2, 5.25), (4, 5.875)]
    found = page.evaluations(run)
    assert found.head == ["measure", "before", "best (step 2)", "last (step 4)", "published (weights of step 2)"]
    assert found.rows == [["loss", "6.1", "5.25", "5.875", "5.25"]]
    assert [frame["at"] for frame in page.prompts(run)[0]["frames"]] == ["step 4", "step 4, weights of step 2"]
    assert run.outcome.word == "stopped early"
    compared = page.results([("one", run)], {})
    assert [[row[0], row[-1]] for row in compared.rows] == [["one", "5.875"], ["one, as published: of step 2", "5.25"]]
    assert "of step" not in words_of(run.folder).replace("of step 2", "")  # of_step is no measure


def test_samples_of_published_weights_leave_the_last_step_s_in_place(tmp_path):
    """A run that was killed after them resumes between both evaluations of its last step."""
    lines = [dict(source="a:1", prompt="p", expected="e", step=4, answer="x"), {}]
    lines[1] = lines[0] | {"of_step": 2}
    samples.append(tmp_path, lines)
    samples.keep_evaluated(tmp_path, {(4, None)}, "mark")
    assert samples.read(tmp_path) == lines[:1]


def test_a_clock_that_was_set_back_before_a_resume_hides_no_end(tmp_path):
    run = a_run(tmp_path / "run", started(time=2e9), started(), *FALLING, ended())
    assert badge(run)[1] == "finished"


def test_a_run_with_something_to_look_at_is_not_green(tmp_path):
    facts = {"held_out": {"of": "validation", "rows": 4, "in_training": 4}}
    run = a_run(tmp_path / "run", started(facts=facts), *FALLING, ended())
    assert badge(run) == ("careful", "finished", "with something to look at")


def test_a_pipe_in_the_place_of_the_samples_is_a_line(tmp_path):
    """The page waited for somebody to write into it."""
    (tmp_path / "metrics.jsonl").write_text("")
    os.mkfifo(tmp_path / "samples.jsonl")
    with pytest.raises(PlanError, match="Restore them, or leave the folder out"):
        page.page_of([tmp_path])
