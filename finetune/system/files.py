"""Files and folders that appear complete or not at all, and locks that the kernel releases however a process ends."""

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from finetune.errors import PlanError

WRITING = ".writing-"  # name prefix of an incomplete file
UNFINISHED = ".unfinished"  # in an incomplete folder, with its temporary name


def open_file(path: Path, mode: str, **options):
    """open() of a regular file that is not a link.

    Whoever may write a folder could otherwise empty any file of the run's user; a pipe would never open.
    """
    return open(path, mode, opener=_open_regular, **options)


def _open_regular(name, flags: int) -> int:
    handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", name)
    return handle


@contextlib.contextmanager
def replace(path: Path, durable: bool = False, mark: str = "") -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end: a reader sees the old content or the new one.

    `durable`: file and folder are fsynced, so that this holds after a power failure too. `mark`: of its temporary
    name, by which the owner of the folder knows it. OSError if `path` is a link, a device or a pipe.
    """
    beside = path.with_name(f"{WRITING}{mark or os.getpid()}-{path.name}")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.ELOOP if path.is_symlink() else errno.EINVAL, "is not a regular file", str(path))
    try:
        with open_file(beside, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes names in the folder, such as those of new files, survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Holds an exclusive flock on a folder, or on a file, which it creates.

    BlockingIOError if another process does and `wait` is False.
    """
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked_in_cache(path: Path) -> Iterator[None]:
    """`locked`, and unlocked where the folder cannot be written: a cache that cannot be written only costs time."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path))
        yield


def check_new(folder: Path, flag: str) -> None:
    """Raises PlanError unless `folder` does not exist or is empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise PlanError(f"{flag} {folder}: exists and is not empty. Give another folder.")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `target` (absent or empty) at the end; it is removed if that is not reached.

    What killed writers of this target left is known by UNFINISHED and removed: the kernel has released their locks.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name[:200]}.tmp-"
    for stale in target.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), locked(stale, wait=False):
            with open_file(stale / UNFINISHED, "r") as file:
                is_ours = file.read(len(stale.name) + 1) == stale.name
            if is_ours and not stale.is_symlink():
                shutil.rmtree(stale)
    beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=prefix))
    try:
        with locked(beside, wait=False):
            (beside / UNFINISHED).write_text(beside.name)
            yield beside
            umask = os.umask(0)
            os.umask(umask)
            beside.chmod(0o777 & ~umask)
            beside.rename(target)
            (target / UNFINISHED).unlink()
    finally:
        shutil.rmtree(beside, ignore_errors=True)
