"""The page on reliability holds the figures of the run that is recorded beside the rig."""

import json

from tests.rig.kinds import KINDS
from tests.rig.options import bound
from tests.rig.report import LAST_RUN, PAGE, with_table


def test_the_table_of_the_page_is_the_recorded_run():
    page = PAGE.read_text()
    assert with_table(page, json.loads(LAST_RUN.read_text())) == page, "run python -m tests.rig.report outputs/rig.json"


def test_every_kind_of_case_has_a_row_on_the_page():
    assert all(f"| {name} |" in PAGE.read_text() for name in KINDS)


def test_the_bound_of_a_row_is_three_in_n_if_nothing_failed():
    assert bound(dict(cases=200, failed=0, tried=1000)) == "0.30%"
    assert bound(dict(cases=200, failed=1, tried=1000)) == ""
