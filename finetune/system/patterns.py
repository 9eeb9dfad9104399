"""Regular expressions of users and of other people's files, whose searches have an end."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from finetune.errors import PlanError

# What follows a brace that repeats; any other brace is itself to `re`.
REPETITION = re.compile(r"\{(\d+(,\d*)?|,\d*)\}")
REMEDY = "Write it without a repetition inside another, such as (a|aa)+."
LIMIT_S = 5.0  # of one search; those of a pattern that fits its purpose take microseconds
LATER_S = 0.1  # of a search after one that had no end


class Pattern:
    """A regular expression as `re` reads it, each search limited to LIMIT_S, or LATER_S once one had no end.
    Raises re.error.

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
        self.limit_s = LIMIT_S

    def finditer(self, text: str) -> list[Any]:
        """The matches, from left to right."""
        with self.limited() as limit_s:
            return list(self.compiled.finditer(text, timeout=limit_s))

    def match(self, text: str) -> Any:
        """The match at the beginning, or None."""
        with self.limited() as limit_s:
            return self.compiled.match(text, timeout=limit_s)

    def fullmatch(self, text: str) -> Any:
        """The match of all of the text, or None."""
        with self.limited() as limit_s:
            return self.compiled.fullmatch(text, timeout=limit_s)

    @contextlib.contextmanager
    def limited(self) -> Iterator[float]:
        """Context of one search; its limit in seconds."""
        try:
            yield self.limit_s
        except TimeoutError:
            self.limit_s = min(self.limit_s, LATER_S)
            raise


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
        raise PlanError(f"{said}: the pattern finds no end in {LIMIT_S:g} s. {REMEDY}") from None
