"""The first rows of a file on the Hub, by range requests, as a file of the same kind here: what a dry run reads."""

import codecs
import itertools
import json
from pathlib import Path

from finetune.errors import PlanError
from finetune.model_files.hub_ranges import RemoteFile, look_at, looks_folder
from finetune.system.files import replace
from finetune.system.json_files import read_json
from finetune.system.untrusted import untrusted

FIRST_BYTES = 2**18  # of text: some hundred rows
PARQUET_ROWS = 128
PARQUET_BUFFER = 2**16
SMALL_BYTES = 2**20  # a file that is read in full, of whatever kind
LINES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".md")
COUNT = ".count.json"  # beside the rows: about how many the file has, and what was read of it


class NotReadError(PlanError):
    """A file whose first rows are not to be had without the whole."""


def first_rows(repo_id: str, name: str, commit: str, files: int = 1) -> Path:
    """A file with the first rows of a dataset's file, the first of so many, kept for the next dry run. Raises
    NotReadError, and what huggingface_hub does.
    """
    target = looks_folder("dataset", repo_id, commit) / name
    count = target.with_name(target.name + COUNT)
    look_at(repo_id, count)
    if target.is_file() and count.is_file():
        return target
    remote = RemoteFile(repo_id, name, commit, "dataset")
    content, rows = _first(remote, target.suffix.lower(), f"{repo_id}/{name}")
    if files > 1:  # taken to be as long as this one
        rows = files * (rows or content.count(b"\n"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with replace(target) as file:
        file.write(content)
    with replace(count) as file:
        file.write(json.dumps({"rows": rows, "moved": remote.moved}).encode())
    return target


def counted(path: Path) -> tuple[int | None, int]:
    """(estimated number of rows on the Hub, None if these are all; bytes read of it)."""
    file = path.with_name(path.name + COUNT)
    found = {}
    if file.is_file():
        found = read_json(file, {})
    return found.get("rows"), found.get("moved", 0)


def _first(remote: RemoteFile, suffix: str, label: str) -> tuple[bytes, int | None]:
    """(content of a file with the first rows, about how many there are; None if these are all)."""
    if suffix == ".parquet":
        return _of_parquet(remote, label)
    start = remote.read_range(0, FIRST_BYTES)
    if len(start) == remote.size:
        return start, None
    found = _complete(start, suffix)
    if found is None and remote.size <= SMALL_BYTES:
        return remote.read_range(0, SMALL_BYTES), None
    if found is None:
        raise NotReadError(f"{label} is {remote.size / 2**20:,.0f} MiB of {suffix}, which has to be read in full")
    kept, rows, length = found
    if not kept:
        raise NotReadError(f"{label} has no end of a row in its first {FIRST_BYTES >> 10} KiB")
    return kept, round(rows * remote.size / length)


def _complete(start: bytes, suffix: str) -> tuple[bytes, int, int] | None:
    """(the complete rows at a file's start, their number, their bytes as they were); None where they are not found."""
    start = start.removeprefix(codecs.BOM_UTF8)
    is_json = suffix in (".json", ".jsonl", ".ndjson")
    if is_json and start.startswith(b"{") and not _is_json(start.split(b"\n", 1)[0]):
        found = _complete_objects(start)
        if found[0]:
            return found
    if suffix in LINES or (suffix == ".json" and start.lstrip().startswith(b"{") and b"}\n{" in start):
        is_table = suffix in (".csv", ".tsv")
        kept = _complete_lines(start, quotes=is_table)
        unquoted = kept.split(b'"')[::2] if is_table else [kept]
        return kept, sum(part.count(b"\n") for part in unquoted), len(kept)
    if suffix == ".json" and start.lstrip().startswith(b"["):
        return _complete_entries(start)
    return None


def _complete_lines(start: bytes, quotes: bool) -> bytes:
    """Up to the last line that is complete; with `quotes`, that does not end within a quoted field."""
    end = start.rfind(b"\n") + 1
    while quotes and end and start.count(b'"', 0, end) % 2:
        end = start.rfind(b"\n", 0, end - 1) + 1
    return start[:end]


def _is_json(line: bytes) -> bool:
    """True for a line that is a value of its own."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _complete_objects(start: bytes) -> tuple[bytes, int, int]:
    """(the complete JSON objects at the start, which span several lines each, their number, their bytes)."""
    text = start.decode("utf-8", "ignore")
    found, at = _values(text, 0, " \t\r\n")
    kept = text[:at].encode()
    return (kept + b"\n" if found else b""), len(found), len(kept)


def _complete_entries(start: bytes) -> tuple[bytes, int, int]:
    """(the complete entries at the start of a JSON array, one a line, as an array of their own, their number, their
    bytes as they were).
    """
    text = start.decode("utf-8", "ignore")
    found, at = _values(text, text.index("[") + 1, " \t\r\n,")
    if not found:
        return b"", 0, 0
    return ("[" + ",\n".join(map(json.dumps, found)) + "\n]").encode(), len(found), len(text[:at].encode())


def _values(text: str, at: int, between: str) -> tuple[list, int]:
    """(the complete JSON values from there on, the end of the last one). `between`: characters that separate them."""
    decoder = json.JSONDecoder()
    found: list = []
    while True:
        next_one = at + len(text[at:]) - len(text[at:].lstrip(between))
        try:
            entry, at = decoder.raw_decode(text, next_one)
        except ValueError:
            return found, at
        found.append(entry)


def _of_parquet(remote: RemoteFile, label: str) -> tuple[bytes, int | None]:
    import pyarrow
    from pyarrow import parquet

    with untrusted(f"{label}: cannot be read", "Download it and give a local file."):
        file = parquet.ParquetFile(remote, pre_buffer=False, buffer_size=PARQUET_BUFFER)
        total = file.metadata.num_rows
        batches = list(itertools.islice(file.iter_batches(PARQUET_ROWS), 1))
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_batches(batches, file.schema_arrow), sink)
    return sink.getvalue().to_pybytes(), total if total > PARQUET_ROWS else None
