"""Rows as they are read: a dataset of them, and one that is malformed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from finetune.data.columns import Notices
from finetune.errors import PlanError


@dataclass(frozen=True)
class BadRow:
    """A malformed row: its location, to the byte if known, and the reason."""

    where: str
    reason: str


class NotedRow(dict):
    """A row that reading changed. `notes`: {what a user should know of it: how often}."""

    notes: dict[str, int]

    @classmethod
    def of(cls, row: dict, notes: dict[str, int]) -> dict:
        """The row with these notes beside those it has; `row` itself without any."""
        if not notes and not isinstance(row, cls):
            return row
        found = cls(row)
        found.notes = (row.notes if isinstance(row, cls) else {}) | notes
        return found


@dataclass(frozen=True)
class RawDataset:
    """Rows as read. `skipped`: the reason for each bad row left out; at most `skip_bad_rows` over all stages.
    `digest`: sha256 of the bytes read. `about`: how many rows there are, roughly, if these are the first of them.
    `notices`: what a user should know of how they were read.
    """

    rows: list[dict]
    sources: list[str]
    columns: tuple[str, ...]
    skipped: tuple[str, ...]
    digest: str
    description: str
    skip_bad_rows: int = 0
    about: int | None = None
    notices: Notices = field(default_factory=Notices)


def skip_or_raise(bad: BadRow, num_skipped: int, skip_bad_rows: int) -> str:
    """The notice for a skipped row. Raises PlanError if `skip_bad_rows` is exceeded."""
    if num_skipped < skip_bad_rows:
        return f"{bad.where}: {bad.reason}"
    if skip_bad_rows:
        raise PlanError(
            f"{bad.where}: {bad.reason}. It is bad row {num_skipped + 1}, and --skip_bad_rows allows {skip_bad_rows}."
        )
    raise PlanError(f"{bad.where}: {bad.reason}. Fix or remove the row, or skip it with --skip_bad_rows 1.")


def collected(rows: Iterable, skip_bad_rows: int, samples: int = -1) -> tuple[list, list, dict, list, Notices]:
    """(rows, their sources, columns in order, notices of those skipped, notices of the others) of (source, row or
    BadRow), up to `samples`.
    """
    notices = Notices()
    found: list[dict] = []
    sources: list[str] = []
    columns: dict[str, None] = {}
    skipped: list[str] = []
    for source, row in rows:
        if isinstance(row, BadRow):
            skipped.append(skip_or_raise(row, len(skipped), skip_bad_rows))
            continue
        if isinstance(row, NotedRow):
            for text, count in row.notes.items():
                notices.add(text, source, count)
        found.append(row)
        sources.append(source)
        columns.update(dict.fromkeys(row))
        if len(found) == samples:
            break
    return found, sources, columns, skipped, notices


def first_repeated(names: Iterable[str]) -> str | None:
    """The first name that was there before."""
    first: dict[str, int] = {}
    return next((name for i, name in enumerate(names) if first.setdefault(name, i) != i), None)


def check_no_repeated(names: Iterable[object], where: str) -> None:
    """Raises PlanError for two columns of one name, of which a row could hold only one."""
    twice = first_repeated(map(str, names))
    if twice is not None:
        raise PlanError(f"{where}: has two columns {twice!r}. Rename one.")


class Hasher(Protocol):
    """The interface of hashlib's objects that readers feed."""

    def update(self, data: bytes, /) -> None: ...


def hash_file(path: Path, hasher: Hasher) -> None:
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            hasher.update(chunk)
