"""How dense the lines of the package are, as dev/count_tokens.py counts it; and that parameters have types."""

import ast
import re
from collections import Counter

from dev.count_tokens import density, num_tokens
from tests.support.commands import ROOT
from tests.test_layering import SHIPPED, trees


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
    assert len(untyped) <= 60  # those of Triton's kernels, whose types Triton decides


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
