"""Dataset rows rendered to text through prompt formats, with the target spans marked.

columns.FORMATS is the table. Chat rows (and alpaca and qna rows, if the tokenizer has a chat template) are rendered by
the template, see conversation.py. All other formats are joined here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from finetune.data.columns import OF_TASKS, PREFERENCES, Row
from finetune.data.images.marks import IMAGE_MARK, marked_in, with_plain_marks
from finetune.data.images.references import ImageReference
from finetune.engine import IGNORE_INDEX
from finetune.errors import PlanError
from finetune.model_files.tokenizer import Tokenizer
from finetune.system.json_files import json_in_cell

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
QNA_PROMPT = "###Question:\n{question}\n###Answer:\n"
QNA_PROMPT_WITH_CONTEXT = "###Context:\n{context}\n###Question:\n{question}\n###Answer:\n"
TEXT_MARKER = re.compile(r"### (Human|Assistant):")
WHOLE_NUMBER = re.compile(r"-?\d+\.0")
# How tables write a value that is not there, or a formula that failed.
MISSING = (
    *("nan", "none", "null", "<na>", "#n/a", "#ref!", "#value!", "#div/0!", "#name?", "#null!", "#num!"),
    *("<noinput>", "n/a", "nat", "nil", "undefined", "(null)", "(none)", "(blank)", "(empty)", "\\n", "todo", "tbd"),
)


PADDING = 3  # equal token ids at the end of a row that look like it


@dataclass(frozen=True)
class Span:
    """A piece of text. `is_end`: the end-of-turn token, a target that is not part of the answer text. `is_image`: the
    text that a model's processor writes in the place of an image. `ends_prompt`: programs ask with what ends here.
    """

    text: str
    is_target: bool
    is_end: bool = False
    is_image: bool = False
    ends_prompt: bool = False


@dataclass(frozen=True)
class Document:
    """Spans tokenized as one text. `from_template`: contains its own BOS, if any. `add_eos`: ends with an answer.
    `turn`: number of its only answer, if a conversation has a document per answer. `images`: those of its text, in
    order.
    """

    spans: tuple[Span, ...]
    from_template: bool
    add_eos: bool
    turn: int | None = None
    images: tuple[ImageReference, ...] = ()


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def uses_template(row: Row, has_template: bool) -> bool:
    """True if the chat template renders the row. `has_template`: the tokenizer's own or the default one."""
    return needs_template(row) or (row.format in ("alpaca", "qna") and has_template)


def needs_template(row: Row) -> bool:
    """True if only a chat template renders the row: messages, or turns and a system prompt around a question."""
    if row.format == "prompt_completion":
        return isinstance(row.get("prompt"), list) or isinstance(row.get("completion"), list)
    if row.format in ("alpaca", "qna"):
        return bool(row.get("system") or row.get("history"))
    if row.format in (*PREFERENCES, *OF_TASKS):
        return bool(row.get("system")) or any(
            isinstance(value, list | dict) for name, value in row.values.items() if name != "label"
        )
    return row.format == "chat"


def describe_format(fmt: str, tokenizer: Tokenizer) -> str:
    """A description of the format and of how its rows are rendered."""
    if fmt == "chat":
        return "chat: rendered by the tokenizer's chat template"
    if fmt in ("alpaca", "qna"):
        if tokenizer.chat_template:
            how = "as one turn of the tokenizer's chat template"
        else:
            how = f"in the {fmt} text prompt"
        return f"{fmt}: {how}"
    return {
        "prompt_completion": "prompt_completion: concatenated",
        "text": "text: unchanged",
        "tokens": "tokens: as given",
        "preference": "preference pairs: each half as prompt and completion",
        "kto": "kto: prompt and completion with a label",
        "classify": "classify: a text as it is, or messages in the chat template, and its label",
        "embed": "embed: texts that belong together, each as it is",
    }[fmt]


# ------ rows to documents


def render_text(row: Row, tokenizer: Tokenizer) -> Document:
    """The document of a row that no chat template renders.

    Raises PlanError naming its source and the field. A row without a non-empty answer has no target span.
    """
    document = _joined(row, tokenizer)
    if not row.images:
        return document
    images = tuple(image for span in document.spans for image in marked_in(span.text, row.images))
    spans = tuple(part for span in document.spans for part in _without_marks(span))
    return replace(document, spans=spans, images=images)


def _without_marks(span: Span) -> Iterator[Span]:
    """The span with plain marks, each apart from a target's text: images are not learned."""
    text = with_plain_marks(span.text)
    if not span.is_target:
        yield replace(span, text=text)
        return
    for piece in re.split(f"({IMAGE_MARK})", text):
        if piece:
            yield replace(span, text=piece, is_target=piece != IMAGE_MARK)


def _joined(row: Row, tokenizer: Tokenizer) -> Document:
    if row.format == "text":
        return _render_text(row.text("text"), tokenizer)
    for name in ("system", "tools", "chat_template_kwargs"):
        if row.format == "prompt_completion" and row.get(name):
            raise PlanError(
                f"{row.source}: field {row.columns[name]!r} has no place in prompt and completion, which are joined as "
                f"given. Add --columns question=prompt,answer=completion to render a chat turn with it, or "
                f"--ignore_columns {row.columns[name]}."
            )
    question, extra, answer = question_and_answer(row)
    if not (question + extra).strip():
        row.note(f"field {row.columns[QUESTIONS[row.format][0]]!r} is empty, and the answer is learned without it")
    if row.format == "alpaca":
        prompt = (ALPACA_PROMPT_WITH_INPUT if extra else ALPACA_PROMPT).format(instruction=question, input=extra)
    elif row.format == "qna":
        prompt = (QNA_PROMPT_WITH_CONTEXT if extra else QNA_PROMPT).format(question=question, context=extra)
    else:
        prompt = question
    return Document((Span(prompt, False), Span(answer, bool(answer.strip()))), from_template=False, add_eos=True)


QUESTIONS = {  # format: (question, what precedes or follows it, answer)
    "alpaca": ("instruction", "input", "output"),
    "prompt_completion": ("prompt", None, "completion"),
    "qna": ("question", "context", "answer"),
}


def question_and_answer(row: Row) -> tuple[str, str, str]:
    """(question, input or context, answer) of a row. Choices follow the question, and the answer is a letter."""
    question, extra, answer = QUESTIONS[row.format]
    context = ""
    if extra:
        context = _context(row, extra)
    if context.strip().lower() in MISSING:
        row.note(f"field {row.columns[extra]!r} is {context.strip()!r}, which is asked: is it a missing value?")
    if row.get("choices"):
        choices = choices_of(row)
        listed = "\n".join(f"{letter}. {text}" for letter, text in choices.items())
        return f"{row.text(question)}\n\n{listed}", context, _letter(row, choices)
    text = _answer(row, answer)
    if text.strip().lower() in MISSING:
        row.note(f"field {row.columns[answer]!r} is {text.strip()!r}, which is learned: is it a missing value?")
    if WHOLE_NUMBER.fullmatch(text.strip()):
        row.note(f"field {row.columns[answer]!r} is a number such as 4.0, as tables with gaps write 4: is that meant?")
    return row.text(question), context, text


def _context(row: Row, name: str) -> str:
    """The text of an input or context; of several, as Ragas has them, one after the other."""
    value = row.get(name)
    if _are_texts(value) and name == "context":
        return "\n\n".join(value)
    return row.text(name, required=False)


def choices_of(row: Row) -> dict[str, str]:
    """{letter: text} of a row's choices: a list of texts, or ARC's texts with their labels. Raises PlanError."""
    value = row.get("choices")
    if isinstance(value, str):
        value = json_in_cell(value, f"{row.source}: field {row.columns['choices']!r}")
    if isinstance(value, dict):
        labelled = value
        row.leave(value, ("text", "label"), f"column {row.columns['choices']!r}", row.source)
    else:
        labelled = {"text": value, "label": list(LETTERS)}
    texts = labelled.get("text") or ""
    labels = labelled.get("label") or ""
    if _are_texts(texts) and _are_texts(labels) and len(texts) <= len(set(labels)):
        return dict(zip(labels, texts, strict=False))
    raise PlanError(
        f"{row.source}: field {row.columns['choices']!r} must be a list of at most {len(LETTERS)} texts, or an object "
        "with lists text and label."
    )


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _letter(row: Row, choices: dict[str, str]) -> str:
    """The letter of the right choice, which the row names by its letter, by its text or by its number from 0 on."""
    value = row.get("answer")
    column = row.columns["answer"]
    if isinstance(value, float) and value.is_integer():  # of a table that lacks some
        value = int(value)
    has_numbers = all(letter.isdecimal() for letter in choices)  # instead of letters: an integer is one of these
    if type(value) is int and str(value) in choices:
        if 0 <= value < len(choices) and list(choices)[value] != str(value):
            row.note(f"field {column!r} is the label of one choice and the number of another: the label counts")
        return str(value)
    if type(value) is int and 0 <= value < len(choices) and not has_numbers:
        if str(value) in choices.values() and list(choices.values())[value] != str(value):
            shown = f"{value} of {', '.join(choices.values())}"
            row.note(
                f"field {column!r} is the number of one choice and the text of another: the number counts", 1, shown
            )
        return list(choices)[value]
    found = []
    if isinstance(value, str | bool):
        text = str(value).strip()
        if not text:
            return ""
        same = str.casefold if isinstance(value, bool) else str
        found = [letter for letter, choice in choices.items() if same(text) in (same(letter), same(choice))]
        if len(found) == 1:
            _note_number(row, text, choices)
            return found[0]
    several = f"{len(found)} of" if found else "none of"
    remedy = "Give a letter, a choice's text, or its number from 0 on."
    if has_numbers:
        remedy = "Give one of these, or a choice's text."
    raise PlanError(
        f"{row.source}: field {column!r} is {str(value)[:40]!r}, {several} the choices {', '.join(choices)}. {remedy}"
    )


def _note_number(row: Row, text: str, choices: dict[str, str]) -> None:
    """Counts an answer that is the text of one choice and the number of another, as a table writes both."""
    texts = list(choices.values())
    if text in texts and text.isdecimal() and len(text) < 3 and int(text) < len(texts) and texts[int(text)] != text:
        shown = f"{text} of {', '.join(texts)}"
        row.note(
            f"field {row.columns['answer']!r} is the text of one choice and the number of another: the text counts",
            1,
            shown,
        )


def _answer(row: Row, name: str) -> str:
    """The answer's text; of several, as SQuAD has them, the first."""
    value = row.get(name)
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        row.leave(value, ("text", "answer_start"), f"column {row.columns[name]!r}", row.source)
        value = value["text"]
    if not _are_texts(value):
        return row.text(name)
    if len(set(value)) > 1:
        row.note(f"field {row.columns[name]!r}: only the first of several answers is learned")
    if value:
        return value[0]
    return ""


def question_text(row: Row) -> str:
    """A row's question and its input or context, as the user's turn of a conversation."""
    question, extra, _ = question_and_answer(row)
    return joined_question(row, question, extra)


def joined_question(row: Row, question: str, extra: str) -> str:
    if row.format == "qna":
        parts = [extra, question]
    else:
        parts = [question, extra]
    return "\n\n".join(part for part in parts if part)


def token_document(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """(input ids, is_target) of a row of token ids: labels, a mask of targets, or without either all of them.
    Raises PlanError.
    """
    ids = _integers(row, "input_ids")
    if row.get("labels") is not None:
        marks = _integers(row, "labels")
    else:
        marks = ids
        if row.get("attention_mask") is None and len(ids) > PADDING and len(set(ids[-PADDING:])) == 1:
            row.note(f"token ids end with {ids[-1]} several times, which is learned: is it padding?")
    if row.get("attention_mask") is not None:
        mask = _integers(row, "attention_mask")
    else:
        mask = np.ones_like(ids)
    for name, values in (("labels", marks), ("attention_mask", mask)):
        if len(values) != len(ids):
            column = row.columns[name]
            raise PlanError(f"{row.source}: field {column!r} has {len(values)} numbers, input_ids has {len(ids)}.")
    if marks is ids or row.columns["labels"] == "labels":
        wrong = np.flatnonzero((marks != IGNORE_INDEX) & (marks != ids))
        if len(wrong):
            at = int(wrong[0])
            raise PlanError(
                f"{row.source}: labels[{at}] is {marks[at]}, input_ids[{at}] is {ids[at]}. A label must be the token "
                f"itself, not the next one, or {IGNORE_INDEX}."
            )
        is_target = marks != IGNORE_INDEX
    else:
        if len(odd := marks[(marks != 0) & (marks != 1)]):
            raise PlanError(f"{row.source}: field {row.columns['labels']!r} has {odd[0]}, must be 0 or 1 (learned).")
        is_target = marks != 0
    if len(odd := mask[(mask != 0) & (mask != 1)]):
        raise PlanError(
            f"{row.source}: field {row.columns['attention_mask']!r} has {odd[0]}, must be 0 or 1: texts that a program "
            "packed into one row and numbered would be learned as one. Write each as a row."
        )
    keep = mask != 0
    return ids[keep].astype(np.int32), is_target[keep]


def _integers(row: Row, name: str) -> np.ndarray:
    value = row.get(name)
    if not isinstance(value, list) or not value or not all(type(v) in (int, bool) for v in value):
        raise PlanError(f"{row.source}: field {row.columns.get(name, name)!r} must be a list of integers.")
    found = np.array(value, np.int64)
    if name == "input_ids" and (found.min() < 0 or found.max() >= 2**31):
        raise PlanError(f"{row.source}: field {row.columns[name]!r} has {found.min()}, not a token id.")
    return found


def _render_text(text: str, tokenizer: Tokenizer) -> Document:
    """Plain text is all target; with Human and Assistant markers, the answers are targets, each ending with EOS.

    The first marker begins a line: elsewhere the text only speaks of markers.
    """
    pieces = TEXT_MARKER.split(text)
    begins_line = not pieces[0] or pieces[0].rstrip(" \t").endswith("\n")
    if not begins_line or "Human" not in pieces[1::2] or "Assistant" not in pieces[1::2]:
        return Document((Span(text, bool(text.strip())),), from_template=False, add_eos=True)
    spans = [Span(pieces[0], False)]
    for i in range(1, len(pieces), 2):
        marker = pieces[i]
        content = pieces[i + 1]
        is_last = i + 2 >= len(pieces)
        spans.append(Span(f"### {marker}:", False))
        is_target = marker == "Assistant" and bool(content.strip())
        spans.append(Span(content, is_target))
        if is_target and not is_last:
            spans.append(Span(tokenizer.eos_token or "", True, is_end=True))
    return Document(tuple(spans), from_template=False, add_eos=spans[-1].is_target)
