"""The datasets of a run: `NAME[:weight][@split]`, each with its own split, format and columns."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.columns import parse_columns
from finetune.errors import PlanError

SPEC = re.compile(
    r"(?P<name>.+?)(:(?P<weight>-?\d+(\.\d*)?([eE]-?\d+)?))?(@(?P<split>[\w.-]+(\[(-?\d+%?)?:(-?\d+%?)?\])?))?"
)
PART = re.compile(r"(?P<split>[\w.-]+)\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\]")
KEYS = ("name", "weight", "split", "format", "columns")


@dataclass(frozen=True)
class Source:
    """One dataset of a run. `weight`: its share of the rows, None to take each of them once per epoch. `split` may end
    in the part that is meant, as the package datasets writes it: train[:5%], train[100:200].
    """

    name: str
    weight: float | None = None
    split: str | None = None
    format: str | None = None
    columns: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name + (f"@{self.split}" if self.split else "")

    @property
    def split_name(self) -> str | None:
        """The split without the part of it."""
        return self.split and self.split.partition("[")[0]

    @property
    def is_part(self) -> bool:
        return "[" in (self.split or "")

    def rows(self, count: int) -> range:
        """Numbers of the rows that are meant, of a split of `count`. Raises PlanError if there are none."""
        bounds = PART.fullmatch(self.split or "")
        if bounds:
            found = range(count)[_bound(bounds["start"], count) : _bound(bounds["stop"], count)]
        else:
            found = range(count)
        if count and not found:
            raise PlanError(f"{self}: is none of {count} rows. Name a larger part.")
        return found


def _bound(word: str | None, count: int) -> int | None:
    """One end of a part as a number of rows; percent are rounded to the nearest row."""
    if word is None:
        return None
    if word.endswith("%"):
        return round(int(word[:-1]) * count / 100)
    return int(word)


def sources_of(value: Any, flag: str = "--dataset") -> tuple[Source, ...]:
    """The datasets that a flag names, one or a list. Raises PlanError."""
    if isinstance(value, list | tuple):
        given = value
    else:
        given = [value]
    found = tuple(_of_mapping(v, flag) if isinstance(v, dict) else parse_source(v, flag) for v in given)
    weighted = [s for s in found if s.weight is not None]
    if weighted and len(weighted) < len(found):
        without = next(s for s in found if s.weight is None)
        raise PlanError(f"{flag} {without}: has no weight, others have. Give each one, or none.")
    twice = {(s.name, s.split) for s in found}
    if len(twice) < len(found):
        again = next(s for i, s in enumerate(found) if (s.name, s.split) in {(f.name, f.split) for f in found[:i]})
        raise PlanError(f"{flag} {again}: is given twice. Give it once, with a weight to have more of it.")
    return found


def dataset_words(value: Any) -> str:
    """A flag's value as messages show it: the names of its datasets."""
    if isinstance(value, list):
        return ", ".join(v["name"] if isinstance(v, dict) else v for v in value)
    return str(value)


def parse_source(spec: str, flag: str) -> Source:
    """A dataset in the words of the command line. A file of exactly this name is taken as it is. Raises PlanError."""
    if _exists(spec):
        return Source(spec)
    parts = SPEC.fullmatch(spec)
    if parts is None:
        return Source(spec)
    if parts["weight"] is None:
        weight = None
    else:
        weight = _checked_weight(float(parts["weight"]), f"{flag} {spec}")
    return Source(parts["name"], weight, parts["split"])


def _exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def _of_mapping(given: dict, flag: str) -> Source:
    unknown = [key for key in given if key not in KEYS]
    if unknown or not isinstance(given.get("name"), str):
        fact = "no name"
        if unknown:
            fact = f"unknown key {unknown[0]!r}"
        raise PlanError(f"{flag}: an entry has {fact}. Use {', '.join(KEYS)}.")
    columns = given.get("columns") or {}
    weight = given.get("weight")
    where = f"{flag} {given['name']}"
    if isinstance(columns, dict):
        columns = ",".join(f"{k}={v}" for k, v in columns.items())
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        raise PlanError(f"{where}: weight {weight!r} is not a number. Give one, such as 2.")
    for key in ("split", "format"):
        if given.get(key) is not None and not isinstance(given[key], str):
            raise PlanError(f"{where}: {key} {given[key]!r} is not a word. Give one.")
    if "[" in (given.get("split") or "") and not PART.fullmatch(given["split"]):
        raise PlanError(f"{where}: split {given['split']} is not NAME[START:STOP]. Write it as train[:5%].")
    if weight is None:
        weight = None
    else:
        weight = _checked_weight(float(weight), where)
    return Source(given["name"], weight, given.get("split"), given.get("format"), parse_columns(columns, where))


def _checked_weight(weight: float, where: str) -> float:
    if not (math.isfinite(weight) and weight > 0):
        raise PlanError(f"{where}: weight {weight:g} must be above 0. Omit the dataset to have none of it.")
    return weight
