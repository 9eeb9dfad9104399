"""Style of the package: density of lines (dev/count_tokens.py), types of parameters, English of docstrings."""

import ast
import re
from collections import Counter

from dev.count_tokens import density, num_tokens
from tests.support.commands import ROOT
from tests.support.sources import docstrings_of
from tests.test_layering import SHIPPED, trees

# Prepositions, pronouns, question and relative words, with which neither a noun phrase nor a verb begins.
OPENINGS = re.compile(
    "(about|after|as|at|before|below|beside|between|both|by|during|for|from|how|if|in|inside|into|it|its|like|of|on|over"
    "|see|so|than|that|they|those|through|to|under|until|what|when|where|whether|which|while|who|whose|why|with|within"
    r"|without)\b",
    re.I,
)
# "that" counts as a demonstrative too, and "of which" once.
RELATIVE_WORD = re.compile(r"\b(that|what|whose|which|those)\b", re.I)
MAX_RELATIVE_WORDS = 2
SENTENCE_END = re.compile(r"(?<=[.:;?!])\s+|\n\n")


def test_assignments_and_conditions_are_spread_out():
    found: Counter = Counter()
    for tree in trees().values():
        found.update(density(tree))
    assert found["parallel"] <= 9 * found["statements"] / 1000
    assert found["conditional"] <= 25 * found["statements"] / 1000
    assert found["unpacked"] == 0


def test_each_kind_of_dense_line_is_counted():
    text = '''"""Docstring."""

def f(x):
    """Docstring."""
    a, b = x, 1
    how = (a, b)
    c, d = f(x)  # unpacks a result
    return g(*how) if c else d
'''
    found = density(ast.parse(text))
    assert (found["parallel"], found["conditional"], found["unpacked"]) == (1, 1, 1)
    assert found["statements"] == 5 and num_tokens(text, ast.parse(text)) == 38


def test_every_parameter_of_a_public_function_has_a_type():
    untyped = [name for module, tree in trees().items() for name in untyped_parameters(module, tree)]
    public = [name for name in untyped if not name.split(":")[1].startswith("_")]
    assert public == []
    assert len(untyped) <= 62  # those of Triton's kernels, whose types Triton decides


def test_a_parameter_without_a_type_is_found():
    text = """
class Rows:
    def take(self, ids: list, *more, width: int, **how: int):
        def inner(x): ...

    def _of(cls, part): ...
"""
    assert untyped_parameters("m", ast.parse(text)) == ["m:take:more", "m:_of:part", "m:inner:x"]


def test_mypy_checks_every_room_and_script():
    """An error that is silenced has a code and a reason."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    mypy = text.partition("[tool.mypy]")[2].partition("\n[")[0]
    shipped = {module.split(".")[0] for module in trees()}
    assert shipped <= {name.removesuffix(".py") for name in re.findall(r'^    "(.*)",$', mypy, re.M)}
    assert "check_untyped_defs = true" in mypy and "tool.mypy.overrides" not in text
    silenced = []
    for path in SHIPPED.values():
        lines = path.read_text(encoding="utf-8").splitlines()
        silenced += [line for line in lines if "type: ignore" in line or "# mypy:" in line]
    assert len(silenced) <= 20
    assert all(re.search(r"ignore\[[\w-]+\]  # \w|disable-error-code=", line) for line in silenced), silenced


def test_docstrings_begin_with_the_returned_noun_or_a_verb():
    assert [place for place, text in docstrings() if OPENINGS.match(text.lstrip("([{`"))] == []


def test_a_sentence_of_a_docstring_has_at_most_two_relative_words():
    assert [place for place, text in docstrings() if most_relative_words(text) > MAX_RELATIVE_WORDS] == []


def test_openings_and_relative_words_are_found():
    assert OPENINGS.match("Of a step.") and OPENINGS.match("what it reads.") and not OPENINGS.match("Offset of a row.")
    assert most_relative_words("Rows that train. Those whose end, which was cut, is lost.") == 3


def most_relative_words(text: str) -> int:
    return max(len(RELATIVE_WORD.findall(sentence)) for sentence in SENTENCE_END.split(text))


def docstrings() -> list[tuple[str, str]]:
    """(module:name, text) of each docstring of what is shipped, and of the examples."""
    examples = {str(p.relative_to(ROOT)): p for p in (ROOT / "examples").rglob("*.py")}
    return [
        (f"{module}:{name}", text)
        for module, file in (SHIPPED | examples).items()
        for name, _, text in docstrings_of(file)
    ]


def untyped_parameters(module: str, tree: ast.Module) -> list[str]:
    """module:function:parameter of each without an annotation; lambdas have none."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        a = node.args
        each = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(p for p in (a.vararg, a.kwarg) if p)]
        names = [p.arg for p in each if p.annotation is None and p.arg not in ("self", "cls")]
        found += [f"{module}:{node.name}:{name}" for name in names]
    return found
