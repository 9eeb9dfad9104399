"""Rows as read from a file."""

import pytest

from finetune.data.reading.sources import read_rows
from tests.support.rows import ROWS, jsonl


@pytest.fixture
def raw(tmp_path):
    return read_rows(jsonl(tmp_path / "rows.jsonl", ROWS))
