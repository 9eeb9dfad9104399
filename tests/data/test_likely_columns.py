"""Suggestions for columns that match no format: they name what holds text, and following them works."""

import json
import re

import pytest

from finetune.data.columns import RowOptions, no_format, parse_columns
from finetune.data.likely_columns import likely_pair
from finetune.data.prepare import check_columns
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.tokenize import render_row, tokenize
from finetune.errors import PlanError
from tests.support.rows import write

LABEL_STUDIO = {
    "id": 1,
    "annotations": [
        {
            "id": 7,
            "completed_by": 1,
            "result": [{"value": {"choices": ["Good"]}, "id": "aB", "from_name": "tone", "to_name": "text"}],
            "created_at": "2026-01-01T00:00:00Z",
        }
    ],
    "drafts": [],
    "data": {"text": "I like this lamp a lot."},
    "created_at": "2026-01-01T00:00:00.1Z",
    "project": 3,
}
OPENAI = {
    "input": {"messages": [{"role": "user", "content": "Hi"}], "tools": [], "parallel_tool_calls": True},
    "preferred_output": [{"role": "assistant", "content": "Hello."}],
    "non_preferred_output": [{"role": "assistant", "content": "No."}],
}


@pytest.mark.parametrize(
    ("name", "content", "question", "answer"),
    [
        ("a.csv", "Nr;Frage;Antwort;Datum\n1;Wie hoch?;40 cm;2026-01-01\n", "Frage", "Antwort"),
        ("a.csv", "id,vraag,antwoord\n1,Hoe oud?,40\n2,Hoe hoog?,3\n", "vraag", "antwoord"),
        ("a.csv", "标题,作者,内容\n灯,李,这是一盏灯。它很高。\n", "标题", "内容"),
        ("a.csv", "Дата,Ответ,Вопрос\n2026-01-01,Два метра высотой,Высота?\n", "Вопрос", "Ответ"),
        ("a.csv", "a,b,c\n1,short,a much longer text\n2,word,another long text\n", "b", "c"),
        ("a.csv", "uid,body,url,subject\nx1,It is 40 cm tall.,http://a.b,Lamp\n", "subject", "body"),
        ("a.json", json.dumps([LABEL_STUDIO]), "data.text", "annotations.0.result.0.value.choices.0"),
        (
            "a.jsonl",
            json.dumps({"id": "x", "inputs": {"question": "How tall?"}, "outputs": {"answer": "40 cm."}}),
            "inputs.question",
            "outputs.answer",
        ),
        (
            "a.jsonl",
            json.dumps(
                {
                    "request": {"temperature": 0.5, "messages": [{"role": "user", "content": "How tall?"}]},
                    "response": {
                        "object": "chat",
                        "choices": [{"message": {"role": "assistant", "content": "40 cm."}}],
                    },
                }
            ),
            "request.messages.0.content",
            "response.choices.0.message.content",
        ),
    ],
)
def test_columns_that_hold_a_question_and_its_answer_are_suggested(
    name, content, question, answer, tmp_path, plain_tokenizer
):
    raw = read_rows(write(tmp_path / name, content))
    with pytest.raises(PlanError) as error:
        check_columns(raw, RowOptions(), "--dataset a")
    assert f"--columns question={question},answer={answer}. " in str(error.value)
    options = RowOptions(columns=parse_columns(f"question={question},answer={answer}"))
    check_columns(raw, options, "--dataset a")
    assert tokenize(raw, options, plain_tokenizer, 512).counts["rows"] == len(raw.rows)


def test_openai_s_preference_rows_are_read_as_suggested(tmp_path, chat_tokenizer):
    raw = read_rows(write(tmp_path / "a.jsonl", json.dumps(OPENAI)))
    for pairs, flag in ((False, "--preference dpo --columns"), (True, "Use --columns")):
        with pytest.raises(PlanError, match=f"{flag} chosen=preferred_output,rejected=non_preferred_output") as error:
            check_columns(raw, RowOptions(pairs=pairs), "--dataset a")
    suggested = re.search(r"--columns (\S+)\.$", str(error.value))[1]
    for text in (suggested, "chosen=preferred_output,rejected=non_preferred_output"):
        dataset = tokenize(raw, RowOptions(columns=parse_columns(text), pairs=True), chat_tokenizer, 512)
        shown = render_row(dataset, 0, chat_tokenizer, color=False)
        assert shown.count("user\nHi") == 2 and "⟦Hello." in shown and "⟦No." in shown


def test_columns_without_two_texts_get_no_suggestion():
    rows = [{"id": 1, "when": "2026-01-01"}]
    assert "no two of them hold text" in no_format("a", tuple(rows[0]), RowOptions(), rows)
    assert likely_pair(("id", "date", "text_a", "text_b")) == ("text_a", "text_b")


def test_a_table_that_excel_wrote_says_its_separator(tmp_path):
    for start in ("sep=;\r\n", "\ufeffsep=;\r\n", '"sep=;"\r\n'):
        raw = read_rows(write(tmp_path / "a.csv", start + "question;answer\r\nWie hoch, wo?;40\r\n"))
        assert raw.rows == [{"question": "Wie hoch, wo?", "answer": "40"}] and raw.sources == [f"{tmp_path}/a.csv:3"]


TURNS = [{"role": "user", "content": "How tall?"}, {"role": "assistant", "content": "40 cm."}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "x", "chat": {"messages": TURNS}}, "If chat.messages is the conversation, use --columns messages=chat"),
        (
            {"version": "2", "data": {"train": [{"question": "How tall?", "answer": "40 cm."}] * 2}},
            "data.train has 2 objects. If they are the rows, write that list into a file of its own.",
        ),
        ({"a": TURNS, "b": TURNS, "winner": "a"}, "a has 2 objects"),
        ({"uuid": "x", "turns": [{"text": "How tall?", "sender": "human"}] * 2}, "turns has 2 objects"),
        ({n: {"question": f"How tall is {n}?", "answer": "40 cm."} for n in "ab"}, "no two of them hold text"),
        ({"title": "Lamp", "map": {n: {"id": n, "text": "How tall it is"} for n in "abc"}}, "no two of them hold text"),
    ],
)
def test_the_first_of_several_messages_or_rows_is_no_column(row, said, tmp_path):
    raw = read_rows(write(tmp_path / "a.jsonl", json.dumps(row)))
    with pytest.raises(PlanError) as error:
        check_columns(raw, RowOptions(), "--dataset a")
    assert said in str(error.value) and "answer=" not in str(error.value)


def test_a_conversation_is_read_as_suggested(tmp_path, chat_tokenizer):
    raw = read_rows(write(tmp_path / "a.jsonl", json.dumps({"id": "x", "chat": {"messages": TURNS}})))
    options = RowOptions(columns=parse_columns("messages=chat.messages"))
    check_columns(raw, options, "--dataset a")
    assert tokenize(raw, options, chat_tokenizer, 512).counts["rows"] == 1


@pytest.mark.parametrize(
    "row",
    [
        {"question": {"full_text": "How tall?"}, "answer_0": "40 cm.", "answer_1": "No idea.", "score_1": -1},
        {"asked": "How tall is it?", "response_j": "It is 40 cm.", "response_k": "No idea."},
        {"info": {"post": "It is 40 cm tall."}, "choice": 1},
        {"dialog": ["Hi.", "Hello."], "act": [0, 1], "emotion": [0, 0]},
        {"internal": [["How tall?", "40 cm."], ["More?", "No."]], "visible": [["How tall?", "40 cm."], ["M?", "No."]]},
        {
            "request": {"instructions": "Be brief.", "input": [{"content": "a"}] * 2},
            "response": {"output_text": "It is."},
        },
        {"template": "Translate {{text}}", "vars": {"text": ["a", "b"]}, "output": "Hallo du."},
    ],
)
def test_no_number_no_entry_of_a_list_and_none_of_several_answers_is_suggested(row):
    said = no_format("a", tuple(row), RowOptions(), [row])
    assert "match no format" in said and not re.search(r"If \S+ is the question", said), said


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("win", "lose"),
        ("accept", "reject"),
        ("yw", "yl"),
        ("right_answer", "wrong_answer"),
        ("safe_text", "unsafe_text"),
    ],
)
def test_of_opposed_answers_the_pair_is_suggested(better, worse):
    row = {"prompt": "How tall?", worse: "No idea at all.", better: "It is 40 cm."}
    said = no_format("a", tuple(row), RowOptions(), [row])
    assert f"Use --preference dpo --columns chosen={better},rejected={worse},prompt=prompt." in said


def test_why_an_answer_ended_is_no_answer():
    said = {"content": {"role": "model", "parts": [{"text": "Hello"}]}, "finishReason": "MAX_TOKENS"}
    row = {"request": {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}, "response": {"candidates": [said]}}
    pair = likely_pair(list(row), [row])
    assert pair == ("request.contents.0.parts.0.text", "response.candidates.0.content.parts.0.text")
