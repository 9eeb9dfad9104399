"""Files of a teacher's distributions at a dataset's targets: parts of rows that appear whole, named by their sha256."""

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.arrays import Named, Per
from finetune.data.tokens.tokenize import TokenizedDataset
from finetune.objectives import TEACHER_LOG_PROBS, TEACHER_TOKENS
from finetune.safetensors_io import digest_of, read_header_and_start, shards_of_arrays, write_file
from finetune.system.files import WRITING, scratch_folder

PART_ROWS = 512
LEAST = -60000.0  # of a log-probability in two bytes


class TaughtRows:
    """The files of one dataset, teacher and number of tokens, in `folder`. `width`: tokens that are kept; `is_full`:
    all are. Log-probabilities of all take four bytes, of some two: they are within 2.5e-4 of their own size then, and
    a probability within 1e-4.
    """

    def __init__(self, folder: Path, dataset: TokenizedDataset, width: int, is_full: bool):
        self.folder = folder
        self.dataset = dataset
        self.width = width
        self.dtypes = {
            TEACHER_TOKENS: np.dtype(np.int32),
            TEACHER_LOG_PROBS: np.dtype(np.float32 if is_full else np.float16),
        }
        self.widths = {TEACHER_TOKENS: width, TEACHER_LOG_PROBS: width if is_full else width + 1}
        self.verified: dict[int, Path] = {}

    @property
    def num_parts(self) -> int:
        return -(-len(self.dataset) // PART_ROWS)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        of_target = sum(self.widths[name] * dtype.itemsize for name, dtype in self.dtypes.items())
        return of_target * int(self.dataset.is_target.sum())

    def rows_of(self, part: int) -> range:
        return range(part * PART_ROWS, min((part + 1) * PART_ROWS, len(self.dataset)))

    def targets_of(self, part: int) -> int:
        rows = self.rows_of(part)
        offsets = self.dataset.offsets
        return int(self.dataset.is_target[offsets[rows.start] : offsets[rows.stop]].sum())

    def has(self, part: int) -> bool:
        """True if the part is here, and what its name says."""
        if part in self.verified:
            return True
        for path in sorted(self.folder.glob(f"part-{part:06d}-*.safetensors")):
            if digest_of(path)[:16] == path.stem.rpartition("-")[2] and self._fits(path, part):
                self.verified[part] = path
                return True
            path.unlink(missing_ok=True)
        return False

    def _fits(self, path: Path, part: int) -> bool:
        header, _ = read_header_and_start(path)
        rows = self.targets_of(part)
        return all(header.get(name, {}).get("shape") == [rows, width] for name, width in self.widths.items())

    def write(self, part: int, of_rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Writes a part: of each of its rows (tokens [T, K], log-probabilities [T, B]). Raises OSError."""
        tokens, log_probs = (np.concatenate(each) for each in zip(*of_rows, strict=True))
        arrays = {TEACHER_TOKENS: tokens, TEACHER_LOG_PROBS: np.maximum(log_probs, LEAST)}
        self.folder.mkdir(parents=True, exist_ok=True)
        found = {name: np.ascontiguousarray(array, self.dtypes[name]) for name, array in arrays.items()}
        with scratch_folder(self.folder, WRITING) as beside:  # what a killed one left goes with it
            digest = write_file(beside / "part", shards_of_arrays(found))["sha256"]
            path = self.folder / f"part-{part:06d}-{digest[:16]}.safetensors"
            (beside / "part").replace(path)
        self.verified[part] = path

    def missing(self) -> list[int]:
        """Parts that are not here."""
        return self.share(0, 1)

    def share(self, rank: int, size: int) -> list[int]:
        """Parts that are not here and one of `size` ranks makes, whatever the others have made meanwhile."""
        return [part for part in range(rank, self.num_parts, size) if not self.has(part)]

    def arrays(self) -> dict[str, Named]:
        """The dataset's arrays, read when a batch is made; zeros in the place of a missing part."""
        kept = {name: [self._mapped(part, name) for part in range(self.num_parts)] for name in self.dtypes}
        return {
            name: Named(KeptTargets(self.dataset, parts), Per.TARGET, is_data=False) for name, parts in kept.items()
        }

    def _mapped(self, part: int, name: str) -> "Kept":
        shape = (self.targets_of(part), self.widths[name])
        path = self.verified.get(part)
        if path is None or not shape[0]:
            return Kept(np.broadcast_to(np.zeros(1, self.dtypes[name]), shape), None)
        header, start = read_header_and_start(path)
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        first = start + header[name]["data_offsets"][0]
        values = np.frombuffer(mapping, self.dtypes[name], count=shape[0] * shape[1], offset=first)
        return Kept(values.reshape(shape), mapping)


@dataclass(frozen=True)
class Kept:
    """One array of a part: [targets, K], and the file's mapping that it is in, if it is."""

    values: np.ndarray
    mapping: mmap.mmap | None

    def read(self, targets: slice, out: np.ndarray) -> None:
        """Copies some targets. The pages that were read leave the process: over a run they add up to the file."""
        out[:] = self.values[targets]
        if self.mapping is not None and hasattr(self.mapping, "madvise"):  # Windows has none
            self.mapping.madvise(mmap.MADV_DONTNEED)


class KeptTargets:
    """[tokens, K] of a dataset: what is kept of its targets, and zeros elsewhere. A slice is an array."""

    def __init__(self, dataset: TokenizedDataset, parts: list[Kept]):
        self.is_target = dataset.is_target
        self.before = np.concatenate([[0], np.cumsum(dataset.is_target)])
        self.starts = np.cumsum([0, *(len(part.values) for part in parts)])
        self.parts = parts
        (self.width,) = {part.values.shape[1] for part in parts} or {0}
        self.dtype = np.dtype(np.float32 if parts and parts[0].values.dtype.kind == "f" else np.int32)
        self.shape = (len(self.is_target), self.width)

    def __len__(self) -> int:
        return len(self.is_target)

    def __getitem__(self, index: Any) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        out = np.zeros((max(0, stop - start), self.width), self.dtype)
        out[self.is_target[start:stop]] = self._targets(int(self.before[start]), int(self.before[max(start, stop)]))
        return out

    def _targets(self, start: int, stop: int) -> np.ndarray:
        part = int(np.searchsorted(self.starts, start, "right")) - 1
        found = np.empty((stop - start, self.width), self.dtype)
        at = start
        while at < stop:
            end = min(stop, int(self.starts[part + 1]))
            before = int(self.starts[part])
            self.parts[part].read(slice(at - before, end - before), found[at - start : end - start])
            at = end
            part += 1
        return found


def key_of(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]
