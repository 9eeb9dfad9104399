"""What Arrow adds to rows, and that they teach what the same rows as JSON lines do."""

import json
from pathlib import Path

import pytest

from finetune.data.columns import RowOptions
from finetune.data.in_memory import as_file
from finetune.data.reading.sources import read_rows
from finetune.data.reading.structs import ADDED_NULLS
from finetune.data.tokens.tokenize import reader_of
from tests.support.rows import jsonl


def call(name: str, **arguments) -> dict:
    schema = {"type": "object", "properties": {key: {"type": "string", "enum": ["x"]} for key in arguments}}
    called = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": [called]}],
        "tools": [{"type": "function", "function": {"name": name, "parameters": schema}}],
    }


CALLS = [
    call("weather", city="Rome"),
    call("add", a="2", b={"deep": {"x": "1"}}),
    call("now"),
    call("add", a="1", b={"deep": {"y": "2"}, "list": ["1"]}),
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
]


def arrow_files(folder: Path, rows: list[dict]) -> dict[str, str]:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "a.parquet")
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as file:
        file.write_table(table)
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return {name: str(folder / name) for name in ("a.parquet", "a.arrow", "saved")}


def known(rows: list[dict]) -> list[dict]:
    """Rows without columns that are null or empty structs, which are the same to every format."""
    return json.loads(
        json.dumps(rows), object_hook=lambda row: {k: v for k, v in row.items() if v is not None and v != {}}
    )


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "saved"])
def test_rows_of_arrow_have_no_keys_that_only_other_rows_have(name, tmp_path, chat_tokenizer):
    raw = read_rows(arrow_files(tmp_path, CALLS)[name])
    assert known(raw.rows) == known(CALLS)
    assert "null" not in json.dumps([message for row in raw.rows for message in row["messages"]])
    assert ADDED_NULLS in reader_of(raw, RowOptions(), chat_tokenizer).notices.counts


def test_rows_of_python_that_were_a_table_s_are_those_that_it_was_made_of():
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    dataset, table = datasets.Dataset.from_list(CALLS), pyarrow.Table.from_pylist(CALLS)
    values = {
        "Dataset": dataset,
        "Table": table,
        "DataFrame": table.to_pandas(),
        "list of a Dataset": list(dataset),
        "iterator of a Dataset": iter(dataset),
    }
    for kind, value in values.items():
        lines: list[str] = []
        written = Path(as_file(value, "x", lines.append)).read_text().splitlines()
        assert known([json.loads(line) for line in written]) == known(CALLS), kind
        assert len(lines) == 1 and ADDED_NULLS in lines[0], kind


def test_nulls_that_were_written_are_kept(tmp_path):
    rows = [call("find", city="a", unit=None), call("add", a=None)]
    assert read_rows(jsonl(tmp_path / "a.jsonl", rows)).rows == rows
    assert [json.loads(line) for line in Path(as_file(rows, "x")).read_text().splitlines()] == rows
    alone = [call("find", city="a", unit=None)] * 2  # a table would have no such key
    assert [json.loads(line) for line in Path(as_file(alone, "x")).read_text().splitlines()] == alone


def test_numbers_of_classes_are_read_as_their_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label, "tags": [label]})
    features["of"] = {"feature": label}  # a field of the name that a list's type has
    rows = [{"text": "a", "label": 1, "tags": [0, 1]}, {"text": "b", "label": 0, "tags": []}]
    rows = [row | {"of": {"feature": 0}} for row in rows]
    dataset = datasets.Dataset.from_list(rows, features=features)
    named = [{"text": "a", "label": "good", "tags": ["bad", "good"]}, {"text": "b", "label": "bad", "tags": []}]
    named = [row | {"of": {"feature": "bad"}} for row in named]
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "saved"):
        raw = read_rows(str(tmp_path / name))
        assert raw.rows == named and any("'label'" in text for text in raw.notices.counts)
    for value in (dataset, dataset.data.table):
        lines: list[str] = []
        assert [json.loads(line) for line in Path(as_file(value, "x", lines.append)).read_text().splitlines()] == named
        assert any("'label'" in line for line in lines)
