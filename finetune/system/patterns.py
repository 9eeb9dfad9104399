"""Regular expressions of users and of other people's files, whose searches have an end."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from finetune.errors import PlanError

# What follows a brace that repeats; any other brace is itself to `re`.
REPETITION = re.compile(r"\{(\d+(,\d*)?|,\d*)\}")
LIMIT_S = 5.0  # of one search; those of a pattern that fits its purpose take microseconds


class Pattern:
    """A regular expression as `re` reads it, each search limited to LIMIT_S. Raises re.error.

    Its searches raise TimeoutError: see `ended_in_time`.
    """

    def __init__(self, text: str):
        import regex

        re.compile(text)  # regex has more syntax, which is not offered
        try:
            self.compiled = regex.compile(as_re_reads(text), regex.VERSION0)
        except regex.error as error:
            raise re.error(str(error)) from None
        self.groups = self.compiled.groups

    def finditer(self, text: str) -> list[Any]:
        """The matches, from left to right."""
        return list(self.compiled.finditer(text, timeout=LIMIT_S))

    def match(self, text: str) -> Any:
        """The match at the beginning, or None."""
        return self.compiled.match(text, timeout=LIMIT_S)

    def fullmatch(self, text: str) -> Any:
        """The match of all of the text, or None."""
        return self.compiled.fullmatch(text, timeout=LIMIT_S)


def as_re_reads(text: str) -> str:
    """A pattern of `re` for `regex`. Braces that repeat nothing (fuzzy matches there) and brackets within a set
    (classes such as [[:alpha:]]) are escaped.
    """
    out = []
    i = 0
    set_begins: int | None = None  # where the first character of the set that is open stands
    while i < len(text):
        part = text[i]
        if part == "\\":
            end = i + 2
            if text.startswith("\\N{", i):
                end = text.find("}", i) + 1
            part = text[i:end]
        elif set_begins is not None:
            if part == "]" and i > set_begins:
                set_begins = None
            elif part == "[":
                out.append("\\")
        elif part == "[":
            set_begins = i + 1
            if text.startswith("[^", i):
                part = "[^"
                set_begins = i + 2
        elif part == "{" and not REPETITION.match(text, i):
            out.append("\\")
        out.append(part)
        i += len(part)
    return "".join(out)


@contextlib.contextmanager
def ended_in_time(said: str) -> Iterator[None]:
    """A context in which a search beyond LIMIT_S raises PlanError. `said`: whose pattern it is, and on what."""
    try:
        yield
    except TimeoutError:
        raise PlanError(
            f"{said}: the pattern finds no end in {LIMIT_S:g} s. Write it without a repetition inside another, such as "
            "(a|aa)+."
        ) from None
