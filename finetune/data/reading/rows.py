"""Rows as they are read: a dataset of them, and one that is malformed."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import PlanError


@dataclass(frozen=True)
class BadRow:
    """A malformed row: its location, to the byte if known, and the reason."""

    where: str
    reason: str


@dataclass(frozen=True)
class RawDataset:
    """Rows as read. `skipped`: the reason for each bad row left out; at most `skip_bad_rows` over all stages.
    `digest`: sha256 of the bytes read. `about`: how many rows there are, roughly, if these are the first of them.
    """

    rows: list[dict]
    sources: list[str]
    columns: tuple[str, ...]
    skipped: tuple[str, ...]
    digest: str
    description: str
    skip_bad_rows: int = 0
    about: int | None = None


def skip_or_raise(bad: BadRow, num_skipped: int, skip_bad_rows: int) -> str:
    """The notice for a skipped row. Raises PlanError if `skip_bad_rows` is exceeded."""
    if num_skipped < skip_bad_rows:
        return f"{bad.where}: {bad.reason}"
    if skip_bad_rows:
        raise PlanError(
            f"{bad.where}: {bad.reason}. It is bad row {num_skipped + 1}, and --skip_bad_rows allows {skip_bad_rows}."
        )
    raise PlanError(f"{bad.where}: {bad.reason}. Fix or remove the row, or skip it with --skip_bad_rows 1.")


def collected(rows: Iterable, skip_bad_rows: int, samples: int = -1) -> tuple[list, list, dict, list]:
    """(rows, their sources, columns in order, notices of those skipped) of (source, row or BadRow), up to `samples`."""
    found: list[dict] = []
    sources: list[str] = []
    columns: dict[str, None] = {}
    skipped: list[str] = []
    for source, row in rows:
        if isinstance(row, BadRow):
            skipped.append(skip_or_raise(row, len(skipped), skip_bad_rows))
            continue
        found.append(row)
        sources.append(source)
        columns.update(dict.fromkeys(row))
        if len(found) == samples:
            break
    return found, sources, columns, skipped


def first_repeated(names) -> str | None:
    """The first name that was there before."""
    first: dict[str, int] = {}
    return next((name for i, name in enumerate(names) if first.setdefault(name, i) != i), None)


def hash_file(path: Path, hasher) -> None:
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            hasher.update(chunk)
