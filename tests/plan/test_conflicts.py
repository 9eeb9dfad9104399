"""The table of conflicts: its rows name settings that exist, and each refuses by one form of error."""

import pytest

from backend_manager import CAPABILITIES, Backend
from finetune.config import FIELDS
from finetune.errors import PlanError
from finetune.plan.asked import Standing
from finetune.plan.conflicts import ALWAYS, TABLES, Conflict, Values, check, shown
from finetune.plan.facts import Facts

ANY = Values("any", lambda value, default: True)
ROWS = [conflict for conflicts in TABLES.values() for conflict in conflicts]


def plan_of(**flags) -> Standing:
    return Standing.of({"model_name": "m", "dataset": ["d"], **flags}, Facts(Backend.CPU, CAPABILITIES[Backend.CPU]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.flag}, {row.other.text or 'always'}")
def test_every_row_refuses_with_the_flag_its_value_the_fact_and_what_to_do(row):
    plan = plan_of()
    with pytest.raises(PlanError) as error:
        check(plan, (Conflict(row.flag, ANY, ALWAYS, row.why, row.remedy),))
    line = str(error.value)
    assert row.flag in FIELDS and "{" not in line and "\n" not in line
    assert line.startswith(f"--{row.flag} {shown(plan)[row.flag]}: ") and line.endswith(".") and ".." not in line


def test_the_default_settings_are_in_no_conflict():
    for conflicts in TABLES.values():
        check(plan_of(), [row for row in conflicts if row.other.text != "a model without experts"])


def test_only_the_first_conflict_is_told():
    with pytest.raises(PlanError, match="^--streaming true: the number of rows .* Add --max_steps.$"):
        check(plan_of(streaming=True, validation_split=0.1), TABLES["Data"])
