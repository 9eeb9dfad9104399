"""Streamed files edited between a kill and the resume: bitwise the uninterrupted run, or one line that names them."""

import os
import random
import shutil
import time
from pathlib import Path

from finetune.checkpoint.store import newest_checkpoint
from tests.rig.children import start_run
from tests.rig.kill_cases import FINISHED, KILLED, wait_for_first_write
from tests.rig.materials import Place
from tests.rig.oracle import Outcome, check_finished

REFUSED = 2


def streaming(seed: int, place: Place) -> Outcome:
    """A run on streamed rows, killed, its file edited, started again; restored to what it was, it finishes bitwise."""
    rng, folder, outcome = random.Random(f"streaming {seed}"), place.empty(), Outcome()
    flags = place.flags("streaming", folder / "run")
    whole, file = flags["dataset"], folder / "rows.log" / "rows.jsonl"
    file.parent.mkdir()
    shutil.copy2(whole, file)
    flags["dataset"] = file
    child = start_run(flags, folder, name="first")
    wait_for_first_write(child, folder / "run")
    time.sleep(rng.uniform(0, 0.1))
    child.send(9)
    killed = child.end()
    if not outcome.judge(killed, (KILLED, FINISHED), "the run that is killed"):
        return outcome
    saved = newest_checkpoint(folder / "run")[0] is not None
    edit, allowed, must_refuse = _edit(rng, file)
    again = start_run(flags, folder, name="again").end()
    finished = killed.code == FINISHED
    outcome.judge(again, allowed, f"resume after {edit}")
    if again.code == FINISHED and must_refuse and saved and not finished:
        outcome.fail("differing_bits", f"{edit} of what was read: trained on, exit 0")
    if again.code == REFUSED:
        if file.name not in again.err or len(again.err.strip().splitlines()) != 1:
            outcome.fail("wrong_code", f"{edit}: {again.err[:300]}")
        shutil.copy2(whole, file)
        outcome.judge(start_run(flags, folder, name="last").end(), (FINISHED,), f"restored after {edit}")
    if not outcome.failures and (again.code == REFUSED or edit in ("nothing", "touch")):
        check_finished(outcome, place, "streaming", folder / "run")
    return outcome


def _edit(rng: random.Random, file: Path) -> tuple[str, tuple, bool]:
    """(what was done to the file, exit codes that may follow, whether what was read has changed)."""
    kind, lines = rng.choice(("nothing", "touch", "first", "swap", "cut", "append", "torn", "gone")), None
    lines = file.read_bytes().splitlines(keepends=True)
    if kind == "touch":
        os.utime(file)
    elif kind == "first":
        lines[0] = lines[0].replace(b"0 plus 0", b"1 plus 1")
    elif kind == "swap":
        lines[0], lines[1] = lines[1], lines[0]
    elif kind == "cut":
        lines = lines[: rng.randrange(len(lines))]
    elif kind == "append":
        lines.append(lines[0])
    elif kind == "torn":
        lines[0] = lines[0][: rng.randrange(1, len(lines[0]) - 2)] + b"\n"
    if kind == "gone":
        file.unlink()
    elif kind not in ("nothing", "touch"):
        file.write_bytes(b"".join(lines))
    allowed = (FINISHED,) if kind in ("nothing", "touch") else (FINISHED, REFUSED)
    return kind, allowed, kind in ("first", "swap", "torn", "gone")
