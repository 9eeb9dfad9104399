"""How dense the lines of the package are, as dev/count_tokens.py counts it."""

import ast
from collections import Counter

from dev.count_tokens import density, num_tokens
from tests.test_layering import trees


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
