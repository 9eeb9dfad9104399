"""Shared by the tables of techniques: limits, the implementation that a row names, and words in a sentence."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Limit:
    """A setting with which a technique is refused. `beside`: its name in plan.conflicts; `why` and `remedy`: as there,
    where the remedy is not that of the table.
    """

    beside: str
    why: str
    remedy: str = ""


def implementation(path: str) -> Any:
    """The object that a row names as 'module.name'. Its engine calls this: a row is read without its framework."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def words_with(rows: dict[str, Facts], holds: Callable[[Facts], object]) -> tuple[str, ...]:
    """The words of a table whose rows are so."""
    return tuple(word for word, facts in rows.items() if holds(facts))


def sharing(rows: dict[str, Facts], text_of: Callable[[Facts], str]) -> dict[str, list[str]]:
    """{text: the words of the rows that have it}; rows without one are left out."""
    found: dict[str, list[str]] = {}
    for word, facts in rows.items():
        if text_of(facts):
            found.setdefault(text_of(facts), []).append(word)
    return found


def in_prose(words: Iterable[str], last: str = "and") -> str:
    """The words in a sentence: 'a, b and c'."""
    *others, end = words
    if others:
        return f"{', '.join(others)} {last} {end}"
    return end
