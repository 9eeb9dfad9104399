"""A process beside this one that ends it where its own threads cannot: while a thread holds Python's lock, as a search
of `re` does, no other runs, and no signal is handled.
"""

import contextlib
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator

# Reads [seconds or null, line] per line. A parent that is stopped (SIGSTOP) is not waited for.
WATCH = """
import json, os, select, signal, sys, time

def is_stopped():
    try:
        with open(f"/proc/{parent}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False

parent = os.getppid()
seconds = None
while os.getppid() == parent:
    left = 5.0 if seconds is None else min(5.0, max(0.0, end - time.monotonic()))
    if select.select([0], [], [], left)[0]:
        lines = os.read(0, 1 << 16).splitlines()
        if not lines:
            break
        seconds, said = json.loads(lines[-1])
    elif seconds is None or time.monotonic() < end and not is_stopped():
        continue
    elif not is_stopped():
        sys.stderr.write(said + "\\n")
        sys.stderr.flush()
        os.kill(parent, signal.SIGKILL)
        break
    end = time.monotonic() + (seconds or 0)
"""


class Outside:
    """The process beside this one. It ends with this one, and when nothing refers to it any more."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", WATCH]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        weakref.finalize(self, _end, self.process)

    @contextlib.contextmanager
    def ended_after(self, seconds: float, said: str) -> Iterator[None]:
        """A context in which this process is killed, with a line on stderr, if it takes longer."""
        self._tell(seconds, said)
        try:
            yield
        finally:
            self._tell(None, "")

    def _tell(self, seconds: float | None, said: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody ended it
            self.process.stdin.write(f"{json.dumps([seconds, said])}\n".encode())
            self.process.stdin.flush()


def _end(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()
