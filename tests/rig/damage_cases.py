"""Flipped bits, cut, grown, deleted and swapped files of a run: noticed, and never a differing bit."""

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from finetune.checkpoint.store import newest_checkpoint, verify_checkpoint
from finetune.errors import CheckpointDamagedError
from tests.rig.children import Child, start_ranks, start_run
from tests.rig.materials import NUM_STEPS, ONE_RANK, TWO_RANKS, VARIANTS, Place
from tests.rig.oracle import Caught, Outcome, check_finished

DAMAGED_STEP = 5
TOP_LEVEL = (
    "run_plan.json",
    "run_plan.json",
    "run_plan.json",
    ".written.json",
    "metrics.jsonl",
    "checkpoints/latest",
    "base_model.json",
    "tokenizer_config.json",
)
ONE_IN_RESUMED = 40  # of the damages to a checkpoint, a restart is tried in one in so many
ONE_IN_TOP_LEVEL = 12
REFUSED = (2, 76)
WAIT_S = 10
NUM_FILES = 5  # of a checkpoint, at least


@dataclass
class Damage:
    """A file of a crashed run, and the change to be made to it."""

    variant: str
    run: Path
    file: Path
    top_level: bool

    @property
    def name(self) -> str:
        return f"{self.variant} {self.file.relative_to(self.run)}"


def crashed_run(place: Place, variant: str) -> Path:
    """This worker's copy of a run that died after step 5: no later checkpoint, no train_state.json."""
    folder = place.own / variant / "run"
    if not folder.exists():
        shutil.copytree(place.whole(variant) / "run", folder)
        shutil.rmtree(folder / f"checkpoints/step-{NUM_STEPS}")
        for step in (1, 2):
            shutil.rmtree(folder / f"checkpoints/step-{step}")
        (folder / "train_state.json").unlink()
        (folder / "checkpoints/latest").write_text(f"step-{DAMAGED_STEP}")
    return folder


def choose(rng: random.Random, place: Place) -> Damage:
    variant = rng.choice(ONE_RANK + TWO_RANKS)
    run = crashed_run(place, variant)
    top_level = rng.randrange(ONE_IN_TOP_LEVEL) == 0
    if top_level:
        files = [run / name for name in TOP_LEVEL if (run / name).is_file()]
    else:
        files = sorted(f for f in (run / f"checkpoints/step-{DAMAGED_STEP}").iterdir() if f.stat().st_size)
    return Damage(variant, run, rng.choice(files), top_level)


def flip(seed: int, place: Place) -> Outcome:
    """One bit of one file."""
    rng, outcome = random.Random(f"flips {seed}"), Outcome()
    damage = choose(rng, place)
    before = damage.file.read_bytes()
    after = bytearray(before)
    after[rng.randrange(len(after))] ^= 1 << rng.randrange(8)
    damage.file.write_bytes(after)
    check(outcome, rng, damage, place)
    restore(damage, before)
    return outcome


def cut_or_swap(seed: int, place: Place) -> Outcome:
    """One file cut, grown, emptied, deleted, zeroed at its end, or another in its place."""
    rng, outcome = random.Random(f"cuts-swaps {seed}"), Outcome()
    damage = choose(rng, place)
    before = damage.file.read_bytes()
    change = rng.choice((_cut, _grow, _delete, _zero_tail, _swap, _swap, _replace))
    if not change(rng, damage, before):
        restore(damage, before)
        return Outcome(tried=0)
    check(outcome, rng, damage, place)
    restore(damage, before)
    return outcome


def _cut(rng, damage, before) -> bool:
    damage.file.write_bytes(before[: rng.randrange(len(before))])
    return True


def _grow(rng, damage, before) -> bool:
    damage.file.write_bytes(before + rng.randbytes(rng.choice((1, 8, 4096))))
    return True


def _delete(rng, damage, before) -> bool:
    damage.file.unlink()
    return True


def _zero_tail(rng, damage, before) -> bool:
    at = rng.randrange(len(before))
    damage.file.write_bytes(before[:at] + bytes(len(before) - at))
    return any(before[at:])


def _swap(rng, damage, before) -> bool:
    """The file of another step, of another run, or another file of the same step."""
    step, name = damage.file.parent, damage.file.name
    others = [*step.parent.glob(f"step-*/{name}"), *step.iterdir()]
    others += [*damage.run.parents[1].glob(f"*/run/checkpoints/{step.name}/{name}")]
    others = [f for f in others if f.is_file() and f.read_bytes() != before]
    if not others:
        return False
    damage.file.write_bytes(rng.choice(sorted(others)).read_bytes())
    return True


def _replace(rng, damage, before) -> bool:
    """Something that is not a file of its own."""
    damage.file.unlink()
    rng.choice((os.mkdir, os.mkfifo, lambda p: os.symlink("/dev/zero", p), lambda p: os.symlink(p, p)))(damage.file)
    return True


def restore(damage: Damage, before: bytes) -> None:
    """Puts the file back; a run that was restarted is copied again by the next case."""
    if not damage.run.exists():
        return
    if damage.file.is_dir() and not damage.file.is_symlink():
        shutil.rmtree(damage.file)
    damage.file.unlink(missing_ok=True)
    damage.file.write_bytes(before)


def check(outcome: Outcome, rng: random.Random, damage: Damage, place: Place) -> None:
    """The damaged checkpoint is not taken, the older one is; or a restart is refused or bitwise the same run."""
    if damage.top_level:
        restart(outcome, rng, damage, place, (0, 74, *REFUSED))
        return
    noticed = _is_noticed(outcome, damage)
    if noticed and rng.randrange(ONE_IN_RESUMED) == 0:
        restart(outcome, rng, damage, place, (0,))


def _is_noticed(outcome: Outcome, damage: Damage) -> bool:
    step = damage.run / f"checkpoints/step-{DAMAGED_STEP}"
    if not damage.file.is_file():  # reading a pipe never ends: in a child
        found = Child(damage.run.parent, name="verify").start(lambda: verify_checkpoint(step) and 0).end(WAIT_S)
        return outcome.judge(found, (CheckpointDamagedError.exit_code,), f"{damage.name}, not a file")
    with Caught() as caught:
        saved = verify_checkpoint(step)
    error = caught.error
    if error is None:
        if damage.file.name != "manifest.json" or len(saved.manifest["files"]) < NUM_FILES:
            outcome.fail("differing_bits", f"{damage.name}: the damage is not noticed")
        return False
    if not isinstance(error, CheckpointDamagedError):
        outcome.fail("traceback", f"{damage.name}: {type(error).__name__}: {error}")
        return False
    if "\n" in str(error):
        outcome.fail("wrong_code", f"{damage.name}: a message of several lines: {error}")
    found, skipped = newest_checkpoint(damage.run)
    if found is None or found.step != DAMAGED_STEP - 1 or len(skipped) != 1:
        outcome.fail("failed_restart", f"{damage.name}: falls back to {found and found.step}")
    return True


def restart(outcome: Outcome, rng: random.Random, damage: Damage, place: Place, allowed: tuple) -> None:
    """Starts the run again, with all its flags or with its folder alone."""
    size, folder = VARIANTS[damage.variant][0], damage.run.parent
    flags = place.flags(damage.variant, damage.run)
    if damage.top_level and rng.random() < 0.5:
        flags = {"resume": damage.run}
    if size == 1:
        ended = [start_run(flags, folder).end()]
    else:
        ended = [child.end() for child in start_ranks(flags, folder, place.port())]
    fine = [outcome.judge(e, allowed, f"restart after damage to {damage.name}") for e in ended]
    if all(fine) and ended[0].code == 0 and damage.file.name not in ("metrics.jsonl", "tokenizer_config.json"):
        check_finished(outcome, place, damage.variant, damage.run)
    shutil.rmtree(folder)
