"""Rows that a head beside the model's own reads: their texts as documents, each with its label."""

from dataclasses import replace

import numpy as np

from finetune.data.columns import OF_TASKS, Row
from finetune.data.formats import needs_template, uses_template
from finetune.data.labels import number_of
from finetune.data.meanings import texts_in
from finetune.data.preference_rows import as_answer
from finetune.errors import PlanError
from finetune.model_files.tokenizer import Tokenizer
from finetune.parts.objectives import EMBED
from finetune.system.json_files import json_kind


def texts_of(row: Row) -> list[tuple[Row, int]]:
    """[(row of one text, its label)] of a row: of texts that belong together, and their negative, each without a label.
    Raises PlanError.
    """
    if row.format == EMBED:
        names = ("anchor", "positive", "negative")[: row.options.documents]
        if "negative" in names and row.get("negative") is not None and row.get("positive") == row.get("negative"):
            raise PlanError(f"{row.source}: positive and negative are equal, so neither is nearer. Remove the row.")
        if row.get("anchor") == row.get("positive"):
            row.note("anchor and positive are equal, and nothing is learned of them")
        return [(text_row(row, name), 0) for name in names]
    return [(text_row(row, "text"), number_of(row))]


def reads_messages(row: Row, has_template: bool) -> bool:
    """True for a row of a head whose texts the chat template renders."""
    if row.format in OF_TASKS:
        return needs_template(row)
    return uses_template(as_answer(row), has_template)


def text_row(row: Row, name: str) -> Row:
    """The row of one of its fields: a text as it is, or messages, which the chat template renders. Raises PlanError."""
    value = row.get(name)
    if isinstance(value, dict):
        value = [value]
    kept = {n: row.get(n) for n in ("system", "chat_template_kwargs") if row.get(n)}
    columns = {n: row.columns[n] for n in kept}
    if isinstance(value, str) and kept.get("system"):
        value = [{"role": "user", "content": value}]
    are_texts = isinstance(value, list) and value and all(isinstance(part, str) for part in value)
    if are_texts and row.format == EMBED:
        raise PlanError(
            f"{row.source}: field {row.columns[name]!r} is a list of texts, must be one text. Write a row for each."
        )
    if isinstance(value, list):
        said = [part for message in value if isinstance(message, dict) for part in texts_in(_without_role(message))]
        are_messages = all(isinstance(message, dict) for message in value)
        if value and are_messages and not "".join(said).strip():
            raise PlanError(f"{row.source}: field {row.columns[name]!r} is empty. Fill it in, or remove the row.")
        values = {"messages": value, **kept}
        return replace(row, format="chat", values=values, columns={"messages": row.columns[name], **columns})
    if value is None:
        raise PlanError(f"{row.source}: field {row.columns.get(name, name)!r} is missing. Add it, or remove the row.")
    if not isinstance(value, str):
        raise PlanError(
            f"{row.source}: field {row.columns[name]!r} is {json_kind(value)}, must be a string or a list of messages."
        )
    if not row.text(name).strip():
        raise PlanError(f"{row.source}: field {row.columns[name]!r} is empty. Fill it in, or remove the row.")
    return replace(row, format="document", values={"text": row.text(name)}, columns={"text": row.columns[name]})


def _without_role(message: dict) -> dict:
    return {name: part for name, part in message.items() if name not in ("role", "from", "type")}


def padding_of(tokenizer: Tokenizer) -> int:
    """The padding token's id, see model_files.tokenizer.pad_id, of either kind of tokenizer."""
    named = tokenizer.special_tokens_map.get("pad_token")
    if isinstance(named, str) and named in tokenizer.get_vocab():
        return tokenizer.get_vocab()[named]
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    return 0


def without_padding(ids: np.ndarray, pad_id: int) -> np.ndarray:
    """The tokens up to the last one that is not the padding token: where transformers' classes read a row, which
    take every such token at its end for padding.
    """
    real = np.flatnonzero(ids != pad_id)
    if not len(real):
        return ids[:1]
    return ids[: real[-1] + 1]


def last_alone(number: int) -> np.ndarray:
    """A bool for each of a document's tokens: True for the last, at which a head reads."""
    found = np.zeros(number, bool)
    found[-1:] = True
    return found
