"""Tokens made on all cores and kept on disk: the same as made here, found again, shared, and never stale."""

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from finetune.data.columns import RowOptions
from finetune.data.prepare import DatasetSource, tokenized_once
from finetune.data.reading.mixture import Source
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.overlong import Cut
from finetune.data.tokens.token_cache import META, TokenCache
from finetune.data.tokens.tokenize import Limits, tokenize
from finetune.data.tokens.workers import progress_line, tokenize_on_cores
from finetune.errors import PlanError
from tests.support.chats import FORGETFUL, with_template
from tests.support.commands import command, finish
from tests.support.rows import jsonl
from tests.support.runs import losses

LIMITS = Limits(Cut(64), False, 400)


def rows(number=600):
    turns = [{"role": "user", "content": "q " * 9}, {"role": "assistant", "content": "t|a " * 9}]
    found = [{"messages": [{**turns[0], "content": f"{i}?"}, turns[1]] * (1 + i % 4), "id": i} for i in range(number)]
    found[7] = {"question": "2?", "answer": 2}
    found[9] = {"text": "long " * 100}
    found[11] = {"prompt": "a", "completion": " "}
    found[13] = {"prompt": "a", "completion": 1.5}
    return found


@pytest.fixture
def raw(tmp_path):
    return read_rows(jsonl(tmp_path / "rows.jsonl", rows()), skip_bad_rows=1)


@pytest.fixture
def cache(tmp_path, monkeypatch, raw):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: TokenCache([(tmp_path / "rows.jsonl", "rows.jsonl")], [1], RowOptions())


def assert_same(one, two):
    assert one.digest() == two.digest() and (one.full_lengths == two.full_lengths).all()
    for name in ("sources", "counts", "description", "skipped", "first", "noted"):
        assert getattr(one, name) == getattr(two, name), name
    assert Counter(one.notices) == Counter(two.notices)


@pytest.mark.parametrize("template", [None, pytest.param(FORGETFUL, marks=pytest.mark.slow)])
def test_all_cores_make_the_tokens_that_one_makes(template, raw, chat_tokenizer):
    tokenizer = with_template(chat_tokenizer, template) if template else chat_tokenizer
    here = tokenize(raw, "auto", tokenizer, LIMITS.cut, LIMITS.train_on_prompt, LIMITS.vocab_size)
    assert_same(tokenize_on_cores(raw, "auto", tokenizer, LIMITS, cores=2), here)
    assert here.counts["skipped"] == 1 and here.counts["split"] == 1 and here.counts["messages_cut"]


def test_an_error_in_a_worker_is_its_line(tmp_path, raw, chat_tokenizer):
    with pytest.raises(PlanError, match=r"rows.jsonl:14: field 'completion' is float"):
        tokenize_on_cores(read_rows(str(tmp_path / "rows.jsonl")), "auto", chat_tokenizer, LIMITS, cores=2)
    with pytest.raises(PlanError, match="is out of range for the model's 50 embedding rows"):
        tokenize_on_cores(raw, "auto", chat_tokenizer, Limits(Cut(64), False, 50), cores=2)


def test_the_second_time_tokens_come_from_the_cache(raw, cache, chat_tokenizer):
    said, unread = [], []
    first = tokenized_once(DatasetSource.of(raw, RowOptions(), Source("a")), chat_tokenizer, LIMITS)
    made = DatasetSource(Source("a"), RowOptions(), lambda: raw, cache())
    assert not made.cache.holds_some()
    assert_same(tokenized_once(made, chat_tokenizer, LIMITS, say=said.append), first)
    found = DatasetSource(Source("a"), RowOptions(), lambda: unread.append(1), cache())
    assert found.cache.holds_some()
    again = tokenized_once(found, chat_tokenizer, LIMITS, say=said.append)
    assert_same(again, first)
    assert said[-1].startswith("tokens of a: ") and not unread and isinstance(again.tokens, np.memmap)
    for name in (first.sources[0], first.sources[5]):  # one row is kept, to ask the trained model about
        assert found.row(name).get("messages") == raw.rows[0]["messages"]


def test_another_tokenizer_template_setting_or_file_is_another_entry(raw, cache, tmp_path, chat_tokenizer):
    entries = {
        cache().entry(chat_tokenizer, LIMITS),
        cache().entry(with_template(chat_tokenizer, FORGETFUL), LIMITS),
        cache().entry(chat_tokenizer, Limits(Cut(65), False, 400)),
        cache().entry(chat_tokenizer, Limits(Cut(64, "drop"), False, 400)),
        cache().entry(chat_tokenizer, Limits(Cut(64), True, 400)),
    }
    options = RowOptions(columns={"prompt": "q"})
    entries.add(TokenCache([(tmp_path / "rows.jsonl", "rows.jsonl")], [1], options).entry(chat_tokenizer, LIMITS))
    jsonl(tmp_path / "rows.jsonl", rows()[1:])
    entries.add(cache().entry(chat_tokenizer, LIMITS))
    assert len(entries) == 7


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("meta", "missing")]


@pytest.mark.parametrize("damage", ["tokens", *SLOW])
def test_a_damaged_entry_is_made_again(damage, raw, cache, chat_tokenizer):
    read = DatasetSource(Source("a"), RowOptions(), lambda: raw, cache())
    first = tokenized_once(read, chat_tokenizer, LIMITS)
    entry = read.cache.entry(chat_tokenizer, LIMITS)
    if damage == "tokens":
        data = bytearray((entry / "tokens.npy").read_bytes())
        data[-3] ^= 1
        (entry / "tokens.npy").write_bytes(data)
    elif damage == "meta":
        (entry / META).write_text((entry / META).read_text()[:-9])
    else:
        (entry / "offsets.npy").unlink()
    assert read.cache.get(entry) is None
    assert_same(tokenized_once(read, chat_tokenizer, LIMITS), first)
    assert read.cache.get(entry) is not None


def test_a_cache_that_cannot_be_written_costs_only_time(raw, cache, tmp_path, chat_tokenizer):
    (tmp_path / "cache").write_text("a file where the folder should be")
    read = DatasetSource(Source("a"), RowOptions(), lambda: raw, cache())
    assert len(tokenized_once(read, chat_tokenizer, LIMITS)) > 500


def test_progress_says_how_long_it_takes():
    assert progress_line(500, 2000, 5.0) == "tokenizing: 500 of 2,000 rows, 100 rows/s, 15 s left"


def test_workers_import_no_framework():
    code = (
        "import finetune.data.tokens.tokenize_process, sys; print({'torch', 'transformers', 'mlx'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "set()", out.stderr


@pytest.mark.slow
def test_ranks_share_the_tokens_that_one_of_them_makes(base, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "big.jsonl"
    text = "What is it? " * 20
    file.write_text("".join(json.dumps({"prompt": f"{i} {text}", "completion": text}) + "\n" for i in range(9000)))
    assert file.stat().st_size > 4 * 2**20
    flags = {**base, "dataset": file}
    for name, more in (("two", "--world_size 2 --batch_size 2"), ("one", "--batch_size 4")):
        code, out, err = finish(command(flags, more, "--max_steps 2", output_dir=tmp_path / name))
        assert code == 0, err
    assert "from " in out and "tokens of " in out
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert len(list((tmp_path / "cache" / "finetune" / "tokens").glob(f"*/*/{META}"))) == 1
