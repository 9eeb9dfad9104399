"""Rewards of answers: metrics of finetune.parts.answer_metrics, and functions of the user's own.

A function is called with three lists of one length: prompts and answers as texts, and the rows they came from. It
returns a number for each answer. It is the only code of a user that a run executes.
"""

import contextlib
import copy
import hashlib
import importlib.util
import inspect
import itertools
import keyword
import numbers
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from functools import partial
from importlib.abc import Loader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from finetune.errors import PlanError, first_line
from finetune.parts.answer_metrics import CHOICE, choices_among, chosen, judges
from finetune.parts.reward import MOST_REWARD, PYTHON, RewardPlan, RewardSource
from finetune.system.outside import ended_after, not_exited
from finetune.system.patterns import ended_in_time
from finetune.system.process import restorer_of_folder
from finetune.system.terminal import clean, reopened
from finetune.system.threads import in_background

UNORDERED = (str, bytes, bytearray, Mapping, Set)  # which are no list of numbers, though they can be read as one
LOCKED_S = 10.0  # beyond twice --reward_timeout: of a call, and of the halving after an error
MOST_SHOWN = 60  # letters of a value in a message
DESCRIBED_S = 1.0  # seconds that a value or an error may take to say what it is
RewardFunction = Callable[[list[str], list[str], list[dict]], Sequence[float]]
GIVEN: dict[str, RewardFunction] = {}  # functions of this call of fine_tune(reward=...), by name


@dataclass(frozen=True)
class Asked:
    """An answer to be rewarded: its prompt, text, what its row expects (None: nothing), the row, and its place."""

    prompt: str
    answer: str
    expected: str | None
    row: dict
    source: str


class Rewards:
    """The rewards of a run, loaded and checked. Raises PlanError, which names the reward and the row.

    `runs_code`: False for a dry run, which has no functions.
    """

    def __init__(self, plan: RewardPlan, runs_code: bool = True):
        self.sources = plan.sources
        self.timeout = plan.reward_timeout
        metrics = [source.name for source in self.sources if source.is_metric]
        self.judges = judges(metrics, plan.score_pattern, "reward", "score_pattern")
        self.functions: dict[str, RewardFunction] = {}
        self.models: dict[str, Callable[[list[Asked]], list[float]]] = {}  # once they are opened
        self.standing = 0  # bytes of the models
        self.reading = 0  # and of a forward beside them, at most
        for source in self.sources:
            if source.is_function and runs_code:
                with self._ended(source):
                    self.functions[source.label] = load_function(source, self.timeout)

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
        if source.is_model:
            return self.models[source.label](asked)
        with self._ended(source):
            return _called(source.label, self.functions[source.label], asked, self.timeout)

    @contextlib.contextmanager
    def _ended(self, source: RewardSource) -> Iterator[None]:
        """A context that is ended from outside where the function's thread leaves no other a moment to end it, and
        whose end is in the working directory of its start: the run's own paths may be relative. os._exit ends no run.
        """
        line = (
            f"error: --reward {source.label[:200]}: did not return within {self.timeout:g} s, nor let others run, "
            "as a search of re that finds no end. Correct it; the run goes on with --resume auto."
        )
        back = restorer_of_folder()
        try:
            with ended_after(2 * self.timeout + LOCKED_S, line), not_exited():
                yield
        finally:
            back()

    def _judged(self, name: str, asked: Asked) -> float:
        if asked.expected is None:
            raise PlanError(
                f"--reward {name}: {asked.source} has no answer to compare with. Add it, or use a function."
            )
        with ended_in_time(f"--reward {name} on the answer to {asked.source}"):
            return float(self.judges[name](asked.answer, asked.expected))


def given_functions(values: Sequence[str | RewardFunction]) -> list[str]:
    """Words of --reward, with a word for each function of this call; those of earlier calls are forgotten. Two of one
    name get numbers, in their order, so that a resumed run finds functions that were defined again.
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
    GIVEN.clear()
    GIVEN.update(named)
    return words


def load_function(source: RewardSource, timeout: float) -> RewardFunction:
    """The function that --reward names. Its file is imported, within the time. Raises PlanError."""
    assert source.file is not None, source
    flag = f"--reward {source.file}:{source.name}"
    if source.file == PYTHON:
        if source.name not in GIVEN:
            raise PlanError(
                f"--reward {source.name}: is a function of a Python program, and this call does not give it. Give it "
                "again as reward=, start the program with torchrun for several ranks, or name FILE.py:FUNCTION."
            )
        return GIVEN[source.name]
    path = Path(source.file).expanduser()
    source.check_file()
    apart = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]  # of another folder's file of this name
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}_{apart}", path.resolve())
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        future = in_background(_imported, spec.loader, module, source.name, wait_at_exit=False)
        error = future.exception(timeout)
    except NotInTime:
        raise PlanError(
            f"{flag}: importing the file took more than {timeout:g} s. Make it faster, or raise --reward_timeout."
        ) from None
    finally:
        _check_output(flag)
    if error is not None:
        sys.modules.pop(spec.name, None)
        raise PlanError(f"{flag}: importing the file raised {_described(error)}. Correct it.")
    function = future.result()
    if not callable(function):
        own = {name: value for name, value in vars(module).items() if type(value) is FunctionType}
        names = [name for name, value in own.items() if value.__module__ == spec.name]
        there = f"It has {', '.join(names)}" if names else "It has none"
        raise PlanError(f"{flag}: the file has no function of this name. {there}.")
    if type(function) is FunctionType:
        _check_parameters(function, flag)
    return function


def _check_parameters(function: FunctionType, flag: str) -> None:
    """Raises PlanError for a plain function that cannot be called as rewards are."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it says something else of itself
        return
    try:
        signature.bind([], [], [])
    except TypeError:
        names = ", ".join(signature.parameters)
        raise PlanError(
            f"{flag}: takes ({clean(names)[:MOST_SHOWN]}), but is called with prompts, answers and rows, a list each. "
            f"Write def {function.__name__}(prompts, answers, rows)."
        ) from None


def _imported(loader: Loader, module: ModuleType, name: str) -> Any:
    """The module's value of this name, once it is executed; None if it has none."""
    loader.exec_module(module)
    return getattr(module, name, None)


class Unusable(Exception):
    """A function returned something else than rewards; the text says which in a line's words."""


def _called(name: str, function: RewardFunction, asked: list[Asked], timeout: float) -> list[float]:
    """Rewards of a function. Its code, and that of the objects which it returns, runs in a thread, within the time."""
    flag = f"--reward {name}"
    future = in_background(_returned, function, asked, wait_at_exit=False)
    try:
        error = future.exception(timeout)
    except NotInTime:
        raise PlanError(
            f"{flag}: did not return within {timeout:g} s. Make it faster, or raise --reward_timeout."
        ) from None
    finally:
        _check_output(flag)
    if type(error) is Unusable:
        raise PlanError(f"{flag}: {error}") from None
    if error is not None:
        where = _where(function, asked, timeout)
        raise PlanError(f"{flag}: raised {_described(error)}{where}. Correct it.")
    return future.result()


def _check_output(flag: str) -> None:
    """Raises PlanError if code of the user's has closed what the run prints to, which is open again then."""
    closed = reopened()
    if closed:
        names = " and ".join(f"sys.{name}" for name in closed)
        raise PlanError(f"{flag}: closed {names}, which the run prints to. Leave it open.")


def _returned(function: RewardFunction, asked: list[Asked]) -> list[float]:
    """Rewards that the function returns for copies of the rows: it may change them."""
    rows = [copy.deepcopy(one.row) for one in asked]
    found: Any = function([one.prompt for one in asked], [one.answer for one in asked], rows)
    if not isinstance(found, Iterable) or isinstance(found, UNORDERED):
        raise Unusable(f"returned {_short(found)}. Return a list of one number per answer.")
    values = list(itertools.islice(found, len(asked) + 1))
    if len(values) != len(asked):
        number = str(len(values))
        if len(values) > len(asked):
            number = f"more than {len(asked)}"
        raise Unusable(f"returned {number} values for {len(asked)} answers. Return one number for each.")
    rewards = []
    for value, one in zip(values, asked, strict=True):
        reward = _number(value)
        if reward is None:
            raise Unusable(
                f"gave {_short(value)} for the answer to {one.source}. Return a number up to {MOST_REWARD:g}."
            )
        rewards.append(reward)
    return rewards


def _number(value: Any) -> float | None:
    """A number of Python, numpy or torch, of a size that means can be taken of; None for anything else."""
    if getattr(value, "shape", None) == ():  # a tensor or an array of one number
        value = value.item()
    if isinstance(value, numbers.Real | np.number | np.bool_) and abs(value) <= MOST_REWARD:
        return float(value)
    return None


def _where(function: RewardFunction, asked: list[Asked], timeout: float) -> str:
    """The row whose answer alone makes the function raise, in words; empty if halving finds none within the time."""
    end = time.monotonic() + timeout
    while len(asked) > 1:
        half = len(asked) // 2
        asked = next((part for part in (asked[:half], asked[half:]) if _raises(function, part, end)), [])
    return f" on the answer to {asked[0].source}" if asked else ""


def _raises(function: RewardFunction, asked: list[Asked], end: float) -> bool:
    """True if the function raises for these answers before the time `end`."""
    if time.monotonic() >= end:
        return False
    future = in_background(_returned, function, asked, wait_at_exit=False)
    try:
        error = future.exception(max(0.0, end - time.monotonic()))
    except NotInTime:
        return False
    return error is not None and type(error) is not Unusable


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
    """One line that an object of the user's says of itself; empty if that raises, or takes longer than DESCRIBED_S."""
    future = in_background(lambda: clean(" ".join(describe(value).split())), wait_at_exit=False)
    try:
        error = future.exception(DESCRIBED_S)
    except NotInTime:
        return ""
    if error is not None:
        return ""
    return future.result()
