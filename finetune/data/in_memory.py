"""Rows that a Python program holds, as a file: lists, DataFrames, datasets, tables, iterators.

Each rank reads the rows on its own, and a resumed run reads them again, so they are written once as JSON lines, under
the digest of what they say: the same rows are the same file.
"""

import datetime
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from finetune.data.reading.mixture import KEYS
from finetune.errors import PlanError


def is_rows(value) -> bool:
    """True for rows; False for names of datasets, and for entries that have one."""
    if isinstance(value, str | dict | bytes) or value is None:
        return False
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(row, dict) and not _is_entry(row) for row in value)
    return isinstance(value, Iterable) or hasattr(value, "to_pylist")  # pyarrow's tables


def _is_entry(row: dict) -> bool:
    return isinstance(row.get("name"), str) and set(row) <= set(KEYS)


def rows_of(value) -> Iterator:
    """The rows of a list, a pandas or polars DataFrame, a pyarrow table, a datasets.Dataset or any iterable."""
    if hasattr(value, "to_pylist"):
        return iter(value.to_pylist())
    if hasattr(value, "to_dicts"):
        return iter(value.to_dicts())
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return iter(value.to_dict("records"))
    return iter(value)


def as_file(value, where: str) -> str:
    """The path of a file of JSON lines with these rows. Raises PlanError, which `where` begins, for what is not one."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune" / "rows"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
    except OSError as error:
        raise PlanError(
            f"{where}: rows cannot be written to {folder} ({error.strerror}). Set XDG_CACHE_HOME."
        ) from None
    digest, number = hashlib.sha256(), 0
    try:
        with open(handle, "wb") as file:
            for number, row in enumerate(rows_of(value), 1):
                if not isinstance(row, dict):
                    raise PlanError(f"{where}, row {number}: is {type(row).__name__}, not a dict. Give rows as dicts.")
                line = _line(row, f"{where}, row {number}")
                digest.update(line)
                file.write(line)
        if not number:
            raise PlanError(f"{where}: has no rows. Give some.")
        path = folder / f"{digest.hexdigest()[:24]}.jsonl"
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return str(path)


def _line(row: dict, where: str) -> bytes:
    values = {str(name): _plain(value, f"{where}: column {name}") for name, value in row.items()}
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _plain(value, where: str):
    """A value as JSON has it: numbers and arrays of numpy as Python's, what is missing as null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "tolist"):  # a number or an array of numpy
        return _plain(value.tolist(), where)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v, where) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, where) for v in value]
    if isinstance(value, datetime.date | datetime.datetime):
        return value.isoformat()
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    raise PlanError(f"{where} is {type(value).__name__}, which is no text, number or list. Convert it.")
