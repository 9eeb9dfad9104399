"""Files to rows, and what is wrong with a file."""

import json
import random
import resource
import struct
import time

import pytest

from finetune.data.reading import readers
from finetune.data.reading.sources import read_rows
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
    text = write(tmp_path / "a.txt", b"one\r\n\r\ntwo")
    assert read_rows(text, text_unit="line").rows == [{"text": "one"}, {"text": "two"}]
    assert read_rows(text).rows == [{"text": "one\n\ntwo"}]


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
        ("a.json", b'"text"', ':1: is text, must be an object such as {"text": "..."}. Fix the file.'),
        ("a.csv", b"a,a\n1,2\n", ":1: column 'a' appears twice in the header. Rename one."),
        ("a.csv", b"a,b\n1,2,3\n", ":2: has 3 fields, the header has 2. Fix or remove the row"),
        ("a.csv", b'a,b\n1,"2\n', ":2: is not CSV (unexpected end of data). Fix the file."),
        ("a.csv", b"a,b\n1,\xe9\n", ":2:byte 3: is not UTF-8 (0xe9): iconv -f CP1252 -t UTF-8 converts the file."),
        ("a.parquet", b"PAR1 nonsense", ": not a readable Parquet file ("),
        ("a.arrow", b"nonsense", ": not a readable Arrow file ("),
        ("a.zip", b"PK", None),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    if name == "a.zip":
        message, start = ": is packed. Unpack it, and give what it holds.", f"--dataset {path}"
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


def test_a_repeated_key_is_found_in_one_pass(tmp_path):
    line = "{" + ", ".join(f'"k{i}": 0' for i in range(200_000)) + ', "k199999": 1}'
    header = ",".join(f"k{i}" for i in range(200_000)) + ",k199999"
    began = time.process_time()
    with pytest.raises(PlanError, match="has duplicate key 'k199999'"):
        read_rows(write(tmp_path / "a.jsonl", line))
    with pytest.raises(PlanError, match="column 'k199999' appears twice"):
        read_rows(write(tmp_path / "a.csv", header + "\n"))
    assert time.process_time() - began < 5


def test_a_row_at_the_parsers_limit_of_nesting_is_a_bad_row(tmp_path):
    for depth in range(900, 1100):  # the limits of parsing and of encoding differ
        line = '{"text": ' + "[" * depth + '"\\ud83d\\ude00"' + "]" * depth + "}"
        raw = read_rows(write(tmp_path / "a.jsonl", GOOD + line.encode() + b"\n"), skip_bad_rows=1)
        assert len(raw.rows) + len(raw.skipped) == 2


def arrow_file(path, table, kind):
    """The table as a Parquet file, or as an Arrow file or stream."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "parquet":
        pq.write_table(table, path, compression="zstd")
    else:
        with {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind](str(path), table.schema) as file:
            file.write_table(table)
    return str(path)


@pytest.mark.parametrize(("kind", "suffix"), [("parquet", "parquet"), ("file", "arrow"), ("stream", "arrow")])
def test_damaged_columnar_files_are_rows_or_one_line(tmp_path, kind, suffix):
    """Read from a memory map and without validation, 31 of 850 ended the process."""
    import pyarrow as pa

    rows = [{**row, "messages": [{"role": "user", "content": row["prompt"]}], "n": 1.5} for row in ROWS]
    good = (path := tmp_path / f"a.{suffix}") and arrow_file(path, pa.Table.from_pylist(rows), kind)
    data, read = open(good, "rb").read(), 0
    for i in range(150):
        rng, damaged = random.Random(i), bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 4))):
            damaged[rng.randrange(len(damaged))] = rng.choice((0, 255, rng.randrange(256)))
        try:
            read += len(read_rows(write(tmp_path / f"b.{suffix}", bytes(damaged)), skip_bad_rows=99).rows) > 0
        except PlanError as error:
            assert "\n" not in str(error)
    assert 0 < read < 150


def test_a_list_that_ends_far_outside_its_file_is_a_bad_row_alone(tmp_path):
    """Arrow itself reads there when it is asked for the size of such a list: the process ended."""
    import pyarrow as pa

    bounds, outside = struct.pack("<5i", 0, 1, 2, 3, 3), struct.pack("<5i", 0, 1, 2, 2**30, 2**30 + 1)
    table = pa.table({"messages": [[{"content": text}] for text in "abc"] + [[]]})
    for kind in ("file", "stream"):
        data = open(arrow_file(tmp_path / "a.arrow", table, kind), "rb").read()
        assert data.count(bounds) == 1
        found = read_rows(write(tmp_path / f"{kind}.arrow", data.replace(bounds, outside)), skip_bad_rows=2)
        assert [row["messages"] for row in found.rows] == [[{"content": "a"}], [{"content": "b"}]]


@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_values_that_python_lacks_are_bad_rows(tmp_path, kind):
    import pyarrow as pa

    far = {
        "a": pa.array([0, 10**8], pa.date32()),
        "b": pa.array([0, 2**62], pa.timestamp("us")),
        "c": pa.array([0, 2**62], pa.duration("s")),
    }
    for name, column in far.items():
        table = pa.table({"text": ["x", "y"], name: column})
        path = arrow_file(tmp_path / f"{name}.{'arrow' if kind == 'stream' else kind}", table, kind)
        with pytest.raises(PlanError, match=r":row 2: cannot be read \(.*\). Fix or remove the row"):
            read_rows(path)
        assert len(read_rows(path, skip_bad_rows=1).rows) == 1


def test_columns_of_one_name_and_names_that_are_not_text_are_refused(tmp_path):
    import pyarrow as pa

    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    for kind, suffix in (("parquet", "parquet"), ("file", "arrow")):
        path = arrow_file(tmp_path / f"a.{suffix}", table, kind)
        with pytest.raises(PlanError, match=f"a.{suffix}: has two columns 'text'. Rename one.$"):
            read_rows(path)
    good = open(arrow_file(tmp_path / "b.parquet", pa.table({"texts": ["a"]}), "parquet"), "rb").read()
    path = write(tmp_path / "c.parquet", good.replace(b"texts", b"t\xff\xfets"))
    with pytest.raises(PlanError, match="c.parquet: not a readable Parquet file"):
        read_rows(path)


def test_a_small_file_of_gigabytes_is_refused_and_its_first_rows_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 8192, pa.int32()), ["x" * 2**18])
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": texts}), path, store_schema=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PlanError, match=r"rows take 0.\d GiB, of a file of .* MiB. Read fewer with --dataset_samples"):
        read_rows(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20
    assert len(read_rows(path, samples=8).rows) == 8


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_file_of_zeros_is_refused_before_it_is_read(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**32)
    began = time.process_time()
    with pytest.raises(PlanError, match=f"{name}: "):
        read_rows(str(tmp_path / name))
    assert time.process_time() - began < 2
