"""Rows of chosen and rejected answers: two documents each, of which the answers are targets and the prompt is not."""

import pytest

from finetune.data.collate import microbatches
from finetune.data.columns import RowOptions
from finetune.data.overlong import Cut
from finetune.data.sources import read_rows
from finetune.data.tokenize import Limits, render_sample, tokenize
from finetune.data.workers import tokenize_on_cores
from finetune.errors import PlanError
from tests.support.rows import jsonl

PAIRS = RowOptions(pairs=True)
HELLO, HI, NO = ({"role": r, "content": c} for r, c in (("user", "Hello"), ("assistant", "Hi."), ("assistant", "No.")))
MORE = {"role": "user", "content": "More"}
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
EXPLICIT = {"prompt": "A: ", "chosen": "yes.", "rejected": "no."}
TEXTS = {
    "a prompt and two answers": (EXPLICIT, ["A: ⟦yes.</s>⟧", "A: ⟦no.</s>⟧"]),
    "two texts that begin alike": (
        {"chosen": "A: good yes.", "rejected": "A: good yet."},
        ["A: good ⟦yes.</s>⟧", "A: good ⟦yet.</s>⟧"],
    ),
}
CHATS = {
    "messages after a prompt of messages": {"prompt": [HELLO], "chosen": [HI], "rejected": [NO]},
    "conversations that contain the prompt": {"chosen": [HELLO, HI], "rejected": [HELLO, NO]},
    "conversations beside a column of the prompt": {"prompt": "Hello", "chosen": [HELLO, HI], "rejected": [HELLO, NO]},
}


def read(tmp_path, tokenizer, rows, **cut):
    raw = read_rows(jsonl(tmp_path / "a.jsonl", rows))
    return tokenize(raw, PAIRS, tokenizer, Cut(**{"context_length": 512, **cut}))


def shown(dataset, tokenizer):
    return [render_sample(dataset, i, tokenizer, False).removeprefix("<s>") for i in range(len(dataset))]


@pytest.mark.parametrize("name", TEXTS)
def test_a_row_is_two_documents_whose_answers_are_targets(name, tmp_path, plain_tokenizer):
    row, wanted = TEXTS[name]
    dataset = read(tmp_path, plain_tokenizer, [row])
    assert shown(dataset, plain_tokenizer) == wanted
    assert dataset.documents_per_row == 2 and dataset.order == dataset.counts["rows"] == 1


@pytest.mark.parametrize("name", CHATS)
def test_what_both_conversations_begin_with_is_no_target(name, tmp_path, chat_tokenizer):
    dataset = read(tmp_path, chat_tokenizer, [CHATS[name]])
    start = TURN.format("Hello")
    wanted = [start + f"⟦{answer}<|im_end|>⟧" for answer in ("Hi.", "No.")]
    assert shown(dataset, chat_tokenizer) == wanted
    assert bool(dataset.notices) == ("beside" in name)


def test_earlier_answers_of_a_shared_conversation_are_not_learned(tmp_path, chat_tokenizer):
    row = {"chosen": [HELLO, HI, MORE, HI], "rejected": [HELLO, HI, MORE, NO]}
    first, second = shown(read(tmp_path, chat_tokenizer, [row]), chat_tokenizer)
    assert first.count("⟦") == second.count("⟦") == 1 and first.endswith("⟦Hi.<|im_end|>⟧")


@pytest.mark.parametrize("prompt", ["Hello", [HELLO]])
def test_a_prompt_that_answers_of_several_turns_do_not_contain_is_kept(prompt, tmp_path, chat_tokenizer):
    row = {"prompt": prompt, "chosen": [HI, MORE, HI], "rejected": [HI, MORE, NO]}
    for text in shown(read(tmp_path, chat_tokenizer, [row]), chat_tokenizer):
        assert text.startswith(TURN.format("Hello") + "⟦Hi.<|im_end|>⟧") and text.count("⟦") == 2


@pytest.mark.parametrize("layout", ["padding_free", "padded"])
def test_a_pair_whose_half_is_empty_or_too_long_is_left_out_whole(layout, tmp_path, plain_tokenizer):
    rows = [EXPLICIT, EXPLICIT | {"rejected": ""}, EXPLICIT | {"chosen": "yes " * 90}]
    dataset = read(tmp_path, plain_tokenizer, rows, context_length=40, overlong="drop")
    assert shown(dataset, plain_tokenizer) == TEXTS["a prompt and two answers"][1] and len(set(dataset.sources)) == 1
    (batch,) = microbatches(dataset, range(1), layout, 8, 10**6, pad_id=0)
    assert batch.rows == (0, 1)


@pytest.mark.parametrize(
    "row, said",
    {
        "no rejected answer": ({"chosen": "a", "rejected": None}, "field 'rejected' is missing"),
        "a number": ({"chosen": "a", "rejected": 3.5}, "field 'rejected' is float"),
        "text and messages": ({"prompt": "a", "chosen": "a", "rejected": [NO]}, "one of chosen and rejected is text"),
        "equal halves": ({"chosen": [HELLO, HI], "rejected": [HELLO, HI]}, "chosen and rejected are equal"),
        "another format": ({"prompt": "a", "completion": "b"}, "needs columns chosen and rejected"),
    }.values(),
)
def test_a_row_that_is_no_pair_is_one_line(row, said, tmp_path, plain_tokenizer):
    with pytest.raises(PlanError, match=said):
        read(tmp_path, plain_tokenizer, [EXPLICIT, row] if "chosen" in row else [row])


def test_pairs_tokenized_on_cores_are_those_tokenized_here(tmp_path, chat_tokenizer):
    rows = [CHATS["conversations that contain the prompt"] | {"prompt": None}] * 3
    raw = read_rows(jsonl(tmp_path / "a.jsonl", rows))
    there = tokenize_on_cores(raw, PAIRS, chat_tokenizer, Limits(Cut(512)), cores=1)
    here = tokenize(raw, PAIRS, chat_tokenizer, 512)
    assert there.digest() == here.digest() and there.documents_per_row == here.documents_per_row == 2


def test_selected_rows_keep_both_documents_of_a_pair(tmp_path, plain_tokenizer):
    dataset = read(tmp_path, plain_tokenizer, [EXPLICIT | {"prompt": f"{name}: "} for name in "abc"])
    kept = dataset.select([2, 0])
    assert shown(kept, plain_tokenizer) == ["c: ⟦yes.</s>⟧", "c: ⟦no.</s>⟧", "a: ⟦yes.</s>⟧", "a: ⟦no.</s>⟧"]
    assert (
        kept.order == kept.counts["rows"] == 2 and kept.sources == (dataset.sources[4],) * 2 + (dataset.sources[0],) * 2
    )
