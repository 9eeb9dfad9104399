"""Dataset readers: JSONL, JSON, CSV, plain text, Parquet, Arrow, save_to_disk folders, Hub datasets, aliases.

Reading is strict: each row knows its file and line, and a malformed row is reported, never repaired. A reader yields
(source, row or BadRow); an unreadable file is a PlanError. Lines are read in binary with a size limit, which bounds
memory for any input.
"""

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from backend_manager import system_memory
from finetune.errors import PlanError, first_line
from finetune.untrusted import untrusted

MAX_LINE_BYTES = 16 * 2**20
MAX_JSON_BYTES = 512 * 2**20
DUMMY_ROWS = 256
BATCH_ROWS = 64  # of Parquet and Arrow in memory at a time; a page of a few bytes may hold a GiB
ROW_BYTES = 100  # of a row in memory whatever it holds
FEWER = "Read fewer with --dataset_samples, or split the file."
EXPANSION = (2**28, 1000)  # bytes in memory that a compressed file may take: so many, and so many for each of its own
SAVE_AGAIN = "Save the dataset again with save_to_disk."
LIST_FIELDS = ("data", "rows", "examples", "instances", "train", "validation", "test")


@dataclass(frozen=True)
class BadRow:
    """A malformed row: its location, to the byte if known, and the reason."""

    where: str
    reason: str


@dataclass(frozen=True)
class RawDataset:
    """Rows as read. `skipped`: the reason for each bad row left out; at most `skip_bad_rows` over all stages.

    `digest`: sha256 of the bytes read.
    """

    rows: list[dict]
    sources: list[str]
    columns: tuple[str, ...]
    skipped: tuple[str, ...]
    digest: str
    description: str
    skip_bad_rows: int = 0


def skip_or_raise(bad: BadRow, num_skipped: int, skip_bad_rows: int) -> str:
    """The notice for a skipped row. Raises PlanError if `skip_bad_rows` is exceeded."""
    if num_skipped < skip_bad_rows:
        return f"{bad.where}: {bad.reason}"
    if skip_bad_rows:
        raise PlanError(
            f"{bad.where}: {bad.reason}. It is bad row {num_skipped + 1}, and --skip_bad_rows allows {skip_bad_rows}."
        )
    raise PlanError(f"{bad.where}: {bad.reason}. Fix or remove the row, or skip it with --skip_bad_rows 1.")


def _reader(name: str, what: str, split: str):
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in READERS:
        raise PlanError(f"{what}: is {suffix or 'a file without suffix'}. Use one of {', '.join(READERS)}.")
    return partial(READERS[suffix], split=split) if suffix == ".json" else READERS[suffix]


def read_saved_field(path: Path, key: str, valid: Callable[[object], bool]):
    """A field of a file written by save_to_disk; None if it is absent. Raises PlanError unless it is `valid`."""
    with untrusted(f"{path}: has no readable {key!r}", SAVE_AGAIN):
        if path.stat().st_size > MAX_LINE_BYTES:
            raise PlanError(f"{path}: is longer than {MAX_LINE_BYTES >> 20} MiB. {SAVE_AGAIN}")
        value = json.loads(path.read_bytes()).get(key)
    if value is not None and not valid(value):
        raise PlanError(f"{path}: {key!r} is not what save_to_disk writes. {SAVE_AGAIN}")
    return value


# ------ readers


def read_jsonl(path: Path, label: str, hasher) -> Iterator[tuple[str, dict | BadRow]]:
    for number, text, complete in text_lines(path, label, hasher):
        source = f"{label}:{number}"
        if isinstance(text, BadRow):
            yield source, text
        elif text.strip():
            row = parse_object(text, source)
            if isinstance(row, BadRow) and not complete and row.reason.startswith("is not JSON"):
                row = BadRow(source, row.reason.replace("is not JSON", "is truncated: the last line is not JSON", 1))
            yield source, row


def read_json(path: Path, label: str, hasher, split: str = "train") -> Iterator[tuple[str, dict | BadRow]]:
    """Yields rows of a JSON array of objects, of an object that holds one under a known key, or of JSON lines."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.readline(MAX_LINE_BYTES).strip()
        if head.startswith(b"{") and head.endswith(b"}") and file.read(1):
            yield from read_jsonl(path, label, hasher)
            return
        if size > MAX_JSON_BYTES:
            raise PlanError(
                f"{label}: is {size / 2**20:.0f} MiB, the maximum for .json is {MAX_JSON_BYTES >> 20} MiB. Use .jsonl."
            )
        file.seek(0)
        data = file.read()
    hasher.update(data)
    text = _decode_whole(data, label)
    del data
    if not text.strip():
        return
    if not text.lstrip().startswith("["):
        yield from _rows_of_object(text, label, split)
        return
    # Decodes one object at a time: json.loads of the full array would lose the line numbers.
    spaces = re.compile(r"[ \t\r\n]*")
    at = spaces.match(text, text.index("[") + 1).end()
    line, counted = 1, 0
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        source = f"{label}:{line}"
        value, end = _decode_value(text, at, source)
        if end - at > MAX_LINE_BYTES:
            value = BadRow(source, f"is longer than {MAX_LINE_BYTES >> 20} MiB")
        yield (
            source,
            value if isinstance(value, (dict, BadRow)) else BadRow(source, f"is {_kind(value)}, must be an object"),
        )
        at = spaces.match(text, end).end()
        if text[at : at + 1] == ",":
            at = spaces.match(text, at + 1).end()
            if text[at : at + 1] != "]":
                continue
        elif text[at : at + 1] == "]":
            continue
        line = 1 + text.count("\n", 0, at)
        fact = (
            "the file ends inside the array" if at >= len(text) else f"{text[at]!r} where a row, ',' or ']' is expected"
        )
        raise PlanError(f"{label}:{line}: is not JSON ({fact}). Fix the file.")
    if text[at + 1 :].strip():
        raise PlanError(f"{label}: is not JSON (something follows the array). Fix the file.")


def read_csv(path: Path, label: str, hasher) -> Iterator[tuple[str, dict | BadRow]]:
    """Yields rows of a CSV file with a header line; all values are strings."""

    def lines():
        for _, text, _ in text_lines(path, label, hasher):
            if isinstance(text, BadRow):
                raise PlanError(f"{text.where}: {text.reason}. Fix the file: CSV lines cannot be skipped.")
            yield text + "\n"

    reader = csv.reader(lines(), strict=True)
    before = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        header = next((row for row in reader if row), None)
        if header is None:
            return
        header = [name.strip() for name in header]
        twice = first_repeated(header)
        if twice is not None:
            raise PlanError(f"{label}:1: column {twice!r} appears twice in the header. Rename one.")
        start = reader.line_num + 1
        for row in reader:
            source, start = f"{label}:{start}", reader.line_num + 1
            if not row:
                continue
            if len(row) != len(header):
                yield source, BadRow(source, f"has {len(row)} fields, the header has {len(header)}")
            else:
                yield source, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise PlanError(f"{label}:{reader.line_num}: is not CSV ({error}). Fix the file.") from error
    finally:
        csv.field_size_limit(before)


def read_text(path: Path, label: str, hasher) -> Iterator[tuple[str, dict | BadRow]]:
    """Yields one document per line; blank lines are left out."""
    for number, text, _ in text_lines(path, label, hasher):
        source = f"{label}:{number}"
        if isinstance(text, BadRow):
            yield source, text
        elif text.strip():
            yield source, {"text": text}


def read_parquet(path: Path, label: str, hasher) -> Iterator[tuple[str, dict | BadRow]]:
    import pyarrow.parquet

    with untrusted(f"{label}: not a readable Parquet file", "Write it again."):
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow, label)
            _hash_file(path, hasher)
            yield from _arrow_rows(file.iter_batches(BATCH_ROWS), path, label)


def read_arrow(path: Path, label: str, hasher) -> Iterator[tuple[str, dict | BadRow]]:
    """Yields rows of an Arrow file or stream. Not memory-mapped: a file that shrinks meanwhile would be a SIGBUS."""
    import pyarrow

    with untrusted(f"{label}: not a readable Arrow file", "Write it again."):
        with pyarrow.OSFile(str(path), "rb") as source:
            if source.read(6) == b"ARROW1":
                opened = pyarrow.ipc.open_file(source)
                batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
            else:
                source.seek(0)
                batches = opened = pyarrow.ipc.open_stream(source)
            _check_columns(opened.schema, label)
            _hash_file(path, hasher)
            yield from _arrow_rows(batches, path, label)


def read_dummy(path, label: str, hasher) -> Iterator[tuple[str, dict]]:
    for i in range(DUMMY_ROWS):
        a, b = i * 7 % 50, i * 13 % 41
        row = {"instruction": f"Add {a} and {b}.", "output": f"{a} plus {b} is {a + b}."}
        hasher.update(json.dumps(row).encode())
        yield f"dummy:{i + 1}", row


# In order of precedence, for folders with several kinds of files.
READERS = {
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".txt": read_text,
}


# ------ parts of readers


def text_lines(path: Path, label: str, hasher) -> Iterator[tuple[int, str | BadRow, bool]]:
    """Yields (line number, text without line ending, whether it had one). Reads at most MAX_LINE_BYTES of a line."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            hasher.update(line)
            if number == 1:
                line = _without_bom(line, label)
            complete = line.endswith(b"\n")
            if len(line) > MAX_LINE_BYTES and not complete:
                yield number, BadRow(f"{label}:{number}", f"is longer than {MAX_LINE_BYTES >> 20} MiB"), True
                while (rest := file.readline(2**20)) and not rest.endswith(b"\n"):
                    hasher.update(rest)
                hasher.update(rest)
                continue
            yield number, decode(line.rstrip(b"\r\n"), label, number), complete


def decode(line: bytes, label: str, number: int) -> str | BadRow:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{label}:{number}:byte {error.start + 1}"
        return BadRow(where, f"is not UTF-8 (0x{line[error.start]:02x})")
    if "\0" in text:
        return BadRow(f"{label}:{number}:byte {line.index(0) + 1}", "is a NUL byte")
    return text


def parse_object(text: str, where: str) -> dict | BadRow:
    """Parses one JSON object strictly: no duplicate keys, no lone surrogates."""
    try:
        value, end = _decode_value(text, len(text) - len(text.lstrip(" \t\r")), where)
    except PlanError as error:
        return BadRow(where, str(error.__cause__ and _json_fact(error.__cause__)))
    if isinstance(value, BadRow):
        return value
    if text[end:].strip(" \t\r"):
        return BadRow(where, f"is not JSON (something follows the value at column {end + 1})")
    return value if isinstance(value, dict) else BadRow(where, f"is {_kind(value)}, must be an object")


def _decode_value(text: str, at: int, where: str):
    """(value or BadRow, end position). Raises PlanError if the text is not JSON."""
    repeated = []

    def pairs(items):
        value = dict(items)
        if len(value) != len(items):
            repeated.append(first_repeated(key for key, _ in items))
        return value

    try:
        value, end = json.JSONDecoder(object_pairs_hook=pairs).raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: {_json_fact(error)}. Fix the file.") from error
    if repeated:
        return BadRow(where, f"has duplicate key {repeated[0][:80]!r}"), end
    if "\\ud" in text[at:end] or "\\uD" in text[at:end]:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return BadRow(where, f"is not Unicode text (lone surrogate \\u{ord(error.object[error.start]):04x})"), end
        except RecursionError:
            return BadRow(where, "is nested too deeply"), end
    return value, end


def _json_fact(error) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON ({error.msg} at column {error.colno})"
    return f"is not usable JSON ({first_line(error)})"


def _rows_of_object(text: str, label: str, split: str):
    value = parse_object(text.strip(), f"{label}:1")
    if isinstance(value, BadRow):
        raise PlanError(f"{value.where}: {value.reason}. Fix the file.")
    names = [split] if split in value else [key for key in LIST_FIELDS if isinstance(value.get(key), list)]
    if len(names) != 1 or not isinstance(value[names[0]], list):
        if any(isinstance(v, list) and k in LIST_FIELDS for k, v in value.items()):
            raise PlanError(f"{label}: has several lists of rows, {', '.join(names)}, none named {split!r}. Keep one.")
        yield f"{label}:1", value
        return
    for i, row in enumerate(value[names[0]]):
        source = f"{label}:row {i + 1}"
        yield source, row if isinstance(row, dict) else BadRow(source, f"is {_kind(row)}, must be an object")


def _check_columns(schema, label: str) -> None:
    twice = first_repeated(schema.names)
    if twice is not None:
        raise PlanError(f"{label}: has two columns {twice!r}. Rename one.")


def _arrow_rows(batches, path: Path, label: str):
    try:
        yield from _validated_rows(batches, path, label)
    except MemoryError:  # a size in the file, or a long entry that many rows refer to
        raise PlanError(f"{label}: takes more memory than there is. {FEWER}") from None


def _validated_rows(batches, path: Path, label: str):
    """Yields rows of record batches, each validated in full first: nothing else checks the offsets in a file."""
    file_bytes, number, size = path.stat().st_size, 0, 0
    limit = min(EXPANSION[0] + EXPANSION[1] * file_bytes, system_memory()[1])
    for whole in batches:
        is_valid = _fault_of(whole) is None
        for start in range(0, whole.num_rows, BATCH_ROWS):
            batch = whole.slice(start, BATCH_ROWS)
            batch = _without_dictionaries(batch) if is_valid else batch
            size += batch.nbytes + ROW_BYTES * batch.num_rows
            if size > limit:
                taken = f"{number + batch.num_rows:,} rows take {size / 2**30:.1f} GiB"
                raise PlanError(f"{label}: its first {taken}, of a file of {file_bytes / 2**20:.1f} MiB. {FEWER}")
            rows = _python_rows(batch, is_valid)
            if isinstance(rows, str):  # only some of its rows are to blame
                rows = [_python_rows(batch.slice(i, 1), False) for i in range(batch.num_rows)]
                rows = [row if isinstance(row, str) else row[0] for row in rows]
            for row in rows:
                number += 1
                source = f"{label}:row {number}"
                yield source, BadRow(source, row) if isinstance(row, str) else row


def _without_dictionaries(batch):
    """The batch with its dictionary-encoded columns decoded: a slice of one holds the whole dictionary."""
    import pyarrow

    if not any(isinstance(column, pyarrow.DictionaryArray) for column in batch.columns):
        return batch
    columns = [c.dictionary_decode() if isinstance(c, pyarrow.DictionaryArray) else c for c in batch.columns]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _fault_of(batch) -> str | None:
    import pyarrow

    try:
        batch.validate(full=True)
    except pyarrow.ArrowException as error:
        return "is not UTF-8" if "UTF8" in str(error) else f"is damaged ({first_line(error)})"


def _python_rows(batch, is_valid: bool) -> list[dict] | str:
    """The batch as dicts; what is wrong with it otherwise."""
    fault = None if is_valid else _fault_of(batch)
    if fault:
        return fault
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, TypeError, RecursionError) as error:  # such as a date after the year 9999
        return f"cannot be read ({first_line(error)})"


def first_repeated(names) -> str | None:
    """The first name that was there before."""
    seen = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def _without_bom(data: bytes, label: str) -> bytes:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise PlanError(f"{label}:1:byte 1: is not UTF-8 but UTF-16. Convert it: iconv -f UTF-16 -t UTF-8.")
    return data.removeprefix(codecs.BOM_UTF8)


def _decode_whole(data: bytes, label: str) -> str:
    data = _without_bom(data, label)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line, start = data.count(b"\n", 0, error.start) + 1, data.rfind(b"\n", 0, error.start) + 1
        where = f"{label}:{line}:byte {error.start - start + 1}"
        raise PlanError(f"{where}: is not UTF-8 (0x{data[error.start]:02x}). Convert the file to UTF-8.") from error
    if "\0" in text:
        at = text.index("\0")
        raise PlanError(f"{label}:{text.count(chr(10), 0, at) + 1}: contains a NUL byte. Remove it.")
    return text


def _hash_file(path: Path, hasher):
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            hasher.update(chunk)


def _kind(value) -> str:
    names = {
        list: "an array",
        str: "text",
        int: "a number",
        float: "a number",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
