"""Child processes that answer requests over their pipes: what may run away, crash or take a core of its own.

A message is a line with the sizes of its parts, then the parts. The child ends with its input, or soon after its parent
where it computes; it ignores the parent's signals, and what the kernel's limits do to it costs no more than the child.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import IO

from finetune.system.isolated import python_command
from finetune.system.threads import start_thread

PARENT_ASKED_S = 0.5


class ChildEnded(Exception):
    """The child ended before it answered. `status`: its exit status, negative for a signal."""

    def __init__(self, status: int):
        super().__init__(f"exit status {status}")
        self.status = status


class Child:
    """A module that calls `serve`, in an interpreter and a session of its own: Ctrl-C is for this process.

    `start`: the parts of the first message, which is sent at once. `environment`: variables to set. `stderr`: as
    Popen's.
    """

    def __init__(
        self, module: str, *start: bytes, environment: dict | None = None, stderr: IO[bytes] | int | None = None
    ):
        self.process = subprocess.Popen(
            python_command(module),
            cwd="/",
            env={"TRANSFORMERS_VERBOSITY": "error"} | os.environ | (environment or {}),
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        assert self.process.stdin is not None and self.process.stdout is not None, module
        self.stdin = self.process.stdin
        self.stdout = self.process.stdout
        self.send(*start)

    def send(self, *parts: bytes) -> None:
        """Sends a message. A child that has ended says so where its answer is received."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.writelines(_message(parts))
            self.stdin.flush()

    def receive(self) -> list[bytes]:
        """The parts of the next answer. Raises ChildEnded."""
        parts = _read(self.stdout)
        if parts is None:
            raise ChildEnded(self.process.wait())
        return parts

    def request(self, *parts: bytes) -> list[bytes]:
        """The answer to a message that has one. Raises ChildEnded."""
        self.send(*parts)
        return self.receive()

    def close(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        self.process.wait()


def serve(handler: Callable[[Iterator[list[bytes]]], Iterable[tuple[bytes, ...]]]) -> None:
    """The child's life: writes each answer that `handler(messages)` yields, a tuple of parts, until it returns."""
    start_thread(partial(_end_with, os.getppid()))
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's, which stops when it has saved
        signal.signal(number, signal.SIG_IGN)
    for parts in handler(iter(lambda: _read(sys.stdin.buffer), None)):
        for piece in _message(parts):
            left = memoryview(piece)
            while left:
                left = left[os.write(1, left) :]


def _end_with(parent: int) -> None:
    """Ends this process once its parent is another: the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(PARENT_ASKED_S)
    os._exit(0)


def limit_memory(num_bytes: int) -> None:
    """Limits this process's address space. macOS rejects that; a limit of time still applies."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def limit_time(seconds: float, kept_s: float = 0.0) -> None:
    """The kernel ends this process with SIGPROF after these seconds of processor time.

    That holds inside one operation that no exception interrupts. `kept_s`: added of what an earlier limit left.
    """
    left = signal.getitimer(signal.ITIMER_PROF)[0]
    signal.setitimer(signal.ITIMER_PROF, min(left, kept_s) + seconds)


def _message(parts: Iterable[bytes]) -> tuple[bytes, ...]:
    return " ".join(str(len(part)) for part in parts).encode() + b"\n", *parts


def _read(stream: IO[bytes]) -> list[bytes] | None:
    """The parts of the next message; None if the stream ended before or within it."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    parts = [stream.read(int(size)) for size in line.split()]
    return parts if [len(part) for part in parts] == [int(size) for size in line.split()] else None
