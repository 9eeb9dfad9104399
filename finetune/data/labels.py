"""Labels of --task classify: a row's label, and the names of all of them in the order of their numbers."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

from finetune.data.columns import Row
from finetune.errors import PlanError
from finetune.parts.objectives import CLASSIFY
from finetune.system.json_files import json_kind

MOST_LABELS = 2000
FEW = 20  # labels of which each may have a row or two
SHOWN = 8
MOST_DIGITS = 40  # of labels that are sorted as numbers; Python reads at most 4,300
NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?|[-+]?\d+\.")
# What tables hold where a value is missing.
MISSING = ("nan", "none", "null", "na", "n/a", "#n/a", "<na>", "-", "?")


def label_of(row: Row) -> str:
    """The name of a row's label: text, or a number or boolean as text. Raises PlanError."""
    value = row.get("label")
    column = row.columns["label"]
    if isinstance(value, list | tuple):
        raise PlanError(
            f"{row.source}: field {column!r} is a list, and --task {CLASSIFY} learns one label of each row. Write one, "
            "or train a run for each label."
        )
    if value is None or (isinstance(value, str) and not value.strip()):
        raise PlanError(
            f"{row.source}: field {column!r} is missing, so the row has no label. Add it or remove the row."
        )
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        raise PlanError(
            f"{row.source}: field {column!r} is {value}, a number with a decimal point, and --task {CLASSIFY} learns "
            "labels. Write labels as text or whole numbers."
        )
    if not isinstance(value, int | str):
        kind = json_kind(value)
        raise PlanError(f"{row.source}: field {column!r} is {kind}, must be text, a whole number or a boolean.")
    return str(value).strip()


def number_of(row: Row) -> int:
    """The number of a row's label; 0 while the names are not known. Raises PlanError for one that is not among them."""
    label = label_of(row)
    names = row.options.class_names
    if not names:
        return 0
    if label not in names:
        raise PlanError(
            f"{row.source}: label {label[:40]!r} is in no training row or not in --class_names: the labels are "
            f"{shown(names)}. Remove the row, or add the label."
        )
    return names.index(label)


def shown(names: Iterable[str]) -> str:
    """The first labels, and how many more there are."""
    names = list(names)
    found = ", ".join(name[:40] for name in names[:SHOWN])
    if len(names) > SHOWN:
        found += f" and {len(names) - SHOWN:,} more"
    return found


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """The labels sorted: as numbers if all are whole ones, so that 0 to n - 1 keep theirs, else as text."""
    names = set(names)
    if are_numbers(names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def are_numbers(names: Iterable[str]) -> bool:
    """True if all labels are whole numbers."""
    return all(len(name) <= MOST_DIGITS and name.removeprefix("-").isdecimal() for name in names)


def notes_on(names: Iterable[str]) -> list[str]:
    """A line for each label that may not be what it seems: some look alike, some say that a row has none."""
    names = list(names)
    found = []
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_seen(name), []).append(name)
    for same in alike.values():
        if len(same) > 1:
            words = " and ".join(ascii(name[:40]) for name in same)
            found.append(f"labels {words} look alike and are {len(same)}. Write them alike if they are one")
    found += [f"label {name!r} is a label as any other. Remove its rows if they have none" for name in _missing(names)]
    return found


def _seen(name: str) -> str:
    """The label without case, invisible characters and zeros before a number."""
    text = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) not in ("Cf", "Cc"))
    if are_numbers([text]):
        return str(int(text))
    return " ".join(text.casefold().split())


def _missing(names: list[str]) -> list[str]:
    """The labels that may say that a row has none; -1 does in data sets of the package datasets."""
    if are_numbers(names) and not any(int(name) < -1 for name in names) and "0" in names:
        return [name for name in names if name == "-1"]
    return [name for name in names if name.casefold() in MISSING]


def checked_names(counts: Counter[str], dataset: str) -> tuple[str, ...]:
    """The names of the labels in `counts` {label: rows}, in order. Raises PlanError for those that are no classes."""
    if len(counts) < 2:
        one = next(iter(counts), "")
        raise PlanError(
            f"{dataset}: all {counts.total():,} rows have the label {one[:40]!r}, so there is nothing to tell apart. "
            "Add rows with other labels."
        )
    if len(counts) > MOST_LABELS or (len(counts) > FEW and 2 * len(counts) > counts.total()):
        raise PlanError(
            f"{dataset}: {counts.total():,} rows have {len(counts):,} different labels, such as "
            f"{shown(in_order(counts)[:3])}. --task {CLASSIFY} learns labels that rows share, at most {MOST_LABELS:,}; "
            "learn such values as text, without --task."
        )
    names = in_order(counts)
    if all(NUMBER.fullmatch(name) for name in names) and not are_numbers(names):
        number = next((name for name in names if not name.lstrip("+-").isdecimal()), names[0])
        raise PlanError(
            f"{dataset}: its labels are numbers, such as {number[:40]}, and --task {CLASSIFY} learns labels, whose "
            "order and distance mean nothing. Write them as text or whole numbers, or name them with --class_names."
        )
    return names
