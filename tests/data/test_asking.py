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
