"""What a dry run shows of the data: samples with targets, lengths, and what is odd, each with its place and remedy."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from finetune.data.preview import histogram, lint
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.tokenize import tokenize
from finetune.model_files.plain_tokenizer import PlainTokenizer
from tests.support.commands import command, finish, without_frameworks, words
from tests.support.rows import jsonl


def chat(question, answer, **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


@pytest.fixture
def odd(tmp_path):
    """Files with a duplicate, an empty answer, rows of validation and score among them, and a long row."""
    rows = [chat(f"q{i}", f"a{i}", id=i) for i in range(8)]
    rows += [chat("q1", "a1", id=9), chat("q9", " ", id=10), chat("long " * 80, "a"), chat("q5", "b")]
    rows[6]["messages"] += [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    return {
        "dataset": jsonl(tmp_path / "train.jsonl", rows),
        "validation_dataset": jsonl(
            tmp_path / "validation.jsonl", [chat("q2", "a2"), chat("q3", "a3"), chat("x", "y")]
        ),
        "score_dataset": jsonl(tmp_path / "score.jsonl", [chat("q4", "a4")]),
    }


def test_a_dry_run_previews_the_data_and_writes_it_as_json(odd, flags, chat_model, tmp_path):
    report = tmp_path / "report.json"
    code, out, err = finish(command(flags | odd, "--dry_run", model_name=chat_model, data_report=report))
    assert code == 0, err
    train = odd["dataset"]
    for line in (
        f"data, train: {train}, chat: rendered by the tokenizer's chat template: 11 rows, ",
        f"data, validation: {odd['validation_dataset']}, ",
        f"data, score: {odd['score_dataset']}, ",
        "  note: columns not used, with their number of rows: 'id' (10)",
        "tokens per row: p50 ",
        f"{train}:3:",
        "⟦a2<|im_end|>⟧",
        f"check: rows without an answer to learn (1), first {train}:10: fill in the answers, or remove the rows",
        f"check: rows that repeat an earlier one, token for token (1), first {train}:9: remove all but one of each",
        f"check: rows whose prompt has another answer in an earlier row (1), first {train}:12: keep the answer",
        f"check: training rows that are validation rows too (2), first {train}:3: remove them from the training rows",
        f"check: training rows that are scored too (1), first {train}:5: remove them",
        f"check: truncated at the start of the prompt (1), first {train}:11: raise --context_length",
    ):
        assert line in out, line
    content = json.loads(report.read_text())
    assert {d["use"]: d["rows"] for d in content["datasets"]} == {"train": 11, "validation": 3, "score": 1}
    assert [sample["source"] for sample in content["samples"]] == [f"{train}:{i}" for i in (1, 2, 3)]
    lint = {entry["check"]: (entry["count"], entry["first"]) for entry in content["lint"]}
    assert lint["duplicates"] == (1, f"{train}:9") and lint["in validation"] == (2, f"{train}:3")
    assert all(entry["remedy"] for entry in content["lint"]) and "keeps all (p50" in content["lost"]
    assert sum(n for _, n in content["lengths"]["bins"]) == 11
    assert not (tmp_path / "out").exists()


def test_a_preview_shows_the_tokens_that_the_run_trains_on(flags, plain_run, capsys):
    code, out, _ = finish(command(flags, "--dry_run"))
    assert code == 0 and "check: no problems found" in out
    plain_run(max_steps=1)
    trained = capsys.readouterr().out
    described = next(line for line in trained.splitlines() if line.startswith("data: "))
    tokens, targets = described.split(", ")[1].split(" (")[0], described.split(", ")[2].split(";")[0]
    assert f"{tokens}, {targets}" in out
    sample = trained.splitlines()[trained.splitlines().index(described) + 1]
    assert sample in out.splitlines()


def test_a_preview_of_several_datasets_has_a_line_for_each(odd, flags):
    argv = [
        *command({**flags, "dataset": odd["dataset"] + ":2"}, "--dry_run"),
        "--dataset",
        odd["score_dataset"] + ":1",
    ]
    code, out, err = finish(argv)
    assert code == 0, err
    assert "data, train (weight 2): " in out and "data, train (weight 1): " in out
    assert f"check: rows that repeat an earlier one, token for token (2), first {odd['dataset']}:9: remove all" in out


def test_bad_data_ends_a_dry_run_as_it_ends_the_run(flags, tmp_path):
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    for more in ("--dry_run", ""):
        code, _, err = finish(command({**flags, "dataset": pairs}, more))
        assert code == 2 and "are preference pairs" in err and "--columns completion=chosen" in err
    code, _, err = finish(command(flags, "--data_report x.json"))
    assert code == 2 and "--data_report x.json: is written by a dry run. Add --dry_run." in err
    code, _, err = finish(command(flags, "--dry_run --data_report /none/x.json"))
    assert code == 2 and "--data_report /none/x.json: cannot be written" in err


def test_text_that_the_tokenizer_has_no_token_for_is_named(tmp_path):
    known = Tokenizer(models.WordLevel({"?": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="?"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="?", pad_token="?")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=known, **names)
    raw = read_rows(
        jsonl(tmp_path / "a.jsonl", [{"prompt": p, "completion": f" {c}"} for p, c in ("ab", "aa", "cd", "bc")])
    )
    train = tokenize(raw, "auto", tokenizer, 64)
    assert train.notices[-1] == "tokens that the tokenizer does not know: 3, 2 of them learned"
    plain = PlainTokenizer.of(tokenizer)
    (found,) = [entry for entry in lint(plain, {"train": train}) if entry["check"] == "unknown"]
    assert (found["count"], found["first"]) == (2, raw.sources[2])
    names["eos_token"] = "?"  # as GPT-2's, of which the end is no unknown text
    same = transformers.PreTrainedTokenizerFast(tokenizer_object=known, **names)
    assert not any("does not know" in line for line in tokenize(raw, "auto", same, 64).notices)


def test_a_report_replaces_no_file_but_a_report(flags, tmp_path):
    mine, report = tmp_path / "mine.jsonl", tmp_path / "report.json"
    mine.write_bytes(Path(flags["dataset"]).read_bytes())
    before = mine.read_bytes()
    code, _, err = finish(command({**flags, "dataset": mine}, "--dry_run", data_report=mine))
    assert code == 2 and f"--data_report {mine}: exists and is no such report. Give another file." in err
    assert mine.read_bytes() == before
    for _ in range(2):
        code, _, err = finish(command(flags, "--dry_run", data_report=report))
        assert code == 0, err
    assert json.loads(report.read_text())["datasets"]


def test_a_dataset_that_is_not_on_this_disk_is_not_read(flags):
    code, out, _ = finish(command({**flags, "dataset": "org/name"}, "--dry_run"))
    assert code == 0 and "data: org/name is not read by a dry run, as it is not on this disk" in out


def test_the_preview_imports_no_framework(flags, odd):
    argv = words(flags | odd, "--dry_run", context_length="auto")
    out = without_frameworks(argv)
    assert out.returncode == 0, out.stderr
    assert "context_length: auto -> " in out.stdout and "check: " in out.stdout


def test_a_histogram_counts_every_row_once():
    found = histogram(np.array([1, 5, 10, 10, 100]))
    assert sum(n for _, n in found["bins"]) == 5 and found["max"] == 100 and found["bins"][-1] == [100, 1]
