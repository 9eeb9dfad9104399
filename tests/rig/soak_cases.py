"""A long run with saves and evaluations: resident memory, descriptors and threads stay as they are."""

import os
import time
from pathlib import Path

import numpy as np

from tests.rig.children import start_run
from tests.rig.materials import Place
from tests.rig.oracle import Outcome
from tests.support.runs import count_steps

SAMPLED_S = 0.25
MOST_BYTES_PER_STEP = 512  # of growth over the last half; a leaked tensor of this model is more
S_PER_STEP = 0.25


def soak(seed: int, place: Place) -> Outcome:
    """RIG_SOAK steps; a checkpoint every 100 and an evaluation every 200."""
    steps, folder, outcome = int(os.environ["RIG_SOAK"]), place.empty(), Outcome()
    flags = place.flags("lora-evaluated", folder / "run") | dict(max_steps=steps, num_epochs=1)
    flags |= dict(save_every=100, eval_every=200, log_every_n_steps=100)
    child, samples = start_run(flags, folder), []
    while child.running() and time.monotonic() - child.began < 60 + steps * S_PER_STEP:
        samples.append(sample(child.pid, folder / "run"))
        time.sleep(SAMPLED_S)
    ended = child.end(60 + steps * S_PER_STEP)
    outcome.tried = steps
    outcome.judge(ended, (0,), f"{steps} steps")
    found = np.array([s for s in samples if s is not None and s[0] > 0])
    if len(found) < 8:
        outcome.fail("rig", f"{len(found)} samples of a run of {steps} steps")
        return outcome
    half = found[len(found) // 2 :]
    growth = np.polyfit(half[:, 0], half[:, 1], 1)[0]
    what = "bytes per step of resident memory over the last half"
    # Medians: while a save goes on beside the steps there are more.
    start, end = (np.median(part, axis=0) for part in (half[: len(half) // 2], half[len(half) // 2 : -1]))
    facts = f"{growth:.0f} {what}, {end[2]:.0f} descriptors, {end[3]:.0f} threads"
    if growth > MOST_BYTES_PER_STEP and steps >= 5000:
        outcome.fail("wrong_code", f"resident memory grows: {facts}")
    for column, name in ((2, "descriptors"), (3, "threads")):
        if end[column] > start[column]:
            outcome.fail("wrong_code", f"{name} went from {start[column]:.0f} to {end[column]:.0f}")
    outcome.kept = {"facts": facts}
    return outcome


def sample(pid: int, run: Path) -> tuple | None:
    """(steps so far, resident bytes, descriptors, threads); None once the process is gone."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        resident, threads = int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"])
        return count_steps(run), resident, len(os.listdir(f"/proc/{pid}/fd")), threads
    except (OSError, KeyError):
        return None
