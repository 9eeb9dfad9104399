"""The collective that a rank is in, by the stack of its main thread: for the line on ranks that do not agree."""

import re
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

# Where torch's collectives are; their decorators and waits are not what was asked for.
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py", "_collectives.py")
NOT_ASKED_FOR = ("wrapper", "wait", "wait_tensor")
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>\S+)')
Frame = tuple[str, int, str]  # file, line, function


def current() -> str | None:
    """`all_reduce (process_groups.py, line 88)`, that the main thread is in now; None if it is in none."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return _named((f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame))


def of_error(error: BaseException) -> str | None:
    """The collective that raised it."""
    found = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__)]
    return _named(reversed(found))


def of_dump(text: str) -> str | None:
    """The collective in a dump of faulthandler: of the first thread that is in one."""
    threads = re.split(r"^(?:Current thread|Thread) .*\n", text, flags=re.MULTILINE)
    dumps = ([(f["file"], int(f["line"]), f["function"]) for f in FRAME.finditer(thread)] for thread in threads)
    return next((named for frames in dumps if (named := _named(frames))), None)


def _named(frames: Iterable[Frame]) -> str | None:
    """The innermost collective of a stack, innermost frame first, with the line outside of torch that took it."""
    operation = None
    for file, line, function in frames:
        if operation is None and Path(file).name in COLLECTIVES and function not in NOT_ASKED_FOR:
            operation = function.lstrip("_")
        elif operation and "/torch/" not in Path(file).as_posix():
            return f"{operation} ({Path(file).name}, line {line})"
    return operation
