"""The rate at which a disk gives files."""

import fcntl
import functools
import os
import time
from pathlib import Path

from finetune.system.files import open_file

READ_BYTES = 2**27  # of a probe
LEAST_BYTES = 2**24  # of a file that tells a rate
PIECE = 2**24


@functools.cache
def disk_rate(files: tuple[Path, ...]) -> float | None:
    """Bytes/s of reading what the page cache does not hold of the largest of `files`, its beginning; None if none of
    them is large enough to tell, or can be read.
    """
    try:
        file = max(files, key=lambda path: path.stat().st_size)
        with open_file(file.resolve(), "rb", buffering=0) as handle:
            return _timed(handle.fileno())
    except (OSError, ValueError):
        return None


def _timed(handle: int) -> float | None:
    size = min(os.fstat(handle).st_size, READ_BYTES)
    if size < LEAST_BYTES:
        return None
    _forget(handle, size)
    into = bytearray(PIECE)
    read = 0
    began = time.perf_counter()
    while read < size:
        found = os.preadv(handle, [into], read)
        if not found:  # it was cut meanwhile
            return None
        read += found
    return read / max(time.perf_counter() - began, 1e-9)


def _forget(handle: int, size: int) -> None:
    """Lets the system drop a file's first bytes from its page cache, or read past it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
    else:
        fcntl.fcntl(handle, getattr(fcntl, "F_NOCACHE", 48), 1)
