"""Rows that only ask: who has answered already, and what an answer is taken from."""

import pytest

from finetune.data.asking import STANDS_FOR_ANSWER, asking
from finetune.data.blocks import ROLES
from finetune.data.reading.rows import RawDataset


@pytest.mark.parametrize("name", ROLES)
def test_a_conversation_that_the_assistant_ends_under_any_name_is_asked_without_another_answer(name):
    messages = [{"from": "human", "value": "2 + 2?"}, {"from": name, "value": "4"}]
    raw = RawDataset([{"conversations": messages}], ["0"], ("conversations",), (), "", "rows", 0)
    (row,) = asking(raw, {}, only_known=False).rows
    if ROLES[name] == "assistant":
        assert row["conversations"] == messages
    else:
        assert row["conversations"] == [*messages, {"from": "gpt", "value": STANDS_FOR_ANSWER}]


def test_columns_are_read_in_any_case():
    rows = [{"Question ": "2 + 2?", "ANSWER": "4", "Context": "Sums.", "Level": 3}, {"Prompt": "a", "Solution": "b"}]
    rows.append({"question": "c", "Question": "d", "answer": "e"})
    raw = RawDataset(rows, ["0", "1", "2"], ("question",), (), "", "rows", 0)
    found = asking(raw, {}, only_known=True)
    assert found.rows[0] == {"question": "2 + 2?", "answer": "4", "context": "Sums."}
    assert found.rows[1] == {"prompt": "a", "completion": "b"}
    assert found.rows[0].whole is rows[0]
    assert found.rows[2] == {"question": "c", "answer": "e"}
    assert list(found.notices.counts) == [
        f"column {name!r} is not asked: reward functions alone see it" for name in ("Level", "Solution", "Question")
    ]
    (row,) = asking(
        RawDataset([{"question": "c", "answer": "e", "Label": 1, "Options": ["e"]}], ["0"], ("question",), (), "", "rows", 0),
        {},
        only_known=True,
    ).rows
    assert row == {"question": "c", "answer": "e"}  # the others are a function's
    raw = RawDataset([{"Frage": "2?"}], ["0"], ("Frage",), (), "", "rows", 0)
    (row,) = asking(raw, {"question": "frage"}, only_known=True).rows
    assert row == {"frage": "2?", "answer": STANDS_FOR_ANSWER}
