"""Rewards of answers: metrics of finetune.parts.answer_metrics, and functions of the user's own.

A function is called with three lists of one length: prompts and answers as texts, and the rows they came from. It
returns a number for each answer. It is the only code of a user that a run executes.
"""

import copy
import hashlib
import importlib.util
import itertools
import keyword
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from finetune.errors import PlanError, first_line
from finetune.parts.answer_metrics import CHOICE, choices_among, chosen, judges
from finetune.parts.reward import MOST_REWARD, RewardPlan, RewardSource
from finetune.system.patterns import ended_in_time
from finetune.system.terminal import clean
from finetune.system.threads import in_background

UNORDERED = (str, bytes, bytearray, Mapping, Set)  # which are no list of numbers, though they can be read as one
PYTHON = "<python>.py"  # stands for the file of a function that a Python program gave
MOST_SHOWN = 60  # letters of a value in a message
RewardFunction = Callable[[list[str], list[str], list[dict]], Sequence[float]]
GIVEN: dict[str, RewardFunction] = {}  # functions of fine_tune(reward=...), by name


@dataclass(frozen=True)
class Asked:
    """An answer to be rewarded: its prompt, text, what its row expects (None: nothing), the row, and its place."""

    prompt: str
    answer: str
    expected: str | None
    row: dict
    source: str


class Rewards:
    """The rewards of a run, loaded and checked. Raises PlanError, which names the reward and the row."""

    def __init__(self, plan: RewardPlan):
        self.sources = plan.sources
        self.timeout = plan.reward_timeout
        metrics = [source.name for source in self.sources if source.is_metric]
        self.judges = judges(metrics, plan.score_pattern, "reward", "score_pattern")
        self.functions = {s.label: load_function(s, self.timeout) for s in self.sources if not s.is_metric}

    def choose_among(self, answers: list[str]) -> None:
        """Sets the answers that `choice` tells apart. Raises PlanError if there are too few, or too many."""
        if CHOICE in [source.name for source in self.sources if source.is_metric]:
            self.judges[CHOICE] = partial(chosen, choices_among(answers, "reward"))

    def check_expected(self, expected: str, source: str) -> None:
        """Raises PlanError if a metric holds no answer to this row right, not even the expected one."""
        for name, judge in self.judges.items():
            with ended_in_time(f"--reward {name} on the answer of {source}"):
                reachable = judge(expected, expected)
            if not reachable:
                raise PlanError(
                    f"--reward {name}: {source} expects {_short(expected)}, which {name} never holds right. Correct "
                    "the row, or use another reward."
                )

    @property
    def names(self) -> list[str]:
        return [source.label for source in self.sources]

    @property
    def needs_answers(self) -> str | None:
        """The first metric that compares with a row's answer; None if there is none."""
        return next((source.name for source in self.sources if source.is_metric), None)

    def of(self, asked: list[Asked]) -> np.ndarray:
        """[rewards, answers] fp64, without their weights."""
        return np.array([self._values(source, asked) for source in self.sources], np.float64)

    def total(self, values_FN: np.ndarray) -> np.ndarray:
        """[answers]: the weighted sum."""
        return np.array([source.weight for source in self.sources]) @ values_FN

    def _values(self, source: RewardSource, asked: list[Asked]) -> list[float]:
        if source.is_metric:
            return [self._judged(source.name, one) for one in asked]
        return _called(source.label, self.functions[source.label], asked, self.timeout)

    def _judged(self, name: str, asked: Asked) -> float:
        if asked.expected is None:
            raise PlanError(
                f"--reward {name}: {asked.source} has no answer to compare with. Add it, or use a function."
            )
        with ended_in_time(f"--reward {name} on the answer to {asked.source}"):
            return float(self.judges[name](asked.answer, asked.expected))


def given_functions(values: Sequence[str | RewardFunction]) -> list[str]:
    """Words of --reward, with a word for each function of this process. Two of one name get numbers, in their order, so
    that a resumed run finds functions that were defined again.
    """
    named: dict[str, RewardFunction] = {}
    words = []
    for value in values:
        if not callable(value):
            words.append(value)
            continue
        name = getattr(value, "__name__", "")
        if not name.isidentifier() or keyword.iskeyword(name):
            name = "reward"
        word = name
        number = 1
        while word in named:
            number += 1
            word = f"{name}_{number}"
        named[word] = value
        words.append(f"{PYTHON}:{word}")
    GIVEN.update(named)
    return words


def load_function(source: RewardSource, timeout: float) -> RewardFunction:
    """The function that --reward names. Its file is imported, within the time. Raises PlanError."""
    assert source.file is not None, source
    flag = f"--reward {source.file}:{source.name}"
    if source.file == PYTHON:
        if source.name not in GIVEN:
            raise PlanError(
                f"--reward {source.name}: is a function of a Python program, and this process is another. Start the "
                "program with torchrun, or name FILE.py:FUNCTION."
            )
        return GIVEN[source.name]
    path = Path(source.file).expanduser()
    if not path.is_file():
        raise PlanError(f"{flag}: there is no such file. Check the path.")
    apart = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]  # of another folder's file of this name
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}_{apart}", path.resolve())
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        error = in_background(spec.loader.exec_module, module, wait_at_exit=False).exception(timeout)
    except NotInTime:
        raise PlanError(
            f"{flag}: importing the file took more than {timeout:g} s. Make it faster, or raise --reward_timeout."
        ) from None
    if error is not None:
        raise PlanError(f"{flag}: importing the file raised {_described(error)}. Correct it.")
    function = getattr(module, source.name, None)
    if not callable(function):
        names = [
            n for n, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == spec.name
        ]
        there = f"It has {', '.join(names)}" if names else "It has none"
        raise PlanError(f"{flag}: the file has no function of this name. {there}.")
    return function


def _called(name: str, function: RewardFunction, asked: list[Asked], timeout: float) -> list[float]:
    flag = f"--reward {name}"
    values = _in_time(flag, function, asked, timeout)
    if not isinstance(values, list):
        raise PlanError(f"{flag}: returned {_short(values)}. Return a list of one number per answer.")
    if len(values) != len(asked):
        number = str(len(values))
        if len(values) > len(asked):
            number = f"more than {len(asked)}"
        raise PlanError(f"{flag}: returned {number} values for {len(asked)} answers. Return one number for each.")
    for value, one in zip(values, asked, strict=True):
        if not _is_reward(value):
            raise PlanError(
                f"{flag}: gave {_short(value)} for the answer to {one.source}. Return a number up to {MOST_REWARD:g}."
            )
    return [float(value) for value in values]


def _is_reward(value: object) -> bool:
    """True for numbers of Python, numpy and torch of a size that means can be taken of."""
    if getattr(value, "shape", None) == ():  # a tensor or an array of one number
        value = cast(Any, value).item()
    return isinstance(value, numbers.Real | np.number | np.bool_) and bool(abs(value) <= MOST_REWARD)


def _in_time(flag: str, function: RewardFunction, asked: list[Asked], timeout: float) -> Any:
    """Result of the function for copies of the rows: it may change them."""
    future = in_background(_call, function, asked, wait_at_exit=False)
    try:
        error = future.exception(timeout)
    except NotInTime:
        raise PlanError(
            f"{flag}: did not return within {timeout:g} s. Make it faster, or raise --reward_timeout."
        ) from None
    if error is not None:
        where = _where(function, asked, timeout)
        raise PlanError(f"{flag}: raised {_described(error)}{where}. Correct it.")
    return future.result()


def _call(function: RewardFunction, asked: list[Asked]) -> Any:
    rows = [copy.deepcopy(one.row) for one in asked]
    found = function([one.prompt for one in asked], [one.answer for one in asked], rows)
    if isinstance(found, Iterable) and not isinstance(found, UNORDERED):  # a generator runs here too, within the time
        return list(itertools.islice(found, len(asked) + 1))
    return found


def _where(function: RewardFunction, asked: list[Asked], timeout: float) -> str:
    """The row whose answer alone makes the function raise, in words; empty if none is found by halving."""
    while len(asked) > 1:
        half = len(asked) // 2
        asked = next((part for part in (asked[:half], asked[half:]) if _raises(function, part, timeout)), [])
    return f" on the answer to {asked[0].source}" if asked else ""


def _raises(function: RewardFunction, asked: list[Asked], timeout: float) -> bool:
    try:
        return in_background(_call, function, asked, wait_at_exit=False).exception(timeout) is not None
    except NotInTime:
        return False


def _described(error: BaseException) -> str:
    name = type(error).__name__
    text = _text_of(first_line, error)
    if text.startswith(name):
        return text
    return f"{name}: {text}" if text else name


def _short(value: object) -> str:
    text = _text_of(repr, value) or f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _text_of(describe: Callable[[Any], str], value: object) -> str:
    """One line that an object of the user's says of itself; empty if that raises."""
    future = in_background(describe, value)
    if future.exception() is not None:
        return ""
    return clean(" ".join(future.result().split()))
