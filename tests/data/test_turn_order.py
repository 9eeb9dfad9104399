"""Messages whose own times say another order than they have are refused."""

import pytest

from finetune.data.columns import RowOptions
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.tokenize import tokenize
from finetune.errors import PlanError
from tests.support.rows import jsonl


def read(tmp_path, tokenizer, times: list[dict], ignored: tuple = ()):
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"turn {i}", **fields} for i, fields in enumerate(times)
    ]
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [{"messages": messages}]))
    return tokenize(raw, RowOptions(ignored=ignored), tokenizer, 512)


@pytest.mark.parametrize(
    "times",
    [
        [{"created_at": 2}, {"created_at": 1}],
        [{"created_at": 1}, {"created_at": 4}, {"created_at": 3}, {"created_at": 2}],
        [{"timestamp": "2024-01-02"}, {"timestamp": "2024-01-01"}],
        [{"createdAt": "2024-01-02T10:02:00Z"}, {"createdAt": "2024-01-02T10:00:00+00:00"}],
        [{"createdAt": f"2024-01-02T10:00:0{second}Z"} for second in (9, 7, 5, 3)],
        [{"ts": 1_700_000_100_000_000}, {"ts": 1_700_000_000_000_000}],
        [{"ts": "1512085990.000216"}, {"ts": "1512085900.000216"}],
        [{"date": 1_700_000_100}, {"date": 1_700_000_000}],
        [{"ts": 1_700_000_100_000}, {"ts": 1_700_000_000_000}],
    ],
)
def test_times_that_fall_are_refused(times, tmp_path, chat_tokenizer):
    (name,) = times[0]
    with pytest.raises(PlanError, match=rf"\.{name}' is before that of a message above it.* --ignore_columns {name}"):
        read(tmp_path, chat_tokenizer, times)
    assert read(tmp_path, chat_tokenizer, times, (name.casefold(),)).num_rows == 1


@pytest.mark.parametrize(
    "times",
    [
        [{"created_at": 1}, {"created_at": 1}, {"created_at": 3}],
        [{"created_at": None}, {"created_at": "now"}, {"timestamp": "2024-01-01"}],
        [{"create_time": 1_700_000_000.9}, {"create_time": 1_700_000_000.2}],
        [{"time": 3.5}, {"time": 1.2}],
        # clocks of two machines, times that stand for none, a zone or a day that is not known, no time at all
        [{"create_time": 1_700_000_003.2}, {"create_time": 1_700_000_000.1}, {"create_time": 1_700_000_030}],
        [{"timestamp": 1_700_000_000}, {"timestamp": 0}, {"timestamp": 1_700_000_005}],
        [{"created_at": "2024-01-01T00:00:00Z"}, {"created_at": "0001-01-01T00:00:00Z"}],
        [{"timestamp": "2024-01-01T12:00:00"}, {"timestamp": "2024-01-01T10:00:05+00:00"}],
        [{"timestamp": "2024-01-01T12:00:00"}, {"timestamp": "2024-01-01"}],
        [{"timestamp": 10**400}, {"timestamp": 1}],
        [{"timestamp": "2024-01-01T10:00:00+02:00"}, {"timestamp": "2024-01-01T09:00:00Z"}],
    ],
)
def test_times_in_order_at_once_or_of_other_things_are_a_line(times, tmp_path, chat_tokenizer):
    assert read(tmp_path, chat_tokenizer, times).num_rows == 1
