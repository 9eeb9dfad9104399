"""Every file system call of a run, with every fault that can happen there."""

import random
from pathlib import Path

from tests.rig import intercept
from tests.rig.children import start_run
from tests.rig.kill_cases import finish
from tests.rig.materials import Place
from tests.rig.oracle import Outcome

# The runs whose calls are enumerated: three steps, each with an evaluation, a checkpoint and a rotation.
ENUMERATED = ("short",)
ALLOWED = {"kill before": (-9, 0), "kill after": (-9, 0), "short write": (0,)}
FINISHED, STORAGE = 0, 74


def pairs(place: Place) -> list[tuple[str, int, str, str]]:
    """(variant, number of the call, fault, the call and its file) of all pairs, shuffled once for all."""
    found = []
    for variant in ENUMERATED:
        folder = place.once(f"calls-{variant}", lambda folder, v=variant: _log_calls(place, v, folder))
        for number, line in enumerate((folder / "calls.log").read_text().splitlines(), 1):
            call, _, path = line.partition(" ")
            name = "/".join(Path(path).parts[-2:])
            found += [(variant, number, fault, f"{call} {name}") for fault in intercept.applicable(call)]
    random.Random(0).shuffle(found)
    return found


def _log_calls(place: Place, variant: str, folder: Path) -> None:
    log = folder / "calls.log"
    ended = start_run(place.flags(variant, folder / "run"), folder, armed=(folder / "run", 0, "none", log)).end()
    assert ended.code == 0, ended.err


def fault(seed: int, place: Place) -> Outcome:
    """One pair: the run meets the fault, and the next start ends as the uninterrupted run."""
    every = pairs(place)
    if seed >= len(every):
        return Outcome(tried=0)
    variant, number, what, call = every[seed]
    folder = place.empty()
    flags, outcome = place.flags(variant, folder / "run"), Outcome()
    ended = start_run(flags, folder, name="faulty", armed=(folder / "run", number, what)).end()
    outcome.judge(ended, ALLOWED.get(what, (STORAGE, FINISHED)), f"{what} at call {number} of {variant}, {call}")
    return finish(outcome, place, variant, flags)
