"""Rows that only ask, for rewards. One without an answer gets that of a column beside it, or a sign in place of an
answer, so that every format can be read.
"""

from dataclasses import replace

from finetune.data.blocks import ROLES
from finetune.data.columns import FORMATS, Format, Notices
from finetune.data.meanings import is_nothing
from finetune.data.reading.rows import RawDataset
from finetune.errors import PlanError

STANDS_FOR_ANSWER = "\u2603"  # merges with no prompt's last token
# Columns that hold what is expected where the format's own are missing, as rows for rewards have them.
EXPECTED = ("answer", "ground_truth", "solution", "reference", "reference_answer", "expected", "target")
ASKS = {
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "qna": ("question", "answer"),
}


class AskingRow(dict):
    """A row that was changed to be read. `whole`: as it was."""

    whole: dict


def as_read(row: dict) -> dict:
    """The row as it was read."""
    if isinstance(row, AskingRow):
        return row.whole
    return row


def asking(
    raw: RawDataset, columns: dict[str, str], *, only_known: bool, may_lack: bool = True, kept: tuple[str, ...] = ()
) -> RawDataset:
    """The rows, each with an answer. `columns`: of --columns, {field: column}. `only_known`: without columns that no
    format reads, which are for a reward function. `may_lack`: False: rows without an answer are as they were. `kept`:
    columns that are read beside those of formats, of images.
    """
    missing = None
    if may_lack:
        missing = STANDS_FOR_ANSWER
    rows = [_asking(row, columns, missing) for row in raw.rows]
    notices = raw.notices
    if only_known:
        known = {*columns.values(), *(name for fmt in FORMATS.values() for names in _names(fmt) for name in names)}
        known.update(kept)
        notices = Notices()
        notices.update(raw.notices.counts, raw.notices.first, raw.notices.examples)
        for row, source in zip(raw.rows, raw.sources, strict=True):
            for name in (n for n in row if n not in known and not is_nothing(row[n])):
                notices.add(f"column {name!r} is not asked: reward functions alone see it", source)
        rows = [row if row.keys() <= known else {n: v for n, v in row.items() if n in known} for row in rows]
    rows = [_changed(row, whole) for row, whole in zip(rows, raw.rows, strict=True)]
    found = dict.fromkeys(name for row in rows for name in row)
    return replace(raw, rows=rows, columns=tuple(found), notices=notices)


def _changed(row: dict, whole: dict) -> dict:
    if row is whole:
        return row
    found = AskingRow(row)
    found.whole = whole
    return found


def answered(row: dict, columns: dict[str, str], answer: str) -> dict:
    """The row with `answer` in the place of its own. Raises PlanError for a row of another format than those of ASKS
    and chat.
    """
    row = _asking(row, columns, STANDS_FOR_ANSWER)
    for name in (columns.get("messages", "messages"), *FORMATS["chat"].required["messages"]):
        messages = row.get(name)
        if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
            own = {"from": "gpt", "value": answer}
            if "role" in messages[-1]:
                own = {"role": "assistant", "content": answer}
            return row | {name: [*messages[:-1], own]}
    for word, (_, field) in ASKS.items():
        for column in (columns.get(field), *FORMATS[word].required[field]):
            if column is not None and _is_there(row.get(column)):
                if isinstance(row[column], list):
                    return row | {column: [{"role": "assistant", "content": answer}]}
                return row | {column: answer}
    raise PlanError(f"columns {', '.join(row)[:80]}: there is no place for an answer. Give messages, or a prompt.")


def shown(answer: str) -> str:
    """A target's text as a person reads it."""
    if answer.startswith(STANDS_FOR_ANSWER):
        return "(no answer given)"
    return answer


def is_missing(answer: str) -> bool:
    """True if the text stands for an answer that the row does not have."""
    return answer.strip() in ("", STANDS_FOR_ANSWER)


def _names(fmt: Format) -> list[tuple[str, ...]]:
    return [*fmt.required.values(), *fmt.optional.values()]


def _asking(row: dict, columns: dict[str, str], missing: str | None) -> dict:
    """The row with an answer. `missing`: stands for one that no column holds; None: the row is as it was then."""
    for name in (columns.get("messages", "messages"), *FORMATS["chat"].required["messages"]):
        messages = row.get(name)
        if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
            return _chat(row, name, messages, missing)
    for word, (field, answer) in ASKS.items():
        required = FORMATS[word].required
        asks = [n for n in (columns.get(field), *required[field]) if n is not None and n in row]
        answered = [n for n in (columns.get(answer), *required[answer]) if n is not None and _is_there(row.get(n))]
        if asks and not answered:
            expected, rest = _expected(row, missing)
            if expected is None:
                return row
            if isinstance(row[asks[0]], list):  # messages
                return rest | {columns.get(answer, answer): [{"role": "assistant", "content": expected}]}
            return rest | {columns.get(answer, answer): expected}
    return row


def _chat(row: dict, name: str, messages: list[dict], missing: str | None) -> dict:
    last = messages[-1]
    if "role" in last:
        speaker = last["role"]
    else:
        speaker = last.get("from")
    if not isinstance(speaker, str) or ROLES.get(speaker.lower(), "assistant") == "assistant":
        return row  # answered, or refused when it is read
    expected, rest = _expected(row, missing)
    if expected is None:
        return row
    if "role" in last:
        return rest | {name: [*messages, {"role": "assistant", "content": expected}]}
    return rest | {name: [*messages, {"from": "gpt", "value": expected}]}


def _expected(row: dict, missing: str | None) -> tuple[str | None, dict]:
    """(the answer that a column beside the question holds, else `missing`; the row without that column)."""
    for name in EXPECTED:
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value.strip():
            return value, {other: of for other, of in row.items() if other != name}
    return missing, row


def _is_there(value: object) -> bool:
    return value is not None and value != "" and value != []
