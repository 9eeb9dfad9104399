"""Full disks, limits of memory, and several runs that want one output_dir."""

import contextlib
import os
import random
import resource
import shutil
import subprocess
import time
from pathlib import Path

from tests.rig.children import start_run
from tests.rig.kill_cases import finish
from tests.rig.materials import ONE_RANK, Place
from tests.rig.oracle import Outcome

FINISHED, USER, OUT_OF_MEMORY, STORAGE, IN_USE = 0, 2, 71, 74, 75
MEBIBYTE = 2**20


def disk_full(seed: int, place: Place) -> Outcome:
    """A run whose disk is full after some bytes, in one of three ways; it resumes once there is space."""
    rng, folder = random.Random(f"disk-full {seed}"), place.empty()
    variant, outcome = rng.choice(ONE_RANK), Outcome()
    flags, how = place.flags(variant, folder / "run"), ("tmpfs", "limit", "call")[seed % 3]
    what = f"{how}, {variant}"
    if how == "call":
        armed = (folder / "run", rng.randint(1, 250), "ENOSPC on")
        ended = start_run(flags, folder, name="full", armed=armed).end()
    elif how == "limit" or not _can_mount():
        limits = {resource.RLIMIT_FSIZE: rng.randint(1, 200) * 1024}
        ended = start_run(flags, folder, name="full", limits=limits).end()
    else:
        with _tmpfs(folder / "run", rng.randint(4, 600)):
            ended = start_run(flags, folder, name="full").end()
            shutil.copytree(folder / "run", folder / "kept", symlinks=True)
        shutil.rmtree(folder / "run")
        (folder / "kept").rename(folder / "run")
    outcome.judge(ended, (FINISHED, STORAGE), what)
    return finish(outcome, place, variant, flags)


def _can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None and not os.environ.get("RIG_NO_MOUNT")


@contextlib.contextmanager
def _tmpfs(folder: Path, kibibytes: int):
    """A file system of this size at `folder`; a folder without a limit where mounting is not permitted."""
    folder.mkdir(parents=True)
    options = f"size={max(4, kibibytes)}k"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "rig", folder], capture_output=True)
    try:
        yield
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=True)
            folder.mkdir(exist_ok=True)
        else:
            os.environ["RIG_NO_MOUNT"] = "1"


def memory_limit(seed: int, place: Place) -> Outcome:
    """A run under RLIMIT_AS: it finishes, or says that memory is short."""
    rng, folder = random.Random(f"memory {seed}"), place.empty()
    variant, outcome = rng.choice(ONE_RANK), Outcome()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    more = int(rng.choice((rng.uniform(0, 30), rng.uniform(0, 200), rng.uniform(0, 600))) * MEBIBYTE)
    flags = place.flags(variant, folder / "run")
    ended = start_run(flags, folder, name="limited", limits={resource.RLIMIT_AS: mapped + more}).end()
    outcome.judge(ended, (FINISHED, OUT_OF_MEMORY), f"{more / MEBIBYTE:.0f} MiB above the start, {variant}")
    return finish(outcome, place, variant, flags)


def owners(seed: int, place: Place) -> Outcome:
    """Two or three runs that start in one folder, each delayed somewhere: one owner, and its run is undisturbed."""
    rng, folder = random.Random(f"owners {seed}"), place.empty()
    variant, outcome = rng.choice(ONE_RANK), Outcome()
    flags, started = place.flags(variant, folder / "run"), []
    refused = rng.random() < 0.5  # one of them is not to have the folder, and tidies up on its way out
    for number in range(rng.choice((2, 3))):
        armed = (folder / "run", rng.randint(1, 12), "delay") if rng.random() < 0.7 else None
        own = {k: v for k, v in flags.items() if k != "resume"} if refused and number == 1 else flags
        started.append(start_run(own, folder, name=f"owner{number}", armed=armed))
        time.sleep(rng.choice((0, 0, 0.01, 0.1, 0.4)))
    ended = [child.end() for child in started]
    for number, one in enumerate(ended):
        outcome.judge(one, (FINISHED, IN_USE, USER), f"run {number} of {len(ended)} in one folder")
    if not any(one.code == FINISHED for one in ended):
        outcome.fail("failed_restart", "no run got the folder")
    trained = [one for one in ended if one.code == FINISHED and "step     6/6" in one.out]
    resumed = [one for one in trained if "resumed from" in one.out]
    if len(trained) - len(resumed) > 1:
        outcome.fail("differing_bits", f"{len(trained)} runs trained in one folder")
    if not outcome.failures:
        return finish(outcome, place, variant, flags)
    return outcome
