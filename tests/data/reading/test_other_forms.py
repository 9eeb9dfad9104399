"""Files of rows as other programs write them, and a line for those that hold no rows."""

import gzip
import json
import os
from pathlib import Path

import pytest

from finetune.data.reading.readers import read_jsonl
from finetune.data.reading.sources import read_rows
from finetune.data.reading.stream import StreamedFile
from finetune.errors import PlanError
from tests.support.rows import jsonl, write

ROWS = [{"question": f"What is {i}?", "answer": f"It is {i}."} for i in range(3)]


@pytest.mark.parametrize("orient", ["columns", "index", "split", "records", "table", "list"])
def test_what_pandas_writes_is_read_in_each_of_its_forms(orient, tmp_path):
    frame = pytest.importorskip("pandas").DataFrame(ROWS)
    text = json.dumps(frame.to_dict("list")) if orient == "list" else frame.to_json(orient=orient)
    rows = read_rows(write(tmp_path / "a.json", text)).rows
    assert [{name: row[name] for name in ROWS[0]} for row in rows] == ROWS


def test_values_without_names_and_a_single_row_are_not_tables(tmp_path):
    with pytest.raises(PlanError, match="a.json:1: is an array of arrays, whose columns have no names"):
        read_rows(write(tmp_path / "a.json", json.dumps([list(row.values()) for row in ROWS])))
    turn = {"role": "user", "content": "Hi"}
    for row in ({"messages": [turn, turn], "tools": [turn, turn]}, {"input_ids": [1, 2], "labels": [1, 2]}, ROWS[0]):
        assert read_rows(write(tmp_path / "a.json", json.dumps(row))).rows == [row]


def test_objects_over_several_lines_are_read_from_json_lines(tmp_path):
    text = "\n".join(json.dumps(row, indent=2) for row in ROWS)
    for name in ("a.jsonl", "a.json"):
        raw = read_rows(write(tmp_path / name, text + "\n"))
        assert raw.rows == ROWS and raw.sources == [f"{tmp_path / name}:{line}" for line in (1, 5, 9)]
    streamed = StreamedFile(read_jsonl, tmp_path / "a.jsonl", "a")
    assert [row for _, row in streamed.rows(1)] == ROWS[1:]
    with pytest.raises(PlanError, match="a.jsonl:5: is not JSON"):
        read_rows(write(tmp_path / "a.jsonl", json.dumps(ROWS[0], indent=2) + "\n{,}\n"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_packed_file_is_the_file_it_holds(name, tmp_path):
    lines = ["question,answer", *(",".join(row.values()) for row in ROWS)]
    plain = "\n".join(lines) if name == "a.csv" else json.dumps(ROWS) if name == "a.json" else None
    path = write(tmp_path / name, plain) if plain else jsonl(tmp_path / name, ROWS)
    folder = tmp_path / "packed"
    folder.mkdir()
    packed = write(folder / f"{name}.gz", gzip.compress(Path(path).read_bytes()))
    for given in (packed, str(folder), packed):  # from the cache the second time
        raw = read_rows(given)
        assert raw.rows == ROWS and raw.sources[0].startswith(packed)


def test_a_packed_file_of_the_same_size_and_time_is_unpacked_again(tmp_path):
    """As of an archive whose files all have one time."""
    packed = tmp_path / "a.jsonl.gz"
    for word in ("one", "two"):
        line = json.dumps({"question": "Which?", "answer": word}).encode()
        packed.write_bytes(gzip.compress(line + b"\n", compresslevel=0, mtime=0))
        os.utime(packed, (1e9, 1e9))
        assert read_rows(str(packed)).rows[0]["answer"] == word


def test_what_is_not_gzip_or_too_large_is_one_line(tmp_path):
    with pytest.raises(PlanError, match="a.jsonl.gz: is not readable gzip"):
        read_rows(write(tmp_path / "a.jsonl.gz", b"PK nonsense"))
    with pytest.raises(PlanError, match="a.jsonl.gz: holds more than"):
        read_rows(write(tmp_path / "a.jsonl.gz", gzip.compress(b"\0" * 2**29)))


@pytest.mark.parametrize("suffix", [".srt", ".log", ".yaml", ".xlsx", ".pdf", ".zip", ".pkl"])
def test_a_file_without_rows_says_what_to_do(suffix, tmp_path):
    with pytest.raises(PlanError, match=rf"a\{suffix}: is .*\. (Save|Rename|Write|Unpack) "):
        read_rows(write(tmp_path / f"a{suffix}", b"text"))


def test_a_folder_of_a_program_is_no_data(tmp_path):
    (tmp_path / "src").mkdir()
    write(tmp_path / "src" / "main.py", "print()")
    write(tmp_path / "package.json", '{"name": "a"}')
    write(tmp_path / "settings.json", '{"name": "a"}')
    with pytest.raises(PlanError, match=r"holds a program \(1 files such as src/main.py\)"):
        read_rows(str(tmp_path))
    jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "settings.json").unlink()
    assert read_rows(str(tmp_path)).rows == ROWS


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.tsv", 'question\tanswer\nWhat?\t"Hello\nWho?\tMe"\n', "look like rows of their own"),
        ("a.csv", 'question,answer\nWhat?,"Hello\nWho?,Me"\n', "look like rows of their own"),
        ("a.csv", "question,answer\n'What?','Hello'\n", "are in single quotes"),
        (
            "a.json",
            json.dumps({"train": ROWS, "test": ROWS}),
            "lists of the file beside 'train' that are not read: test",
        ),
        (
            "a.json",
            json.dumps({"version": 2, "schema": {"fields": ["a"]}, "license": "", "data": ROWS}),
            "fields of the file beside 'data' that are not read: version, schema",
        ),
    ],
)
def test_rows_that_may_not_be_what_was_meant_are_said(name, text, said, tmp_path):
    assert said in " ".join(read_rows(write(tmp_path / name, text)).notices.counts)


def test_an_answer_of_several_lines_is_no_row_of_a_table(tmp_path):
    raw = read_rows(write(tmp_path / "a.csv", 'question,answer\n"What?","Hello, you.\nBye, then."\n'))
    assert not raw.notices.counts


def test_spaces_after_the_commas_of_a_table_are_no_part_of_its_fields(tmp_path):
    raw = read_rows(write(tmp_path / "a.csv", '"question", "answer"\n"What?", "Hello, you."\nWho?, Me\n'))
    assert raw.rows == [{"question": "What?", "answer": "Hello, you."}, {"question": "Who?", "answer": "Me"}]
    assert [source.rsplit(":", 1)[1] for source in raw.sources] == ["2", "3"]
    assert "spaces after a table's separators" in " ".join(raw.notices.counts)


@pytest.mark.parametrize("log", ["_delta_log/0.json", "metadata/v1.metadata.json", ".hoodie/hoodie.properties"])
def test_a_table_with_deleted_rows_in_its_folder_is_refused(log, tmp_path):
    for file in (tmp_path / "table" / log, tmp_path / "table" / "part.jsonl"):
        file.parent.mkdir(parents=True, exist_ok=True)
        jsonl(file, ROWS)
    with pytest.raises(PlanError, match="whose log says which of its files count"):
        read_rows(str(tmp_path / "table"))


@pytest.mark.parametrize(
    "beside", [{"system_prompt": "Be brief."}, {"tools": [{"name": "f"}]}, {"Instruction": "Be brief."}]
)
def test_what_a_file_says_of_all_its_rows_is_refused(beside, tmp_path):
    with pytest.raises(PlanError, match=f"a.json: '{next(iter(beside))}' beside 'data' may be a part of every row"):
        read_rows(write(tmp_path / "a.json", json.dumps(beside | {"data": ROWS})))
