"""The order of a row's messages, by what they say of it themselves: their parents and their times."""

import contextlib
import math
import re
from datetime import datetime, timezone
from typing import Any

from finetune.data.columns import Row
from finetune.data.meanings import IN_CONVERSATION, meaning_of, plain_name
from finetune.errors import PlanError

TIMES = ("created_at", "create_time", "created", "timestamp", "ts", "sent_at")
DATES = ("time", "date", "datetime", "date_time")  # whose small numbers are durations, or years
EPOCH_S = 1e9  # a number above it is of seconds since 1970
SMALLER_UNIT_S = 1e11  # a number above it is of milliseconds, or less
SAME_MOMENT_S = 1.0  # by which times of one clock may fall
CLOCKS_S = 60.0  # by which the clocks of a user's device and of a server may differ
NUMBER = re.compile(r"\d{10,19}(\.\d*)?")  # as Slack writes its times
SAYS = ("role", "from", "author", "sender", "speaker")


def check_branch(messages: list, wheres: list[str], row: Row) -> None:
    """Raises PlanError for messages of which one answers another one than that before it, as in a tree of them."""
    before = None
    seen: set = set()
    for message, where in zip(messages, wheres, strict=True):
        if not isinstance(message, dict):
            return
        plain = {plain_name(name): (name, value) for name, value in message.items()}
        for name, (column, parent) in plain.items():
            is_parent = meaning_of(name) == IN_CONVERSATION or name == "parent"
            if is_parent and column.strip().casefold() not in row.options.ignored:
                if isinstance(parent, str | int) and parent in seen and parent != before:
                    raise PlanError(
                        f"{where}.{column}' is another message than the one before it: the row has branches of a tree. "
                        f"Write each branch as a row, or add --ignore_columns {column}."
                    )
        before = next((plain[name][1] for name in ("id", "uuid", "message_id") if name in plain), None)
        if isinstance(before, str | int):
            seen.add(before)


def check_order(messages: list, wheres: list[str], row: Row) -> None:
    """Raises PlanError for messages whose own times say another order, as of a list that begins with the newest."""
    latest: dict[tuple, float] = {}
    for message, where in zip(messages, wheres, strict=True):
        if not isinstance(message, dict):
            continue
        who = str(next((message[name] for name in SAYS if name in message), ""))
        for column, value in message.items():
            name = plain_name(column)
            if name not in (*TIMES, *DATES) or column.strip().casefold() in row.options.ignored:
                continue
            form, at = _moment(value)
            if at is None or (name in DATES and at < EPOCH_S):
                continue
            for key, apart in (((name, form, who), SAME_MOMENT_S), ((name, form), CLOCKS_S)):
                if at < EPOCH_S:
                    apart = 0  # a number of its own
                if at < latest.get(key, at) - apart:
                    raise PlanError(
                        f"{where}.{column}' is before that of a message above it: the messages are not in their order. "
                        f"Sort them, or add --ignore_columns {column}."
                    )
                latest[key] = at


def _moment(value: Any) -> tuple[str, float | None]:
    """(the form of a time, by which it compares with others; its seconds), of a number, of milliseconds and less too,
    or of a text in ISO's form. None for anything else, and for times that stand for none: 0, and those of year 1.
    """
    form = "number"
    at = None
    with contextlib.suppress(ValueError, OverflowError):
        text = str(value).strip()
        if isinstance(value, str) and not NUMBER.fullmatch(text):
            found = datetime.fromisoformat(text)
            form = "without zone"
            if len(text) <= len("2024-01-01"):
                form = "day"
            elif found.tzinfo is not None:
                form = "with zone"
            at = found.replace(tzinfo=found.tzinfo or timezone.utc).timestamp()
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            at = float(value)
    if at is None or not 0 < at < math.inf:
        return form, None
    while at > SMALLER_UNIT_S and form == "number":
        at /= 1000
    return form, at
