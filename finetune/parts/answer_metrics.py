"""Metrics of answers: what each word of --metric counts as right. Whitespace around answers never counts, nor does the
thought before an answer where none is expected.
"""

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial

from finetune.errors import PlanError
from finetune.system.patterns import Pattern

# What has several points is a version or an address; a sign after a letter or a digit is a dash.
NUMBER = re.compile(
    r"(?P<dotted>[-+]?\d+(?:\.\d+){2,})|(?:(?<![\w.)])[-+])?"
    r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|[1-9]\d?(?:,\d\d)+,\d{3}(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)(?:[eE][-+]?\d+(?!\w))?"
)
BEFORE_CURRENCY = re.compile(r"(?<![\w.)])-(\\?[$\u20ac\u00a3\u00a5\u20b9])(?=[\d.])")  # -$5
MINUS = "\u2212"  # as typeset text has it
GROUPED = re.compile("(?<=\\d)[\u00a0\u202f\u2009'\u2019](?=\\d{3}(?!\\d))")  # 1'000: between the groups of a number
# A number with both marks, which is read by the last one: 1,234.50.
COMMAS_FIRST = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+\.\d+(?![.,]?\d)")
SPACED = re.compile(r"(?<!\d)\d{1,3}(?: \d{3})+(?!\d)")
POINTED = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:\.\d{3})+(?!\d)")
# A last number that is written as no other notation has it: 1 000 000, 3,5, 1234,567, 1.234,50 or 1 234,5; no pair in
# brackets, no day before its year, which are two.
LOCAL = re.compile(
    r"(?<![\d.,(\[])(?P<number>(?:(?<![\w.)(\[])-)?(?:\d{1,3}(?P<spaces>(?: \d{3})+)(?:,\d+)?"
    r"|(?:0|\d{4,}|\d{1,3}(?P<points>(?:\.\d{3})+)),\d+|\d+,(?:\d{1,2}|\d{5,})))[^\d()\[\]]*$"
)
WORD = re.compile(r"\w+")
# To the next end of a fence, and to the last, as a value may have a fence inside.
FENCES = [re.compile(rf"```(?:json)?({inside})```", re.DOTALL | re.IGNORECASE) for inside in (".*?", ".*")]
NUMERIC_TOLERANCE = Decimal("1e-6")  # relative: 0.1 + 0.2 is 0.3
MOST_TOLERATED = Decimal("1e-3")  # of numbers without an exponent: neighbouring whole numbers are two
NEARLY_ZERO = Decimal("1e-12")
# A thought that a chat template closes at once in an answer without one; its beginning is in the prompt of some.
EMPTY_THOUGHT = re.compile(r"\s*(?:<think>)?\s*</think>\s*")
OPENS, CLOSES = "<think>", "</think>"
METRICS = ("exact", "contains", "numeric", "json", "regex", "choice", "perplexity")
OF_ANSWERS = ("exact", "contains", "numeric", "json", "regex")
WHOLE = ("exact", "contains", "json")  # which are right of all of the expected answer alone
CHOICE = "choice"
MOST_CHOICES = 32


def metrics_of(words: str, pattern: str | None, flag: str = "metric", pattern_flag: str = "pattern") -> list[str]:
    """The names in the value of a flag. Raises PlanError."""
    names = [name.strip() for name in words.split(",") if name.strip()]
    unknown = next((name for name in names if name not in METRICS), None)
    if unknown or not names:
        raise PlanError(f"--{flag} {unknown or words}: is not one. Use {', '.join(METRICS)}.")
    judges(names, pattern, flag, pattern_flag)
    if pattern and "regex" not in names:
        raise PlanError(f"--{pattern_flag} {pattern}: is for --{flag} regex. Add it, or omit the pattern.")
    return list(dict.fromkeys(names))


def without_empty_thought(expected: str) -> str:
    """The answer of a row, without the thought that its chat template closes at once."""
    return EMPTY_THOUGHT.sub("", expected, count=1) if EMPTY_THOUGHT.match(expected) else expected


def after_thought(unlearned: str, expected: str) -> str:
    """The expected answer after a thought of its row, of which it holds the end alone: one without its words."""
    return OPENS + expected if unlearned.lstrip().startswith(OPENS) else expected


def _is_opened_by_prompt(expected: str) -> bool:
    """True if the expected answer closes a thought that it does not open."""
    return without_empty_thought(expected) != expected and not expected.lstrip().startswith(OPENS)


def without_thought(answer: str, expected: str) -> str:
    """The model's answer, without its thought if none is expected; empty of a thought that has no end. A thought begins
    in the answer, or in a prompt whose expected answer closes it.
    """
    thinks = _is_opened_by_prompt(expected) or answer.lstrip().startswith(OPENS)
    if CLOSES in without_empty_thought(expected) or not thinks:
        return answer
    return answer.partition(CLOSES)[2]


def may_become(answer: str, expected: str) -> bool:
    """True if what is generated so far may still become the expected text, or may be a thought before it."""
    wanted = without_empty_thought(expected)
    text = answer.lstrip()
    if not (CLOSES in wanted or CLOSES in answer) and (
        _is_opened_by_prompt(expected) or OPENS.startswith(text[: len(OPENS)])
    ):
        return True
    text = without_thought(answer, expected).lstrip()
    return wanted.strip().startswith(text) or text.strip() == wanted.strip()


def _said(judge: Callable[[str, str], bool], answer: str, expected: str) -> bool:
    """The judgement of what is said, thoughts aside."""
    return judge(without_thought(answer, expected), without_empty_thought(expected))


def judges(
    metrics: list[str], pattern: str | None, flag: str = "metric", pattern_flag: str = "pattern"
) -> dict[str, Callable[[str, str], bool]]:
    """{metric: (answer, expected) -> right} of those that compare an answer's text. Raises PlanError."""
    found: dict[str, Callable[[str, str], bool]] = {
        "exact": lambda answer, expected: answer.strip() == expected.strip(),
        "contains": lambda answer, expected: _words(expected) in _words(answer),
        "numeric": _same_number,
        "json": _same_json,
    }
    if "regex" in metrics:
        if not pattern:
            raise PlanError(f"--{flag} regex: needs --{pattern_flag}, which finds what is compared in both answers.")
        try:
            compiled = Pattern(pattern)
        except re.error as error:
            raise PlanError(f"--{pattern_flag} {pattern}: is not a regular expression ({error}). Correct it.") from None
        found["regex"] = lambda answer, expected: (
            _found(compiled, answer) is not None and _found(compiled, answer) == _found(compiled, expected)
        )
    return {name: partial(_said, found[name]) for name in metrics if name in OF_ANSWERS}


def choices_among(answers: list[str], flag: str = "metric") -> list[str]:
    """The distinct answers, in order. Raises PlanError unless there are a few of them."""
    found = list(dict.fromkeys(answer.strip() for answer in answers))
    if not 2 <= len(found) <= MOST_CHOICES:
        raise PlanError(
            f"--{flag} choice: the rows have {len(found)} distinct answers, of which the likeliest is taken; 2 to "
            f"{MOST_CHOICES} are. Use another metric."
        )
    return found


def chosen(choices: list[str], answer: str, expected: str) -> bool:
    """True if the expected one comes first of the choices in the answer; of two at one place the longer counts.

    A choice is found by its words. One without words, or whose words are another's too (C, C++), is found by its text.
    """
    fold: Callable[[str], str] = str.casefold
    if len(set(map(fold, choices))) < len(choices):  # A and a
        fold = str
    answer = without_thought(answer, expected)
    expected = without_empty_thought(expected)
    words = [WORD.findall(fold(choice)) for choice in choices]
    found = []
    for choice, own in zip(choices, words, strict=True):
        if own and words.count(own) == 1:
            pattern = r"\b" + r"\W+".join(own) + r"\b"
        else:
            pattern = _as_text(fold(choice))
        match = re.search(pattern, fold(answer))
        if match:
            found.append((match.start(), -len(choice), choice))
    return bool(found) and min(found)[2] == expected.strip()


def _as_text(choice: str) -> str:
    """A pattern of this text, which begins and ends no inner part of a word."""
    pattern = re.escape(choice)
    if WORD.match(choice):
        pattern = rf"\b{pattern}"
    if WORD.match(choice[-1]):
        pattern = rf"{pattern}\b"
    return pattern


def _words(text: str) -> str:
    """Casefolded text with single spaces between words."""
    return " ".join(text.casefold().split())


def _plain(text: str) -> str:
    """The text, with a hyphen for a minus, and without what stands between the groups of a number."""
    return BEFORE_CURRENCY.sub(r"\1-", GROUPED.sub("", text.replace(MINUS, "-")))


def _in_points(text: str, local: re.Match | None) -> str:
    """The plain text, its numbers as 1000000.5 where they are written as the local one is."""
    if local is None:
        return text
    text = COMMAS_FIRST.sub(lambda number: number[0].replace(",", ""), text)
    if local["spaces"]:
        text = SPACED.sub(lambda groups: groups[0].replace(" ", ""), text)
    if "," in local["number"]:
        text = POINTED.sub(lambda groups: groups[0].replace(".", ""), text)
        text = re.sub(r"(?<=\d),(?=\d)", ".", text)
    return text


def _numbers(text: str) -> list[str]:
    """The numbers of a text; empty ones in the place of those too large for a float."""
    found = [match.group().replace(",", "") for match in NUMBER.finditer(text) if match["dotted"] is None]
    return [number if math.isfinite(float(number)) else "" for number in found]


def _same_number(answer: str, expected: str) -> bool:
    """True if the last number of both is the same. What may be one number, or several without a space between, as 3,5,
    is also found as these, with a space.
    """
    answer = _plain(answer)
    expected = _plain(expected)
    local = LOCAL.search(expected)
    found = _numbers(_in_points(answer, local))
    wanted = _numbers(_in_points(expected, local))
    if _are_same(found[-1:], wanted[-1:]):
        return True
    parts = _numbers(local["number"]) if local and local["number"].count(".") < 2 else []
    return _are_same(found[-len(parts) :], parts)


def _are_same(ones: list[str], others: list[str]) -> bool:
    """True if both are the same numbers, and there are some."""
    return len(ones) == len(others) > 0 and all(map(_is_same, ones, others))


def _is_same(one: str, other: str) -> bool:
    if not (one and other):
        return False
    first, second = (Decimal(number) if float(number) else Decimal(0) for number in (one, other))
    if not (first and second):
        return abs(first - second) <= NEARLY_ZERO
    tolerance = NUMERIC_TOLERANCE * max(abs(first), abs(second))
    if "e" not in (one + other).lower():
        tolerance = min(tolerance, MOST_TOLERATED)
    return abs(first - second) <= tolerance


def _same_json(answer: str, expected: str) -> bool:
    """True if both are JSON of the same value; an answer may be in a code fence. 1 equals 1.0, not true."""
    wanted = _canonical_text(expected)
    fenced = [match[1] for fence in FENCES if (match := fence.search(answer))]
    return wanted is not None and any(_canonical_text(text) == wanted for text in (answer, *fenced))


def _canonical_text(text: str) -> str | None:
    """JSON in one form; None of what is not JSON, or nested too deeply to be read."""
    try:
        return _canonical(json.loads(text.strip()))
    except (ValueError, RecursionError):
        return None


def _canonical(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_canonical(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


def _found(pattern: Pattern, text: str) -> str | None:
    r"""The first group of the last match that is not empty, or all of it: `.*` and `\d*` match nothing at each end."""
    matches = [match for match in pattern.finditer(text) if match.group()]
    if not matches:
        return None
    group = matches[-1].group(min(pattern.groups, 1))
    return (group or "").strip() or None
