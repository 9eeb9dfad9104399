"""SIGKILL at random moments and at chosen system calls: the restarts go on, and no bit differs."""

import contextlib
import random
import time
from pathlib import Path

from tests.rig import intercept
from tests.rig.children import Child, start_ranks, start_run
from tests.rig.materials import CONTINUED, ONE_RANK, TWO_RANKS, Place
from tests.rig.oracle import Outcome, check_finished, events

KILLS = 5
CALLS_AHEAD = 60  # about two saves: a chain of kills still gets forward
CALLS_AHEAD_OF_RANK_1 = 8
FINISHED, KILLED, RANK_LOST = 0, -9, 69


def random_kills(seed: int, place: Place) -> Outcome:
    return killed_at_random(f"kills {seed}", place, ONE_RANK)


def killed_at_random(seed: str, place: Place, variants: tuple) -> Outcome:
    """A run killed five times, each anywhere in loading, steps and saves."""

    def kill(rng: random.Random, flags: dict, folder: Path, number: int) -> tuple[list, str]:
        child = start_run(flags, folder, name=f"run{number}")
        wait_for_first_write(child, folder / "run")
        time.sleep(rng.uniform(0, 0.08))
        child.send(9)
        return [child.end()], ""

    return _killed_five_times(seed, place, variants, kill)


def call_kills(seed: int, place: Place) -> Outcome:
    return killed_at_calls(f"call-kills {seed}", place, ONE_RANK)


def continued_kills(seed: int, place: Place) -> Outcome:
    """Of runs that continue from an adapter, or merge it first: every other one at system calls."""
    killed = killed_at_calls if seed % 2 else killed_at_random
    return killed(f"continued-kills {seed}", place, CONTINUED)


def killed_at_calls(seed: str, place: Place, variants: tuple) -> Outcome:
    """A run killed five times, each at a system call."""

    def kill(rng: random.Random, flags: dict, folder: Path, number: int) -> tuple[list, str]:
        armed = (folder / "run", rng.randint(1, CALLS_AHEAD), rng.choice(intercept.KILLS))
        return [start_run(flags, folder, name=f"run{number}", armed=armed).end()], f": {armed[1:]}"

    return _killed_five_times(seed, place, variants, kill)


def rank_call_kills(seed: int, place: Place) -> Outcome:
    """A run of two ranks of which one is killed at a system call, five times."""

    def kill(rng: random.Random, flags: dict, folder: Path, number: int) -> tuple[list, str]:
        rank = rng.choice((0, 0, 1))
        calls = CALLS_AHEAD if rank == 0 else CALLS_AHEAD_OF_RANK_1
        armed = (folder / "run", rng.randint(1, calls), rng.choice(intercept.KILLS))
        ranks = start_ranks(flags, folder, place.port(), {rank: armed})
        return [r.end() for r in ranks], f", rank {rank}: {armed[1:]}"

    return _killed_five_times(f"rank-call-kills {seed}", place, TWO_RANKS, kill, ranks=2)


def save_kills(seed: int, place: Place) -> Outcome:
    """A run whose saves are slow and go on beside its steps, killed five times; on one rank, and on two in every third
    case. Kills count that left a save unfinished after later steps.
    """
    ranks, counted = 2 if seed % 3 == 2 else 1, []

    def kill(rng: random.Random, flags: dict, folder: Path, number: int) -> tuple[list, str]:
        run, slow = folder / "run", (folder / "run", 1, "slow saves")
        if ranks == 1:
            children = [start_run(flags, folder, name=f"run{number}", armed=slow)]
        else:
            children = start_ranks(flags, folder, place.port(), dict.fromkeys(range(2), slow))
        save = wait_for_a_save(children[0], run)
        time.sleep(rng.uniform(0, 0.25))
        for child in children if rng.random() < 0.5 else [rng.choice(children)]:
            child.send(9)
        ended = [child.end() for child in children]
        steps = [event["step"] for event in events(run, "step", ("step",)) if "step" in event]
        if save is not None and save.exists() and steps[-1] > int(save.name.rpartition("-")[2]):
            counted.append(number)
        return ended, f" at a save, {save and save.name}"

    variants = TWO_RANKS if ranks == 2 else ONE_RANK
    flags = dict(save_every=random.Random(seed).choice((2, 3)), async_save="true")
    outcome = _killed_five_times(f"save-kills {seed}", place, variants, kill, ranks, flags)
    outcome.tried = len(counted)
    return outcome


def wait_for_a_save(child: Child, run: Path, timeout_s: float = 20.0) -> Path | None:
    """The folder of a save that has begun and is not the one that the kill before left; None if the child has ended."""
    end, before = time.monotonic() + timeout_s, {path: path.stat().st_ino for path in run.glob("checkpoints/.tmp-*")}
    while child.running() and time.monotonic() < end:
        for path in run.glob("checkpoints/.tmp-*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino != before.get(path):
                    return path
        time.sleep(0.001)
    return None


def _killed_five_times(
    seed: str, place: Place, variants: tuple, kill, ranks: int = 1, more: dict | None = None
) -> Outcome:
    """A run started over and over and ended by kill(rng, flags, folder, number) -> (ends, where), then finished.
    `more`: flags beside the variant's.
    """
    rng, folder = random.Random(seed), place.empty()
    variant = rng.choice(variants)
    flags, outcome = place.flags(variant, folder / "run") | (more or {}), Outcome(tried=0)
    for number in range(KILLS):
        ended, where = kill(rng, flags, folder, number)
        if not _count(outcome, ended, f"kill {number + 1} of {variant}{where}"):
            break
    return finish(outcome, place, variant, flags, ranks)


def wait_for_first_write(child: Child, run: Path, timeout_s: float = 20.0) -> None:
    """Returns when the child has logged something new, or has ended."""
    file, end = run / "metrics.jsonl", time.monotonic() + timeout_s
    before = file.stat().st_mtime_ns if file.exists() else None
    while child.running() and time.monotonic() < end:
        if file.exists() and file.stat().st_mtime_ns != before:
            return
        time.sleep(0.002)


def _count(outcome: Outcome, ended: list, what: str) -> bool:
    """Counts a kill; False if the run went on to its end, or failed otherwise."""
    killed = [e.code == KILLED for e in ended]
    if not any(killed):
        for one in ended:
            outcome.judge(one, (FINISHED,), what)
        return False
    outcome.tried += 1
    for one in ended:
        if not outcome.judge(one, (KILLED, RANK_LOST, FINISHED), what):
            return False
    return True


def finish(outcome: Outcome, place: Place, variant: str, flags: dict, ranks: int = 1) -> Outcome:
    """Starts the same command once more; it must end as the uninterrupted run."""
    folder = place.own
    if ranks == 1:
        last = [start_run(flags, folder, name="last").end(60)]
    else:
        last = [child.end(60) for child in start_ranks(flags, folder, place.port())]
    for rank, ended in enumerate(last):
        if not outcome.judge(ended, (FINISHED,), f"restart of {variant}, rank {rank}"):
            outcome.fail("failed_restart", ended.first_line)
            return outcome
    check_finished(outcome, place, variant, folder / "run")
    return outcome
