"""Rows over --context_length: nothing of a text is lost or learned twice, and chats are cut at messages."""

import numpy as np
import pytest

from finetune.data.reading.sources import read_rows
from finetune.data.tokens.overlong import Cut, cut_document, windows
from finetune.data.tokens.tokenize import render_sample, tokenize
from finetune.errors import PlanError
from tests.support.chats import FORGETFUL, with_template
from tests.support.rows import jsonl, write


@pytest.mark.parametrize("bos", [None, 7])
def test_every_token_of_a_split_text_is_learned_once(bos):
    rng = np.random.default_rng(0)
    for _ in range(2000):
        length = int(rng.integers(2, 40))
        overlap = int(rng.integers(0, length // 2 + 1)) if length > 3 else 0
        ids = np.arange(100, 100 + rng.integers(2, 200))
        if bos is not None:
            ids[0] = bos
        is_target = np.ones(len(ids), bool)
        is_target[0] = False
        learned = []
        for part, targets in windows(ids, is_target, length, overlap, bos):
            assert len(part) <= length and len(part) == len(targets) and not targets[0]
            assert bos is None or part[0] == bos
            learned += part[targets].tolist()
            body = part[int(bos is not None) :]
            assert (np.diff(body) == 1).all()  # in order, without a gap
        assert learned == ids[1:].tolist()


@pytest.mark.parametrize("bos", [None, 7])
def test_windows_repeat_as_much_as_asked(bos):
    ids = np.arange(100)
    if bos is not None:
        ids[0] = bos
    parts = windows(ids, np.r_[False, np.ones(99, bool)], 20, 5, bos)
    for (one, _), (two, targets) in zip(parts, parts[1:], strict=False):
        head = int(bos is not None)
        assert (one[-5:] == two[head : head + 5]).all() and not targets[: head + 5].any() and targets[head + 5 :].all()


def text_file(tmp_path, words=900):
    return write(tmp_path / "a.txt", " ".join(f"w{i}" for i in range(words)))


def test_a_long_text_is_split_by_default_and_loses_nothing(tmp_path, plain_tokenizer, chat_tokenizer):
    raw = read_rows(text_file(tmp_path))
    for tokenizer in (plain_tokenizer, chat_tokenizer):  # with a BOS and without
        whole = tokenize(raw, "auto", tokenizer, 10**6)
        split = tokenize(raw, "auto", tokenizer, 64)
        assert split.lengths.max() == 64 and split.counts["split"] == 1 and split.lost() is None
        targets = np.concatenate([ids[is_target] for ids, is_target in map(split.document, range(len(split)))])
        assert (targets == whole.tokens[whole.is_target]).all()
        assert "1 split into windows" in split.describe()
        assert set(split.sources) == {raw.sources[0]}
        on_prompt = tokenize(raw, "auto", tokenizer, 64, train_on_prompt=True)
        assert on_prompt.counts["targets"] == split.counts["targets"]  # repeated tokens are not learned again


@pytest.mark.parametrize(
    ("overlong", "kept", "count"),
    [("keep_end", slice(-63, None), "prompt_truncated"), ("keep_start", slice(0, 64), "end_truncated")],
)
def test_the_end_or_the_start_is_kept_as_asked(overlong, kept, count, tmp_path, plain_tokenizer):
    rows = [{"prompt": "p", "completion": "c " * 20}, {"prompt": "p " * 300, "completion": "c " * 20}]
    if overlong == "keep_start":
        rows[1] = {"prompt": "p " * 20, "completion": "c " * 300}
    raw = read_rows(jsonl(tmp_path / "a.jsonl", rows))
    whole = tokenize(raw, "auto", plain_tokenizer, 10**6)
    cut = tokenize(raw, "auto", plain_tokenizer, Cut(64, overlong))
    assert cut.counts[count] == 1 and cut.counts["tokens_lost"] == whole.counts["tokens"] - cut.counts["tokens"]
    expected = whole.document(1)[0][kept]
    assert (cut.document(1)[0][-len(expected) :] == expected).all()
    longest = whole.lengths.max()
    p50, p95 = (int(np.percentile(whole.lengths, q)) for q in (50, 95))
    assert cut.lost().endswith(f"--context_length {longest} keeps all (p50 {p50}, p95 {p95}, max {longest})")


def test_long_rows_are_dropped_counted_or_refused_as_asked(tmp_path, plain_tokenizer):
    rows = [{"prompt": "p", "completion": "c"}, {"prompt": "p " * 300, "completion": "c"}]
    raw = read_rows(jsonl(tmp_path / "a.jsonl", rows))
    dropped = tokenize(raw, "auto", plain_tokenizer, Cut(64, "drop"))
    assert len(dropped) == 1 and "1 dropped: too long" in dropped.describe() and "tokens (9" in dropped.lost()
    with pytest.raises(PlanError, match=r"a.jsonl:2: has \d+ tokens, --context_length is 64. Raise it, or remove"):
        tokenize(raw, "auto", plain_tokenizer, Cut(64, "error"))
    with pytest.raises(PlanError, match="all of its 1 rows with an answer are too long, see --context_length"):
        tokenize(read_rows(jsonl(tmp_path / "b.jsonl", rows[1:])), "auto", plain_tokenizer, Cut(64, "drop"))


def long_chat(turns=12, answer="answer"):
    messages = [{"role": "system", "content": "Be brief."}]
    for i in range(turns):
        messages += [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"{answer} {i}"}]
    return {"messages": messages}


def test_a_long_chat_is_cut_at_a_message_and_keeps_its_system_prompt(tmp_path, chat_tokenizer):
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [long_chat()]))
    cut = tokenize(raw, "auto", chat_tokenizer, 128)
    ids, is_target = cut.document(0)
    text = chat_tokenizer.decode(ids)
    first = int(text.split("question ")[1].split("<")[0])
    assert text == chat_tokenizer.apply_chat_template(
        long_chat()["messages"][:1] + long_chat()["messages"][1 + 2 * first :], tokenize=False
    ).removesuffix("\n")
    assert 0 < first < 11 and len(ids) <= 128
    assert chat_tokenizer.decode(ids[is_target]).split("<|im_end|>")[:-1] == [f"answer {i}" for i in range(first, 12)]
    assert "1 cut at a message, the oldest left out" in cut.describe() and "are over the context length" in cut.lost()
    longer = long_chat()["messages"][:1] + long_chat()["messages"][1 + 2 * (first - 1) :]
    assert len(chat_tokenizer.apply_chat_template(longer, return_dict=False)) - 1 > 128  # one turn more does not fit


def test_each_answer_of_a_template_that_rewrites_is_cut_for_itself(tmp_path, chat_tokenizer):
    tokenizer = with_template(chat_tokenizer, FORGETFUL)
    cut = tokenize(read_rows(jsonl(tmp_path / "a.jsonl", [long_chat(answer="t|answer")])), "auto", tokenizer, 128)
    assert len(cut) == 12 and cut.lengths.max() <= 128
    for i in range(12):
        sample = render_sample(cut, i, tokenizer, color=False)
        assert sample.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nquestion ")
        assert sample.endswith(f"⟦t|answer {i}<|im_end|>⟧")


def test_a_chat_whose_last_exchange_is_too_long_keeps_its_answer(tmp_path, chat_tokenizer):
    row = long_chat(2)
    row["messages"][3]["content"] = "long " * 300
    cut = tokenize(read_rows(jsonl(tmp_path / "a.jsonl", [row])), "auto", chat_tokenizer, 64)
    ids, is_target = cut.document(0)
    assert len(ids) == 64 and chat_tokenizer.decode(ids[is_target]) == "answer 1<|im_end|>"
    assert cut.counts["prompt_truncated"] == 1


def test_rows_without_a_long_answer_are_as_they_were(tmp_path, plain_tokenizer):
    ids, is_target = np.arange(10), np.arange(10) > 5
    for overlong in ("auto", "keep_end", "keep_start", "split", "drop", "error"):
        ((same, targets),), how = cut_document(ids, is_target, Cut(10, overlong), None, "a:1")
        assert how is None and (same == ids).all() and (targets == is_target).all()
