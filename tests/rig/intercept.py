"""The library that fails, delays or kills a process at a chosen file system call: built, found and armed."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("intercept.c")
FAULTS = ("none", "kill before", "kill after", "EIO once", "EIO on", "ENOSPC on", "short write", "SIGTERM", "SIGINT")
FAULTS += ("delay", "slow saves")
KILLS = ("kill before", "kill after")
ALLOCATING = ("write", "create", "mkdir", "truncate", "rename", "fsync")


def build(folder: Path) -> Path | None:
    """The compiled library; None without a C compiler."""
    compiler, target = shutil.which("cc") or shutil.which("gcc"), folder / "intercept.so"
    if compiler is None:
        return None
    if not target.exists():
        subprocess.run([compiler, *"-shared -fPIC -O1 -w -o".split(), target, SOURCE, "-ldl"], check=True)
    return target


def is_loaded() -> bool:
    return "intercept.so" in os.environ.get("LD_PRELOAD", "")


def arm(folder: Path, call: int, fault: str, log: Path | None = None) -> None:
    """From now on `fault` happens at this process's call number `call` below `folder`; `log` gets a line per call."""
    log_fd = -1 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ctypes.CDLL(None).rig_arm(os.fsencode(folder), ctypes.c_long(call), FAULTS.index(fault), log_fd)


def applicable(call: str) -> list[str]:
    """The faults that can happen at a call of this kind."""
    faults = [*KILLS, "EIO once", "EIO on"]
    return faults + ["ENOSPC on"] * (call in ALLOCATING) + ["short write"] * (call == "write")
