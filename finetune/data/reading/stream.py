"""Rows read while the run trains: memory for a buffer of rows, whatever the files' size.

The order is a function of the seed and the position: each dataset's rows are shuffled within blocks of `buffer` rows,
and drawn by weight in a seeded pattern. A position is a number of rows, so a checkpoint needs no more than its cursor.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from finetune.data.reading.arrow import stream_parquet
from finetune.data.reading.readers import is_blank, read_jsonl, spans_lines
from finetune.data.reading.rows import BadRow
from finetune.errors import PlanError

PATTERN = 1000  # draws after which the shares of all datasets are exact


@dataclass
class ReadSoFar:
    """The part of a file that the run has read: its first `num_bytes`, of which `hasher` holds the first `hashed`."""

    path: Path
    num_bytes: int = 0
    hashed: int = 0
    hasher: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def __post_init__(self):
        self.changed = self.path.stat().st_ctime_ns  # a program can set the time of modification, but not this one

    def record(self) -> list:
        """[number of bytes, their sha256, when the file was changed] for a checkpoint. Reads what is not hashed."""
        if self.hashed < self.num_bytes:
            with open(self.path, "rb") as file:
                file.seek(self.hashed)
                while chunk := file.read(min(2**20, self.num_bytes - self.hashed)):
                    self.hasher.update(chunk)
                    self.hashed += len(chunk)
        return [self.hashed, self.hasher.hexdigest(), self.changed]


class Position:
    """Takes the place of a reader's hash, and moves the end of what was read. `at`: the byte it begins at."""

    def __init__(self, read: ReadSoFar | None, at: int = 0):
        self.read = read
        self.at = at

    def update(self, data: bytes) -> None:
        self.move_to(self.at + len(data))

    def move_to(self, at: int) -> None:
        self.at = at
        if self.read:
            self.read.num_bytes = max(self.read.num_bytes, at)


class StreamedFile:
    """A file whose rows can be read from the middle. `reader`: of its type, as in readers.READERS."""

    def __init__(self, reader: Callable, path: Path | None, label: str):
        self.reader = reader
        self.path = path
        self.label = label
        self.read: ReadSoFar | None = None
        if path:
            self.read = ReadSoFar(path)

    def num_bytes(self) -> int:
        if self.path:
            return self.path.stat().st_size
        return 0

    def check(self, record: list) -> str | None:
        """Raises PlanError unless the file begins with the bytes of `record`. A notice if its rest may have changed."""
        if self.read is None:
            return None
        num_bytes, digest, changed = record
        self.read.num_bytes = num_bytes
        if self.read.record()[1] != digest:
            raise PlanError(
                f"--resume: {self.label}: its first {num_bytes:,} bytes, which the run has read, are others now. "
                "Give the file of that run, or a new --output_dir."
            )
        if self.read.changed == changed or num_bytes == self.num_bytes():
            return None
        what = "was written, moved or copied since, or has other attributes"
        return f"{self.label} {what}: the {num_bytes:,} bytes read so far are the same, others may differ"

    def rows(self, skip: int) -> Iterator[tuple[str, dict | BadRow]]:
        """(source, row) of the rows after the first `skip`. Raises PlanError for a file that cannot be read."""
        if self.path is not None and self.reader is read_jsonl and not spans_lines(self.path):
            return self._lines(self.path, skip)
        if self.path is not None and str(self.path).lower().endswith(".parquet"):
            return stream_parquet(self.path, self.label, skip, Position(self.read).move_to)
        return itertools.islice(self.reader(self.path, self.label, Position(self.read)), skip, None)

    def _lines(self, path: Path, skip: int) -> Iterator[tuple[str, dict | BadRow]]:
        if not skip:
            return read_jsonl(path, self.label, Position(self.read))
        offset = 0
        number = 0
        left = skip
        with open(path, "rb") as file:
            for line in file:
                offset = offset + len(line)
                number = number + 1
                left -= not is_blank(line, number)
                if not left:
                    break
        return read_jsonl(path, self.label, Position(self.read, offset), offset, number)


class SourceStream:
    """One dataset's rows, shuffled within blocks, again and again. `number`: its place among the run's datasets."""

    def __init__(self, files: list[StreamedFile], seed: int, number: int, buffer: int):
        self.files = files
        self.seed = seed
        self.number = number
        self.buffer = buffer
        self.size: int | None = None
        self.key: tuple[int, int] | None = None
        self.rows: Iterator[tuple[str, dict | BadRow]] | None = None
        self.block: list[tuple[str, dict | BadRow]] = []

    def row(self, passes: int, index: int) -> tuple[str, dict | BadRow] | None:
        """Row `index` of a pass over the dataset; None past its end. Rows in order are read once."""
        block, within = divmod(index, self.buffer)
        if self.key != (passes, block):
            self._read(passes, block)
        order = self._order(passes, block, len(self.block))
        if within < len(self.block):
            return self.block[order[within]]
        return None

    def count(self) -> int:
        """The number of its rows, by reading them all."""
        return sum(1 for _ in self._rows_from(0))

    def _order(self, passes: int, block: int, size: int) -> np.ndarray:
        entropy = np.random.SeedSequence([self.seed, self.number, passes, block, 3])
        return np.random.Generator(np.random.PCG64(entropy)).permutation(size)

    def _read(self, passes: int, block: int) -> None:
        rows = None
        if self.key == (passes, block - 1):
            rows = self.rows
        follows = rows is not None
        if rows is None:
            rows = self.rows = self._rows_from(block * self.buffer)
        self.block = list(itertools.islice(rows, self.buffer))
        self.key = passes, block
        if self.block or follows or not block:  # else it began past the end, which says nothing about the size
            if len(self.block) < self.buffer:
                self.size = block * self.buffer + len(self.block)

    def _rows_from(self, skip: int) -> Iterator[tuple[str, dict | BadRow]]:
        for file in self.files:
            if not skip:
                yield from file.rows(0)
                continue
            rows = file.rows(skip)
            first = next(rows, None)
            if first is None:  # the file is shorter: how much, only reading it says
                skip -= sum(1 for _ in file.rows(0)) if len(self.files) > 1 else 0
                continue
            yield first
            yield from rows
            skip = 0


class Stream:
    """The rows of a run in their order. `weights`: of the datasets, or None to read one after the other."""

    def __init__(self, sources: list[SourceStream], weights: list[float] | None, seed: int):
        self.sources = sources
        self.seed = seed
        if weights is None:
            self.counts = None
        else:
            self.counts = pattern_counts(weights)

    def row(self, epoch: int, index: int) -> tuple[int, str, dict | BadRow] | None:
        """(dataset, source, row) at a position; None past the end of an epoch. Weighted datasets never end."""
        if self.counts is not None:
            return self._drawn(index, self.counts)
        for number, source in enumerate(self.sources):
            found = None
            if source.size is None or index < source.size:
                found = source.row(epoch, index)
            if found is not None:
                return number, *found
            index -= self._size(source)
        return None

    def _drawn(self, index: int, counts: list[int]) -> tuple[int, str, dict | BadRow]:
        pattern, within = divmod(index, PATTERN)
        order = self._pattern(pattern, counts)
        number = int(order[within])
        drawn = pattern * counts[number] + int((order[:within] == number).sum())
        source = self.sources[number]
        passes, at = divmod(drawn, source.size) if source.size else (0, drawn)
        found = source.row(passes, at)
        if found is None:  # its end, seen for the first time
            found = source.row(*divmod(drawn, self._size(source)))
        assert found is not None, (number, drawn)
        return number, *found

    def _pattern(self, pattern: int, counts: list[int]) -> np.ndarray:
        entropy = np.random.SeedSequence([self.seed, pattern, 4])
        draws = np.repeat(np.arange(len(counts)), counts)
        return np.random.Generator(np.random.PCG64(entropy)).permutation(draws)

    @staticmethod
    def _size(source: SourceStream) -> int:
        """The dataset's number of rows. Raises PlanError if it has none."""
        if source.size is None:  # a position far past the end was asked for: count
            source.size = source.count()
        if not source.size:
            raise PlanError(f"{source.files[0].label}: has no rows. Give a file with at least one row.")
        return source.size


def pattern_counts(weights: list[float]) -> list[int]:
    """Number of draws from each dataset in a pattern of PATTERN draws."""
    shares = np.array(weights) / sum(weights) * PATTERN
    found = np.maximum(1, shares.astype(int))
    for i in np.argsort(found - shares)[: max(0, PATTERN - int(found.sum()))]:
        found[i] += 1
    while found.sum() > PATTERN:
        found[np.argmax(found)] -= 1
    return found.tolist()
