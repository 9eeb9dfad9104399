"""Forked children of a warm process: each is a run of its own, watched from outside and ended with its session."""

import contextlib
import os
import resource
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import train
from finetune.system import process
from tests.rig import intercept

HANG_S = 30.0
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ended:
    """How a child ended. `code`: its exit code, negative for a signal; `hung`: it was killed after its time limit."""

    code: int
    out: str
    err: str
    seconds: float
    hung: bool

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.err or "panicked at" in self.err

    @property
    def first_line(self) -> str:
        """The line that says what went wrong: the last of a traceback, else the first."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        if self.traceback:
            lines = [line for line in lines if not line.startswith((" ", "Traceback"))][-1:] or lines[-1:]
        return lines[0][:300] if lines else ""


@dataclass
class Child:
    """A started child. `limits`: of resource.setrlimit; `armed`: arguments of intercept.arm."""

    folder: Path
    name: str = "child"
    environment: dict = field(default_factory=dict)
    limits: dict = field(default_factory=dict)
    armed: tuple | None = None
    closed: tuple = ()

    def start(self, call) -> "Child":
        """Forks; the child runs `call() -> exit code` as the programs do and exits with its code."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become()
                process.exit_with(call)
            finally:  # an exception ends the child as it ends the interpreter
                traceback.print_exc()
                os._exit(1)
        self.handle = os.pidfd_open(self.pid)
        return self

    def _become(self) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name, fd in (("out", 1), ("err", 2)):
            file = os.open(self.folder / f"{self.name}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, fd)
            os.close(file)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        for name in LAUNCHER:
            os.environ.pop(name, None)
        os.environ.update(self.environment)
        for kind, value in self.limits.items():
            resource.setrlimit(kind, (value, value))
        if self.armed:
            intercept.arm(*self.armed)

    def running(self) -> bool:
        return not select.select([self.handle], [], [], 0)[0]

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, timeout_s: float = HANG_S) -> Ended:
        """Waits for the end, at most this long after the start, and ends what is left of its session."""
        left = max(0.0, self.began + timeout_s - time.monotonic())
        hung = not select.select([self.handle], [], [], left)[0]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if hung:
            self.send(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.handle)
        texts = [(self.folder / f"{self.name}.{end}") for end in ("out", "err")]
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in texts)
        return Ended(os.waitstatus_to_exitcode(status), out, err, time.monotonic() - self.began, hung)


def argv_of(flags: dict) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def start_run(flags: dict, folder: Path, **options) -> Child:
    """train.py with these flags in a child; its output goes to `folder`."""
    argv = argv_of(flags)
    return Child(folder, **options).start(lambda: train.main(argv))


def start_ranks(flags: dict, folder: Path, port: int, armed: dict | None = None, size: int = 2) -> list[Child]:
    """train.py as the ranks that a launcher starts. `armed`: {rank: arguments of intercept.arm}."""
    started = []
    for rank in range(size):
        environment = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        environment = {name: str(value) for name, value in environment.items()}
        options = dict(name=f"rank{rank}", environment=environment, armed=(armed or {}).get(rank))
        started.append(start_run(flags, folder, **options))
    return started
