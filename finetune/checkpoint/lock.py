"""Exclusive lock on an output_dir: an flock, which the kernel releases however the process ends."""

import fcntl
import os
import time
from pathlib import Path

from finetune.checkpoint.store import make_folder, open_file, storage
from finetune.errors import OutputDirInUseError, StorageError


class Lock:
    """The lock, taken. `created_folder`: the output_dir did not exist before.

    Raises OutputDirInUseError naming the owner, PlanError, StorageError.
    """

    def __init__(self, output_dir: Path):
        self.file, self.handle = output_dir / ".lock", None
        with storage(output_dir):
            self.created_folder = make_folder(output_dir)
        while self.handle is None:
            with storage(output_dir):
                handle = open_file(self.file, "a+")
            self._lock(handle, output_dir)
            if self._is_current(handle):
                self.handle = handle
            else:  # its owner removed the file between open and flock: another process may hold the new one
                handle.close()
        self.handle.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self.handle.write(f"pid {os.getpid()} on {os.uname().nodename}, started {started}")
        self.handle.flush()

    def _lock(self, handle, output_dir: Path) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read(200).strip() or "another process"
            handle.close()
            raise OutputDirInUseError(
                f"--output_dir {output_dir}: in use by {owner}. Wait for it, or give another folder."
            ) from None
        except OSError as error:
            raise StorageError(
                f"--output_dir {output_dir}: its file system does not support locks ({error.strerror})."
            ) from error

    def _is_current(self, handle) -> bool:
        try:
            at_path = os.stat(self.file, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(at_path, os.fstat(handle.fileno()))

    def release(self) -> None:
        self.handle.close()
