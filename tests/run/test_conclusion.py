"""What a finished run says and writes beside its weights: scores on both bases, by any metric, and its model card."""

import argparse
import json
import math
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

import export
import score
from finetune.engine import StepResult
from finetune.errors import PlanError
from finetune.parts import answer_metrics
from finetune.run import evaluation, model_card, samples, scoring
from tests.support.cells import but_slow
from tests.support.rows import ROWS, jsonl
from tests.support.runs import read_events
from train import fine_tune

NF4 = dict(train_type="qlora", quantization_backend="nf4", num_epochs=2)
LIMITS = dict(score_max_new_tokens=6, score_samples=6)


@pytest.fixture
def rows(tmp_path):
    return jsonl(tmp_path / "scored.jsonl", ROWS[:6])


def of_dense(folder, rows, capsys) -> dict:
    capsys.readouterr()
    assert score.main(f"--checkpoint {folder} --dataset {rows} --n_bits 16 --json --max_new_tokens 6".split()) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.promise("AT_01", "AT_03")
def test_a_qlora_run_ends_with_the_scores_on_both_bases_and_the_card_has_them(rows, tmp_path, run, capsys):
    state = run(**NF4, **LIMITS, score_dataset=rows, score_metric="exact,contains,perplexity")
    said = capsys.readouterr().out
    own = read_events(tmp_path / "out", "eval")[-1]
    dense = of_dense(tmp_path / "out", rows, capsys)
    found = state.scores["dense"]
    assert found["loss"] == pytest.approx(dense["loss"], rel=1e-6) and found["loss"] != own["loss"]
    assert found["exact_match"] == dense["exact_match"]
    assert f"nf4 4 bits, as trained (generate.py, score.py): exact match {own['exact_match']:.1%}" in said
    assert f"dense (what export.py writes): exact match {dense['exact_match']:.1%}" in said
    assert f"loss {dense['loss']:.4f}" in said and f"loss {own['loss']:.4f}" in said
    card = ModelCard.load(tmp_path / "out" / "README.md")
    by_name = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert by_name["perplexity"] == pytest.approx(found["perplexity"], abs=1e-6)
    assert f"| the same adapter, dense base | {found['loss']:.4f} |" in card.text
    assert "It was trained on a base in nf4 4 bits" in card.text


def test_a_readme_of_the_user_s_own_stays(rows, tmp_path, run, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("mine")
    run(**NF4 | {"num_epochs": 1}, save_every=1)
    assert "README.md is not as a run wrote it and stays: no model card is written" in capsys.readouterr().out
    fine_tune(resume=str(tmp_path / "out"), num_epochs=2)
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


def test_a_card_that_was_edited_stays_and_one_that_was_not_is_written_again(tmp_path, run, capsys):
    card = tmp_path / "out" / "README.md"
    run(num_epochs=1, save_every=1)
    first = card.read_text()
    fine_tune(resume=str(tmp_path / "out"), num_epochs=2)
    assert card.read_text() != first and "no model card" not in capsys.readouterr().out
    card.write_text(card.read_text().replace("#", "# Mine,", 1))
    mine = card.read_text()
    fine_tune(resume=str(tmp_path / "out"), num_epochs=3)
    assert card.read_text() == mine and "README.md is not as a run wrote it and stays" in capsys.readouterr().out


def test_the_dense_base_of_a_padded_run_is_scored_in_its_own_layout(rows, tmp_path, run, capsys):
    state = run(**NF4, **LIMITS, score_dataset=rows, batch_layout="padded", batch_size=4)
    dense = of_dense(tmp_path / "out", rows, capsys)
    assert state.scores["dense"]["loss"] == pytest.approx(dense["loss"], rel=1e-6)


def test_a_dense_base_that_does_not_fit_is_a_line_with_the_command(rows, tmp_path, run, capsys, monkeypatch):
    from finetune.run import conclusion

    monkeypatch.setattr(conclusion, "ENGINE_BYTES", 1e9)
    state = run(**NF4, **LIMITS, score_dataset=rows)
    assert "not scored, as it takes" in state.scores["dense"]
    assert f"To have it: python score.py --checkpoint {tmp_path / 'out'} --n_bits 16" in capsys.readouterr().out
    assert "the same adapter, dense base" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.promise("AT_08")
def test_a_run_is_scored_by_each_metric_as_score_py_does(rows, tmp_path, run, capsys):
    names = "exact,contains,numeric,json,regex,choice,perplexity"
    run(**LIMITS, num_epochs=1, score_dataset=rows, score_metric=names, score_pattern=r"\d+")
    own = read_events(tmp_path / "out", "eval")[-1]
    capsys.readouterr()
    argv = f"--checkpoint {tmp_path / 'out'} --dataset {rows} --json --max_new_tokens 6 --metric {names} --pattern \\d+"
    assert score.main(argv.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert own["exact_match"] == found["exact_match"]
    for name in ("contains", "numeric", "json", "regex", "choice"):
        assert own[name] == found["scores"][name], name
    assert own["perplexity"] == pytest.approx(found["perplexity"], rel=1e-5)


def scored_by_score_py(folder, rows, capsys, **flags) -> dict:
    argv = ["--checkpoint", str(folder), "--dataset", str(rows), "--json", "--max_new_tokens", "6"]
    capsys.readouterr()
    assert score.main([*argv, *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_perplexity_is_of_the_scored_rows_beside_other_validation_rows(rows, tmp_path, run, capsys):
    other = jsonl(tmp_path / "validation.jsonl", ROWS[6:])
    run(**LIMITS, num_epochs=1, score_dataset=rows, validation_dataset=other, score_metric="choice, perplexity")
    own = read_events(tmp_path / "out", "eval")[-1]
    found = scored_by_score_py(tmp_path / "out", rows, capsys, metric="choice,perplexity")
    assert (
        own["perplexity"] == pytest.approx(found["perplexity"], rel=1e-5) and own["choice"] == found["scores"]["choice"]
    )
    assert own["perplexity"] != pytest.approx(math.exp(own["loss"]), rel=1e-3)


def test_rows_that_choice_cannot_score_are_refused_before_the_model_is_used(tmp_path, run):
    rows = jsonl(tmp_path / "same.jsonl", [{"prompt": f"{i}?", "completion": "yes"} for i in range(4)])
    with pytest.raises(PlanError, match="--score_metric choice: the rows have 1 distinct answers"):
        run(score_dataset=rows, score_metric="choice")
    assert not (tmp_path / "out" / "checkpoints").exists() and not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize("validated", but_slow([False, True], [True]))
def test_a_run_of_preferences_is_scored_by_the_next_token(rows, tmp_path, run, capsys, validated):
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(8)])
    more = dict(validation_dataset=pairs) if validated else {}
    state = run(
        **NF4 | {"num_epochs": 1}, **LIMITS, **more, dataset=pairs, preference="dpo", score_dataset=rows,
        score_metric="exact,choice,perplexity",
    )  # fmt: skip
    own = read_events(tmp_path / "out", "eval")[-1]
    found = scored_by_score_py(tmp_path / "out", rows, capsys, metric="choice,perplexity")
    assert (
        own["perplexity"] == pytest.approx(found["perplexity"], rel=1e-5) and own["choice"] == found["scores"]["choice"]
    )
    dense = of_dense(tmp_path / "out", rows, capsys)
    assert state.scores["dense"]["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-5)
    assert "loss" not in state.scores["dense"]  # of pairs it needs the reference too


@pytest.mark.parametrize(
    ("metric", "pattern", "fact"),
    [
        ("exakt", None, "--score_metric exakt: is not one"),
        ("regex", None, "--score_metric regex: needs --score_pattern"),
        ("exact", "x", "--score_pattern x: is for --score_metric regex"),
        ("regex", "(", "--score_pattern .: is not a regular expression"),
    ],
)
def test_a_metric_that_is_none_is_refused_in_the_plan(run, tmp_path, metric, pattern, fact):
    with pytest.raises(PlanError, match=fact):
        run(score_metric=metric, score_pattern=pattern)
    assert not (tmp_path / "out").exists()


@pytest.mark.promise("AT_03")
def test_the_card_names_base_data_plan_command_scores_and_limits(rows, tmp_path, run, tiny_model):
    run(max_steps=2, score_dataset=rows, **LIMITS)
    text = (tmp_path / "out" / "README.md").read_text()
    start = read_events(tmp_path / "out", "start")[-1]
    base = json.loads((tmp_path / "out" / "base_model.json").read_text())
    for part in (base["digest"], start["data"]["sha256"], "## Scores", "## Limits", "| lora_rank | 4 |", "rows.jsonl"):
        assert part in text
    assert f"python train.py --model_name {tiny_model.name} --train_type lora --dataset rows.jsonl" in text
    assert str(tmp_path) not in text  # folders of this machine are not for others
    assert ModelCard(text).data.library_name == "peft"


def test_the_metadata_name_the_base_and_data_that_are_on_the_hub(tmp_path):
    settled = {"dataset": ["org/rows:2", "mine.jsonl"], "train_type": "lora", "preference": "dpo"}
    facts = model_card.Facts(base="org/base", settled=settled | {"dataset": ["org/rows", "mine.jsonl"]})
    for kind, relation in (("adapter", "adapter"), ("model", "finetune")):
        data = ModelCard(model_card.card(facts, "mine", kind)).data
        assert (data.base_model, data.base_model_relation, data.datasets) == ("org/base", relation, ["org/rows"])
        assert data.tags == ["lora", "dpo"]
    local = replace(facts, base=str(tmp_path))
    assert ModelCard(model_card.card(local, "mine", "adapter")).data.base_model is None


def test_a_card_says_what_is_known_where_files_are_missing_or_damaged(run, tmp_path):
    run(max_steps=1)
    whole = model_card.card(model_card.facts_of(tmp_path / "out"), "x", "adapter")
    for name in ("run_plan.json", "metrics.jsonl", "base_model.json", "train_state.json"):
        (tmp_path / "out" / name).write_text("{")
    poorer = model_card.card(model_card.facts_of(tmp_path / "out"), "x", "adapter")
    assert "| training | lora |" in whole and "| training |" not in poorer and "Limits" in poorer
    assert ModelCard(poorer).data.library_name == "peft"


@pytest.mark.parametrize("to", but_slow(["hf", "mlx-lm"], ["hf"]))
def test_an_export_has_a_card_too(rows, run, tmp_path, to):
    run(max_steps=2, score_dataset=rows, **LIMITS)
    assert export.main(["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "m"), "--to", to]) == 0
    card = ModelCard.load(tmp_path / "m" / "README.md")
    assert card.data.library_name == {"hf": "transformers", "mlx-lm": "mlx"}[to]
    assert f"export.py --to {to}" in card.text and "## Training" in card.text
    assert ("| this model, 6 rows |" in card.text) is (to == "hf")


def test_adapter_config_names_the_version_of_peft_whose_form_it_is(run, tmp_path):
    from peft import PeftConfig

    run(max_steps=1)
    config = PeftConfig.from_pretrained(tmp_path / "out")
    assert config.peft_version == json.loads((tmp_path / "out" / "adapter_config.json").read_text())["peft_version"]


class Answering:
    """An engine that gives these answers: what counts them is judged here, not a model."""

    def __init__(self, answers: list[str]):
        self.answers = answers

    def shard_list(self, items):
        return items

    def full_weights(self):
        import contextlib

        return contextlib.nullcontext()

    def all_reduce_max(self, number):
        return number

    def all_gather_object(self, value):
        return [value]

    def generate(self, prompts, most, ends, stop_row=None):
        return [[int(prompt[0])] for prompt in prompts]

    def broadcast_object(self, value):
        return value

    def evaluate(self, batches):
        raise AssertionError(f"asked for {StepResult}")


def test_metrics_equal_a_table_of_sixty_answers_counted_by_hand():
    """tests/support/sixty_answers.py: each answer with which metrics find it right, as read by a person."""
    from tests.support.sixty_answers import PATTERN, TABLE

    assert len(TABLE) == 60
    words = [answer for _, answer, _ in TABLE]
    examples = [([i], expected, f"{i}") for i, (expected, _, _) in enumerate(TABLE)]
    tokenizer = argparse.Namespace(decode=lambda ids, skip_special_tokens=False: words[ids[0]])
    data = argparse.Namespace(score_examples=examples, tokenizer=tokenizer, stop_ids=set())
    names = answer_metrics.OF_ANSWERS
    how = argparse.Namespace(score_metric=",".join(names), score_pattern=PATTERN, score_max_new_tokens=9)
    found = evaluation.scores(Answering(words), data, how)
    values, right_rows = found.values, found.right
    assert found.answers == words
    letters = dict(zip(names, "ECNJR", strict=True))
    for name, letter in letters.items():
        key = "exact_match" if name == "exact" else name
        assert right_rows[key] == [i for i, (_, _, right) in enumerate(TABLE) if letter in right], name
        assert values[key] == len(right_rows[key]) / 60, name
    for i, answer in enumerate(scoring.judged(examples, words, list(names), PATTERN, tokenizer.decode)):
        assert {letters[n] for n, right in answer.right.items() if right} == set(TABLE[i][2]), TABLE[i]


def test_samples_that_a_score_has_answered_are_not_generated_again():
    asked = []

    class Asked(Answering):
        def generate(self, prompts, most, ends, stop_row=None):
            asked.extend(prompts)
            return super().generate(prompts, most, ends, stop_row)

    data = argparse.Namespace(tokenizer=argparse.Namespace(decode=lambda ids: f"answer {ids[0]}"), stop_ids=set())
    prompts = [([i], "expected", "file") for i in range(4)]
    answers = [f"answer {i}" for i in range(4)]
    cases = ([None] * 4, [[0], [1], [2], [3]]), (answers, []), (["answer 0", None, "answer 2", None], [[1], [3]])
    for known, wanted in cases:
        asked.clear()
        assert samples.answers_to(Asked([]), data, prompts, known, 9, lambda: False) == [(a, False) for a in answers]
        assert asked == wanted
