"""The plan of data: what is refused before a file is read, and --context_length auto."""

import dataclasses

import pytest

from backend_manager import Backend
from finetune.data.lengths import DataSample
from finetune.errors import PlanError
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from finetune.plan.resume import inherited_from_checkpoint
from tests.support.planned import GIB, SMALL
from tests.support.plans import NOW, adjustment, capabilities, plan_of


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"columns": "prompt"}, "--columns prompt: 'prompt' is not FIELD=COLUMN. Use prompt=A,completion=B."),
        ({"columns": "nose=a"}, "--columns nose=a: 'nose' is not a field of any format. Use messages, system, tools,"),
        ({"columns": "prompt=a,prompt=b"}, "--columns prompt=a,prompt=b: 'prompt' is given twice. Give it one column."),
        ({"columns": "prompt=A", "ignore_columns": "a"}, "--ignore_columns A: --columns uses it."),
        (
            {"window_overlap": 8, "overlong": "drop"},
            "--window_overlap 8: --overlong drop makes no windows. Omit one of them.",
        ),
        (
            {"window_overlap": 33, "context_length": 64},
            "--window_overlap 33: must be at most half of --context_length 64. Use 32 or less.",
        ),
    ],
)
def test_data_flags_that_contradict_themselves_are_refused(flags, line):
    with pytest.raises(PlanError) as error:
        plan_of(**flags)
    assert str(error.value).startswith(line)


def planned(lengths, gib=64, shape=SMALL, inherited=None, **flags):
    caps = capabilities(memory_bytes=int(gib * GIB))
    sample = None if lengths is None else DataSample(lengths, len(lengths))
    facts = Facts(Backend.CPU, caps, shape, inherited, sample=lambda data: sample)
    return resolve_plan({"train_type": "lora", "output_dir": "o", **flags}, facts, NOW)


def test_auto_is_what_99_percent_of_the_rows_fit_in():
    plan = planned((100,) * 990 + (190,) * 9 + (9000,))
    assert plan.settings.context_length == 192
    assert adjustment(plan, "context_length").reason == (
        "99 % of the 1,000 rows read have at most 190 tokens; a multiple of 64"
    )
    assert planned((10,)).settings.context_length == 64


@pytest.mark.parametrize(("longest", "length"), [(512, 512), (600, 640), (700, 704), (9000, 576)])
def test_auto_keeps_all_rows_where_that_costs_little(longest, length):
    plan = planned((560,) * 990 + (longest,)) if longest > 512 else planned((100,) * 990 + (longest,))
    assert plan.settings.context_length == length


def test_auto_is_at_most_the_models_limit_and_what_memory_allows():
    plan = planned((9000,))
    assert plan.settings.context_length == 4096
    assert adjustment(plan, "context_length").reason.startswith("this model's limit; all of the 1 row read")
    longer = dataclasses.replace(SMALL, context_limit=10**6)
    plan = planned((500_000,), gib=12, shape=longer)
    assert 64 <= plan.settings.context_length < 500_000
    assert adjustment(plan, "context_length").reason.startswith("what memory allows for one row; all of the 1 row read")


def test_a_number_stays_and_auto_without_rows_is_512():
    assert planned((9000,), context_length=128).settings.context_length == 128
    plan = planned(None, context_length="auto")
    assert plan.settings.context_length == 512
    assert adjustment(plan, "context_length").reason == "the rows are not read yet"
    with pytest.raises(PlanError, match="--context_length 8192: exceeds this model's limit of 4096. Use at most 4096."):
        planned((10,), context_length=8192)


def test_a_resumed_run_keeps_its_length_whatever_the_rows_are():
    def unread(settings):
        raise AssertionError("read")

    caps = capabilities(memory_bytes=64 * GIB)
    facts = Facts(Backend.CPU, caps, SMALL, {"context_length": 512}, sample=unread)
    assert resolve_plan({"output_dir": "o"}, facts, NOW).settings.context_length == 512
    assert resolve_plan({"output_dir": "o", "context_length": "auto"}, facts, NOW).settings.context_length == 512


def test_a_run_saved_before_a_setting_keeps_what_it_did():
    settled = plan_of(backend="cpu").to_json()["settled"]
    older = {name: value for name, value in settled.items() if name not in ("overlong", "text_unit")}
    saved = {"requested": {}, "settled": older}
    inherited = inherited_from_checkpoint(saved, "cpu")
    assert (inherited["overlong"], inherited["text_unit"], inherited["context_length"]) == ("keep_end", "line", 512)
    assert "overlong" not in inherited_from_checkpoint({"requested": {}, "settled": settled}, "cpu")
