"""Conversations as tokens: markers, targets, truncation; data sets as they are built and read; rows in their slots."""

import json
import os

import numpy as np
import pytest

from dataset import build_chat_dataset, build_puzzle_dataset
from finetune.engine import IGNORE_INDEX
from finetune.errors import PlanError
from finetune.parts.train_state import Cursor
from recursive.data.arrays import joined, read_split
from recursive.data.carry import Carry, earliest_halt
from recursive.data.chat_tokens import ChatTokenizer, read_conversations, rows_of, truncated
from tests.support import pretraining

TURNS = [
    ("system", "Be kind."),
    ("user", "Hi <|endassistant|>"),
    ("assistant", "Hello!"),
    ("user", "Bye"),
    ("assistant", "Bye!"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer.train([text for _, text in TURNS], 300)


def test_a_conversation_is_its_turns_in_markers_and_its_answers_are_targets(tokenizer):
    ids, is_target = tokenizer.conversation(TURNS)
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|system|>Be kind.<|endsystem|><|sep|><|user|>Hi <|endassistant|><|enduser|><|sep|><|assistant|>Hello!"
        "<|endassistant|><|sep|><|user|>Bye<|enduser|><|sep|><|assistant|>Bye!<|endassistant|><|endoftext|>"
    )
    targets = [t for t, target in zip(ids, is_target, strict=True) if target]
    assert tokenizer.decode(targets, skip_special_tokens=False) == "Hello!<|endassistant|>Bye!<|endassistant|>"
    # What the user types is text, even if it looks like a marker.
    assert ids.count(tokenizer.id_of("<|endassistant|>")) == 2
    assert all(tokenizer.conversation(TURNS, "all")[1])
    assert tokenizer.prompt(TURNS[:2]) == ids[: ids.index(tokenizer.id_of("<|assistant|>")) + 1]


@pytest.mark.promise("TR_10")
def test_a_long_row_loses_its_front_or_the_tail_of_its_answer(tokenizer):
    ids, is_target = tokenizer.conversation(TURNS)
    kept, target = truncated(ids, is_target, 12)
    end = max(i for i, t in enumerate(is_target) if t) + 1
    assert kept == ids[end - 12 : end] and target == is_target[end - 12 : end]
    ids, is_target = tokenizer.conversation([("user", "x"), ("assistant", "abcdefghijklmnop" * 3)])
    kept, target = truncated(ids, is_target, 8)
    assert len(kept) == 8 and target == [False] + [True] * 7
    assert kept[0] == tokenizer.id_of("<|assistant|>")
    inputs, _, longer = rows_of([TURNS, [("user", "x"), ("assistant", "y")]], tokenizer, 12, "assistant")
    assert inputs.shape == (2, 12) and longer == 1


ROWS = {
    "sharegpt": {
        "conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "Q"},
            {"from": "gpt", "value": "A"},
        ]
    },
    "alpaca": {"instruction": "Q", "input": "X", "output": "A"},
    "openassistant": {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
}


@pytest.mark.promise("TR_10")
@pytest.mark.parametrize("form", ROWS)
def test_every_format_is_built_and_read_back(form, tmp_path, capsys):
    file, out = tmp_path / "in.json", tmp_path / "out"
    file.write_text(json.dumps([ROWS[form]] * 10))
    argv = ["--input-file", str(file), "--output-dir", str(out), "--format", form, "--tokenizer", "bpe:280"]
    for _ in range(2):  # the second call replaces the data set of the first
        assert build_chat_dataset.main([*argv, "--max-length", "32", "--train-split", "0.8"]) == 0
    train, test = read_split(str(out), "train"), read_split(str(out), "test")
    assert (len(train), len(test), train.seq_len) == (8, 2, 32)
    tokenizer = ChatTokenizer.load(out / "tokenizer")
    text = tokenizer.decode(train.inputs_NS[0][: train.lengths[0]], skip_special_tokens=False)
    assert "<|user|>Q" in text and ("<|system|>S" in text) == (form == "sharegpt")
    labels = train.labels_NS[0]
    # Shifted by one: position s answers token s + 1.
    at = np.flatnonzero(labels != IGNORE_INDEX)
    assert np.array_equal(labels[at], train.inputs_NS[0][at + 1])
    assert tokenizer.decode(labels[at], skip_special_tokens=False) == "A<|endassistant|>"
    # The fork's files, with the fork's types.
    assert np.load(out / "train/all__group_indices.npy").tolist() == list(range(9))
    assert np.load(out / "train/all__inputs.npy").dtype == np.int32


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--input-file", "nothing.json"], "no such file"),
        (["--tokenizer", "bpe:5"], "bytes and markers take"),
        (["--tokenizer", "no/such/folder/here"], "no such folder"),
        (["--format", "alpaca"], "row 1: has no text 'instruction'"),
        (["--max-length", "0"], "must be 4 to"),
        (["--train-split", "2"], "must be above 0"),
        (["--train-split", "0.01"], "leaves no row"),
        (["--sed", "3"], "Nearest: --seed"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_the_builder_refuses_in_one_line(argv, text, tmp_path):
    file = pretraining.write_questions(tmp_path / "in.json")
    given = {"--input-file": str(file), "--output-dir": str(tmp_path / "out"), "--tokenizer": "bpe:280"}
    given |= dict(zip(argv[::2], argv[1::2], strict=True))
    with pytest.raises(PlanError) as found:
        build_chat_dataset.main([word for pair in given.items() for word in pair])
    assert text in str(found.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [("\ud83d", "row 1: 'value' holds half of a surrogate pair"), ("x" * 3_000_000, "a word of 3,000,000 characters")],
    ids=["half a character", "a long word"],
)
def test_text_that_no_tokenizer_can_be_made_of_is_refused_at_once(tmp_path, value, text):
    file = pretraining.write_questions(tmp_path / "in.json", [(value, "a")] * 4)
    argv = ["--input-file", str(file), "--output-dir", str(tmp_path / "out"), "--tokenizer", "bpe:300"]
    with pytest.raises(PlanError, match=text):
        build_chat_dataset.main(argv)
    assert not (tmp_path / "out").exists()


def test_a_line_of_json_ends_where_json_lines_end(tmp_path):
    """U+2028, which texts of the Web have, ended it: "is not JSON"."""
    turns = [{"from": "human", "value": "Hi\u2028there\x85"}, {"from": "gpt", "value": "Yo."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": turns}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_conversations(tmp_path / "a.jsonl", "sharegpt") == [[("user", turns[0]["value"]), ("assistant", "Yo.")]]


@pytest.mark.parametrize("role", [["human"], {"a": 1}, 5, None])
def test_a_role_that_is_not_text_is_refused_in_one_line(tmp_path, role):
    (tmp_path / "in.json").write_text(json.dumps([{"conversations": [{"from": role, "value": "Q"}]}]))
    argv = ["--input-file", str(tmp_path / "in.json"), "--output-dir", str(tmp_path / "out"), "--tokenizer", "bpe:280"]
    with pytest.raises(PlanError, match="row 1: from is .*, must be user, assistant or system"):
        build_chat_dataset.main(argv)


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: p.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_an_input_without_an_end_is_not_read(tmp_path, make):
    make(tmp_path / "in.json")
    with pytest.raises(PlanError, match="in.json: is not a file"):
        build_chat_dataset.main(["--input-file", str(tmp_path / "in.json"), "--output-dir", str(tmp_path / "out")])


def test_more_puzzles_than_there_are_is_said_at_once(tmp_path):
    argv = ["--size", "4", "--count", "10000000", "--output-dir", str(tmp_path / "out")]
    with pytest.raises(PlanError, match="--count 10000500, training and test: there are 85,632 different puzzles"):
        build_puzzle_dataset.main(argv)


@pytest.mark.promise("TR_10")
def test_a_hub_tokenizer_that_is_not_reachable_is_replaced_with_a_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    file = pretraining.write_questions(tmp_path / "in.json")
    argv = ["--input-file", file, "--output-dir", tmp_path / "out", "--max-length", 32, "--subsample-size", 10]
    assert build_chat_dataset.main(list(map(str, argv))) == 0
    printed = capsys.readouterr().out
    assert "--tokenizer gpt2 is not reachable" in printed and "10 of them drawn at random" in printed


def test_puzzles_are_built_and_read_back(tmp_path):
    for kind, size, vocab in (("sudoku", 4, 6), ("maze", 7, 6)):
        out = tmp_path / kind
        argv = ["--kind", kind, "--size", size, "--count", 6, "--test-count", 2, "--output-dir", out]
        assert build_puzzle_dataset.main(list(map(str, argv))) == 0
        rows = read_split(str(out), "train")
        assert (len(rows), rows.seq_len, rows.vocab_size, rows.symmetries) == (6, size**2, vocab, kind)
        assert (rows.labels_NS != IGNORE_INDEX).all()


def test_data_sets_of_different_vocabularies_are_not_mixed(tmp_path):
    one = read_split(str(pretraining.build_chat(tmp_path, "one")), "train")
    other = read_split(str(pretraining.build_chat(tmp_path, "other", "--tokenizer", "bpe:275")), "train")
    assert len(joined([one, one])) == 2 * len(one)
    with pytest.raises(PlanError, match="has vocab_size"):
        joined([one, other])


# ---- rows in their slots


def test_without_halting_all_rows_come_and_go_together():
    carry, cursor, seen = Carry(4, 3, halting=False), Cursor(), []
    for _ in range(9):
        cursor = carry.refill(10, 0, cursor)
        seen.append(sorted(carry.rows[carry.rows >= 0].tolist()))
        carry.advance(np.zeros(4, bool))
    assert seen[0] == seen[1] == seen[2] and [len(rows) for rows in seen] == [4] * 6 + [2] * 3
    assert sorted(seen[0] + seen[3] + seen[6]) == list(range(10)) and cursor == Cursor(1, 0)


def test_with_halting_a_row_that_leaves_makes_room_for_the_next():
    carry, cursor = Carry(3, 4, halting=True), Cursor()
    cursor = carry.refill(5, 0, cursor)
    first = carry.rows.copy()
    carry.advance(np.array([False, True, False]))
    cursor = carry.refill(5, 0, cursor)
    assert carry.rows[0] == first[0] and carry.rows[1] not in first and carry.steps.tolist() == [1, 0, 1]
    for _ in range(3):
        carry.advance(np.zeros(3, bool))
    assert carry.rows.tolist()[0] == -1 and carry.rows[1] >= 0  # N_sup for those that began first
    again = Carry(3, 4, halting=True)
    again.load(carry.state())
    assert again.refill(5, 0, cursor) == carry.refill(5, 0, cursor) and again.rows.tolist() == carry.rows.tolist()


def test_exploration_is_a_function_of_the_row_and_keeps_to_its_probability():
    found = [earliest_halt(0, 0, row, 0.25, 8) for row in range(2000)]
    assert found == [earliest_halt(0, 0, row, 0.25, 8) for row in range(2000)]
    explored = [n for n in found if n > 1]
    assert set(explored) == set(range(2, 9)) and 0.2 < len(explored) / 2000 < 0.3
