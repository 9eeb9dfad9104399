"""What each metric counts as right, by a table worked out by hand; score.py's predictions and choices."""

import json
import random
import threading

import pytest
import torch

import score
from finetune.errors import PlanError
from finetune.parts import answer_metrics
from finetune.run import evaluation, scoring
from finetune.system import progress
from finetune.torch_engine.weights.stream import load_dense
from tests.support.rows import ROWS, jsonl
from train import fine_tune

# answer, expected, and for each of exact, contains, numeric, json, regex (`#### (\S+)`): is it right?
TABLE = [
    ("Paris", "Paris", "11000"),
    (" Paris\n", "Paris", "11000"),
    ("paris", "Paris", "01000"),
    ("It is Paris.", "Paris", "01000"),
    ("It is  PARIS now", "is paris", "01000"),
    ("London", "Paris", "00000"),
    ("", "Paris", "00000"),
    ("Par is", "Paris", "00000"),
    ("42", "42", "11110"),
    ("42.0", "42", "01110"),
    ("4 2", "42", "00000"),
    ("The answer is 42", "42", "01100"),
    ("42 lamps, not 43", "42", "01000"),
    ("43, no, 42", "42", "01100"),
    ("1,234", "1234", "00100"),
    ("1,234.50", "1234.5", "00100"),
    ("12,34", "34", "01100"),
    ("-5", "5", "01000"),
    ("5", "-5", "00000"),
    ("+5", "5", "01100"),
    ("0.30000000000000004", "0.3", "01100"),
    ("1e3", "1000", "00110"),
    (".5", "0.5", "00100"),
    ("50 %", "50", "01100"),
    ("$7", "7", "01100"),
    ("seven", "7", "00000"),
    ('{"code": "```x```"}', '{"code": "```x```"}', "11010"),
    ('```JSON\n{"code": "```x```"}\n```', '{"code": "```x```"}', "01010"),
    ("Here:\n```json\n[1]\n```\nDone.", "[1]", "01110"),
    ("```json\r\n[1]\r\n``` Hope this helps 2.", "[1]", "01010"),
    ("Here: ```[1]```.", "[1]", "01110"),
    ("```[2]``` and ```[1]```", "[1]", "01100"),
    ("100000001", "100000000", "00000"),
    ("12345670", "12345678", "00000"),
    ("9007199254740993", "9007199254740992", "00000"),
    ("6.0221408e23", "6.02214076e23", "00100"),
    ("6.626e-34", "1.602e-19", "00000"),
    ("1e-17", "0", "00100"),
    ("1 000 000", "2 000 000", "00000"),
    ("1000000", "1 000 000", "00100"),
    ("1'000", "2'000", "00000"),
    ("x = 3,5", "2,5", "00000"),
    ("5", "2,5", "00000"),
    ("1e-99999999999999999999", "3", "00000"),
    ("0e99999999999999999999", "0", "01110"),
    ("(3, 4)", "(3,4)", "00100"),
    ("3", "(3,0)", "00000"),
    ("125", "0,125", "00000"),
    ("0.125 kg", "0,125", "00100"),
    ("12345,67", "12 345,67", "00100"),
    ("345,67", "12 345,67", "00000"),
    ("It was 2020", "May 5,2020", "00100"),
    ("(-3, 4)", "(-3,4)", "00100"),
    ("-1 and 1", "\u22121,1", "00100"),
    ("-3.5", "-3,5", "00100"),
    ("1 and 2", "1,2", "00100"),
    ("May 5, 2020", "May 5,2020", "00100"),
    ("page 12, 345", "page 12 345", "00100"),
    ("x = 3.5", "3,5", "00100"),
    ("1.234,50", "1234,5", "00100"),
    ("14.349.498,7", "14.349.497,7", "00000"),
    ("[0.125, 3]", "[0.125,3]", "00110"),
    ("125.3", "(0.125,3)", "00000"),
    ("[9, 4.5, 1]", "[9, 4.500,1]", "00110"),
    ("x = 0.25, 1", "x=0.250,1", "00100"),
    ("12.5 and 7", "12.500,7", "00100"),
    ("-9.999.480", "-2.553.480", "00000"),
    ("1,234.50", "1.234,50", "00100"),
    ("1234,5", "1.234,50", "00100"),
    ("1.234,50", "Total (1.234,50)", "00100"),
    ("1.234,51", "1,234.50", "00000"),
    ("\u20b9100000", "1,00,000", "00100"),
    ("5,00,000", "1,00,000", "00000"),
    ("99,34,567", "12,34,567", "00000"),
    ("$5", "-$5", "00000"),
    ("\\$-5.00", "-$5", "00100"),
    ("23\u202f706,6", "23\u202f704,6", "00000"),
    ("1.235,567", "1.234,567", "00000"),
    ("1234.567", "1.234,567", "00100"),
    ("8,5", "Aus 3 und 4,5 wird 7,5", "00000"),
    ("7.5", "Aus 3 und 4,5 wird 7,5.", "00100"),
    ("0,4", "-0,4", "00000"),
    ("100000", "in 2020 100 000", "00100"),
    ("1.001", "1", "01000"),
    ("x #### 9", "y #### 9", "00101"),
    ("x #### 9", "y #### 8", "00000"),
    ("#### 9", "#### 9", "11101"),
    ("9", "#### 9", "00100"),
    ("#### 1 then #### 2", "#### 2", "01101"),
    ("#### 2 then #### 1", "#### 2", "01000"),
    ("####9", "#### 9", "00100"),
    ('{"a": 1}', '{"a": 1}', "11110"),
    ('{"a":1}', '{"a": 1}', "00110"),
    ('{"a": 1.0}', '{"a": 1}', "00110"),
    ('{"b": 2, "a": 1}', '{"a": 1, "b": 2}', "00010"),
    ('```json\n{"a": 1}\n```', '{"a": 1}', "01110"),
    ("```\n[1, 2]\n```", "[1, 2]", "01110"),
    ('Here: {"a": 1}', '{"a": 1}', "01100"),
    ('{"a": true}', '{"a": 1}', "00000"),
    ('{"a": "1"}', '{"a": 1}', "00100"),
    ('{"a": null}', '{"a": null}', "11010"),
    ("{a: 1}", '{"a": 1}', "00100"),
    ("[1, 2]", "[2, 1]", "00000"),
    ("[]", "{}", "00000"),
    ("null", "null", "11010"),
    ("true", "true", "11010"),
    ("True", "true", "01000"),
    ('"a"', '"a"', "11010"),
    ('"é"', '"\\u00e9"', "00010"),
    ("[1.5, [2]]", "[1.50, [2.0]]", "00110"),
    ("NaN", "NaN", "11010"),
    ("2024-01-05", "2024-01-05", "11100"),
    ("2024-1-5", "2024-01-05", "00100"),
    ("Yes, to Spain.", "Yes, to Spain.", "11000"),
    ("  ", "", "11000"),
    ("3 + 4 = 7", "7", "01100"),
]
NAMES = ["exact", "contains", "numeric", "json", "regex"]


@pytest.mark.parametrize(("answer", "expected", "right"), TABLE)
def test_each_metric_by_hand(answer, expected, right):
    judges = answer_metrics.judges(NAMES, r"#### (\S+)")
    found = "".join(str(int(judges[name](answer, expected))) for name in NAMES)
    assert found == right, dict(zip(NAMES, found, strict=True))


@pytest.mark.parametrize(
    ("pattern", "answer", "expected", "right"),
    [
        (r".*", "It is 3", "It is 4", False),
        (r".*", "It is 4", "It is 4", True),
        (r"\d*", "17", "42", False),
        (r"\d*", "42.", "so 42", True),
        (r"\b", "a", "b", False),
        (r"#### (.*)", "#### ", "#### ", False),
        (r"(x)?", "a", "b", False),
    ],
)
def test_a_pattern_that_matches_nothing_too_holds_nothing_right_by_that(pattern, answer, expected, right):
    assert answer_metrics.judges(["regex"], pattern)["regex"](answer, expected) is right


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("5", "\u22125", False),  # a minus sign
        ("-5", "x = \u22125", True),
        ("\u22121,500.5", "-1500.5", True),
        ("1e999", "2e999", False),
        ("1" * 400, "2" * 400, False),
        ("see table1", "1", True),
        ("Nf3 e5", "5", True),
        ("e9", "the ninth", False),
        ("2e3", "2000", True),
        ("release 1.2.3", "0.3", False),  # a version is no number
        ("10-5", "-5", False),  # a range
        ("10-5", "5", True),
        ("wait...5", "5", True),
        ("about .5", "0.5", True),
    ],
)
def test_signs_and_sizes_of_numbers_count(answer, expected, right):
    assert answer_metrics.judges(["numeric"], None)["numeric"](answer, expected) is right


THOUGHT_OF = {  # (answer, expected): right?
    ("Hm, Rome?\n</think>\n\nIt is Paris", "\n</think>\n\nParis"): {"contains": True, "exact": False},
    ("Hm, Paris?\n</think>\n\nIt is Rome", "\n</think>\n\nParis"): {"contains": False, "exact": False},
    ("\n</think>\n\nParis", "\n</think>\n\nParis"): {"contains": True, "exact": True},
    ("I wonder if it is Paris or Rome, so", "\n</think>\n\nParis"): {"contains": False, "exact": False},
    ("<think>7 or", "7"): {"numeric": False, "exact": False},
    ("<think>Rome?</think>Paris", "Paris"): {"contains": True, "exact": True},
    ("<think>\n\n</think>\n\n7", "<think>\n\n</think>\n\n7"): {"exact": True, "numeric": True, "json": True},
    ("<think>1 or 2</think>7", "7"): {"exact": True, "numeric": True, "json": True},
    ("<think>b</think>7", "<think>a</think>7"): {"exact": False, "numeric": True},
    ("<think>a</think>7", "<think>a</think>7"): {"exact": True},
}


@pytest.mark.parametrize(("answer", "expected"), THOUGHT_OF)
def test_a_thought_is_no_part_of_an_answer_where_none_is_expected(answer, expected):
    for metric, right in THOUGHT_OF[answer, expected].items():
        assert answer_metrics.judges([metric], None)[metric](answer, expected) is right, metric
    if THOUGHT_OF[answer, expected].get("exact"):  # no answer is given up on its way to the right one
        assert all(answer_metrics.may_become(answer[:number], expected) for number in range(len(answer) + 1))
    assert not answer_metrics.may_become("<think>x</think>Berlin", "Paris")
    assert not answer_metrics.may_become("Berlin", "Paris")


def test_no_answer_is_given_up_on_its_way_to_a_right_one():
    """Exact match alone ends an answer early, and says what it says beside other metrics."""
    exact = answer_metrics.judges(["exact"], None)["exact"]
    drawn = random.Random(1)
    pieces = ["\n", " ", "a", "b c", "<", "<t", "<think>", "</think>", "<think>\n\n</think>\n\n", "x"]
    right = 0
    for _ in range(20_000):
        expected = "".join(drawn.choices(pieces, k=drawn.randint(1, 4)))
        answer = "".join(drawn.choices(pieces, k=drawn.randint(0, 3))) + drawn.choice([expected, expected.strip()])
        if expected.strip() and exact(answer, expected):
            right += 1
            assert all(answer_metrics.may_become(answer[:n], expected) for n in range(len(answer) + 1)), (
                answer,
                expected,
            )
    assert right > 1000


def test_wrong_predictions_come_first(tmp_path):
    answers = [scoring.Answer(str(i), "p", "e", "a", {"exact": i % 2 == 0}) for i in range(5)]
    scoring.write_predictions(tmp_path / "p.jsonl", answers)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [row["source"] for row in rows] == ["1", "3", "0", "2", "4"]


@pytest.fixture
def scored(tiny_model, tmp_path, capsys):
    def run(rows, *flags):
        file = jsonl(tmp_path / "rows.jsonl", rows)
        argv = [
            "--checkpoint",
            str(tiny_model),
            "--dataset",
            file,
            "--device",
            "cpu",
            "--max_new_tokens",
            "4",
            "--json",
        ]
        assert score.main([*argv, *flags]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_predictions_are_full_answers_with_wrong_ones_first(scored, tmp_path):
    file = tmp_path / "predictions.jsonl"
    found = scored(ROWS[:4], "--metric", "exact,contains,numeric", "--predictions", str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 4 and set(rows[0]["right"]) == {"exact", "contains", "numeric"} == set(found["scores"])
    wrong = [not all(row["right"].values()) for row in rows]
    assert wrong == sorted(wrong, reverse=True)
    # An untrained model is wrong at once: exact match alone would have ended its answers there.
    assert all(row["answer"] for row in rows) and max(len(row["answer"]) for row in rows) > 4
    assert {row["expected"].strip() for row in rows} == {row["completion"] for row in ROWS[:4]}
    with pytest.raises(PlanError, match="--predictions .*: exists"):
        scored(ROWS[:4], "--predictions", str(file))


def test_with_json_stdout_is_the_object_alone(tiny_model, tmp_path, monkeypatch, capsys):
    """The answers wait until a line of their progress was made: how long they take is the machine's."""
    shared, duration, made = evaluation.shared, evaluation.duration, threading.Event()

    def awaited(*args):
        answers = shared(*args)
        assert made.wait(60)
        return answers

    monkeypatch.setattr(progress, "SILENCE_S", 0.0)
    monkeypatch.setattr(evaluation, "shared", awaited)
    monkeypatch.setattr(evaluation, "duration", lambda seconds: (made.set(), duration(seconds))[1])
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    argv = f"--checkpoint {tiny_model} --dataset {file} --device cpu --max_new_tokens 4 --json --show 1".split()
    assert score.main(argv) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["exact_match"] == 0.0
    assert "answering: " in printed.err and "  expected " in printed.err


def test_expected_answers_for_which_there_is_no_room_are_said(scored):
    rows = [{"prompt": "a", "completion": " b" * number} for number in (1, 2, 9, 12)]
    (note,) = scored(rows)["notes"]
    assert "2 of 4 expected answers have more tokens than --max_new_tokens 4 (the longest 12)" in note, note
    assert "notes" not in scored(rows, "--metric", "perplexity")
    assert "notes" not in scored(rows, "--max_new_tokens", "12")


def test_wrong_answers_are_not_shown_of_metrics_that_read_none(scored):
    with pytest.raises(PlanError, match=r"^--show 2: shows wrong answers, and --metric choice,perplexity reads none"):
        scored(ROWS[:4], "--metric", "choice,perplexity", "--show", "2")


def test_what_of_the_rows_is_not_read_is_said(scored):
    rows = [row | {"completion": f" {row['completion']}"} for row in ROWS[:4]]
    assert "notes" not in scored(rows, "--metric", "perplexity")
    odd = [row | {"odd": 1} for row in rows]
    said = ["note: columns not used, with their number of rows: 'odd' (4)"]
    assert scored(odd, "--metric", "perplexity")["notes"] == said


def test_the_likeliest_of_the_answers_is_chosen(scored, tiny_model):
    """Against log-probabilities of a plain forward over prompt, answer and the token that ends it."""
    import transformers

    answers = [" yes", " yes, but", " no"]
    rows = [{"prompt": f"Is {i} even?", "completion": answers[i % 3]} for i in range(6)]
    found = scored(rows, "--metric", "choice")["scores"]["choice"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    model, right = load_dense(tiny_model, torch.float32), 0
    for row in rows:
        prompt, scores = tokenizer(row["prompt"]).input_ids, []
        for answer in answers:
            ids = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            with torch.no_grad():
                log_probs = model(input_ids=torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
            scores.append(sum(log_probs[len(prompt) - 1 + i, token].item() for i, token in enumerate(ids)))
        right += answers[scores.index(max(scores))] == row["completion"]
    assert found == right / len(rows)


def test_an_answer_that_another_begins_with_can_be_the_likeliest(tiny_model, tmp_path, capsys):
    answers = ["red", "red wine"]
    rows = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "completion": answers[i % 2]} for i in range(4)])
    out = tmp_path / "out"
    fine_tune(
        model_name=str(tiny_model), dataset=str(rows), train_type="full", precision="fp32", backend="cpu", lr=1e-2,
        max_steps=60, batch_size=4, log_to="stdout", output_dir=str(out),
    )  # fmt: skip
    capsys.readouterr()
    score.main(["--checkpoint", str(out), "--dataset", str(rows), "--metric", "exact,choice", "--json"])
    assert json.loads(capsys.readouterr().out)["scores"] == {"exact": 1.0, "choice": 1.0}


def test_answers_with_special_tokens_are_right_where_they_are_the_same(tiny_model, tmp_path, capsys):
    """As calls of tools have them."""
    answers = [" call<|im_start|>red", " call<|im_start|>blue"]
    rows = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "completion": answers[i % 2]} for i in range(4)])
    out = tmp_path / "out"
    fine_tune(
        model_name=str(tiny_model), dataset=str(rows), train_type="full", precision="fp32", backend="cpu", lr=1e-2,
        max_steps=60, batch_size=4, log_to="stdout", output_dir=str(out), special_tokens_in_text="keep",
    )  # fmt: skip
    capsys.readouterr()
    assert score.main(["--checkpoint", str(out), "--dataset", str(rows), "--metric", "exact", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exact_match"] == 1.0


def test_rows_to_which_no_answer_is_right_are_said_by_score_and_by_runs(tiny_model, tmp_path, capsys):
    rows = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{i} + 1 = ", "completion": str(i + 1)} for i in range(5)])
    odd = jsonl(tmp_path / "odd.jsonl", [{"prompt": "1 + 1 = ", "completion": text} for text in ("2", "two")])
    common = ["--checkpoint", str(tiny_model), "--dataset", odd, "--device", "cpu", "--max_new_tokens", "4"]
    assert score.main([*common, "--metric", "exact,numeric"]) == 0
    assert "note: --metric numeric: no answer to row 2 is right, not even the expected one" in capsys.readouterr().out
    how = dict(train_type="lora", backend="cpu", max_steps=1, context_length=64, score_metric="exact,numeric")
    fine_tune(model_name=str(tiny_model), dataset=rows, score_dataset=odd, output_dir=str(tmp_path / "out"), **how)
    said = "note: --score_metric numeric: no answer to row 2 is right, not even the expected one"
    assert said in " ".join(capsys.readouterr().out.split())


def test_json_that_is_nested_too_deeply_is_not_right():
    deep = "[" * 700 + "]" * 700
    right = answer_metrics.judges(["json"], None)["json"]
    assert right("[[1]]", "[[1]]") and not right("1", deep) and not right(deep, "1")


def test_a_file_of_predictions_that_cannot_be_written_is_refused_before_anything_is_opened(tmp_path):
    argv = ["--checkpoint", "none", "--dataset", jsonl(tmp_path / "rows.jsonl", ROWS[:2]), "--predictions"]
    with pytest.raises(PlanError, match="--predictions .*: there is no folder"):
        score.main([*map(str, argv), str(tmp_path / "none" / "p.jsonl")])


def test_columns_are_named_as_in_training(scored):
    """Rows under other names, with a column left out, score as the rows themselves do."""
    renamed = [{"Frage": row["prompt"], "Antwort": row["completion"], "label": 1} for row in ROWS[:4]]
    found = scored(renamed, "--columns", "prompt=Frage,completion=Antwort", "--ignore_columns", "label")
    plain = scored(ROWS[:4])
    assert {name: found[name] for name in ("rows", "loss", "exact_match")} == {
        name: plain[name] for name in ("rows", "loss", "exact_match")
    }
    with pytest.raises(PlanError, match="has no column .Nothing. that --columns names"):
        scored(renamed, "--columns", "prompt=Nothing,completion=Antwort", "--ignore_columns", "label")
    with pytest.raises(PlanError, match="--columns: is of rows, and there are none"):
        score.main(["--checkpoint", "x", "--columns", "prompt=a,completion=b"])


def test_rows_of_text_have_no_answers_to_score(scored):
    rows = [{"text": "a b c d"}] * 4
    assert scored(rows)["exact_match"] is None
    for flags, said in (
        (["--metric", "perplexity,exact"], "--metric exact"),
        (["--predictions", "p"], "--predictions p"),
    ):
        with pytest.raises(PlanError, match=f"{said}: the rows of .* are text, which asks nothing"):
            scored(rows, *flags)


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        ("--metric accuracy", "--metric accuracy: is not one. Use exact, contains"),
        ("--metric regex", "--metric regex: needs --pattern"),
        ("--metric regex --pattern (", "is not a regular expression"),
        ("--pattern a", "--pattern a: is for --metric regex"),
        ("--metric choice", "--metric choice: the rows have 1 distinct answers"),
    ],
)
def test_what_cannot_be_scored_is_one_line(scored, flags, fact):
    with pytest.raises(PlanError) as error:
        scored([{"prompt": "a", "completion": "b"}], *flags.split())
    assert fact in str(error.value)
