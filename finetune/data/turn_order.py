"""The order of a row's messages, by what they say of it themselves: their parents and their times."""

import contextlib
from datetime import datetime, timezone
from typing import Any

from finetune.data.columns import Row
from finetune.data.meanings import IN_CONVERSATION, meaning_of, plain_name
from finetune.errors import PlanError

TIMES = ("created_at", "create_time", "created", "timestamp", "ts", "sent_at")
DATES = ("time", "date", "datetime", "date_time")  # whose small numbers are durations, or years
EPOCH_S = 1e9  # a number above it is of seconds since 1970
SAME_MOMENT_S = 1.0  # by which clocks of a message and its answer may differ


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
    latest: dict[str, float] = {}
    for message, where in zip(messages, wheres, strict=True):
        for column, value in message.items() if isinstance(message, dict) else ():
            name = plain_name(column)
            at = None
            if name in (*TIMES, *DATES) and column.strip().casefold() not in row.options.ignored:
                at = _moment(value)
            if at is None or (name in DATES and at < EPOCH_S):
                continue
            apart = SAME_MOMENT_S if at > EPOCH_S else 0  # a smaller one is a number of its own
            if at < latest.get(name, at) - apart:
                raise PlanError(
                    f"{where}.{column}' is before that of a message above it: the messages are not in their order. "
                    f"Sort them, or add --ignore_columns {column}."
                )
            latest[name] = at


def _moment(value: Any) -> float | None:
    """Seconds of a time, as a number (of milliseconds too) or in ISO's form; None for anything else."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, OverflowError):
            found = datetime.fromisoformat(value.strip())
            return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value / 1000 if value > 1000 * EPOCH_S else float(value)
