"""SIGTERM and SIGINT by phase, half of them at a system call: one save, the signal's code, and a bitwise restart."""

import random
import signal
import time

from finetune.checkpoint.store import newest_checkpoint
from tests.rig.children import start_ranks, start_run
from tests.rig.kill_cases import finish, wait_for_first_write
from tests.rig.materials import ONE_RANK, Place
from tests.rig.oracle import Outcome
from tests.support.runs import count_steps

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}
LATEST_S = 10.0  # from the signal to the end
PHASES = ("start", "steps", "call", "call", "second", "ranks")


def signals(seed: int, place: Place) -> Outcome:
    """A signal in a phase of a run: on its way to the first step, in steps, at a call, twice, or to both ranks."""
    rng, folder = random.Random(f"signals {seed}"), place.empty()
    number, phase, variant = rng.choice((signal.SIGTERM, signal.SIGINT)), rng.choice(PHASES), rng.choice(ONE_RANK)
    if phase == "ranks":
        return _to_both_ranks(rng, number, place)
    flags, outcome = place.flags(variant, folder / "run"), Outcome()
    save_every = rng.choice((0, 1))
    armed = (folder / "run", rng.randint(1, 250 if save_every else 60), NAMES[number]) if phase == "call" else None
    child = start_run(flags | dict(save_every=save_every), folder, armed=armed)
    sent = time.monotonic()
    if phase == "start":
        time.sleep(rng.uniform(0.02, 0.3))
    elif phase in ("steps", "second"):
        wait_for_first_write(child, folder / "run")
        time.sleep(rng.uniform(0, 0.1))
    if phase != "call":
        sent = time.monotonic()
        child.send(number)
    if phase == "second":
        time.sleep(rng.uniform(0, 0.02))
        child.send(number)
    ended = child.end()
    # Before the handlers are installed the signal itself ends the process: a shell shows the same code.
    allowed = (CODES[number], 0, -number) if phase == "start" or number == signal.SIGINT else (CODES[number], 0)
    outcome.judge(ended, allowed, f"{NAMES[number]} in {phase}, {armed and armed[1]}, save_every {save_every}")
    if time.monotonic() - sent > LATEST_S:
        outcome.fail("hang", f"{NAMES[number]} in {phase}: {time.monotonic() - sent:.0f} s until the end")
    trained = ended.code == CODES[number] and phase == "steps" and count_steps(folder / "run") > 0
    if trained and newest_checkpoint(folder / "run")[0] is None:
        outcome.fail("failed_restart", f"{NAMES[number]} in {phase}: nothing was saved")
    return finish(outcome, place, variant, flags)


def _to_both_ranks(rng: random.Random, number: int, place: Place) -> Outcome:
    folder, outcome = place.own, Outcome()
    flags = place.flags("lora-2", folder / "run")
    ranks = start_ranks(flags, folder, place.port())
    wait_for_first_write(ranks[0], folder / "run")
    time.sleep(rng.uniform(0, 0.1))
    for rank in rng.choice((ranks, ranks[:1], ranks[1:])):
        rank.send(number)
    for rank, child in enumerate(ranks):
        outcome.judge(child.end(), (CODES[number], 0), f"{NAMES[number]} to ranks, rank {rank}")
    return finish(outcome, place, "lora-2", flags, ranks=2)
