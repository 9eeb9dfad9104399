"""The end of this process while code of a user runs. A process beside it ends it where its own threads cannot: while a
thread holds Python's lock, as a search of `re` does, no other runs, and no signal is handled.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

# Seconds while the parent is stopped (SIGSTOP) are not counted, on Linux.
WATCH = """
import os, signal, sys, time

def is_stopped():
    try:
        with open(f"/proc/{parent}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False

parent = os.getppid()
left = float(sys.argv[1])
while os.getppid() == parent:
    if left <= 0:
        sys.stderr.write(sys.argv[2] + "\\n")
        sys.stderr.flush()
        os.kill(parent, signal.SIGKILL)
        break
    before = time.monotonic()
    time.sleep(min(1.0, left))
    if not is_stopped():
        left -= time.monotonic() - before
"""


@contextlib.contextmanager
def ended_after(seconds: float, said: str) -> Iterator[None]:
    """A context in which this process is killed, with a line on stderr, if it takes longer."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", WATCH, str(seconds), said],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def not_exited() -> Iterator[None]:
    """A context in which os._exit of other code than this package's raises SystemExit: it would end a run at once, with
    an exit code that means something else. Children that such code forks exit as they ask to.
    """
    leave = os._exit
    process = os.getpid()

    def guarded(status: int) -> None:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if os.getpid() != process or asking.partition(".")[0] == __name__.partition(".")[0]:
            leave(status)
        raise SystemExit(f"os._exit({status!r})")

    os._exit = guarded  # type: ignore[assignment]  # it may return from here, by raising
    try:
        yield
    finally:
        os._exit = leave
