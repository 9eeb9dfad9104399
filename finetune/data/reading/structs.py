"""Arrow tables as the rows they were made of: without nulls for keys that a struct lacked, with the names of classes.

A table gives each struct of a column the keys of all its rows. A null there is a key that the row did not have, which
is no argument of a tool and no property of a schema.
"""

from collections import Counter
from functools import cached_property
from typing import Any

from finetune.data.reading.rows import NotedRow

ADDED_NULLS = "nulls in structs, which Arrow gives to rows without the key, are left out"
CLASS_NAMES = "column {!r}: its numbers are read as the names of the classes in the file"


def without_added_nulls(row: dict) -> dict:
    """The row without nulls inside its columns' structs; noted if any is deeper than a message's own fields."""
    found: list[int] = []
    cleaned = {name: _without_nulls(value, 0, found) for name, value in row.items()}
    return NotedRow.of(cleaned, {ADDED_NULLS: sum(found)} if found else {})


def _without_nulls(value: Any, depth: int, found: list[int]):
    """`depth`: structs around it. `found`: the numbers of nulls left out of structs inside structs."""
    if isinstance(value, list):
        return [_without_nulls(part, depth, found) for part in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_nulls(part, depth + 1, found) for key, part in value.items() if part is not None}
    if depth and len(kept) < len(value):
        found.append(len(value) - len(kept))
    return kept


def with_class_names(row: dict, features: dict) -> dict:
    """The row with the names of its classes, which `features` of the package datasets give for their numbers."""
    named = {name: _named(value, features.get(name)) for name, value in row.items()}
    changed = [name for name, value in row.items() if named[name] != value]
    return NotedRow.of(named if changed else row, {CLASS_NAMES.format(name): 1 for name in changed})


def _named(value: Any, feature: Any):
    if isinstance(feature, list) and len(feature) == 1 and isinstance(value, list):
        return [_named(part, feature[0]) for part in value]
    if not isinstance(feature, dict):
        return value
    names = feature.get("names")
    if feature.get("_type") == "ClassLabel" and isinstance(names, list) and type(value) is int:
        if 0 <= value < len(names):
            return str(names[value])
        return None
    inner = feature.get("feature") if isinstance(feature.get("_type"), str) else None  # or a field of this name
    if inner is not None and isinstance(value, list):
        return [_named(part, inner) for part in value]
    if isinstance(value, dict):  # a Sequence of a dict is a dict of lists
        if isinstance(inner, dict):
            parts = {key: [part] for key, part in inner.items()}
        else:
            parts = feature
        return {key: _named(part, parts.get(key)) for key, part in value.items()}
    return value


class NullsOfRows:
    """Nulls in rows of Python's that came from a table: of dicts at one place that all have the same keys, for a key
    that others have a value of. Written by hand, rows have no keys without a value.
    """

    def __init__(self):
        self.keys: dict[tuple, set[tuple]] = {}
        self.filled: dict[tuple, set] = {}
        self.nulls: dict[tuple, Counter] = {}

    def add(self, value: Any, place: tuple = ()) -> None:
        """Counts a row."""
        if isinstance(value, list):
            for part in value:
                self.add(part, (*place, None))
        elif isinstance(value, dict):
            if place:
                self.keys.setdefault(place, set()).add(tuple(value))
                self.filled.setdefault(place, set()).update(key for key, part in value.items() if part is not None)
                self.nulls.setdefault(place, Counter()).update(key for key, part in value.items() if part is None)
            for key, part in value.items():
                self.add(part, (*place, key))

    @cached_property
    def added(self) -> dict[tuple, dict]:
        """{place: {key: number of its nulls}} of those that are no values, once all rows are counted."""
        found = {}
        for place, keys in self.keys.items():
            nulls = {key: n for key, n in self.nulls[place].items() if key in self.filled[place]}
            if len(keys) == 1 and nulls:
                found[place] = nulls
        return found

    @property
    def num_deep(self) -> int:
        """The number of those in dicts that are inside other dicts."""
        deep = [nulls for place, nulls in self.added.items() if sum(key is not None for key in place) > 1]
        return sum(sum(nulls.values()) for nulls in deep)

    def without(self, value: Any, place: tuple = ()):
        """A row without them."""
        if isinstance(value, list):
            return [self.without(part, (*place, None)) for part in value]
        if not isinstance(value, dict):
            return value
        left_out = self.added.get(place, {})
        return {k: self.without(v, (*place, k)) for k, v in value.items() if v is not None or k not in left_out}
