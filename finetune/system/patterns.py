"""Regular expressions of users and of other people's files, whose searches have an end."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from finetune.errors import PlanError

LIMIT_S = 5.0  # of one search; those of a pattern that fits its purpose take microseconds


class Pattern:
    """A regular expression as `re` reads it, each search limited to LIMIT_S. Raises re.error.

    Its searches raise TimeoutError: see `ended_in_time`.
    """

    def __init__(self, text: str):
        import regex

        re.compile(text)  # regex has more syntax, which is not offered
        try:
            self.compiled = regex.compile(text, regex.VERSION0)
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
