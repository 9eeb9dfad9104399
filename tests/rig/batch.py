"""Batches of mutants in one forked child under a memory limit: a crash or a hang names its case, and the rest goes on.

A Batch of a module is called in the child: prepare(place) once, then for each seed mutant(rng) -> Mutant and
check(mutant), which may return, or raise one of finetune.errors.EXPECTED with one line. Anything else is a failure.
"""

import base64
import contextlib
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import time
import traceback
import zlib
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import EXPECTED, NonFiniteError
from finetune.system import process
from tests.rig.children import HANG_S
from tests.rig.materials import Place
from tests.rig.oracle import Caught, Outcome

MEMORY_BYTES = 4 * 2**30  # above what the process has mapped before
KEPT_BYTES = 64 * 2**10
ONE_LINE_CHARACTERS = 2000
CANARY = "canary"
ROOT = Path(__file__).parents[2]


class Finding(Exception):
    """A failure that the check itself sees: its class in the table, and what it saw."""


@dataclass(frozen=True)
class Mutant:
    """`files`: {name: bytes} to write into the case's folder; `argv`: words of a command line."""

    files: dict
    argv: tuple = ()

    def to_json(self, root: Path) -> dict | None:
        """For the corpus, with $ROOT for the rig's folder; None if it is too large to keep."""
        files = {name: data.replace(bytes(root), b"$ROOT") for name, data in self.files.items()}
        if sum(map(len, files.values())) > KEPT_BYTES:
            return None
        packed = {name: base64.b85encode(zlib.compress(data, 9)).decode() for name, data in files.items()}
        return dict(argv=[word.replace(str(root), "$ROOT") for word in self.argv], files=packed)

    @staticmethod
    def from_json(kept: dict, root: Path) -> "Mutant":
        files = {name: zlib.decompress(base64.b85decode(text)) for name, text in kept["files"].items()}
        files = {name: data.replace(b"$ROOT", bytes(root)) for name, data in files.items()}
        return Mutant(files, tuple(word.replace("$ROOT", str(root)) for word in kept["argv"]))


def run_batch(module, kind, seeds: list, place: Place):
    """Yields (seed, outcome, seconds); a seed may also be a corpus entry, with its mutant in "kept"."""
    place.model(), place.rows()
    batch, waiting = getattr(module, kind.function), list(seeds)
    for variant in batch.variants:
        place.whole(variant)
    while waiting:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _child(batch, kind, waiting, place, write)
        os.close(write)
        try:
            yield from _watched(pid, read, waiting)
        finally:
            os.close(read)


def _child(batch, kind, seeds: list, place: Place, write: int) -> None:
    try:
        os.setsid()
        out = os.open(place.root / f"batch-{place.worker}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        place.empty()
        context = batch.prepare(place)
        limit = _mapped_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for seed in seeds:
            mutant = mutant_of(batch, kind, seed, context, place)
            begun = {"begun": _name(seed), "kept": mutant.to_json(place.root)}
            os.write(write, json.dumps(begun).encode() + b"\n")
            outcome = _judge(batch, mutant, context, place)
            os.write(write, json.dumps({"failures": outcome.failures, "kept": outcome.kept}).encode() + b"\n")
            os.truncate(1, 0)
        os._exit(0)
    finally:  # a fault of the rig itself
        os.write(write, json.dumps({"rig": traceback.format_exc()[-390:]}).encode() + b"\n")
        os._exit(1)


def mutant_of(batch, kind, seed, context, place: Place) -> Mutant:
    """The mutant of a seed, or the one that a corpus entry holds."""
    if isinstance(seed, dict):
        return Mutant.from_json(seed["kept"], place.root)
    return batch.mutant(random.Random(f"{kind.name} {seed}"), context)


def _judge(batch, mutant: Mutant, context, place: Place) -> Outcome:
    outcome, folder, case = Outcome(), place.own, place.own / "case"
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    for name, data in mutant.files.items():
        (case / name).parent.mkdir(parents=True, exist_ok=True)
        (case / name).write_bytes(data)
    before = set(folder.iterdir())
    with Caught() as caught:
        batch.check(mutant, case, context)
    error = caught.error
    if isinstance(error, EXPECTED):
        _judge_message(outcome, error)
    elif isinstance(error, Finding):
        outcome.fail(*error.args)
    elif isinstance(error, SystemExit):
        if error.code not in (0, None):
            outcome.fail("wrong_code", f"SystemExit {error.code}")
    elif error is not None:
        where = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(f.filename).name}:{f.lineno}" for f in where if _is_ours(Path(f.filename))]
        outcome.fail("traceback", f"{type(error).__name__} at {ours[-1] if ours else '-'}: {error}")
    if (folder / CANARY).exists() or set(folder.iterdir()) != before:
        outcome.fail("payload_or_escape", f"{sorted(p.name for p in set(folder.iterdir()) - before)}")
        (folder / CANARY).unlink(missing_ok=True)
    if outcome.failures:
        outcome.kept = mutant.to_json(place.root)
    return outcome


def _judge_message(outcome: Outcome, error) -> None:
    """What the program prints for the error is one line of text, and moves no cursor."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        process.log_error(error)
    text, name = said.getvalue(), type(error).__name__
    if len(text.splitlines()) != 1 and not isinstance(error, NonFiniteError):
        outcome.fail("wrong_code", f"{name} with {len(text.splitlines())} lines: {text[:200]!r}")
    elif len(text) > ONE_LINE_CHARACTERS:
        outcome.fail("wrong_code", f"{name} with a line of {len(text)} characters: {text[:200]!r}")
    elif "\x1b" in text:
        outcome.fail("wrong_code", f"{name} with an escape sequence: {text[:200]!r}")


def _watched(pid: int, read: int, waiting: list):
    """Yields the answers of a child, taking their seeds from `waiting`; the one during which it ended failed."""
    lines, begun, asked = _Lines(read), time.monotonic(), False
    while waiting:
        line = lines.next(HANG_S)
        if line is None:
            seed, outcome, log = waiting.pop(0), Outcome(), lines.ended
            code = _end(pid, kill=not log)
            if not log:
                outcome.fail("hang", f"no end after {HANG_S:.0f} s")
            else:
                outcome.fail("traceback" if asked else "rig", f"the process ended with {code}")
            outcome.kept = lines.last.get("kept")
            yield _name(seed), outcome, time.monotonic() - begun
            return
        if "begun" in line:
            begun, asked = time.monotonic(), True
            continue
        outcome = Outcome(failures=line.get("failures", []), kept=line.get("kept"))
        if "rig" in line:
            outcome.fail("rig", line["rig"])
        yield _name(waiting.pop(0)), outcome, time.monotonic() - begun
        if "rig" in line:
            break
    _end(pid, kill=True)


class _Lines:
    """JSON lines of a pipe, each awaited for a time. `ended`: the other end was closed."""

    def __init__(self, read: int):
        self.read, self.buffer, self.ended, self.last = read, b"", False, {}

    def next(self, timeout_s: float) -> dict | None:
        end = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            if not select.select([self.read], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            new = os.read(self.read, 2**16)
            if not new:
                self.ended = True
                return None
            self.buffer += new
        line, _, self.buffer = self.buffer.partition(b"\n")
        self.last = json.loads(line)
        return self.last


def _end(pid: int, kill: bool) -> int:
    if kill:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return code


def _is_ours(file: Path) -> bool:
    return file.is_relative_to(ROOT) and "tests" not in file.parts and ".venv" not in file.parts


def _name(seed):
    return seed["seed"] if isinstance(seed, dict) else seed


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
