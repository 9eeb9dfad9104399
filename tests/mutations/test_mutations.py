"""The mutations, without running them: every promise has one, and each still finds the text that it breaks."""

import ast

import pytest
import yaml

from tests.mutations.mutation import Mutation
from tests.mutations.run import Result, failures, marked_tests, page_of, rows_of
from tests.mutations.table import MUTATIONS
from tests.promises.test_checklist import NUMBERS
from tests.support.commands import ROOT

IDS = [f"{kind}_{i:02}" for kind, last in NUMBERS.items() for i in range(1, last + 1)]


def test_every_promise_has_a_mutation_and_tests_to_run():
    assert {mutation.promise for mutation in MUTATIONS} == set(IDS)
    assert all(marked_tests(set(IDS)).values())
    assert len({(m.promise, m.what) for m in MUTATIONS}) == len(MUTATIONS)


def test_each_mutation_applies_once_outside_of_the_tests_and_leaves_a_file_that_is_read():
    for mutation in MUTATIONS:
        assert not mutation.file.startswith("tests/")
        text = mutation.applied_to((ROOT / mutation.file).read_text(encoding="utf-8"))
        if mutation.file.endswith(".py"):
            ast.parse(text, mutation.what)
        if mutation.file.endswith(".yaml"):
            yaml.safe_load(text)


def test_a_mutation_whose_text_is_not_there_once_is_refused(tmp_path):
    mutation = Mutation("BM_01", "b is c", "a.py", "b", "c")
    for text in ("a", "b b"):
        with pytest.raises(ValueError, match="BM_01, b is c: a.py has"):
            mutation.applied_to(text)
    (tmp_path / "a.py").write_text("a b")
    before = mutation.apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "a c"
    mutation.undo(tmp_path, before)
    assert (tmp_path / "a.py").read_text() == "a b"


def test_what_pytest_printed_is_read_for_the_test_that_failed():
    assert failures("1 passed") == (None, None)
    printed = "FAILED tests/test_a.py::test_b[x y] - AssertionError: c - d\n1 failed"
    assert failures(printed) == ("tests/test_a.py::test_b[x y]", None)
    assert failures("ERROR tests/test_a.py - ImportError: x\n") == (None, "ERROR tests/test_a.py - ImportError: x")


def test_the_list_keeps_the_rows_of_mutations_that_were_not_tried_again():
    first, second = MUTATIONS[:2]
    page = page_of([Result(first, "tests/a.py::test_a[x | y]", "", 2.4), Result(second, None, "no end", 300.0)], {})
    assert "1 of 2 promises noticed; not: BM-02. 2 mutations, 5 min in all." in page
    again = page_of([Result(second, "tests/b.py::test_b", "", 7.0)], rows_of(page))
    assert "2 of 2 promises noticed. 2 mutations" in again
    assert rows_of(again)[first.promise, first.what] == rows_of(page)[first.promise, first.what]
