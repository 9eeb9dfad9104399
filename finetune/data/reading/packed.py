"""Files of rows that gzip packed, unpacked once into the cache: every reader then reads a plain file."""

import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from finetune.data.reading.rows import BadRow, Hasher
from finetune.errors import PlanError
from finetune.model_files.digest import file_digest
from finetune.system.files import cache_folder, replace
from finetune.system.json_files import JsonFileError, read_json

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
    """The unpacked file, kept under the digest of the packed one. Raises PlanError.

    One that is not as it was written is unpacked again: nothing else knows what rows a packed file has.
    """
    folder = cache_folder("unpacked")
    target = folder / f"{file_digest(path)[:32]}{row_suffix(path.name)}"
    written = target.with_name(f"{target.name}.json")
    if target.is_file() and os.access(target, os.R_OK) and _digest_in(written) == file_digest(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
    except OSError as error:
        raise _unwritable(label, folder, error) from None
    left = LARGEST[0] + LARGEST[1] * path.stat().st_size
    digest = hashlib.sha256()
    try:
        with open(handle, "wb") as file, gzip.open(path) as packed:
            while chunk := packed.read(2**20):
                left -= len(chunk)
                if left < 0:
                    raise PlanError(f"{label}: holds more than {LARGEST[1]} times its size. Unpack it yourself.")
                digest.update(chunk)
                file.write(chunk)
        with replace(written) as file:
            file.write(json.dumps({"sha256": digest.hexdigest()}).encode())
        os.replace(name, target)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PlanError(f"{label}: is not readable gzip ({error}). Pack it again.") from None
    except OSError as error:
        raise _unwritable(label, folder, error) from None
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def _digest_in(file: Path) -> str | None:
    """The digest that was written beside an unpacked file; None without one."""
    try:
        return read_json(file, {"sha256": str})["sha256"]
    except (JsonFileError, FileNotFoundError):
        return None


def _unwritable(label: str, folder: Path, error: OSError) -> PlanError:
    return PlanError(f"{label}: cannot be unpacked into {folder} ({error.strerror}). Set XDG_CACHE_HOME.")
