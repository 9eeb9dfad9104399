"""The sample of rows from which open settings follow."""

import pytest

from backend_manager import Backend
from finetune.data.lengths import SAMPLE_ROWS, data_sample, one_of_each
from finetune.plan.amount import training_rows
from finetune.plan.asked import Asked
from finetune.plan.facts import Facts
from tests.support.chats import FORGETFUL
from tests.support.plans import capabilities, plan_of
from tests.support.rows import jsonl


def test_rows_whose_kinds_alternate_are_sampled_as_they_are_mixed(tiny_model, tmp_path):
    """Every fourth is short; at equal distances of four all or none would be."""
    rows = [{"prompt": "Say it: ", "completion": "one two " * (20 if i % 4 else 1)} for i in range(4 * SAMPLE_ROWS)]
    sample = data_sample(plan_of(dataset=str(jsonl(tmp_path / "rows.jsonl", rows))).data, tiny_model, False)
    assert len(sample.lengths) == SAMPLE_ROWS
    short = sum(n < max(sample.lengths) / 2 for n in sample.lengths)
    assert short == pytest.approx(SAMPLE_ROWS / 4, rel=0.2)


@pytest.mark.parametrize(("answers", "kind"), [(4, "chat"), (1, "chat"), (2, "kto")])
def test_rows_that_a_row_makes_are_counted(make_tokenizer, tmp_path, answers, kind):
    """A conversation whose template rewrites its earlier turns is a row of each answer; a pair with labels is two."""
    make_tokenizer(tmp_path / "model", bos=False, chat_template=FORGETFUL)
    turns = [{"role": role, "content": f"{role}|{i}"} for i in range(answers) for role in ("user", "assistant")]
    row = {"messages": turns}
    if kind == "kto":
        row = {"prompt": "q", "chosen": "a b", "rejected": "b a"}
    file = jsonl(tmp_path / "rows.jsonl", [row] * 20)
    plan = plan_of(dataset=str(file), **({"preference": "kto"} if kind == "kto" else {}))
    sample = data_sample(plan.data, tmp_path / "model", False)
    assert sample.num_rows == 20 and sample.per_row == answers
    facts = Facts(Backend.CPU, capabilities(Backend.CPU))
    assert training_rows(Asked.of({"dataset": str(file)}, facts), sample) == 20 * answers


@pytest.mark.parametrize(("count", "stride"), [(0, 1), (5, 1), (10, 3), (12, 4), (20_000, 20)])
def test_one_row_of_every_few_is_drawn_and_the_same_ones_each_time(count, stride):
    found = one_of_each(count, stride)
    assert [row // stride for row in found] == list(range(-(-count // stride)))
    assert all(0 <= row < count for row in found) and found == one_of_each(count, stride)
