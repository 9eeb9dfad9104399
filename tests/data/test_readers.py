"""Files to rows, and what is wrong with a file."""

import json
import resource

import pytest

from finetune.data import readers
from finetune.data.sources import read_rows
from finetune.errors import PlanError
from tests.support.rows import GOOD, ROWS, jsonl, write


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as file:
        file.write_table(table)
    jsonl(tmp_path / "a.jsonl", ROWS)
    jsonl(tmp_path / "a.ndjson", ROWS)
    jsonl(tmp_path / "lines.json", ROWS)
    write(tmp_path / "a.json", json.dumps(ROWS))
    write(tmp_path / "pretty.json", json.dumps(ROWS, indent=2))
    write(tmp_path / "data.json", json.dumps({"version": "1", "data": ROWS}))
    write(tmp_path / "a.csv", "prompt,completion\n" + "".join(f'{r["prompt"]},"{r["completion"]}"\n' for r in ROWS))
    for path in sorted(tmp_path.iterdir()):
        raw = read_rows(str(path))
        assert raw.rows == ROWS, path
        assert raw.columns == ("prompt", "completion") and len(raw.sources) == 40 and len(raw.digest) == 64


def test_sources_name_file_and_line(tmp_path):
    assert read_rows(jsonl(tmp_path / "a.jsonl", ROWS)).sources[2] == f"{tmp_path}/a.jsonl:3"
    path = write(tmp_path / "p.json", json.dumps(ROWS, indent=1))
    assert read_rows(path).sources[:3] == [f"{path}:{line}" for line in (2, 6, 10)]
    path = write(tmp_path / "a.csv", 'text\n"two\nlines"\nlast\n')
    assert read_rows(path).sources == [f"{path}:2", f"{path}:4"]


def test_samples_takes_the_first_rows_and_reads_no_further(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "b"}\nbroken\n')
    assert [row["text"] for row in read_rows(path, samples=2).rows] == ["a", "b"]
    with pytest.raises(PlanError, match="^--dataset_samples 0: leaves no rows"):
        read_rows(path, samples=0)


def test_crlf_bom_blank_lines_and_a_missing_last_newline_are_accepted(tmp_path):
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    raw = read_rows(path)
    assert [row["text"] for row in raw.rows] == ["a", "b"]
    assert raw.sources == [f"{path}:1", f"{path}:4"]
    assert read_rows(write(tmp_path / "a.csv", b"\xef\xbb\xbftext,n\r\na,1\r\n")).rows == [{"text": "a", "n": "1"}]
    assert read_rows(write(tmp_path / "a.json", b'\xef\xbb\xbf[{"text": "a"}]\r\n')).rows == [{"text": "a"}]
    assert read_rows(write(tmp_path / "a.txt", b"one\r\n\r\ntwo")).rows == [{"text": "one"}, {"text": "two"}]


BAD_LINES = {
    "broken": (
        b"{'text': 1}\n",
        "2: is not JSON (Expecting property name enclosed in double quotes at column 2). Fix or remove",
    ),
    "cut off": (
        b'{"text": "b',
        "2: is truncated: the last line is not JSON (Unterminated string starting at at column 10)",
    ),
    "two values": (b'{"text": "b"} {"text": "c"}\n', "2: is not JSON (something follows the value at column 14)"),
    "array": (b'["text"]\n', "2: is an array, must be an object"),
    "number": (b"3\n", "2: is a number, must be an object"),
    "null": (b"null\n", "2: is null, must be an object"),
    "key twice": (b'{"text": "b", "text": "c"}\n', "2: has duplicate key 'text'"),
    "inner key twice": (b'{"text": {"a": 1, "a": 2}}\n', "2: has duplicate key 'a'"),
    "NUL": (b'{"text": "b\0"}\n', "2:byte 12: is a NUL byte"),
    "latin-1": (b'{"text": "caf\xe9"}\n', "2:byte 14: is not UTF-8 (0xe9)"),
    "raw surrogate": (b'{"text": "\xed\xa0\x80"}\n', "2:byte 11: is not UTF-8 (0xed)"),
    "escaped surrogate": (b'{"text": "\\ud83d"}\n', "2: is not Unicode text (lone surrogate \\ud83d)"),
    "deep": (b"[" * 200_000 + b"\n", "2: is nested too deeply"),
    "huge number": (b'{"text": ' + b"9" * 5000 + b"}\n", "2: is not usable JSON (Exceeds the limit (4300 digits)"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_and_can_be_skipped(tmp_path, name):
    line, message = BAD_LINES[name]
    path = write(tmp_path / "a.jsonl", GOOD + line)
    with pytest.raises(PlanError) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path}:{message}"), str(error.value)
    assert str(error.value).endswith("Fix or remove the row, or skip it with --skip_bad_rows 1.")
    raw = read_rows(path, skip_bad_rows=1)
    assert raw.rows == [{"text": "a"}] and len(raw.skipped) == 1 and raw.skipped[0].startswith(f"{path}:{message[:12]}")


def test_more_bad_rows_than_allowed_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD + b"x\ny\nz\n")
    with pytest.raises(PlanError, match="a.jsonl:4: is not JSON .* It is bad row 3, and --skip_bad_rows allows 2.$"):
        read_rows(path, skip_bad_rows=2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", ": has no rows. Give a file with at least one row."),
        ("a.jsonl", b"\n\r\n  \n", ": has no rows."),
        ("a.json", b"", ": has no rows."),
        ("a.json", b"[]", ": has no rows."),
        ("a.csv", b"", ": has no rows."),
        ("a.csv", b"text\n", ": has no rows."),
        ("a.txt", b"\n\n", ": has no rows."),
        ("a.jsonl", "\ufeff" + '{"text": "a"}\n', None),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), ":1:byte 1: is not UTF-8 but UTF-16. Convert it: iconv"),
        ("a.json", '[{"text": "a"}]'.encode("utf-16"), ":1:byte 1: is not UTF-8 but UTF-16."),
        (
            "a.json",
            b'[{"text": "a"},\n{"text": "b\xff"}]',
            ":2:byte 12: is not UTF-8 (0xff). Convert the file to UTF-8.",
        ),
        ("a.json", b'[{"text": "a"},\n{"text": }]', ":2: is not JSON (Expecting value at column 10). Fix the file."),
        (
            "a.json",
            b'[{"text": "a"},\n{"text": "b"}\n',
            ":3: is not JSON (the file ends inside the array). Fix the file.",
        ),
        ("a.json", b'[{"text": "a"},]', ":1: is not JSON (']' where a row, ',' or ']' is expected). Fix the file."),
        ("a.json", b'[{"text": "a"}] x', ": is not JSON (something follows the array). Fix the file."),
        ("a.json", b'[{"text": "a"}, 3]', ":1: is a number, must be an object."),
        ("a.json", b'{"data": [1]}', ":row 1: is a number, must be an object."),
        (
            "a.json",
            b'{"data": [{"text": "a"}], "rows": []}',
            ": has several lists of rows, data, rows, none named 'train'.",
        ),
        ("a.json", b'"text"', ":1: is text, must be an object. Fix the file."),
        ("a.csv", b"a,a\n1,2\n", ":1: column 'a' appears twice in the header. Rename one."),
        ("a.csv", b"a,b\n1,2,3\n", ":2: has 3 fields, the header has 2. Fix or remove the row"),
        ("a.csv", b'a,b\n1,"2\n', ":2: is not CSV (unexpected end of data). Fix the file."),
        ("a.csv", b"a,b\n1,\xe9\n", ":2:byte 3: is not UTF-8 (0xe9). Fix the file: CSV lines cannot be skipped."),
        ("a.parquet", b"PAR1 nonsense", ": not a readable Parquet file ("),
        ("a.arrow", b"nonsense", ": not a readable Arrow file ("),
        ("a.zip", b"PK", None),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    if name == "a.zip":
        message, start = ": is .zip. Use one of .parquet,", f"--dataset {path}"
    elif message is None:
        assert read_rows(path).rows == [{"text": "a"}]
        return
    else:
        start = path
    with pytest.raises(PlanError) as error:
        read_rows(path)
    assert str(error.value).startswith(start + message), str(error.value)
    assert "\n" not in str(error.value)


def test_a_line_over_the_cap_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(GOOD)
        file.truncate(2**30)  # sparse: a line of 1 GiB of NUL
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PlanError) as error:
        read_rows(str(path))
    assert str(error.value).startswith(f"{path}:2: is longer than 16 MiB. ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10


def test_a_long_line_can_be_skipped_and_the_longest_allowed_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 2**21)
    long = b'{"text": "' + b"x" * 2**21 + b'"}\n'
    exact = b'{"text": "' + b"x" * (2**21 - 12) + b'"}\n'
    raw = read_rows(write(tmp_path / "a.jsonl", GOOD + long + exact + GOOD), skip_bad_rows=1)
    assert [len(row["text"]) for row in raw.rows] == [1, 2**21 - 12, 1]
    assert raw.sources[-1].endswith(":4")
