"""A folder that appears complete or not at all: written beside its place, then renamed."""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from finetune.errors import PlanError


def check_new(folder: Path, flag: str) -> None:
    """Raises PlanError unless `folder` does not exist or is empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise PlanError(f"{flag} {folder}: exists and is not empty. Give another folder.")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `target` (absent or empty) at the end; it is removed if that is not reached.

    What killed writers of the same target left is removed first: the kernel has released their locks.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name[:200]}.tmp-"
    for stale in target.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), _locked(stale):
            shutil.rmtree(stale)
    beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=prefix))
    try:
        with _locked(beside):
            yield beside
            umask = os.umask(0)
            os.umask(umask)
            beside.chmod(0o777 & ~umask)
            beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds an exclusive flock on the folder; OSError if another process does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
