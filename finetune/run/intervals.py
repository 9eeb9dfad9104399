"""Confidence intervals of the scores in a log, and the number of rows behind each."""

import math
from typing import Any

Z_95 = 1.959964  # standard normal quantile of 0.975
# What an eval event calls the number of rows or targets behind a fraction; of all others it is num_scored.
COUNTED_BY = {
    "rows_right": "num_rows",
    "targets_right": "num_targets",
    **dict.fromkeys(("accuracy", "macro_f1", "recall_at_1"), "num_rows"),
}


def wilson(fraction: float, number: int) -> tuple[float, float]:
    """The 95 % score interval of a fraction of `number` independent rows (Wilson, 1927)."""
    square = Z_95 * Z_95 / number
    middle = (fraction + square / 2) / (1 + square)
    half = Z_95 * math.sqrt(fraction * (1 - fraction) / number + square / (4 * number)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def number_behind(name: str, events: list[dict]) -> int | None:
    """Number of rows behind the score `name` of these eval events (number of targets, for targets_right); None if no
    event has it.
    """
    key = COUNTED_BY.get(name, "num_scored")
    if name.startswith("rewards/"):
        key = "num_rows"
    for event in events:
        if type(event.get(key)) is int and event[key] > 0:
            return event[key]
    for event in events:  # of a log without num_scored
        right = event.get("right")
        value = event.get(name)
        if not (isinstance(right, dict) and isinstance(right.get(name), list) and isinstance(value, int | float)):
            continue
        if right[name] and 0 < value <= 1:
            return round(len(right[name]) / value)
    return None


def with_interval(name: str, fraction: float, events: list[dict], logged: Any = None) -> str:
    """The fraction in percent, with its number of rows and interval: that which was `logged` with it, if one was.
    Targets of a row are not independent: they get no interval.
    """
    number = number_behind(name, events)
    if number is None:
        return f"{fraction:.1%} (number of rows not logged)"
    if COUNTED_BY.get(name) == "num_targets":
        return f"{fraction:.1%} of {number:,} tokens"
    if not 0 <= fraction <= 1:
        return f"{fraction:.1%} of {number:,}"
    low, high = wilson(fraction, number)
    if isinstance(logged, list) and len(logged) == 2:
        low, high = logged
    return f"{fraction:.1%} of {number:,} ({low:.1%} to {high:.1%})"
