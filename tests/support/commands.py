"""The programs of this repository as commands, started and ended, and what they print."""

import contextlib
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

import train
from finetune.errors import PlanError
from tests.support import ranks
from tests.support.runs import count_steps

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-W", "ignore"]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ACCELERATE = [*PYTHON, "-m", "accelerate.commands.launch"]
# Flags of a run that lasts until it is killed.
LONG = "--num_epochs 400 --save_every 20"


class Finished(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def words(*parts, **values) -> list[str]:
    """Flags as the words of a command line; of a flag given twice, the last value.

    A part is a string, split as a shell splits it, a dict of flags by name, or one word of any other type.
    """
    found = []
    for part in (*parts, values):
        if isinstance(part, str):
            found += shlex.split(part)
        elif isinstance(part, dict):
            found += [word for name, value in part.items() for word in (f"--{name}", str(value))]
        else:
            found.append(str(part))
    last, kept, i = {}, [], 0
    while i < len(found):
        has_value = found[i].startswith("--") and i + 1 < len(found) and not found[i + 1].startswith("--")
        entry = found[i : i + 2] if has_value else found[i : i + 1]
        if has_value and entry[0] in last:
            kept[last[entry[0]]] = []
        if has_value:
            last[entry[0]] = len(kept)
        kept.append(entry)
        i += len(entry)
    return [word for entry in kept for word in entry]


def command(*parts, script="train.py", **values) -> list[str]:
    """argv of a script of this repository with these flags, as `words` reads them."""
    return [*PYTHON, str(ROOT / script), *words(*parts, **values)]


def finish(argv, timeout_s=300, **environment) -> Finished:
    """Runs a command to its end; no process of its session remains.

    A script of this repository is a fork that has imported what it needs, see ranks.py: a process of its own in all but
    its start. With variables of its own, which libraries read when they are imported, it is started as it is.
    """
    script = Path(argv[len(PYTHON)])
    if argv[: len(PYTHON)] == PYTHON and script.parent == ROOT and not environment:
        return finish_fork([script, *argv[len(PYTHON) + 1 :]], timeout_s)
    return finish_start(argv, timeout_s, **environment)


def finish_fork(words: list, timeout_s: float = 300, **environment) -> Finished:
    """Runs a script with its words in a fork, whose variables are none that a library reads when it is imported."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        process = ranks.Fork("script", words, environment, *outputs)
        end = time.monotonic() + timeout_s
        try:
            while process.poll() is None:
                assert time.monotonic() < end, f"no end after {timeout_s:.0f} s: {words}"
                time.sleep(0.02)
        finally:
            ranks.kill_session(process)
        out, err = (file.read_text() for file in outputs)
    return Finished(process.returncode, out, err)


def finish_start(argv, timeout_s=300, **environment) -> Finished:
    """Runs any command in a new process."""
    process = ranks.start(argv, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        ranks.kill_session(process)
    return Finished(process.returncode, out, err)


def refused(flags: dict, **changes) -> str:
    """The one-line error for these flags; the same with --dry_run, where nothing is loaded."""
    lines = set()
    for last in ([], ["--dry_run"]):
        argv = [part for name, value in (flags | changes).items() for part in (f"--{name}", str(value))]
        with pytest.raises(PlanError) as error:
            train.main(argv + last)
        lines.add(str(error.value))
    (line,) = lines
    assert "\n" not in line and error.value.exit_code == 2
    return line


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def by_hand(base: dict, folder: Path, *more, size=2, **values) -> list[subprocess.Popen]:
    """Ranks of train.py started with RANK and WORLD_SIZE alone."""
    values = {"batch_size": 4 // size, "output_dir": folder, "master_port": free_port()} | values
    argv = command(base, *more, **values)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return [ranks.start(argv, {"RANK": str(r), "WORLD_SIZE": str(size)}, **pipes) for r in range(size)]


def wait_for_steps(folder: Path, number: int, process: subprocess.Popen, timeout_s: float = 90) -> None:
    """Returns once the run in `folder` has logged this many steps; asserts that `process` lives until then."""
    end = time.monotonic() + timeout_s
    while count_steps(folder) < number:
        assert process.poll() is None and time.monotonic() < end, process.stderr.read()
        time.sleep(0.05)


def rank_processes(parent: int) -> list[int]:
    """The process ids of the ranks that `parent` started, in rank order."""
    found = {}
    for pid in ranks.members(parent):
        environment = dict(item.split(b"=", 1) for item in environment_of(pid).split(b"\0") if b"=" in item)
        if pid != parent and b"RANK" in environment:
            found[int(environment[b"RANK"])] = pid
    return [pid for _, pid in sorted(found.items())]


def descendants(pid: int) -> list[int]:
    """The process ids below a process in the tree, at any depth."""
    below = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return [*below, *(further for child in below for further in descendants(child))]


def environment_of(pid: int) -> bytes:
    """The environment a process started with; empty if it has ended."""
    return read_or_nothing(Path(f"/proc/{pid}/environ"))


def read_or_nothing(file: Path) -> bytes:
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""


def without_frameworks(argv: list[str]) -> subprocess.CompletedProcess:
    """train.py in a process of its own, which fails if a framework was imported."""
    code = (
        f"import sys; sys.argv = {['train.py', *argv]!r}; import runpy\n"
        "code = runpy.run_path('train.py', run_name='train')['main']()\n"
        "assert not {'torch', 'mlx', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
