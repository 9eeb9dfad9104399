"""Files of rows that gzip packed, unpacked once into the cache: every reader then reads a plain file."""

import gzip
import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from finetune.data.reading.rows import BadRow, Hasher
from finetune.errors import PlanError

LARGEST = (2**28, 200)  # bytes of what was packed: so many, and so many for each of the packed file's


def row_suffix(name: str) -> str:
    """The suffix that says how a file's rows are written, without .gz."""
    path = PurePosixPath(name.lower())
    if path.suffix == ".gz":
        return PurePosixPath(path.stem).suffix
    return path.suffix


def read_packed(reader: Callable, path: Path, label: str, hasher: Hasher) -> Iterator[tuple[str, dict | BadRow]]:
    """Yields what `reader` does of the unpacked file."""
    yield from reader(unpacked(path, label), label, hasher)


def unpacked(path: Path, label: str) -> Path:
    """The unpacked file, kept until the packed one is written, replaced or moved. Raises PlanError."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune" / "unpacked"
    facts = path.stat()
    # ctime too: programs that build archives give every file the same mtime
    known = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_ino}"
    key = hashlib.sha256(known.encode()).hexdigest()[:24]
    target = folder / f"{key}{row_suffix(path.name)}"
    if os.access(target, os.R_OK):  # another user's, in a shared cache, may not be readable
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
    except OSError as error:
        raise _unwritable(label, folder, error) from None
    left = LARGEST[0] + LARGEST[1] * facts.st_size
    try:
        with open(handle, "wb") as file, gzip.open(path) as packed:
            while chunk := packed.read(2**20):
                left -= len(chunk)
                if left < 0:
                    raise PlanError(f"{label}: holds more than {LARGEST[1]} times its size. Unpack it yourself.")
                file.write(chunk)
        os.replace(name, target)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PlanError(f"{label}: is not readable gzip ({error}). Pack it again.") from None
    except OSError as error:
        raise _unwritable(label, folder, error) from None
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def _unwritable(label: str, folder: Path, error: OSError) -> PlanError:
    return PlanError(f"{label}: cannot be unpacked into {folder} ({error.strerror}). Set XDG_CACHE_HOME.")
