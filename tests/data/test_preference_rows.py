"""Preference rows: pairs of two documents, and answers with a label, of which the answers are targets."""

import json

import pytest

from finetune.data.collate import microbatches
from finetune.data.columns import RowOptions
from finetune.data.mismatched import mismatched_documents, others_of
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.overlong import Cut
from finetune.data.tokens.token_cache import TokenCache
from finetune.data.tokens.tokenize import Limits, joined_datasets, render_sample, tokenize
from finetune.data.tokens.workers import tokenize_on_cores
from finetune.errors import PlanError
from tests.support.chats import FORGETFUL, with_template
from tests.support.rows import jsonl

PAIRS, LABELS = RowOptions(pairs=True), RowOptions(labels=True)
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
    "messages before two answers": {"messages": [HELLO], "chosen": "Hi.", "rejected": "No."},
    "contents before two answers": {"contents": [HELLO], "chosen": "Hi.", "rejected": "No."},
    "messages before a message of each": {"messages": [HELLO], "chosen": HI, "rejected": NO},
    "messages beside the chosen conversation, which they are": {
        "messages": [HELLO, HI],
        "chosen": [HELLO, HI],
        "rejected": [HELLO, NO],
    },
    "conversations that contain the prompt": {"chosen": [HELLO, HI], "rejected": [HELLO, NO]},
    "conversations beside a column of the prompt": {"prompt": "Hello", "chosen": [HELLO, HI], "rejected": [HELLO, NO]},
    "a question and two texts": {"question": "Hello", "chosen": "Hi.", "rejected": "No."},
    "a question and two messages": {"question": "Hello", "chosen": HI, "rejected": NO},
}


def read(tmp_path, tokenizer, rows, options=PAIRS, **cut):
    raw = read_rows(jsonl(tmp_path / "a.jsonl", rows))
    return tokenize(raw, options, tokenizer, Cut(**{"context_length": 512, **cut}))


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


def test_of_several_turns_the_last_alone_is_said_to_be_learned_where_the_template_rewrites_earlier_ones(
    tmp_path, chat_tokenizer
):
    first = HI | {"content": "Hm|Hi."}
    row = {"prompt": [HELLO], "chosen": [first, MORE, HI], "rejected": [first, MORE, NO]}
    tokenizer = with_template(chat_tokenizer, FORGETFUL)
    dataset = read(tmp_path, tokenizer, [row])
    assert [text.count("⟦") for text in shown(dataset, tokenizer)] == [1, 1]
    said = "only the last turn of an answer is learned: the chat template writes those before it otherwise: 2 x"
    assert said in dataset.notices
    assert not read(tmp_path, tokenizer, [{**row, "chosen": [HI], "rejected": [NO]}]).notices


@pytest.mark.parametrize("layout", ["padding_free", "padded"])
def test_a_pair_whose_half_is_empty_or_too_long_is_left_out_whole(layout, tmp_path, plain_tokenizer):
    rows = [EXPLICIT, EXPLICIT | {"rejected": ""}, EXPLICIT | {"chosen": "yes " * 90}]
    dataset = read(tmp_path, plain_tokenizer, rows, context_length=40, overlong="drop")
    assert shown(dataset, plain_tokenizer) == TEXTS["a prompt and two answers"][1] and len(set(dataset.sources)) == 1
    assert dataset.counts["dropped_empty"] == dataset.counts["dropped_long"] == 1
    (batch,) = microbatches(dataset, range(1), layout, 8, 10**6, pad_id=0)
    assert batch.rows == (0, 1)


@pytest.mark.parametrize("task", ["generate", "reward_model"])
def test_a_turn_after_both_answers_of_a_pair_is_a_line(task, tmp_path, chat_tokenizer):
    ask = {"role": "user", "content": "a fruit?"}
    answers = [{"role": "assistant", "content": c} for c in ("yes", "no")]
    last = {"role": "user", "content": "no, you are wrong"}
    options = RowOptions(pairs=True, task=task)
    for rest, is_said in (([], False), ([last], True)):
        row = dict(zip(("chosen", "rejected"), ([ask, answer, *rest] for answer in answers), strict=True))
        notices = read(tmp_path, chat_tokenizer, [row], options).notices
        assert any("a conversation ends without an answer to its last turn" in line for line in notices) is is_said


def test_pairs_that_are_alike_within_the_context_are_counted_and_no_run_is_of_them_alone(tmp_path, plain_tokenizer):
    alike = EXPLICIT | {"chosen": "yes " * 90 + "so", "rejected": "yes " * 90 + "no"}
    dataset = read(tmp_path, plain_tokenizer, [EXPLICIT, alike], context_length=40)
    assert dataset.counts["alike"] == 1 and dataset.first["alike"].endswith(":2")
    assert "1 with the same tokens in both answers" in dataset.describe()
    with pytest.raises(PlanError, match="in all of its 2 pairs .* the same tokens, so neither is preferred"):
        read(tmp_path, plain_tokenizer, [alike, alike], context_length=40)
    assert read(tmp_path, plain_tokenizer, [alike], context_length=512).counts["alike"] == 0


@pytest.mark.parametrize("task", ["generate", "reward_model"])
def test_a_pair_with_an_empty_answer_is_dropped(task, tmp_path, plain_tokenizer):
    rows = [EXPLICIT, EXPLICIT | {"chosen": ""}, EXPLICIT | {"rejected": " "}]
    dataset = read(tmp_path, plain_tokenizer, rows, RowOptions(pairs=True, task=task))
    assert dataset.num_rows == 1 and dataset.counts["dropped_empty"] == 2


@pytest.mark.parametrize("names", ["{}_rating", "score_{}", "{}-quality", "rank_{}", "{}_loss"])
def test_pairs_that_are_rated_the_wrong_way_round_are_counted(names, tmp_path, plain_tokenizer):
    chosen, rejected = names.format("chosen"), names.format("rejected")
    numbers = ((1, 5.0), ("5", "1"), (2, "3"), (4, 4), (None, 1), (0.5, 10**400), (10**400, 1))
    is_rank = "rank" in names or "loss" in names
    if is_rank:
        numbers = [(b, a) for a, b in numbers]
    rows = [EXPLICIT | {chosen: a, rejected: b} for a, b in numbers]
    said = [line for line in read(tmp_path, plain_tokenizer, rows).notices if "wrong way" in line or "neither" in line]
    assert sorted(said) == [
        f"column {chosen!r} equals {rejected!r}: neither answer is the better one: 1 x",
        f"column {chosen!r} is {'above' if is_rank else 'below'} {rejected!r}, as of a pair the wrong way round: 3 x",
    ]


@pytest.mark.parametrize(
    "row, said",
    {
        "no rejected answer": ({"chosen": "a", "rejected": None}, "field 'rejected' is missing"),
        "a number": ({"chosen": "a", "rejected": 3.5}, "field 'rejected' is a number"),
        "text and messages": ({"prompt": "a", "chosen": "a", "rejected": [NO]}, "one of chosen and rejected is text"),
        "equal halves": ({"chosen": [HELLO, HI], "rejected": [HELLO, HI]}, "chosen and rejected are equal"),
        "two questions": (
            {"chosen": [HELLO, HI], "rejected": [MORE, NO]},
            "chosen and rejected begin with different messages",
        ),
        "another format": ({"prompt": "a", "completion": "b"}, "need columns chosen and rejected"),
    }.values(),
)
def test_a_row_that_is_no_pair_is_one_line(row, said, tmp_path, plain_tokenizer):
    with pytest.raises(PlanError, match=said):
        read(tmp_path, plain_tokenizer, [EXPLICIT, row] if "chosen" in row else [row])


def test_a_system_prompt_beside_texts_makes_them_a_chat(tmp_path, chat_tokenizer):
    rows = [
        {"system": "Be brief.", name: "Hello", "chosen": "Hi.", "rejected": "No."} for name in ("prompt", "question")
    ]
    for text in shown(read(tmp_path, chat_tokenizer, rows), chat_tokenizer)[::2]:
        start = "<|im_start|>system\nBe brief.<|im_end|>\n" + TURN.format("Hello")
        assert text == start + "⟦Hi.<|im_end|>⟧"


def test_what_else_is_asked_is_used_or_counted(tmp_path, chat_tokenizer, plain_tokenizer):
    chat = {"question": "Hello", "context": "It rains.", "chosen": [HI], "rejected": [NO]}
    first, _ = shown(read(tmp_path, chat_tokenizer, [chat]), chat_tokenizer)
    assert first == TURN.format("It rains.\n\nHello") + "⟦Hi.<|im_end|>⟧"
    found = read(tmp_path, plain_tokenizer, [EXPLICIT | {"question": "A:", "input": "A"}])
    assert shown(found, plain_tokenizer) == TEXTS["a prompt and two answers"][1]
    assert any("'question' (1)" in line and "'input' (1)" in line for line in found.notices)


LABELLED = {"prompt": "A: ", "completion": "yes.", "label": True}


@pytest.mark.parametrize("word", [False, 0, "false", "False", "0"])
def test_a_label_says_which_answers_are_desirable(word, tmp_path, plain_tokenizer):
    rows = [LABELLED, LABELLED | {"completion": "no.", "label": word}]
    dataset = read(tmp_path, plain_tokenizer, rows, LABELS)
    assert shown(dataset, plain_tokenizer) == TEXTS["a prompt and two answers"][1]
    assert dataset.arrays["desirable"].values.tolist() == [True, False] and dataset.order == dataset.counts["rows"] == 2
    kept = dataset.select([1])
    assert kept.arrays["desirable"].values.tolist() == [False]
    assert dataset.digest() != read(tmp_path, plain_tokenizer, [LABELLED, rows[1] | {"label": 1}], LABELS).digest()


def test_both_halves_of_a_pair_are_rows_with_a_label(tmp_path, plain_tokenizer):
    rows = [EXPLICIT, EXPLICIT | {"rejected": ""}]  # an answer that is empty leaves the other
    dataset = read(tmp_path, plain_tokenizer, rows, LABELS)
    assert shown(dataset, plain_tokenizer) == [*TEXTS["a prompt and two answers"][1], "A: ⟦yes.</s>⟧"]
    assert dataset.arrays["desirable"].values.tolist() == [True, False, True] and dataset.documents_per_row == 1
    assert dataset.counts["dropped_empty"] == 1


@pytest.mark.parametrize("label", ["good", 0.5, 2])
def test_a_label_that_is_neither_true_nor_false_is_one_line(label, tmp_path, plain_tokenizer):
    with pytest.raises(PlanError, match=f"field 'label' is '{label}', must be true"):
        read(tmp_path, plain_tokenizer, [LABELLED, LABELLED | {"label": label}], LABELS)


def test_rows_without_a_label_are_refused_by_what_kto_needs(tmp_path, plain_tokenizer):
    with pytest.raises(PlanError, match="kto needs columns prompt, completion and label"):
        read(tmp_path, plain_tokenizer, [{"prompt": "a", "completion": "b"}], LABELS)


def test_mismatched_documents_are_each_prompt_with_the_answer_of_the_row_before(tmp_path, plain_tokenizer):
    rows = [LABELLED | {"prompt": f"{p}: ", "completion": c} for p, c in (("a", "one"), ("b", "two"), ("c", "three"))]
    dataset = read(tmp_path, plain_tokenizer, rows, LABELS)
    found = mismatched_documents(dataset, [2, 0, 1], slice(None), 512, dataset)
    assert shown(found, plain_tokenizer) == ["c: ⟦two</s>⟧", "a: ⟦three</s>⟧", "b: ⟦one</s>⟧"]
    # Two ranks make the same ones.
    ranks = (slice(0, None, 2), slice(1, None, 2))
    halves = [shown(mismatched_documents(dataset, [2, 0, 1], k, 512, dataset), plain_tokenizer) for k in ranks]
    assert halves == [["c: ⟦two</s>⟧", "b: ⟦one</s>⟧"], ["a: ⟦three</s>⟧"]]
    longest = int(dataset.lengths.max())
    short = mismatched_documents(dataset, range(3), slice(None), longest - 1, dataset)
    assert short.lengths.max() == longest - 1 and shown(short, plain_tokenizer)[0].endswith("⟦three</s>⟧")
    alone = [
        shown(mismatched_documents(dataset, [row], slice(None), 512, dataset), plain_tokenizer) for row in range(3)
    ]
    assert alone == [["a: ⟦three</s>⟧"], ["b: ⟦one</s>⟧"], ["c: ⟦two</s>⟧"]]
    held_out = dataset.select([1])
    found = mismatched_documents(held_out, [0], slice(None), 512, dataset)
    assert shown(found, plain_tokenizer) == ["b: ⟦three</s>⟧"]


@pytest.mark.parametrize("rows", [[4], [0], [3, 3], [2, 2, 5, 2], [1, 0], [5, 4, 5]])
def test_no_row_of_a_step_is_paired_with_itself(rows):
    found = others_of(rows, 6)
    assert len(found) == len(rows) and not any(map(int.__eq__, rows, found))
    assert len(set(rows)) == 1 or set(found) <= set(rows)


@pytest.mark.parametrize("options", [PAIRS, LABELS], ids=["pairs", "labels"])
def test_tokenized_on_cores_they_are_those_tokenized_here(options, tmp_path, chat_tokenizer):
    rows = [CHATS["conversations that contain the prompt"] | {"prompt": None}] * 3
    raw = read_rows(jsonl(tmp_path / "a.jsonl", rows))
    there = tokenize_on_cores(raw, options, chat_tokenizer, Limits(Cut(512)), cores=1)
    here = tokenize(raw, options, chat_tokenizer, 512)
    assert there.digest() == here.digest() and there.documents_per_row == here.documents_per_row


def test_selected_rows_keep_both_documents_of_a_pair(tmp_path, plain_tokenizer):
    dataset = read(tmp_path, plain_tokenizer, [EXPLICIT | {"prompt": f"{name}: "} for name in "abc"])
    kept = dataset.select([2, 0])
    assert kept.row_lengths.tolist() == [kept.lengths[:2].sum(), kept.lengths[2:].sum()]
    assert shown(kept, plain_tokenizer) == ["c: ⟦yes.</s>⟧", "c: ⟦no.</s>⟧", "a: ⟦yes.</s>⟧", "a: ⟦no.</s>⟧"]
    assert (
        kept.order == kept.counts["rows"] == 2 and kept.sources == (dataset.sources[4],) * 2 + (dataset.sources[0],) * 2
    )


def test_a_part_of_a_mixture_counts_pairs(tmp_path, plain_tokenizer):
    one, two = (read(tmp_path, plain_tokenizer, [EXPLICIT] * n) for n in (3, 2))
    mixed = joined_datasets([one, two], [("one", 1.0), ("two", 3.0)])
    assert mixed.num_rows == 5 and [part.num_rows for part in mixed.parts] == [3, 2]
    assert mixed.part_numbers().tolist() == [0, 0, 0, 1, 1] and sorted(mixed.order.sizes) == [2, 3]
    assert [part.num_rows for part in mixed.select([0, 3, 4]).parts] == [1, 2]


@pytest.mark.parametrize("options", [PAIRS, LABELS], ids=["pairs", "labels"])
def test_kept_on_disk_they_come_back_whole(options, tmp_path, plain_tokenizer, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = read(tmp_path, plain_tokenizer, [EXPLICIT] * 3, options)
    cache = TokenCache([(tmp_path / "a.jsonl", "a.jsonl")], [], options)
    entry = cache.entry(plain_tokenizer, Limits(Cut(512)))
    cache.put(entry, made, None)
    found, _ = cache.get(entry, None)
    assert found.digest() == made.digest() and found.num_rows == made.num_rows == (3 if options.pairs else 6)


def test_a_prompt_that_the_answers_do_not_begin_with_is_refused(tmp_path, chat_tokenizer):
    row = {"prompt": "Goodbye", "chosen": [HELLO, HI], "rejected": [HELLO, NO]}
    with pytest.raises(PlanError, match="field 'prompt' and the first messages of 'chosen' are two questions"):
        read(tmp_path, chat_tokenizer, [row])


LAMP = {"role": "user", "content": "How tall is the lamp?"}
TWO = [LAMP, HI], [LAMP, NO]


@pytest.mark.parametrize("options", [PAIRS, RowOptions()])
@pytest.mark.parametrize(
    "prompt",
    [
        "The lamp is 40 cm tall. How tall is the lamp?",
        [HELLO],
        [{"role": "system", "content": "Be brief."}, HELLO],
        [HELLO, HI, MORE],
    ],
)
def test_a_prompt_that_says_more_or_other_than_the_first_messages_is_refused(prompt, options, tmp_path, chat_tokenizer):
    row = {"prompt": prompt} | dict(
        zip(("chosen", "rejected") if options.pairs else ("completion",), TWO, strict=False)
    )
    with pytest.raises(PlanError, match="are two questions. Keep one, or add --ignore_columns prompt"):
        read(tmp_path, chat_tokenizer, [row], options)


@pytest.mark.parametrize("options", [PAIRS, RowOptions()])
@pytest.mark.parametrize(
    "before", [[{"role": "system", "content": "Be brief."}], [HELLO, HI], [HELLO, HI, MORE, HI], []]
)
def test_a_question_that_the_answers_repeat_stands_once(before, options, tmp_path, chat_tokenizer):
    names = ("chosen", "rejected") if options.pairs else ("completion",)
    row = {"prompt": [*before, LAMP]} | dict(zip(names, TWO, strict=False))
    found = read(tmp_path, chat_tokenizer, [row], options)
    plain = {"prompt": [*before, LAMP]} | dict(zip(names, ([HI], [NO]), strict=False))
    assert shown(found, chat_tokenizer) == shown(read(tmp_path, chat_tokenizer, [plain], options), chat_tokenizer)
    assert any(word in "".join(found.notices) for word in ("read once", "contain it"))
    after = {"prompt": before} | dict(zip(names, TWO, strict=False))
    if before:
        again = read(tmp_path, chat_tokenizer, [after], options)
        assert shown(again, chat_tokenizer) == shown(found, chat_tokenizer)


def test_what_an_object_of_messages_says_beside_them_is_refused_or_said(tmp_path, chat_tokenizer):
    """OpenAI's input has tools beside its messages."""
    row = {"input": {"messages": [HELLO]}, "chosen": [HI], "rejected": [NO]}
    wanted = shown(read(tmp_path, chat_tokenizer, [row]), chat_tokenizer)
    for more, fact in (
        ({"tools": [{"name": "f"}]}, "field 'tools' of column 'input' lists the tools of a conversation"),
        ({"system": "Be brief."}, "field 'system' of column 'input' is the system prompt"),
    ):
        with pytest.raises(PlanError, match=fact):
            read(tmp_path, chat_tokenizer, [row | {"input": {"messages": [HELLO]} | more}])
    scored = row | {"chosen": {"messages": [HI], "score": 1}, "rejected": {"messages": [NO], "score": 5}}
    with pytest.raises(PlanError, match="field 'score' of column 'chosen' rates the answers"):
        read(tmp_path, chat_tokenizer, [scored])
    called = read(tmp_path, chat_tokenizer, [row | {"input": {"messages": [HELLO], "parallel_tool_calls": True}}])
    assert shown(called, chat_tokenizer) == wanted
    assert called.noted["field 'parallel_tool_calls' of column 'input' is not read"] == 1


def test_a_strength_below_zero_is_said_to_be_of_a_pair_the_wrong_way_round(tmp_path, plain_tokenizer):
    for name in ("preference_strength", "overall_preference_score", "margin", "score_diff"):
        for value in (-2, "-0.5", 3):
            noted = read(tmp_path, plain_tokenizer, [EXPLICIT | {name: value}]).noted
            wrong = [line for line in noted if "wrong way round" in line]
            assert bool(wrong) == (value != 3), (name, value)


PAIR = {"prompt": "How tall is it?", "chosen": "40 cm.", "rejected": "No idea."}
BY_LABEL = {"prompt": "How tall is it?", "completion": "40 cm.", "label": True}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"context": "A lamp."}, "column 'context' may be a part of the prompt"),
        ({"documents": ["A lamp."]}, "column 'documents' may be a part of the prompt"),
        ({"persona": "a pirate"}, "column 'persona' may be a part of the prompt"),
        ({"question": "In inches?"}, "column 'question' may be a part of the (prompt|question)"),
        ({"answer": "41 cm."}, "column 'answer' is another answer"),
        ({"turn_index": 2}, "makes a conversation of several rows"),
    ],
)
@pytest.mark.parametrize("row", [PAIR, BY_LABEL])
def test_what_is_beside_a_pair_is_judged_as_beside_a_question(row, more, said, tmp_path, plain_tokenizer):
    options = LABELS if row is BY_LABEL else PAIRS
    with pytest.raises(PlanError, match=said):
        read(tmp_path, plain_tokenizer, [row | more], options)
    beside = {"answer": "40 cm.", "context": "How tall", "source": "a", "topic": "lamps"}
    assert read(tmp_path, plain_tokenizer, [row | beside], options).num_rows == 1


ASKED_IN_MESSAGES = {
    "whose words an answer has": ([HELLO], "Hello. How are you?", "Hello! No."),
    "whose answers begin alike": ([HELLO], "It is a kind of lamp.", "It is a kind of tree."),
    "in a cell": (json.dumps([HELLO]), "Hi.", "No."),
    "in an object": ({"messages": [HELLO]}, "Hi.", "No."),
}


@pytest.mark.parametrize("name", ASKED_IN_MESSAGES)
def test_messages_beside_a_pair_are_its_prompt(name, tmp_path, chat_tokenizer):
    messages, *texts = ASKED_IN_MESSAGES[name]
    wanted = [TURN.format("Hello") + f"⟦{text}<|im_end|>⟧" for text in texts]
    for answers in (texts, [{"role": "assistant", "content": text} for text in texts]):
        row = {"messages": messages} | dict(zip(("chosen", "rejected"), answers, strict=True))
        assert shown(read(tmp_path, chat_tokenizer, [row]), chat_tokenizer) == wanted


def test_what_an_object_of_messages_beside_a_pair_says_more_is_refused(tmp_path, chat_tokenizer):
    row = {"messages": {"messages": [HELLO], "tools": [{"name": "f"}]}, "chosen": "Hi.", "rejected": "No."}
    with pytest.raises(PlanError, match="field 'tools' of column 'messages' lists the tools of a conversation"):
        read(tmp_path, chat_tokenizer, [row])


def test_texts_with_a_prompt_of_their_own_are_not_asked_twice(tmp_path, chat_tokenizer):
    start = "Human: Hello, lamp?\n\nAssistant: "
    row = {
        "chosen": f"{start}Hi.",
        "rejected": f"{start}No.",
        "messages": [{"role": "user", "content": "Hello, lamp?"}],
    }
    said = shown(read(tmp_path, chat_tokenizer, [row]), chat_tokenizer)
    assert [text.count("Hello, lamp?") for text in said] == [1, 1] and "im_start" not in said[0]
    whole = row | {"messages": [*row["messages"], HI]}
    assert "im_start" not in shown(read(tmp_path, chat_tokenizer, [whole]), chat_tokenizer)[0]
    more = [{"role": "system", "content": "Be a kind helper."}, *row["messages"]]
    with pytest.raises(PlanError, match="column 'messages' may be a part of the prompt"):
        read(tmp_path, chat_tokenizer, [row | {"messages": more}])


@pytest.mark.parametrize("column", ["messages", "conversations", "prompt"])
@pytest.mark.parametrize("answers", [("Hi.", "No."), (HI, NO), ([HI], [NO])])
def test_an_answer_at_the_end_of_its_prompt_is_left_off_it(column, answers, tmp_path, chat_tokenizer):
    row = {column: [HELLO, HI]} | dict(zip(("chosen", "rejected"), answers, strict=True))
    dataset = read(tmp_path, chat_tokenizer, [row])
    assert shown(dataset, chat_tokenizer) == [TURN.format("Hello") + f"⟦{text}<|im_end|>⟧" for text in ("Hi.", "No.")]
    assert dataset.noted["a prompt ends with one of the answers, which is left off it"] == 1


@pytest.mark.parametrize("options", [PAIRS, LABELS])
def test_messages_beside_a_prompt_are_said_elsewhere_or_refused(options, tmp_path, chat_tokenizer):
    answers = {"chosen": "Hi.", "rejected": "No."} if options is PAIRS else {"completion": "Hi.", "label": True}
    said = {"prompt": "Hello", "messages": [HELLO, HI]} | answers
    assert read(tmp_path, chat_tokenizer, [said], options).noted["column 'messages' is not used"] == 1
    with pytest.raises(PlanError, match="column 'messages' may be a part of the prompt, and the row is read without"):
        read(tmp_path, chat_tokenizer, [said | {"messages": [MORE, HI, HELLO]}], options)


def test_a_text_beside_a_pair_without_a_prompt_may_be_it(tmp_path, plain_tokenizer):
    pair = {"chosen": "A: good yes.", "rejected": "A: good yet."}
    with pytest.raises(PlanError, match=r"column 'problem' may be the prompt \(--columns prompt=problem asks it\)"):
        read(tmp_path, plain_tokenizer, [pair | {"problem": "Is it good or bad?"}])
    alike = {"chosen": "Human: Is it so? Assistant: Yes.", "rejected": "Human: Is it so? Assistant: No."}
    assert len(read(tmp_path, plain_tokenizer, [alike | {"problem": "Is it good or bad?"}])) == 2
    for more in (
        {"problem": "good"},
        {"topic": "A: good yes."},
        {"comment": "It is of no use."},
        {"prompt": "Q", "problem": "Is it good or bad?"},
    ):
        assert len(read(tmp_path, plain_tokenizer, [pair | more])) == 2


def test_a_pair_that_names_the_columns_of_its_answers_is_refused(tmp_path, plain_tokenizer):
    row = {"prompt": "How tall is it?", "A": "40 cm.", "B": "No idea.", "chosen": "A", "rejected": "B"}
    with pytest.raises(PlanError, match="column 'A' holds an answer that the pair only names"):
        read(tmp_path, plain_tokenizer, [row], PAIRS)
    for said in ({"chosen": "C", "rejected": "D"}, {"chosen": "yes", "rejected": "no", "no": 3}):
        assert read(tmp_path, plain_tokenizer, [row | said], PAIRS).num_rows == 1
