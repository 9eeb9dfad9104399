"""Tokens made on all cores and kept on disk: the same as made here, found again, shared, and never stale."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from finetune.data.columns import RowOptions
from finetune.data.prepare import DatasetSource, tokenized_once
from finetune.data.reading.mixture import Source
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.overlong import Cut
from finetune.data.tokens.token_cache import META, TokenCache, _key, read_array
from finetune.data.tokens.tokenize import ASKED, Limits, TokenizedDataset, tokenize
from finetune.data.tokens.workers import progress_line, tokenize_on_cores
from finetune.errors import PlanError
from finetune.safetensors_io import digest_of
from tests.support.chats import FORGETFUL, with_template
from tests.support.commands import ROOT, command, finish
from tests.support.nobody import NOBODY
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
    return lambda *options: TokenCache([(tmp_path / "rows.jsonl", "rows.jsonl")], [1], *(options or [RowOptions()]))


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
    with pytest.raises(PlanError, match=r"rows.jsonl:14: field 'completion' is a number"):
        tokenize_on_cores(read_rows(str(tmp_path / "rows.jsonl")), "auto", chat_tokenizer, LIMITS, cores=2)
    with pytest.raises(PlanError, match="is out of range for the model's 50 embedding rows"):
        tokenize_on_cores(raw, "auto", chat_tokenizer, Limits(Cut(64), False, 50), cores=2)


@pytest.mark.parametrize("options", [RowOptions(), RowOptions(mask_reasoning=True)])
def test_the_second_time_tokens_come_from_the_cache(options, raw, cache, chat_tokenizer):
    said, unread = [], []
    first = tokenized_once(DatasetSource.of(raw, options, Source("a")), chat_tokenizer, LIMITS)
    made = DatasetSource(Source("a"), options, lambda: raw, cache(options))
    assert not made.cache.holds_some()
    assert_same(tokenized_once(made, chat_tokenizer, LIMITS, say=said.append), first)
    found = DatasetSource(Source("a"), options, lambda: unread.append(1), cache(options))
    assert found.cache.holds_some()
    again = tokenized_once(found, chat_tokenizer, LIMITS, say=said.append)
    assert_same(again, first)
    assert [again.answer_start(i) for i in range(9)] == [first.answer_start(i) for i in range(9)]
    assert again.arrays.keys() == first.arrays.keys() == ({ASKED} if options.mask_reasoning else set())
    assert said[-1].startswith("tokens of a: ") and not unread
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
    assert read.cache.get(entry, None) is None
    assert_same(tokenized_once(read, chat_tokenizer, LIMITS), first)
    assert read.cache.get(entry, None) is not None


def small(tokens=(3, 4, 5, 6)):
    size = len(tokens)
    arrays = np.array(tokens, np.int32), np.ones(size, bool), np.array([0, 2, size], np.int64)
    return TokenizedDataset(
        *arrays, sources=("a:1", "a:2"), counts={"rows": 2}, full_lengths=np.array([2, 2], np.int32)
    )


def signed(entry: Path, edit) -> None:
    """Changes the entry by edit(content of dataset.json, {array: it}), under right digests."""
    content = json.loads((entry / META).read_text())
    arrays = {name: np.load(entry / f"{name}.npy") for name in content["digests"]}
    edit(content, arrays)
    for name, array in arrays.items():
        np.save(entry / f"{name}.npy", array)
        content["digests"][name] = digest_of(entry / f"{name}.npy")
    content.pop("sha256")
    (entry / META).write_text(json.dumps(content | {"sha256": _key(content)}))


FACTS = ("sources", "counts", "description", "skipped", "notices", "first", "noted", "documents_per_row")
ODD = {
    **{f"without {name}": lambda c, a, name=name: c["facts"].pop(name) for name in FACTS},
    **{f"{name} is a number": lambda c, a, name=name: c["facts"].update({name: 1.5}) for name in FACTS},
    "no facts": lambda c, a: c.update(facts=None),
    "no digests": lambda c, a: c.update(digests=[]) if a.clear() is None else None,
    "example": lambda c, a: c.update(example=["a"]),
    "example of nothing": lambda c, a: c.update(example={}),
    "example without a source": lambda c, a: c["example"].pop("source"),
    "example whose row is a number": lambda c, a: c["example"].update(row=1),
    "three per row": lambda c, a: c["facts"].update(documents_per_row=3),
    "pairs of odd documents": lambda c, a: c["facts"].update(sources=["a"] * 3, documents_per_row=2),
    "float tokens": lambda c, a: a.update(tokens=a["tokens"].astype(np.float32)),
    "two dims": lambda c, a: a.update(tokens=a["tokens"].reshape(2, 2)),
    "no dims": lambda c, a: a.update(tokens=np.array(3, np.int32)),
    "a token too few": lambda c, a: a.update(tokens=a["tokens"][:-1]),
    "unknown token": lambda c, a: a.update(tokens=a["tokens"] + 400),
    "negative token": lambda c, a: a.update(tokens=a["tokens"] - 9),
    "falling offsets": lambda c, a: a.update(offsets=np.array([0, 9, 4])),
    "offsets beyond": lambda c, a: a.update(offsets=np.array([0, 2, 5])),
    "targets as numbers": lambda c, a: a.update(is_target=a["tokens"]),
    "lengths as text": lambda c, a: a.update(full_lengths=np.array(["a", "b"])),
}
PLACED = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("kind", [*ODD, *PLACED, "an odd header", "one flipped bit"])
def test_an_entry_that_is_not_as_it_was_written_is_set_aside_with_one_line(kind, cache, chat_tokenizer):
    kept, said = cache(), []
    entry = kept.entry(chat_tokenizer, LIMITS)
    kept.put(entry, small(), ("a:1", {"text": "x"}))
    assert kept.get(entry, 400, said.append)[1] == ("a:1", {"text": "x"}) and not said
    if kind == "an odd header":
        file = entry / "tokens.npy"
        file.write_bytes(file.read_bytes().replace(b"}", b" ", 1))
        content = json.loads((entry / META).read_text())
        content["digests"]["tokens"] = digest_of(file)
        content.pop("sha256")
        (entry / META).write_text(json.dumps(content | {"sha256": _key(content)}))
    elif kind in ODD:
        signed(entry, ODD[kind])
    elif kind in PLACED:
        (entry / "tokens.npy").unlink()
        PLACED[kind](entry / "tokens.npy")
    else:
        (entry / META).write_text((entry / META).read_text().replace("a:1", "b:1"))
    assert kept.get(entry, 400, said.append) is None
    assert len(said) == 1 and "not as they were written" in said[0] and not entry.exists()
    kept.put(entry, small(), None)
    assert kept.get(entry, 400, said.append)[0].digest() == small().digest() and len(said) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of another user")
def test_an_entry_of_another_user_is_read_and_one_that_is_closed_to_others_costs_nothing(cache, chat_tokenizer):
    """Each start of the other user said that it was damaged and made it again; a closed one ended it with code 2."""
    kept = cache()
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is closed to other users
        os.chmod(folder, 0o755)
        kept.root = Path(folder) / "tokens"
        kept.folder = kept.root / kept.folder.name
        entry = kept.entry(chat_tokenizer, LIMITS)
        kept.put(entry, small(), None)

        def found() -> list:
            said = []
            return [kept.holds_some(), kept.get(entry, 400, said.append) is not None, said]

        assert by_nobody(found) == [True, True, []]
        kept.root.chmod(0o700)
        assert by_nobody(found) == [False, False, []]


def by_nobody(work) -> list:
    """Result of work() in a child that is another user's."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(NOBODY)
        os.write(writing, json.dumps(work()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        content = file.read()
    os.waitpid(child, 0)
    return json.loads(content)


@pytest.mark.parametrize("in_memory_bytes", [0, 2**20])
def test_an_array_whose_file_is_cut_is_still_read(tmp_path, in_memory_bytes):
    file, array = tmp_path / "a.npy", np.arange(2**16)
    np.save(file, array)
    child = os.fork()  # a mapped file that is cut would end this process by SIGBUS
    if not child:
        found = read_array(file, digest_of(file), in_memory_bytes)
        os.truncate(file, 0)
        os._exit(isinstance(found, np.memmap) + 2 * bool((found == array).all()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2 + (in_memory_bytes == 0)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npy"]


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


def test_another_version_of_what_renders_rows_makes_its_own_entries(tmp_path):
    """The digest of the code, in a copy of the package before and after a template's reader is changed."""
    shutil.copytree(ROOT / "finetune" / "data", tmp_path / "data")
    module = tmp_path / "data" / "tokens" / "token_cache.py"
    code = f"import runpy; print(runpy.run_path({str(module)!r})['_code_digest']())"

    def digest() -> str:
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    before = digest()
    assert digest() == before
    with open(tmp_path / "data" / "conversation.py", "a") as file:
        file.write("# another\n")
    assert digest() != before


def test_a_column_that_no_dataset_has_is_refused_though_tokens_are_kept(plain_run, tmp_path):
    """The tokens were made beside another dataset, which had the column."""
    row = {"question": "a?", "answer": "b", "filler": "x" * 2**19}
    for name, rows in (("kept", [row] * 9), ("with", [{"q": "c?", "answer": "d"}]), ("without", [row])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept, other, without = (str(tmp_path / f"{name}.jsonl") for name in ("kept", "with", "without"))
    named = {"columns": "question=q", "ignore_columns": "filler", "max_steps": 1, "overwrite": True}
    for _ in range(2):
        plain_run(dataset=[kept, other], **named)
    for datasets in ([kept, without], kept):
        with pytest.raises(PlanError, match="has no column 'q' that --columns names"):
            plain_run(dataset=datasets, **named)
