"""--lora_rank_pattern and --lora_alpha_pattern: the rank and the alpha of layers that differ from the others, as PEFT's
rank_pattern and alpha_pattern give them.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from finetune.errors import PlanError
from finetune.system.patterns import Pattern, ended_in_time

RANKS = "lora_rank_pattern"
ALPHAS = "lora_alpha_pattern"
LARGEST_RANK = 2**16
LARGEST_SCALE = 1e6  # of alpha and scale; trained adapters have some 1 to 1,000
# A regex, which may have commas and equals signs of its own, and the number that ends the entry.
ENTRY = re.compile(r"\s*([^\s,].*?)\s*=\s*([^=,\s]+)\s*(?:,|$)")


@dataclass(frozen=True)
class ByLayer:
    """The (regex, number) of layers that a flag gives. The first whose regex matches the end of a layer's name, from a
    dot on, is the layer's, as PEFT's get_pattern_key finds it.
    """

    flag: str
    entries: tuple[tuple[str, float], ...] = ()

    @classmethod
    def read(cls, text: str | None, flag: str) -> "ByLayer":
        """The entries of `REGEX=N,...`. Raises PlanError."""
        found: dict[str, float] = {}
        left = text or ""
        while left:
            entry = ENTRY.match(left)
            if entry is None or not _fits(_number(entry[2]), flag):
                what = "a whole number from 1" if flag == RANKS else "a number above 0"
                begun = f"{left[:80]!r} does not begin with NAME=N, N {what}"
                raise PlanError(f"--{flag} {text}: {begun}. Use q_proj=32,down_proj=8.")
            if entry[1] in found:
                raise PlanError(f"--{flag} {text}: {entry[1]!r} is given twice. Give it one number.")
            _compiled(entry[1], flag)
            found[entry[1]] = _number(entry[2])
            left = left[entry.end() :]
        return cls(flag, tuple(found.items()))

    def of(self, layer: str, default: float) -> float:
        """The number of the layer of this name; `default` where no regex matches it."""
        return next((number for regex, number in self.entries if self._matches(regex, layer)), default)

    def check(self, layers: Iterable[str], words_only: bool = False) -> None:
        """Raises PlanError for a regex that matches no layer of these. `words_only`: of regexes that are one word."""
        names = list(layers)
        for regex, _ in self.entries:
            if words_only and not re.fullmatch(r"\w+", regex):
                continue
            if not any(self._matches(regex, name) for name in names):
                raise PlanError(
                    f"--{self.flag} {regex}: no layer with an adapter has a name that ends so. One is "
                    f"{max(names, key=len)}; a regex may stand for a part, such as .*layers\\.[0-3]\\..*"
                )

    def as_peft(self, factor: float = 1, weights: bool = False) -> dict[str, float]:
        """The entries as adapter_config.json has them, their numbers multiplied. `weights`: layers may be named there
        by their .weight.
        """
        form = r"({})(\.weight)?" if weights else "{}"
        return {form.format(regex): _whole(number * factor) for regex, number in self.entries}

    def _matches(self, regex: str, layer: str) -> bool:
        with ended_in_time(f"--{self.flag} {regex}"):
            return _compiled(regex, self.flag).match(layer) is not None


def of_names(regex: str) -> Pattern:
    """A pattern that matches a layer's name whose end, from a dot on, `regex` does. Raises re.error."""
    return Pattern(rf"(.*\.)?({regex})$")


@lru_cache(maxsize=256)
def _compiled(regex: str, flag: str) -> Pattern:
    try:
        return of_names(regex)
    except re.error as error:
        raise PlanError(f"--{flag} {regex}: is not a regular expression ({error}). Use names such as q_proj.") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _fits(number: float, flag: str) -> bool:
    if flag == RANKS:
        return 1 <= number < LARGEST_RANK and number % 1 == 0
    return 0 < number <= LARGEST_SCALE


def _whole(number: float) -> float:
    return int(number) if number % 1 == 0 else number
