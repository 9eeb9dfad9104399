"""Preference rows as prompts and completions: pairs of a chosen and a rejected answer, and answers with a label."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from finetune.data.blocks import is_assistant
from finetune.data.columns import PREFERENCES, Row
from finetune.data.formats import question_text
from finetune.data.meanings import are_said, texts_in
from finetune.errors import PlanError
from finetune.system.json_files import json_in_cell, json_kind

ANSWERS = ("chosen", "rejected", "completion")
TRUE = ("true", "1")
FALSE = ("false", "0")


def as_answer(row: Row) -> Row:
    """The row as one prompt with its answer: of a pair the chosen one; rows of other formats as they are."""
    if row.format in PREFERENCES:
        return labelled_of(row)[0][0]
    return row


def answers_in(row: Row) -> list[Row]:
    """Rows of one answer each: of a preference row those that it compares, else the row. Raises PlanError."""
    if row.format in PREFERENCES:
        return [answer for answer, _ in labelled_of(row)]
    return [row]


def labelled_of(row: Row) -> list[tuple[Row, bool]]:
    """[(row of prompt and completion, whether it is desirable)]: of a pair both halves. Raises PlanError."""
    if row.format == "preference":
        return list(zip(pair_of(row), (True, False), strict=True))
    label = row.get("label")
    column = row.columns["label"]
    word = str(label).strip().casefold()
    if isinstance(label, float) or word not in TRUE + FALSE:
        raise PlanError(
            f"{row.source}: field {column!r} is {str(label)[:40]!r}, must be true (desirable) or false (undesirable)."
        )
    _count_unused(row, {"prompt"})
    values, columns = ({k: of[k] for k in ("prompt", "completion") if k in of} for of in (row.values, row.columns))
    return [(replace(row, format="prompt_completion", values=values, columns=columns), word in TRUE)]


def pair_of(row: Row) -> tuple[Row, Row]:
    """The chosen and the rejected half of a row, each as prompt and completion. Raises PlanError.

    What both begin with is the prompt, if they are conversations that contain it or there is no column of it: messages,
    or text up to the last space before they differ. A question, or a prompt with a system prompt, is a chat turn.
    """
    row = with_prompt(row)
    chosen, rejected, prompt = (_message_list(row, name) for name in ("chosen", "rejected", "prompt"))
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, str | list):
            if value is None:
                fact = "missing"
            else:
                fact = json_kind(value)
            column = row.columns[name]
            raise PlanError(f"{row.source}: field {column!r} is {fact}, must be a string or a list of messages.")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise PlanError(
            f"{row.source}: one of chosen and rejected is text, the other a list of messages. Write both alike."
        )
    prompt = _without_answer(row, prompt, (chosen, rejected))
    if chosen == rejected:
        raise PlanError(f"{row.source}: chosen and rejected are equal, so neither is preferred. Remove the row.")
    asked = "prompt" if prompt is not None else "question" if row.get("question") is not None else None
    if isinstance(chosen, str) and asked and (asked == "question" or (row.get("system") and isinstance(prompt, str))):
        _count_unused(row, {asked, "context"})
        return _question(row, asked, "chosen"), _question(row, asked, "rejected")
    if asked == "question":
        half = _question(row, asked, "chosen")
        prompt = question_text(replace(half, values=half.values | {"answer": "", "output": ""}))
    _count_unused(row, {asked, "context"} if asked == "question" else {asked})
    shared = _common_length(chosen, rejected)
    if isinstance(chosen, str) and prompt is None:
        shared = max(chosen.rfind(" ", 0, shared), chosen.rfind("\n", 0, shared)) + 1
    if prompt is None or (isinstance(chosen, list) and _contains(chosen[:shared], prompt)):
        if prompt is not None:
            row.note(f"column {row.columns[asked]!r} is not used: the answers contain it")
        if isinstance(chosen, list) and not shared:
            raise PlanError(
                f"{row.source}: chosen and rejected begin with different messages, and one question has two answers. "
                "Begin both with it, or give it as the prompt."
            )
        prompt = chosen[:shared]
        chosen = chosen[shared:]
        rejected = rejected[shared:]
    one, other = ({"prompt": prompt, "completion": answer} for answer in (chosen, rejected))
    return (
        _half(row, "prompt_completion", one, asked or "chosen", "chosen"),
        _half(row, "prompt_completion", other, asked or "chosen", "rejected"),
    )


def _count_unused(row: Row, used: set) -> None:
    """Counts what is asked beside the prompt. Raises PlanError for a text that the row's other columns do not have."""
    for name in ("prompt", "question", "context", "messages"):
        if name in used or not row.get(name):
            continue
        column = row.columns[name]
        if not _is_said(row, name, {*used, "system"}):
            raise PlanError(
                f"{row.source}: column {column!r} may be a part of the prompt, and the row is read without it. Put it "
                f"into the prompt, or add --ignore_columns {column.strip().casefold()} to train without it."
            )
        row.note(f"column {column!r} is not used")


def _is_said(row: Row, name: str, others: set) -> bool:
    """True if these other fields and the answers have the texts of a field."""
    said = [value for other, value in row.values.items() if other in others or other in ANSWERS]
    value = _messages_of(row) if name == "messages" else row.get(name)
    return are_said(texts_in(value, leaves=True), "\n".join(texts_in(said)))


def _messages_of(row: Row) -> Any:
    """The messages beside a prompt, or the object that holds them; of a cell as JSON has them. Raises PlanError."""
    value = row.get("messages")
    if isinstance(value, str):
        return json_in_cell(value, f"{row.source}: field {row.columns['messages']!r}")
    return value


def with_prompt(row: Row) -> Row:
    """The row with its input as the prompt if that holds messages, or with the messages beside its answers, if it has
    no other, as OpenAI's preference rows and LLaMA-Factory's have it.
    """
    if row.get("prompt") is not None:
        return row
    if isinstance(row.get("context"), dict | list):
        moved = {"context": "prompt"}
    elif row.get("question") is None and _asks_in_messages(row):
        moved = {"messages": "prompt"}
        row = replace(row, values=row.values | {"messages": _messages_of(row)})
    else:
        return row
    values, columns = ({moved.get(k, k): v for k, v in of.items()} for of in (row.values, row.columns))
    return replace(row, values=values, columns=columns)


def _asks_in_messages(row: Row) -> bool:
    """True if a pair's messages are its prompt: not beside conversations that have them, or texts with a prompt."""
    messages = _messages_of(row)
    if isinstance(messages, dict):
        messages = messages.get("messages")
    chosen = row.get("chosen")
    rejected = row.get("rejected")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return False
    asked = [message for message in messages if not is_assistant(message)]
    if not asked or (asked[-1] is not messages[-1] and not _is_one_of(messages[-1], (chosen, rejected))):
        return False
    if isinstance(chosen, str) and isinstance(rejected, str):  # "Human: ... Assistant: ..." in both
        return chosen[: _common_length(chosen, rejected)].find(_text_of(asked[-1]) or "") <= 0
    if any(isinstance(answer, list) and len(answer) > 1 for answer in (chosen, rejected)):
        return not _is_said(row, "messages", set())
    return True


def _message_list(row: Row, name: str) -> Any:
    """The messages of a field's object that holds them, and a single message, as a list. Raises PlanError for what the
    object says beside them.
    """
    value = row.get(name)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        row.leave(value, ("messages",), f"column {row.columns[name]!r}", row.source)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return value["messages"]
    if isinstance(value, dict):
        return [value]
    return value


def _without_answer(row: Row, prompt: Any, answers: Sequence) -> Any:
    """The prompt, of a conversation that ends with one of the answers the messages before it."""
    last = prompt[-1] if isinstance(prompt, list) and len(prompt) > 1 else None
    if not isinstance(last, dict) or not is_assistant(last) or not _is_one_of(last, answers):
        return prompt
    row.note("a prompt ends with one of the answers, which is left off it")
    return prompt[:-1]


def _is_one_of(message: dict, answers: Sequence) -> bool:
    """True for a message that is a text and no more, which one of the answers has."""
    said = [answer[0] if isinstance(answer, list) and len(answer) == 1 else answer for answer in answers]
    text = _text_of(message)
    return bool(text) and text in map(_text_of, said) and not message.keys() - {"role", "from", "content", "value"}


def _text_of(answer: Any) -> str | None:
    """The text of an answer or a message, if it is one text."""
    text = answer.get("content", answer.get("value")) if isinstance(answer, dict) else answer
    return text.strip() if isinstance(text, str) else None


def _question(row: Row, asked: str, name: str) -> Row:
    """A half as a question or an instruction with its answer."""
    fmt = "qna"
    fields = ("question", "answer", "context")
    if row.columns[asked].strip().casefold() == "instruction":
        fmt = "alpaca"
        fields = ("instruction", "output", "input")
    half = _half(row, fmt, dict(zip(fields, (row.get(asked), row.get(name)), strict=False)), asked, name)
    if not row.get("context"):
        return half
    values = half.values | {fields[2]: row.get("context")}
    columns = half.columns | {fields[2]: row.columns["context"]}
    return replace(half, values=values, columns=columns)


def _half(row: Row, fmt: str, values: dict, asked: str, name: str) -> Row:
    """A half as a row of this format; `asked`, `name`: the fields that its prompt and its answer came from."""
    columns = {field: row.columns[of] for field, of in zip(values, (asked, name), strict=True)}
    for kept in ("system", "chat_template_kwargs"):
        if row.get(kept):
            values = values | {kept: row.get(kept)}
            columns = columns | {kept: row.columns[kept]}
    return replace(row, format=fmt, values=values, columns=columns)


def _contains(messages: list, prompt: Any) -> bool:
    """True if messages begin with those of the prompt, or one of them has its text."""
    if isinstance(prompt, list):
        return bool(prompt) and messages[: len(prompt)] == prompt
    return any(prompt in message.values() for message in messages if isinstance(message, dict))


def _common_length(one: Sequence, other: Sequence) -> int:
    """Number of leading characters or messages that are equal in both."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
