"""Files and folders that appear complete or not at all, and locks that the kernel releases however a process ends."""

import contextlib
import errno
import fcntl
import glob
import math
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from finetune.errors import PlanError
from finetune.system.terminal import say

WRITING = ".writing-"  # name prefix of an incomplete file
UNFINISHED = ".unfinished"  # in an incomplete folder, with its temporary name


def cache_root() -> Path:
    """The folder of this user's caches, ours and the Hub's, by the current environment variables."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def cache_folder(kind: str) -> Path:
    """The folder of what we keep of one kind."""
    return cache_root() / "finetune" / kind


def open_file(path: Path, mode: str, **options: Any) -> Any:
    """open() of a regular file that is not a link.

    Whoever may write a folder could otherwise empty any file of the run's user; a pipe would never open.
    """
    return open(path, mode, opener=_open_regular, **options)


def _open_regular(name: str | Path, flags: int) -> int:
    handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", name)
    return handle


def is_plain_name(name: object) -> bool:
    """True for the name of a file in a folder; a path, and what no file system takes, are none."""
    if not isinstance(name, str) or PurePosixPath(name).name != name:
        return False
    return name != ".." and not set(name) & {"\\", "\0"} and len(name.encode(errors="replace")) <= 255


def outside(file: Path) -> Path | None:
    """Target of a link that leaves its file's folder; None for a file inside it."""
    folder = file.parent.resolve()
    target = file.resolve()
    roots = [folder]
    # Hub cache: snapshots/<commit>/data/file -> ../../../blobs/<hash>
    roots += [above.parent / "blobs" for above in folder.parents if above.name == "snapshots"]
    return None if any(target.is_relative_to(root) for root in roots) else target


def check_listable(folder: Path) -> None:
    """Raises PlanError for a folder whose files this user may not see: pathlib takes it for an empty one."""
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise PlanError(f"{folder}: permission denied. Make it readable for this user.")


def check_inside(file: Path) -> None:
    """Raises PlanError for a link that leaves its file's folder, whose target would be read as a part of the folder."""
    if target := outside(file):
        raise PlanError(f"{file}: links to {target}, outside the folder. Copy the file into it.")


def is_regular(file: Path) -> bool:
    """True for a file; False where there is none. Raises PlanError for a pipe, a device, a folder, and for a link to
    nothing: what reads it by its name would wait, fail, or find none.
    """
    if file.is_file():
        return True
    if file.is_symlink() and not file.exists():
        raise PlanError(
            f"{file}: links to {file.readlink()}, which is not there. Download it again, or remove the link."
        )
    if os.path.lexists(file):
        raise PlanError(f"{file}: is not a regular file. Remove it, or put the file in its place.")
    return False


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


def identity_of(file: Path | int) -> tuple[int, ...]:
    """Facts of a file, by its path or open handle, that differ if it is another or was changed. May raise OSError."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


SAY_AFTER_S = 2.0  # of waiting for a lock
CACHE_PATIENCE_S = 60.0  # with a process that makes a cache entry and shows no progress


@contextlib.contextmanager
def locked(path: Path, wait: bool = True, patience_s: float = math.inf) -> Iterator[Callable[[], None]]:
    """Holds an exclusive flock on a folder, or on a file, which it creates. Yields a function that reports progress to
    waiting processes.

    A waiting process says who holds the lock. Raises BlockingIOError if another process holds it and `wait` is False;
    TimeoutError after `patience_s` without progress of its holder.
    """
    is_folder = path.is_dir()
    if is_folder:
        handle = os.open(path, os.O_RDONLY)
    else:
        handle = _open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        if wait:
            _wait_for_lock(handle, path, patience_s)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_folder:
            program = Path(*sys.argv[:1]).name or "python"  # of an interpreter inside a program there may be none
            owner = f"pid {os.getpid()} ({program}), since {time.strftime('%Y-%m-%d %H:%M:%S')}"
            os.ftruncate(handle, 0)
            os.pwrite(handle, owner.encode(errors="replace"), 0)
        yield lambda: os.utime(handle)
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, path: Path, patience_s: float) -> None:
    began = heard = time.monotonic()
    told = False
    seen = os.fstat(handle).st_mtime_ns
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        now = time.monotonic()
        changed = os.fstat(handle).st_mtime_ns
        if changed != seen:
            seen = changed
            heard = now
        if now - heard > patience_s:
            raise TimeoutError(f"{_owner(handle)} has shown no progress for {patience_s:.0f} s")
        if not told and now - began > SAY_AFTER_S:
            told = True
            say(f"waiting for {_owner(handle)}, which holds {path}")
        time.sleep(0.05)


def _owner(handle: int) -> str:
    if stat.S_ISDIR(os.fstat(handle).st_mode):
        found = b""
    else:
        found = os.pread(handle, 200, 0)
    return found.decode(errors="replace").strip() or "another process"


@contextlib.contextmanager
def locked_in_cache(path: Path, patience_s: float = CACHE_PATIENCE_S) -> Iterator[Callable[[], None]]:
    """`locked`; unlocked where the folder cannot be written, or when patience ends: a cache only saves time."""
    with contextlib.ExitStack() as stack:
        progress: Callable[[], None] = lambda: None  # noqa: E731
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            progress = stack.enter_context(locked(path, patience_s=patience_s))
        except TimeoutError as error:
            say(f"note: {error}: going on without {path}")
        except OSError:
            pass
        yield progress


def check_writable(folder: Path, flag: str) -> None:
    """Raises PlanError if this user may not write to `folder`, or to the folder in which it would be made."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not above.is_dir():
        raise PlanError(f"{flag} {folder}: is a file, or is inside one. Give a folder.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PlanError(f"{flag} {folder}: no permission to write to {above}. Give another folder.")


def check_new(folder: Path, flag: str) -> None:
    """Raises PlanError unless this user may write to `folder`, and it does not exist or is empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise PlanError(f"{flag} {folder}: exists and is not empty. Give another folder.")
    check_writable(folder, flag)


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end.

    What killed processes left under this prefix is known by UNFINISHED and removed: the kernel released their locks.
    """
    for stale in parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), locked(stale, wait=False):
            with open_file(stale / UNFINISHED, "r") as file:
                is_ours = file.read(len(stale.name) + 1) == stale.name
            if is_ours and not stale.is_symlink():
                shutil.rmtree(stale)
    made = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    try:
        with locked(made):  # another process may look into it at this moment
            (made / UNFINISHED).write_text(made.name)
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `target` (absent or empty) at the end; it is removed if that is not reached,
    as what killed writers of this target left is.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target.parent, f".{target.name[:200]}.tmp-") as beside:
        yield beside
        umask = os.umask(0)
        os.umask(umask)
        beside.chmod(0o777 & ~umask)
        beside.rename(target)
        (target / UNFINISHED).unlink()
