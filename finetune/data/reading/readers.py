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
from functools import partial
from pathlib import Path
from typing import Any

from finetune.data.meanings import is_nothing, is_of_all_rows
from finetune.data.reading.arrow import read_arrow, read_parquet
from finetune.data.reading.packed import read_packed, row_suffix
from finetune.data.reading.prose import rather
from finetune.data.reading.rows import BadRow, Hasher, NotedRow, first_repeated
from finetune.data.reading.tables import rows_of_table
from finetune.errors import PlanError, first_line
from finetune.system.untrusted import untrusted

MAX_LINE_BYTES = 16 * 2**20
MAX_JSON_BYTES = 512 * 2**20
DUMMY_ROWS = 256
SAVE_AGAIN = "Save the dataset again with save_to_disk."
NOT_SPACE = re.compile(r"[^ \t\r\n]")
EXCEL_SEPARATOR = re.compile(rb'"?sep=(.)"?[;,\t]*\r?\n?', re.I)
LIST_FIELDS = ("data", "rows", "examples", "instances", "train", "validation", "test")


def _reader(name: str, what: str, split: str, text_unit: str = "auto"):
    suffix = row_suffix(name)
    if name.lower().endswith(".gz") and suffix in READERS:
        return partial(read_packed, _reader(name[: -len(".gz")], what, split, text_unit))
    if suffix in REMEDIES:
        raise PlanError(f"{what}: is {REMEDIES[suffix]}")
    if suffix not in READERS:
        raise PlanError(f"{what}: is {suffix or 'a file without suffix'}. Use one of {', '.join(READERS)}.")
    if suffix in PROSE:
        return partial(READERS[suffix], text_unit=text_unit)
    if suffix == ".json":
        return partial(READERS[suffix], split=split)
    return READERS[suffix]


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


def read_jsonl(
    path: Path, label: str, hasher: Hasher, offset: int = 0, lines_before: int = 0
) -> Iterator[tuple[str, dict | BadRow]]:
    """Yields the row of each line from byte `offset` on, which `lines_before` lines precede."""
    for number, text, complete in text_lines(path, label, hasher, offset, lines_before):
        source = f"{label}:{number}"
        if isinstance(text, BadRow):
            yield source, text
        elif number == 1 and _is_open(text) and not complete_row(text) and complete:
            yield from _read_objects(path, label, hasher)
            return
        elif number == 1 and re.match(r"\s*\[\s*($|{)", text):
            raise PlanError(f"{label}: is one JSON array, must be an object per line. Rename it to .json.")
        elif text.strip():
            row = parse_object(text, source)
            if isinstance(row, BadRow) and not complete and row.reason.startswith("is not JSON"):
                row = BadRow(source, row.reason.replace("is not JSON", "is truncated: the last line is not JSON", 1))
            yield source, row


def spans_lines(path: Path) -> bool:
    """True if the objects in a JSON lines file each span several lines."""
    with open(path, "rb") as file:
        first = file.readline(MAX_LINE_BYTES).removeprefix(codecs.BOM_UTF8)
    text = first.decode("utf-8", "replace")
    return first.endswith(b"\n") and _is_open(text) and not complete_row(text)


def _is_open(text: str) -> bool:
    return text.lstrip().startswith("{") and text.rstrip().endswith(("{", "[", ","))


def complete_row(text: str) -> bool:
    return isinstance(parse_object(text, ""), dict)


def _read_objects(path: Path, label: str, hasher: Hasher) -> Iterator[tuple[str, dict | BadRow]]:
    """Yields the objects of a file that holds one after the other, each over any number of lines."""
    data = path.read_bytes()
    if len(data) > MAX_JSON_BYTES:
        raise PlanError(
            f"{label}: has objects over several lines and is larger than {MAX_JSON_BYTES >> 20} MiB. Write an object "
            "per line."
        )
    hasher.update(data)
    yield from _objects(_decode_whole(data, label), label)


def _objects(text: str, label: str) -> Iterator[tuple[str, dict | BadRow]]:
    at = _after_spaces(text, 0)
    line = 1
    counted = 0
    while at < len(text):
        line = line + text.count("\n", counted, at)
        counted = at
        source = f"{label}:{line}"
        value, end = _decode_value(text, at, source)
        is_row = isinstance(value, dict | BadRow)
        yield source, value if is_row else BadRow(source, f"is {_kind(value)}, must be an object")
        at = _after_spaces(text, end)
        if text[at : at + 1] == ",":
            at = _after_spaces(text, at + 1)


def is_blank(line: bytes, number: int) -> bool:
    """True if `read_jsonl` skips this line: nothing but Unicode white space, after the BOM if the line is the first."""
    text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
    if not text or 32 < text[0] < 127:
        return not text
    try:
        return not text.decode("utf-8").strip()
    except UnicodeDecodeError:  # a bad row
        return False


def read_json(path: Path, label: str, hasher: Hasher, split: str = "train") -> Iterator[tuple[str, dict | BadRow]]:
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
    at = _after_spaces(text, text.index("[") + 1)
    line = 1
    counted = 0
    while text[at : at + 1] != "]":
        line = line + text.count("\n", counted, at)
        counted = at
        source = f"{label}:{line}"
        value, end = _decode_value(text, at, source)
        if end - at > MAX_LINE_BYTES:
            value = BadRow(source, f"is longer than {MAX_LINE_BYTES >> 20} MiB")
        if isinstance(value, list) and text[:at].strip() == "[":
            raise PlanError(
                f"{source}: is an array of arrays, whose columns have no names. Write objects: of pandas, with "
                "orient='records'."
            )
        yield (
            source,
            value if isinstance(value, (dict, BadRow)) else BadRow(source, f"is {_kind(value)}, must be an object"),
        )
        at = _after_spaces(text, end)
        if text[at : at + 1] == ",":
            at = _after_spaces(text, at + 1)
            if text[at : at + 1] != "]":
                continue
        elif text[at : at + 1] == "]":
            continue
        line = 1 + text.count("\n", 0, at)
        if at >= len(text):
            fact = "the file ends inside the array"
        else:
            fact = f"{text[at]!r} where a row, ',' or ']' is expected"
        raise PlanError(f"{label}:{line}: is not JSON ({fact}). Fix the file.")
    if text[at + 1 :].strip():
        raise PlanError(f"{label}: is not JSON (something follows the array). Fix the file.")


def read_csv(path: Path, label: str, hasher: Hasher) -> Iterator[tuple[str, dict | BadRow]]:
    """Yields rows of a CSV or TSV file with a header line; all values are strings."""

    delimiter, before_header = _delimiter(path)

    def lines():
        for number, text, _ in text_lines(path, label, hasher):
            if isinstance(text, BadRow):
                raise PlanError(f"{text.where}: {text.reason}. Lines of a table cannot be skipped.")
            yield "\n" if number <= before_header else text + "\n"

    text = lines()
    reader = csv.reader(text, strict=True, delimiter=delimiter)
    before_rows = 0  # lines that another reader has read
    before = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        header = next((row for row in reader if row), None)
        if header is None:
            return
        spaced = any(name.startswith(" ") for name in header[1:])  # the same separator is between the fields of rows
        header = [name.strip().strip('"') if spaced else name.strip() for name in header]
        twice = first_repeated(header)
        if twice is not None:
            raise PlanError(f"{label}:1: column {twice!r} appears twice in the header. Rename one.")
        if spaced:
            before_rows = reader.line_num
            reader = csv.reader(text, strict=True, delimiter=delimiter, skipinitialspace=True)
        start = before_rows + reader.line_num + 1
        for row in reader:
            source = f"{label}:{start}"
            start = before_rows + reader.line_num + 1
            if not row:
                continue
            if len(row) != len(header):
                yield source, BadRow(source, f"has {len(row)} fields, the header has {len(header)}")
            else:
                yield source, NotedRow.of(dict(zip(header, row, strict=True)), _odd_fields(row, delimiter, spaced))
    except csv.Error as error:
        raise PlanError(f"{label}:{before_rows + reader.line_num}: is not CSV ({error}). Fix the file.") from error
    finally:
        csv.field_size_limit(before)


def _odd_fields(row: list[str], delimiter: str, spaced: bool) -> dict[str, int]:
    """Notes on a table's row whose fields may not be what its writer meant."""
    notes = {}
    if spaced:
        notes["spaces after a table's separators are left out, as its first line has them"] = 1
    if len(row) > 1 and all(len(field) > 1 and field[0] == field[-1] == "'" for field in row):
        notes["all fields of a table's row are in single quotes, which are learned"] = 1
    if any(_holds_rows(field, delimiter, len(row) - 1) for field in row):
        notes[
            "a quoted field of a table holds lines that look like rows of their own. If its quotes are a part of the "
            "text, double them, and quote the field"
        ] = 1
    return notes


def _holds_rows(field: str, delimiter: str, separators: int) -> bool:
    """True if each line of a field after its first has as many separators as a row, without a space after one."""
    lines = field.split("\n")[1:]
    counted = [line.count(delimiter) for line in lines]
    return bool(lines) and separators > 0 and set(counted) == {separators} and f"{delimiter} " not in field


def read_text(path: Path, label: str, hasher: Hasher, text_unit: str = "auto") -> Iterator[tuple[str, dict | BadRow]]:
    """Yields the file as one document, or with `text_unit` line one per line; blank lines are left out."""
    if text_unit != "line":
        yield from _whole_text(path, label, hasher, text_unit)
        return
    for number, text, _ in text_lines(path, label, hasher):
        source = f"{label}:{number}"
        if isinstance(text, BadRow):
            yield source, text
        elif text.strip():
            yield source, {"text": text}


def _whole_text(path: Path, label: str, hasher: Hasher, text_unit: str) -> Iterator[tuple[str, dict]]:
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise PlanError(
            f"{label}: is {size / 2**20:.0f} MiB, the maximum for one document is {MAX_JSON_BYTES >> 20} MiB. Split "
            "the file, or add --text_unit line."
        )
    data = path.read_bytes()
    hasher.update(data)
    text = _decode_whole(data, label).replace("\r\n", "\n")
    first = text.lstrip().partition("\n")[0]
    if text_unit == "auto" and first.startswith("{") and isinstance(parse_object(first, label), dict):
        raise PlanError(
            f"{label}: its first line is a JSON object. Rename it to .jsonl, or add --text_unit document to learn "
            "it as prose."
        )
    if text_unit == "auto" and (fact := rather(text)):
        raise PlanError(f"{label}: {fact}, or add --text_unit document to learn it as prose.")
    if text.strip():
        yield f"{label}:1", {"text": text}


def read_dummy(path: Path, label: str, hasher: Hasher) -> Iterator[tuple[str, dict]]:
    for i in range(DUMMY_ROWS):
        a = i * 7 % 50
        b = i * 13 % 41
        row = {"instruction": f"Add {a} and {b}.", "output": f"{a} plus {b} is {a + b}."}
        hasher.update(json.dumps(row).encode())
        yield f"dummy:{i + 1}", row


# In order of precedence, for folders with several kinds of files.
READERS: dict[str, Callable[..., Iterator[tuple[str, dict | BadRow]]]] = {
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".txt": read_text,
    ".md": read_text,
}
PROSE = (".txt", ".md")
REMEDIES = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "a spreadsheet. Save the sheet as .csv."),
    **dict.fromkeys((".srt", ".vtt"), "a file of subtitles. Save what is said, without times, as .txt."),
    ".log": "a log. Rename it to .txt to learn it as prose, or add --text_unit line to learn its lines.",
    **dict.fromkeys((".yaml", ".yml", ".toml"), "a file of settings. Write its rows as .jsonl, an object per line."),
    ".xml": "XML. Write its rows as .jsonl, an object per line, or its text as .txt.",
    **dict.fromkeys(
        (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".html", ".htm"), "a document. Save it as .txt."
    ),
    **dict.fromkeys(
        (".zip", ".tar", ".tgz", ".7z", ".bz2", ".xz", ".zst"), "packed. Unpack it, and give what it holds."
    ),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3"), "a database. Export its table as .csv."),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".bin"), "a pickle, which can run code. Write its rows as .jsonl."),
    ".ipynb": "a notebook. Save its text as .md.",
}


# ------ parts of readers


def _after_spaces(text: str, at: int) -> int:
    found = NOT_SPACE.search(text, at)
    if found:
        return found.start()
    return len(text)


def _delimiter(path: Path) -> tuple[str, int]:
    """(delimiter of a table's columns, number of lines before its header): from Excel's first line sep=;, else the
    first of comma, tab and semicolon in the header (.tsv: tab, comma), of several one that the next line has as often.
    """
    with open(path, "rb") as file:
        head = file.readline(MAX_LINE_BYTES)
        following = file.readline(MAX_LINE_BYTES)
    said = EXCEL_SEPARATOR.fullmatch(head.removeprefix(codecs.BOM_UTF8))
    if said:
        return said[1].decode("latin-1"), 1
    if path.suffix.lower() == ".tsv":
        marks = [b"\t", b","]
    else:
        marks = [b",", b"\t", b";"]
    if following.count(b'"') % 2:  # a row of several lines
        following = head
    head, following = (b"".join(line.split(b'"')[::2]) for line in (head, following))  # without what is quoted
    found = [mark for mark in marks if mark in head] or marks[:1]
    return next((mark for mark in found if head.count(mark) == following.count(mark)), found[0]).decode(), 0


def text_lines(
    path: Path, label: str, hasher: Hasher, offset: int = 0, number: int = 0
) -> Iterator[tuple[int, str | BadRow, bool]]:
    """Yields (line number, text without line ending, whether it had one). Reads at most MAX_LINE_BYTES of a line.
    From byte `offset` on, which `number` lines precede.
    """
    with open(path, "rb") as file:
        file.seek(offset)
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
        return BadRow(where, f"is not UTF-8 (0x{line[error.start]:02x}): iconv -f CP1252 -t UTF-8 converts the file")
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
    example = ' such as {"text": "..."}' if isinstance(value, str) else ""
    if isinstance(value, dict):
        return value
    return BadRow(where, f"is {_kind(value)}, must be an object{example}")


def _decode_value(text: str, at: int, where: str):
    """(value or BadRow, end position). Raises PlanError if the text is not JSON."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]):
        value = dict(items)
        if len(value) != len(items):
            name = first_repeated(key for key, _ in items)
            assert name is not None, items
            repeated.append(name)
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


def _json_fact(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON ({error.msg} at column {error.colno})"
    return f"is not usable JSON ({first_line(error)})"


def _rows_of_object(text: str, label: str, split: str):
    if text.lstrip().startswith("{"):
        _, end = _decode_value(text, _after_spaces(text, 0), f"{label}:1")
        if text[end:].strip().startswith(("{", ",")):
            yield from _objects(text, label)
            return
    value = parse_object(text.strip(), f"{label}:1")
    if isinstance(value, BadRow):
        raise PlanError(f"{value.where}: {value.reason}. Fix the file.")
    table = rows_of_table(value, label)
    if table is not None:
        yield from ((f"{label}:row {i}", row) for i, row in enumerate(table, 1))
        return
    if split in value:
        names = [split]
    else:
        names = [key for key in LIST_FIELDS if isinstance(value.get(key), list)]
    if len(names) != 1 or not isinstance(value[names[0]], list):
        if any(isinstance(v, list) and k in LIST_FIELDS for k, v in value.items()):
            raise PlanError(f"{label}: has several lists of rows, {', '.join(names)}, none named {split!r}. Keep one.")
        yield f"{label}:1", value
        return
    beside = {key: part for key, part in value.items() if key != names[0] and not is_nothing(part)}
    for key, part in beside.items():
        if is_of_all_rows(key, part):
            raise PlanError(
                f"{label}: {key!r} beside {names[0]!r} may be a part of every row, and is not read. Write it into each "
                "row, or remove it."
            )
    said = {}
    for what, is_list in (("lists", True), ("fields", False)):
        unread = [key for key, part in beside.items() if _are_objects(part) == is_list]
        if unread:
            said[f"{what} of the file beside {names[0]!r} that are not read: {', '.join(unread)[:200]}"] = 1
    for i, row in enumerate(value[names[0]]):
        source = f"{label}:row {i + 1}"
        if isinstance(row, dict):
            yield source, NotedRow.of(row, said)
            said = {}
        else:
            yield source, BadRow(source, f"is {_kind(row)}, must be an object")


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _without_bom(data: bytes, label: str) -> bytes:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise PlanError(f"{label}:1:byte 1: is not UTF-8 but UTF-16. Convert it: iconv -f UTF-16 -t UTF-8.")
    return data.removeprefix(codecs.BOM_UTF8)


def _decode_whole(data: bytes, label: str) -> str:
    data = _without_bom(data, label)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        start = data.rfind(b"\n", 0, error.start) + 1
        where = f"{label}:{line}:byte {error.start - start + 1}"
        raise PlanError(f"{where}: is not UTF-8 (0x{data[error.start]:02x}). Convert the file to UTF-8.") from error
    if "\0" in text:
        at = text.index("\0")
        raise PlanError(f"{label}:{text.count(chr(10), 0, at) + 1}: contains a NUL byte. Remove it.")
    return text


def _kind(value: object) -> str:
    names = {
        list: "an array",
        str: "text",
        int: "a number",
        float: "a number",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
