"""Prose in the code is whole: no docstring or comment was cut by a line wrapper or a sentence splitter."""

import io
import re
import tokenize

from tests.support.commands import ROOT
from tests.support.sources import docstrings_of

FOLDERS = ("finetune", "recursive", "dataset", "docs", "benchmarks", "tests")
FILES = sorted([*ROOT.glob("*.py"), *(file for name in FOLDERS for file in (ROOT / name).rglob("*.py"))])
# Whose comments of one word are headings of the lines below them.
HEADINGS = {"finetune/config.py"}


def name_of(file) -> str:
    return str(file.relative_to(ROOT))


def paragraphs(file):
    """(line of the docstring, its paragraphs) of every docstring of a file."""
    return [(line, re.split(r"\n\s*\n", text)) for _, line, text in docstrings_of(file)]


def test_no_docstring_is_cut_within_a_sentence_or_has_a_short_one_as_its_second_paragraph():
    """`Raises PlanError.` belongs to the paragraph before it. A command line stands alone, and so does a reference."""
    for file in FILES:
        for line, parts in paragraphs(file):
            place = f"{name_of(file)}:{line}"
            for part, following in zip(parts, parts[1:], strict=False):
                assert not re.search(r"\b(al|e\.g|i\.e|cf|vs|sec|fig)\.$", part.strip()), place
                # A path at the beginning keeps its case.
                assert not re.match(r"[A-Z][a-z_]+/", following), place
            assert not (len(parts) == 2 and re.match(r"Raises \w+\W*$", parts[1])), place


def test_no_comment_line_is_one_word():
    for file in FILES:
        text = file.read_text()
        if name_of(file) in HEADINGS or not re.search(r"^\s*#\s*\S+\s*$", text, re.M):
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            words = token.string.lstrip("#").split() if token.type == tokenize.COMMENT else []
            if len(words) == 1 and token.line.strip().startswith("#"):
                assert words[0].startswith("noqa"), f"{name_of(file)}:{token.start[0]}: {words[0]}"
