"""What becomes of a name of another program: the kinds of entries in the tables of this folder.

An entry that is a string is the flag of the same meaning here. Words such as "--precision bf16" are flags with their
values; "{}" stands for the value that was given, and what follows "|" is set unless something else sets it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

UNSET = ("", "none", "null", "false", "no", "off", "0", "0.0", "[]", "{}")


@dataclass(frozen=True)
class LeftOut:
    """Accepted, and without effect: `why` is what happens here in any case."""

    why: str


@dataclass(frozen=True)
class Instead:
    """Refused: `what` to write or to know instead. Values that ask for nothing (`unless`, and UNSET) are left out."""

    what: str
    unless: tuple[str, ...] = ()

    def asks_for_nothing(self, word: str) -> bool:
        return word.lower() in (*UNSET, *self.unless)


Outcome = str | list[dict] | LeftOut | Instead


@dataclass(frozen=True)
class ByValue:
    """The words of each value, "*" those of any other. `why`: what differs, for the line that says so, by value."""

    words: dict[str, str | LeftOut | Instead]
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Computed:
    """`words_of(value)` -> words, entries of --dataset, LeftOut or Instead; `text` says what it does."""

    words_of: Callable[[Any], Outcome]
    text: str


Entry = str | LeftOut | Instead | ByValue | Computed
Names = dict[str, Entry]


def left_out(why: str, *names: str) -> Names:
    return dict.fromkeys(names, LeftOut(why))


def instead(what: str, *names: str, unless: tuple[str, ...] = ()) -> Names:
    return dict.fromkeys(names, Instead(what, unless))


def same(*names: str) -> Names:
    """Names that are flags here too, with the same meaning."""
    return {name: name for name in names}
