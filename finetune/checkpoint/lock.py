"""Exclusive lock on an output_dir: an flock, which the kernel releases however the process ends."""

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import IO

from finetune.checkpoint.store import make_folder, storage
from finetune.errors import OutputDirInUseError, PlanError, StorageError
from finetune.system.files import open_file

OWNER = "pid "  # how the text of the lock file begins
_open: "weakref.WeakSet[IO[str]]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Closes what a forked child has open of locks: it may outlive the run, and would hold them."""
    for handle in list(_open):
        handle.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def check_not_in_use(output_dir: Path) -> None:
    """Raises OutputDirInUseError if a live process holds the lock."""
    try:
        handle = open_file(output_dir / ".lock", "r", errors="replace")
    except OSError:
        return
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(output_dir, handle) from None
        except OSError:  # a file system without locks
            return


def in_use(output_dir: Path, lock_file: IO[str]) -> OutputDirInUseError:
    """The error that names the owner."""
    lock_file.seek(0)
    owner = lock_file.read(200).strip() or "another process"
    return OutputDirInUseError(f"--output_dir {output_dir}: in use by {owner}. Wait for it, or give another folder.")


class Lock:
    """The lock, taken. `created_folder`: the output_dir did not exist before. `text`: what the lock file says.
    Raises OutputDirInUseError naming the owner, PlanError, StorageError.
    """

    def __init__(self, output_dir: Path):
        self.file = Path(os.path.abspath(output_dir)) / ".lock"
        self.handle: IO[str] | None = None
        with storage(output_dir):
            self.created_folder = make_folder(output_dir)
        while self.handle is None:
            with storage(output_dir):
                handle = open_file(self.file, "a+", errors="replace")
            _open.add(handle)
            self._lock(handle, output_dir)
            if self.is_current(handle):
                self.handle = handle
            else:  # its owner removed the file between open and flock: another process may hold the new one
                handle.close()
        self.handle.seek(0)
        if not (self.handle.read(4) or OWNER).startswith(OWNER):
            self.release()
            raise PlanError(f"--output_dir {output_dir}: holds .lock, which is not of a run. Give another folder.")
        self.handle.truncate(0)
        now = time.time()  # to the microsecond: a copied folder has the lock of another moment
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f"{now % 1:.6f}"[1:]
        self.text = f"{OWNER}{os.getpid()} on {os.uname().nodename}, started {started}"
        self.handle.write(self.text)
        self.handle.flush()
        os.fsync(self.handle.fileno())  # other hosts see it in a shared file system

    def _lock(self, handle: IO[str], output_dir: Path) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with handle:
                raise in_use(output_dir, handle) from None
        except OSError as error:
            raise StorageError(
                f"--output_dir {output_dir}: its file system does not support locks ({error.strerror})."
            ) from error

    def is_current(self, handle: IO[str] | None = None) -> bool:
        """True if the file at the lock's path is still the one that `handle` (default: this lock's) has open."""
        handle = handle or self.handle
        assert handle is not None, self.file
        try:
            at_path = os.stat(self.file, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(at_path, os.fstat(handle.fileno()))

    def release(self) -> None:
        assert self.handle is not None, self.file
        if not self.handle.closed:
            with contextlib.suppress(OSError):
                fcntl.flock(self.handle, fcntl.LOCK_UN)  # whoever else has it open
        self.handle.close()
