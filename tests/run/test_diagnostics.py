"""What went wrong in a run is said in one line each; a good run gets none."""

import json
import random

import pytest

from finetune.data.prepare import rows_digest
from finetune.errors import DivergedError
from finetune.run import page, samples
from finetune.run.diagnostics import DivergenceWatch, findings, repeats_itself
from tests.support.rows import json_lines
from tests.support.runs import read_events

FULL = dict(train_type="full", lora_rank=None)
WORDS = "red blue green black white pink brown grey".split()


def rows_of(start: int, number: int) -> list[dict]:
    return [{"prompt": f"What is {i} plus {i}? ", "completion": f"It is {2 * i}"} for i in range(start, start + number)]


@pytest.fixture
def write(tmp_path):
    def call(name: str, rows: list[dict]) -> str:
        (tmp_path / name).write_bytes(json_lines(*rows))
        return str(tmp_path / name)

    return call


def said(capsys) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    return [line.removeprefix("look at this: ") for line in lines if line.startswith("look at this: ")]


def noise(seed: int, number: int) -> list[dict]:
    rng = random.Random(seed)
    return [{"prompt": f"{i} {seed} ", "completion": " ".join(rng.choices(WORDS, k=6))} for i in range(number)]


def test_overfitting_is_said_with_the_folder_of_the_best_weights_and_a_best_column(plain_run, write, capsys, tmp_path):
    files = dict(dataset=write("train.jsonl", noise(1, 8)), validation_dataset=write("other.jsonl", noise(2, 8)))
    plain_run(**files, **FULL, max_steps=60, lr=2e-2, eval_every=10, eval_samples=0)
    out = capsys.readouterr().out
    evaluations = read_events(tmp_path / "out", "eval")
    best = min(evaluations[1:], key=lambda e: e["loss"])
    line = next(line for line in out.splitlines() if line.startswith("look at this: "))
    assert "over-fitting" in line and f"at step {best['step']} to {evaluations[-1]['loss']:.4f} at step 60" in line
    assert f"in {tmp_path}/out/best" in line and out.count("look at this") == 1
    head = next(line for line in out.splitlines() if line.split()[:1] == ["before"])
    row = next(line for line in out.splitlines() if line.startswith("loss "))
    assert head.split() == ["before", "best", "(step", f"{best['step']})", "after"]
    assert row.split()[1:] == [f"{e['loss']:.4f}" for e in (evaluations[0], best, evaluations[-1])]


def test_a_learning_rate_of_100_is_said(plain_run, capsys):
    plain_run(max_steps=24, lr=100.0, **FULL)
    line = said(capsys)[0]  # whether the gradients end large too depends on rounding
    assert line.startswith("training loss ended at ") and line.endswith("the run diverged. Lower --lr.")
    plain_run(max_steps=24, lr=100.0, overwrite=True)
    (line,) = said(capsys)  # of an adapter on the tiny model: its logits saturate, so that no gradient is left
    assert line.startswith("the gradient norm fell from") and line.endswith("Lower --lr.")


def test_answers_of_one_token_that_prompts_do_not_explain_are_said(plain_run, write, capsys):
    rng = random.Random(0)
    rows = [{"prompt": f"row {i} is ", "completion": rng.choice("ab")} for i in range(24)]
    plain_run(dataset=write("one.jsonl", rows), max_steps=6)
    assert len([line for line in said(capsys) if line.startswith("every answer is a single token")]) == 1


@pytest.mark.parametrize(
    "other", [{}, {"preference": "dpo"}, {"task": "classify"}, {"reward": "exact"}, {"teacher": "t"}]
)
def test_answers_of_one_token_are_judged_by_a_loss_that_is_of_answers_alone(other):
    alike = dict(rows=8, distinct_rows=8, distinct_answers=2, answers_of_one_token=True, entropy_per_target=0.35)
    steps = [{"event": "step", "step": i, "loss": 0.6 - i / 100, "grad_norm": 1.0} for i in range(12)]
    found = findings([{"event": "start", "facts": {"alike": alike}}, *steps], [], other)
    assert ["answers of one token" in finding.kind for finding in found] == [True] * (not other)


@pytest.mark.parametrize("use", ["validation_dataset", "score_dataset"])
def test_held_out_rows_that_are_training_rows_are_said_at_the_start_and_at_the_end(plain_run, rows_file, capsys, use):
    plain_run(max_steps=1, **{use: str(rows_file)}, score_samples=-1)
    out = capsys.readouterr().out
    name = use.removesuffix("_dataset")
    assert out.count(f"note: the {name} set is the training set") == 1
    assert out.count(f"look at this: the {name} set is the training set") == 1


@pytest.mark.parametrize("answers", ["one", "many"])
def test_rows_that_are_all_alike_are_said(plain_run, write, capsys, answers):
    rows = [{"prompt": f"What is {i if answers == 'many' else 0}? ", "completion": "It is."} for i in range(12)]
    plain_run(dataset=write("alike.jsonl", rows), max_steps=2)
    (line,) = said(capsys)
    assert "all have the same answer" in line if answers == "many" else "are all alike: one text" in line


def test_a_good_run_gets_no_line(plain_run, write, capsys):
    files = dict(dataset=write("train.jsonl", rows_of(0, 24)), validation_dataset=write("new.jsonl", rows_of(50, 8)))
    plain_run(**files, max_steps=12, lr=5e-3, eval_every=4, eval_samples=0)
    assert said(capsys) == []


def test_stop_on_divergence_ends_with_66_and_a_resumed_run_remembers_its_start(plain_run, tmp_path):
    with pytest.raises(
        DivergedError, match=r"step \d+: the run diverged: the mean loss of the last 5 steps.*Lower --lr 1"
    ) as error:
        plain_run(max_steps=40, lr=1.0, stop_on_divergence=True, save_every=4, **FULL)
    end = read_events(tmp_path / "out", "end")[-1]
    stopped = end["step"]
    assert error.value.exit_code == 66 and (end["status"], end["exit_code"]) == ("failed", 66) and stopped < 40
    with pytest.raises(DivergedError, match=f"step {stopped}: the run diverged"):
        plain_run(max_steps=40, lr=1.0, stop_on_divergence=True, save_every=4, **FULL, resume="auto")


@pytest.mark.slow
def test_ranks_of_a_resumed_run_have_rank_0s_start(plain_run, tmp_path):
    """Rank 1 took the first losses after the resume for the start's, beside which a hard row is a divergence."""
    rng = random.Random(5)
    hard = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(30)) for _ in range(7)]
    rows = [{"prompt": "Say: ", "completion": "yes yes yes yes"}] * 60
    rows += [{"prompt": f"H{number}: ", "completion": text} for number, text in enumerate(hard)]
    rng.shuffle(rows)
    flags = FULL | dict(dataset=rows, lr=3e-3, lr_scheduler="constant", warmup_steps=0, batch_size=1, world_size=2)
    flags |= dict(save_every=20, stop_on_divergence=True)
    plain_run(**flags, max_steps=20)
    plain_run(**flags, max_steps=60, resume="auto")
    assert [event["step"] for event in read_events(tmp_path / "out", "step")] == list(range(1, 61))


# ---- rules


def events_of(losses, norms=None) -> list[dict]:
    norms = norms or [1.0] * len(losses)
    return [
        {"event": "step", "step": i + 1, "loss": loss, "grad_norm": norm, "num_targets": 10}
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        (events_of([3.0] * 20, [1.0] * 4 + [1e-5] * 16), "gradients vanished"),
        (events_of([3.0] * 20, [0.0] * 20), "gradients vanished"),
        (events_of([3.0] * 20, [1.0] * 10 + [1e3] * 10), "gradients exploded"),
        (events_of([3.0] * 18 + [3.0, 1e-4], [1.0] * 10 + [0.5] * 10), None),
        (
            events_of([3.0] * 4 + [1e-4] * 16, [1.0] * 4 + [1e-5] * 16),
            None,
        ),  # a fit: the gradient is small as it should
        ([e | {"skipped": i % 3 == 0} for i, e in enumerate(events_of([3.0] * 20))], "steps skipped"),
        (events_of([3.0] * 4, [1.0, 1.0, 1.0, float("nan")]), None),
        ([], None),
    ],
)
def test_gradients_and_skipped_steps(events, kind):
    assert [f.kind for f in findings(json.loads(json.dumps(events)), [], {})] == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("the the the the the the the the the the the the the", True),
        ("I like it. I like it. I like it. I like it. I like it. I like it.", True),
        ("a" * 60, True),
        ("Sunday Monday Tuesday Wednesday Thursday Friday Saturday one two three four five six seven", False),
        ("SELECT a, b FROM t WHERE a > 1 AND b < 2 ORDER BY a LIMIT 10", False),
        ("no no no", False),
        ("", False),
    ],
)
def test_what_counts_as_repeating_itself(text, loops):
    assert repeats_itself(text) == loops


def sample(step: int, answer: str, expected: str) -> dict:
    return {
        "step": step,
        "source": f"x:{expected}",
        "prompt": "?",
        "expected": expected,
        "answer": answer,
        "right": False,
    }


def test_answers_that_repeat_themselves_are_said_of_the_last_evaluation_alone():
    loop = "again and " * 20
    assert [f.kind for f in findings([], [sample(4, loop, "yes"), sample(4, loop, "no")], {})] == [
        "answers repeat themselves"
    ]
    assert findings([], [sample(0, loop, "yes")], {}) == []
    assert findings([], [sample(4, loop, "yes"), sample(8, "yes", "yes")], {}) == []
    assert findings([], [sample(4, loop, loop)], {}) == []
    same = [sample(4, "yes", word) for word in ("one", "two", "three")]
    assert "get the same answer: 'yes'" in findings([], same, {})[0].text
    assert findings([], [sample(4, "yes", "yes")] * 3, {}) == []


@pytest.mark.parametrize(
    ("losses", "diverges"),
    [
        ([2.0, 2.5, 1.8, 3.0, 2.0, 4.0, 4.4, 4.4, 4.4, 4.4], False),  # of other rows: below half as much again as 3.0
        ([2.0, 2.5, 1.8, 3.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0], True),
        ([2.0, 8.0, 9.0, 9.0, 9.0], True),  # at once
        ([2.0, 8.0, 9.0, 9.0], False),  # too few to say
        ([0.01, 0.02, 0.01, 0.3, 0.2, 0.4, 0.4, 0.4, 0.4], False),  # much more of very little
    ],
)
def test_the_watch_knows_other_rows_from_a_divergence(losses, diverges):
    watch = DivergenceWatch()
    for loss in losses:
        watch.add(loss)
    assert (watch.diverged() is not None) == diverges


# ---- samples


def test_validation_prompts_are_answered_at_each_evaluation_and_a_resumed_run_continues(plain_run, write, tmp_path):
    out, held_out = tmp_path / "out", rows_of(50, 8)
    flags = dict(
        dataset=write("train.jsonl", rows_of(0, 24)), validation_dataset=write("new.jsonl", held_out), eval_samples=3
    )
    plain_run(**flags, max_steps=4, eval_every=2, save_every=2)
    found = samples.read(out)
    assert [s["step"] for s in found] == [0, 0, 0, 2, 2, 2, 4, 4, 4]
    assert [s["expected"].strip() for s in found[:3]] == [row["completion"] for row in held_out[:3]]
    assert [s["prompt"].removeprefix("<s>") for s in found[:3]] == [row["prompt"].rstrip() for row in held_out[:3]]
    assert all(s["right"] == (s["answer"].strip() == s["expected"].strip()) for s in found)
    before = (out / "samples.jsonl").read_bytes()
    plain_run(**flags, max_steps=6, eval_every=2, save_every=2, resume=str(out / "checkpoints/step-2"))
    assert [s["step"] for s in samples.read(out)] == [0, 0, 0, 2, 2, 2, 4, 4, 4, 6, 6, 6]
    assert (out / "samples.jsonl").read_bytes().startswith(before[: before.index(b'"step": 4') - 1])
    plain_run(**flags, max_steps=1, overwrite=True)
    assert [s["step"] for s in samples.read(out)] == [0, 0, 0, 1, 1, 1]


def test_an_answer_that_was_cut_on_its_way_is_not_called_wrong(plain_run, write, tmp_path):
    row = {"prompt": "yes:", "completion": " yes" * 12}
    file = write("one.jsonl", [row] * 2)
    flags = dict(validation_dataset=file, score_max_new_tokens=8, train_type="full", lora_rank=None, lr=5e-3)
    plain_run(dataset=file, max_steps=60, eval_samples=2, **flags)
    first, *_, last = samples.read(tmp_path / "out")
    assert first["right"] is False and last["right"] is None and row["completion"].startswith(last["answer"])
    said = page.page_of([tmp_path / "out"])
    assert "0 of them not as expected" in said and "as expected as far as it was sampled" in said


def test_scored_prompts_are_answered_where_there_are_no_validation_rows(plain_run, rows_file, tmp_path):
    plain_run(max_steps=1, score_dataset=str(rows_file), score_samples=3)
    assert len(samples.read(tmp_path / "out")) == 6
    plain_run(max_steps=1, score_dataset=str(rows_file), score_samples=3, eval_samples=0, overwrite=True)
    assert not (tmp_path / "out" / "samples.jsonl").exists()


def test_answers_that_a_score_has_asked_for_are_those_that_are_generated_for_the_samples(
    plain_run, rows_file, tmp_path
):
    """Wrong ones too, which end a row of the score alone at their first wrong token."""
    plain_run(max_steps=1, score_dataset=str(rows_file), score_samples=5)
    scored = samples.read(tmp_path / "out")
    plain_run(max_steps=1, validation_dataset=str(rows_file), overwrite=True)
    generated = samples.read(tmp_path / "out")
    assert len(scored) == 8 and max(len(s["answer"].split()) for s in scored if not s["right"]) > 8
    names = ("step", "prompt", "expected", "answer", "right")
    assert [[s[name] for name in names] for s in scored] == [[s[name] for name in names] for s in generated]


def test_scored_rows_that_end_wrong_are_sampled_beside_the_first_ones_that_end_right(plain_run, write, tmp_path):
    known, others = rows_of(0, 4), rows_of(60, 6)
    files = dict(dataset=write("train.jsonl", known), score_dataset=write("score.jsonl", known + others))
    plain_run(**files, **FULL, max_steps=60, lr=1e-2, eval_samples=4)
    found = samples.read(tmp_path / "out")
    (last,) = [e for e in read_events(tmp_path / "out", "eval") if e["step"] == 60]
    assert last["num_scored"] == 10 and last["right"]["exact_match"] == [0, 1, 2, 3] and last["exact_match"] == 0.4
    assert [s["step"] for s in found] == [0] * 4 + [60] * 8
    assert [s.get("picked") for s in found] == [None] * 8 + ["wrong"] * 4
    assert [s["right"] for s in found[4:]] == [True] * 4 + [False] * 4
    assert [s["expected"].strip() for s in found[8:]] == [row["completion"] for row in others[:4]]
    assert all(len(s["answer"]) > 0 for s in found[8:])
    (start,) = read_events(tmp_path / "out", "start")
    again = [dict(reversed(row.items())) for row in known + others]
    assert start["facts"]["scored_sha256"] == rows_digest(again) != rows_digest(again[::-1])
    assert len(start["facts"]["held_out_sha256"]) == 64
