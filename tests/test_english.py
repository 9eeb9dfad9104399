"""Prose in the code is whole: no docstring or comment was cut by a line wrapper or a sentence splitter."""

import ast
import io
import re
import tokenize

import pytest

from tests.support.commands import ROOT

FOLDERS = ("finetune", "recursive", "dataset", "docs", "benchmarks", "tests")
FILES = sorted([*ROOT.glob("*.py"), *(file for name in FOLDERS for file in (ROOT / name).rglob("*.py"))])
# Comments of one word that are headings of the lines below them.
HEADINGS = {"finetune/config.py": None}


def name_of(file) -> str:
    return str(file.relative_to(ROOT))


def paragraphs(file):
    """(line of the docstring, its paragraphs) of every docstring of a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, re.split(r"\n\s*\n", text)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_docstring_is_cut_within_a_sentence(file):
    for line, parts in paragraphs(file):
        for part, following in zip(parts, parts[1:], strict=False):
            assert not re.search(r"\b(al|e\.g|i\.e|cf|vs|sec|fig)\.$", part.strip()), f"{name_of(file)}:{line}"
            # A path at the beginning keeps its case.
            assert not re.match(r"[A-Z][a-z_]+/", following), f"{name_of(file)}:{line}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_docstring_has_a_short_sentence_as_its_second_paragraph(file):
    """`Raises PlanError.` belongs to the paragraph before it. A command line stands alone, and so does a reference."""
    for line, parts in paragraphs(file):
        alone = len(parts) == 2 and re.match(r"Raises \w+\W*$", parts[1])
        assert not alone, f"{name_of(file)}:{line}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_comment_line_is_one_word(file):
    headings = HEADINGS.get(name_of(file), set())
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        words = token.string.lstrip("#").split() if token.type == tokenize.COMMENT else []
        if len(words) == 1 and token.line.strip().startswith("#") and headings is not None:
            assert words[0] in headings or words[0].startswith("noqa"), f"{name_of(file)}:{token.start[0]}: {words[0]}"
