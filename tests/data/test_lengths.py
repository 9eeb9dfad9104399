"""The sample of rows from which open settings follow."""

import pytest

from finetune.data.lengths import SAMPLE_ROWS, data_sample, one_of_each
from tests.support.chats import FORGETFUL
from tests.support.plans import plan_of
from tests.support.rows import jsonl


def test_rows_whose_kinds_alternate_are_sampled_as_they_are_mixed(tiny_model, tmp_path):
    """Every fourth is short; at equal distances of four all or none would be."""
    rows = [{"prompt": "Say it: ", "completion": "one two " * (20 if i % 4 else 1)} for i in range(4 * SAMPLE_ROWS)]
    sample = data_sample(plan_of(dataset=str(jsonl(tmp_path / "rows.jsonl", rows))).data, tiny_model, False)
    assert len(sample.lengths) == SAMPLE_ROWS
    short = sum(n < max(sample.lengths) / 2 for n in sample.lengths)
    assert short == pytest.approx(SAMPLE_ROWS / 4, rel=0.2)


def test_answers_that_are_documents_of_their_own_are_the_rows_that_a_plan_counts(tiny_model, tmp_path):
    turns = [{"role": role, "content": f"|{n}"} for n in range(4) for role in ("user", "assistant")]
    (tmp_path / "forgetful.jinja").write_text(FORGETFUL)
    for template, expected in ((str(tmp_path / "forgetful.jinja"), 4), ("chatml", 1)):
        given = dict(chat_template=template, dataset=str(jsonl(tmp_path / "chats.jsonl", [{"messages": turns}] * 20)))
        sample = data_sample(plan_of(**given).data, tiny_model, False)
        assert sample.num_rows == 20 and sample.documents_per_row == expected
    rows = [{"prompt": "Say it: ", "completion": "one" * (i % 2)} for i in range(20)]
    for preference, expected in (("none", 0.5), ("dpo", 1), ("kto", 2)):
        if preference != "none":
            rows = [{"prompt": "Q ", "chosen": "a", "rejected": "b"}] * 20
        given = dict(preference=preference, dataset=str(jsonl(tmp_path / "rows.jsonl", rows)))
        assert data_sample(plan_of(**given).data, tiny_model, False).documents_per_row == expected


@pytest.mark.parametrize(("count", "stride"), [(0, 1), (5, 1), (10, 3), (12, 4), (20_000, 20)])
def test_one_row_of_every_few_is_drawn_and_the_same_ones_each_time(count, stride):
    found = one_of_each(count, stride)
    assert [row // stride for row in found] == list(range(-(-count // stride)))
    assert all(0 <= row < count for row in found) and found == one_of_each(count, stride)
