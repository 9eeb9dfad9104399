"""The source of the project itself, each file parsed and walked once per process: for the tests of its style."""

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(tree_of(file)))


@cache
def docstrings_of(file: Path) -> tuple[tuple[str, int, str], ...]:
    """(name of what is documented, "" for the module; line; text) of each docstring of a file."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return tuple(
        (getattr(node, "name", ""), node.body[0].lineno, text)
        for node in nodes_of(file)
        if isinstance(node, documented) and (text := ast.get_docstring(node))
    )
