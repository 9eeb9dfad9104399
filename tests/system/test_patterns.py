"""Searches by patterns of users and of other people's adapters end."""

import re
import time

import pytest

from finetune.adapters.patterns import Patterns
from finetune.adapters.targets import named_targets
from finetune.errors import PlanError
from finetune.estimate.model_cost import named
from finetune.run.scoring import Answer, endless_lines, judged, unreachable_lines
from finetune.system import patterns
from finetune.system.patterns import Pattern

ENDLESS = "(1|11)+$"
TEXT = "1" * 60 + "x"


@pytest.fixture(autouse=True)
def short_limit(monkeypatch):
    monkeypatch.setattr(patterns, "LIMIT_S", 0.2)


def test_an_answer_on_which_a_score_s_pattern_finds_no_end_counts_as_wrong_and_is_named():
    questions = [([1], "12", "x")] * 21
    started = time.monotonic()
    answers = judged(questions, ["12", *[TEXT] * 20], ["exact", "regex"], ENDLESS, str)
    assert time.monotonic() - started < 10  # 0.1 s a search after the first
    assert not answers[0].is_endless and all(a.is_endless and not a.right["regex"] for a in answers[1:])
    assert endless_lines(answers, "pattern", ENDLESS) == [
        f"note: --pattern {ENDLESS}: finds no end on row 2, 3, 4, 5, 6, 7, 8, 9 and 12 more, counted as wrong. "
        "Write it without a repetition inside another, such as (a|aa)+."
    ]
    assert endless_lines(answers[:1], "pattern", ENDLESS) == []


def test_a_row_without_end_hides_no_row_that_cannot_be_right():
    answers = [Answer(f"{i}", "", expected, "", {}, False) for i, expected in enumerate(["x", TEXT, "y", "11"])]
    assert unreachable_lines(answers, ["regex"], "metric", ENDLESS) == [
        "note: --metric regex: no answer to row 1, 3 is right, not even the expected one"
    ]


def test_patterns_of_adapters_and_of_layers_that_find_no_end_are_refused():
    config = dict(r=4, lora_alpha=8, rank_pattern={ENDLESS: 8})
    with pytest.raises(PlanError, match=f"^a.json: rank_pattern and alpha_pattern on {TEXT}: the pattern finds no end"):
        Patterns(config, "a.json").of(TEXT)
    for matches in (lambda: named_targets([TEXT], ENDLESS, "unknown"), lambda: named(ENDLESS, TEXT)):
        with pytest.raises(PlanError, match="^--lora_target_modules .*: the pattern finds no end in 0.2 s"):
            matches()


def test_a_pattern_is_one_of_re_and_finds_what_re_finds():
    for text in ("(", r"\p{L}", "(?|a|b)", "a**"):
        with pytest.raises(re.error):
            Pattern(text)
    for text in (
        r"#### (\S+)",
        r"a*",
        r"(?i)straße|(b)?",
        r"(?<=x)\d{2,}",
        r"^\w+$",
        r"[\w-]+",
        r"(?m)^.$",
        r"(a|ab)(c|bcd)",
    ):
        for subject in ("#### 12 #### x13", "aab x12 STRASSE b", "abcd", "", "a\nb\n"):
            mine = [(m.span(), m.groups()) for m in Pattern(text).finditer(subject)]
            assert mine == [(m.span(), m.groups()) for m in re.finditer(text, subject)], (text, subject)
            assert bool(Pattern(text).fullmatch(subject)) == bool(re.fullmatch(text, subject))
            assert bool(Pattern(text).match(subject)) == bool(re.match(text, subject))


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"x{e}", ["x", "y", "x{e}"]),
        (r"\\frac{d}{2}", [r"\frac{d}{2}", r"\frac22", "x"]),
        (r"[[:alpha:]]", ["b", ":]", "a]", "[]"]),
        (r"[]{e}]+", ["]", "{e}", "x"]),
        (r"[^]a]{2}", ["bb", "]a"]),
        (r"a{2,3}b{,2}\{1\}", ["aabb{1}", "aaa{1}", "a{1}"]),
        (r"\N{DIGIT ONE}{2}[\]{]", ["11]", "11{", "1{"]),
    ],
)
def test_braces_and_brackets_mean_what_they_mean_to_re(pattern, texts):
    for text in texts:
        ours, theirs = (bool(p.fullmatch(text)) for p in (Pattern(pattern), re.compile(pattern)))
        assert ours == theirs, text
