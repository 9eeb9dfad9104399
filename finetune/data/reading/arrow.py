"""Readers of Parquet and Arrow files: every batch is validated in full before a row of it is used."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from backend_manager import system_memory
from finetune.data.reading.rows import BadRow, Hasher, check_no_repeated, hash_file
from finetune.data.reading.structs import with_class_names, without_added_nulls
from finetune.errors import PlanError, first_line
from finetune.system.untrusted import untrusted

BATCH_ROWS = 64  # in memory at a time; a page of a few bytes may hold a GiB
ROW_BYTES = 100  # of a row in memory whatever it holds
FEWER = "Read fewer with --dataset_samples, or split the file."
EXPANSION = (2**28, 1000)  # bytes in memory that a compressed file may take: so many, and so many for each of its own


def read_parquet(path: Path, label: str, hasher: Hasher) -> Iterator[tuple[str, dict | BadRow]]:
    import pyarrow.parquet

    with untrusted(f"{label}: not a readable Parquet file", "Write it again."):
        with pyarrow.parquet.ParquetFile(path) as file:
            check_no_repeated(file.schema_arrow.names, label)
            yield from _arrow_rows(file.iter_batches(BATCH_ROWS), path, label, features_in(file.schema_arrow))
            hash_file(path, hasher)  # last: who reads only its first rows need not wait for it


def stream_parquet(
    path: Path, label: str, skip: int, move_to: Callable[[int], None]
) -> Iterator[tuple[str, dict | BadRow]]:
    """Yields the rows after the first `skip`, of a file of any size: neither read ahead nor held.

    `move_to` is called with the last byte of each row group before its rows are read.
    """
    import pyarrow.parquet

    with untrusted(f"{label}: not a readable Parquet file", "Write it again."):
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
            check_no_repeated(file.schema_arrow.names, label)
            features = features_in(file.schema_arrow)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            before = [sum(sizes[:i]) for i in range(len(sizes))]
            for i, size in enumerate(sizes):
                if before[i] + size > skip:
                    move_to(_end_of_group(file.metadata.row_group(i)))
                    batches = file.iter_batches(BATCH_ROWS, row_groups=[i])
                    rows = _arrow_rows(batches, path, label, features, before[i], limited=False)
                    yield from islice(rows, max(0, skip - before[i]), None)


def _end_of_group(group: Any) -> int:
    """The byte after a row group's last column."""
    columns = [group.column(i) for i in range(group.num_columns)]
    starts = [min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in columns]
    return max((start + c.total_compressed_size for start, c in zip(starts, columns, strict=True)), default=0)


def read_arrow(path: Path, label: str, hasher: Hasher) -> Iterator[tuple[str, dict | BadRow]]:
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
            check_no_repeated(opened.schema.names, label)
            hash_file(path, hasher)
            yield from _arrow_rows(batches, path, label, features_in(opened.schema))


def features_in(schema: Any) -> dict:
    """The package datasets' types of the columns, which name the classes of numbers; empty without."""
    written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    return written.get("info", {}).get("features") or {}


def _arrow_rows(batches: Iterable, path: Path, label: str, features: dict, number: int = 0, limited: bool = True):
    try:
        for source, row in _validated_rows(batches, path, label, number, limited):
            is_row = isinstance(row, dict)
            yield source, with_class_names(without_added_nulls(row), features) if is_row else row
    except MemoryError:  # a size in the file, or a long entry that many rows refer to
        raise PlanError(f"{label}: takes more memory than there is. {FEWER}") from None


def _validated_rows(batches: Iterable, path: Path, label: str, number: int, limited: bool):
    """Yields rows of record batches, each validated in full first: nothing else checks the offsets in a file.
    `number`: rows before these. `limited`: all of them are to be held in memory.
    """
    file_bytes = path.stat().st_size
    size = 0
    limit = min(EXPANSION[0] + EXPANSION[1] * file_bytes, system_memory()[1])
    for whole in batches:
        for batch, fault in _parts(whole):
            if fault is None:
                batch = _without_dictionaries(batch)
                size += batch.nbytes
            size += ROW_BYTES * batch.num_rows
            if limited and size > limit:
                taken = f"{number + batch.num_rows:,} rows take {size / 2**30:.1f} GiB"
                raise PlanError(f"{label}: its first {taken}, of a file of {file_bytes / 2**20:.1f} MiB. {FEWER}")
            for row in [fault] if fault else _python_rows(batch):
                number += 1
                source = f"{label}:row {number}"
                yield source, BadRow(source, row) if isinstance(row, str) else row


def _parts(whole: Any) -> Iterator[tuple]:
    """(some rows of the batch, None), or (one of them, what is wrong with it): of that, nothing may be read, not even
    its size.
    """
    is_valid = _fault_of(whole) is None
    for start in range(0, whole.num_rows, BATCH_ROWS):
        batch = whole.slice(start, BATCH_ROWS)
        if is_valid or _fault_of(batch) is None:
            yield batch, None
        else:  # only some of its rows are to blame
            for i in range(batch.num_rows):
                row = batch.slice(i, 1)
                yield row, _fault_of(row)


def _without_dictionaries(batch: Any):
    """The batch with its dictionary-encoded columns decoded: a slice of one holds the whole dictionary."""
    import pyarrow

    if not any(isinstance(column, pyarrow.DictionaryArray) for column in batch.columns):
        return batch
    columns = [c.dictionary_decode() if isinstance(c, pyarrow.DictionaryArray) else c for c in batch.columns]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _fault_of(batch: Any) -> str | None:
    import pyarrow

    try:
        batch.validate(full=True)
    except pyarrow.ArrowException as error:
        if "UTF8" in str(error):
            return "is not UTF-8"
        return f"is damaged ({first_line(error)})"
    return None


def _python_rows(batch: Any) -> list[dict | str]:
    """The rows of a valid batch as dicts, or what is wrong with one."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, TypeError, RecursionError) as error:  # such as a date after the year 9999
        if batch.num_rows == 1:
            return [f"cannot be read ({first_line(error)})"]
        return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1))]
