"""Mutants of the JSON files that a run itself wrote: a resume that goes on, starts over or is refused in one line."""

import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import train
from tests.rig import mutate
from tests.rig.batch import Finding, Mutant
from tests.rig.materials import NUM_STEPS, Place
from tests.support.runs import resign

STEP = f"checkpoints/step-{NUM_STEPS - 1}"
FILES = (
    "run_plan.json",
    "train_state.json",
    "metrics.jsonl",
    f"{STEP}/manifest.json",
    f"{STEP}/train_state.json",
    f"{STEP}/run_plan.json",
    f"{STEP}/adapter_config.json",
    ".written.json",
    "checkpoints/latest",
    "cache",
)
SIGNED = f"{STEP}/train_state.json", f"{STEP}/run_plan.json", f"{STEP}/adapter_config.json"


@dataclass
class OwnBatch:
    variants: tuple = ("lora",)

    def prepare(self, place: Place) -> Place:
        return place

    def mutant(self, rng: random.Random, place: Place) -> Mutant:
        """argv: how it is resumed: with all flags (auto), or with the folder alone."""
        name, whole = rng.choice(FILES), place.whole("lora") / "run"
        argv = (rng.choice(("auto", "folder")),)
        if name == "cache":
            (file,) = sorted((place.root / "cache").rglob("*.json"))[:1]
            data, name = file.read_text(), f"cache/{file.relative_to(place.root / 'cache')}"
        else:
            data = (whole / name).read_text()
        if name.endswith("latest"):
            return Mutant({f"run/{name}": mutate.mutated_bytes(rng, data.encode())}, argv)
        if name == "metrics.jsonl" and rng.random() < 0.5:
            return Mutant({f"run/{name}": data.encode()[: rng.randrange(len(data))]}, (*argv, "cut"))
        if name == "metrics.jsonl":
            lines = data.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = mutate.json_text(rng, mutate.mutated_json(rng, json.loads(lines[at]))).decode(errors="replace")
            data = "\n".join(lines).encode(errors="surrogatepass")
            return Mutant({f"run/{name}": mutate.mutated_bytes(rng, data) if rng.random() < 0.5 else data}, argv)
        found = mutate.json_text(rng, mutate.mutated_json(rng, json.loads(data)))
        return Mutant({name if name.startswith("cache/") else f"run/{name}": found}, argv)

    def check(self, mutant: Mutant, folder: Path, place: Place) -> None:
        run, whole = folder / "run", place.whole("lora") / "run"
        shutil.copytree(whole, run, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_left_out(mutant)))
        if "run/train_state.json" not in mutant.files:
            (run / "train_state.json").unlink()  # it had not finished
        for name, data in mutant.files.items():
            (folder / name).write_bytes(data)
            if name.removeprefix("run/") in SIGNED:
                resign(run / STEP, Path(name).name)
        flags = place.flags("lora", run)
        if mutant.argv[0] == "folder":
            flags = dict(resume=run)
        if any(name.startswith("cache/") for name in mutant.files):
            with_cache(folder / "cache", place)
            return
        start(flags)
        if "cut" in mutant.argv:
            after_resume(run)


def _left_out(mutant: Mutant) -> list[str]:
    """The run as it died after step 5, unless the mutant is the file of a finished one."""
    finished = "run/train_state.json" in mutant.files
    return [".lock"] if finished else [".lock", f"step-{NUM_STEPS}", "step-1", "step-2", "step-3"]


def start(flags: dict) -> None:
    train.fine_tune(**{k: str(v) if isinstance(v, Path) else v for k, v in flags.items()})


def with_cache(cache: Path, place: Place) -> None:
    """A dry run that reads the cache of probes."""
    before = os.environ["XDG_CACHE_HOME"]
    os.environ["XDG_CACHE_HOME"] = str(cache)
    try:
        flags = {k: str(v) if isinstance(v, Path) else v for k, v in place.flags("lora", cache / "out").items()}
        del flags["resume"]
        train.make_plan(flags | dict(dry_run=True))
        train.make_plan(flags)
    finally:
        os.environ["XDG_CACHE_HOME"] = before


def after_resume(run: Path) -> None:
    """metrics.jsonl of a run that went on holds no torn line."""
    for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            raise Finding("differing_bits", f"metrics.jsonl holds a torn line after a resume: {line[:80]!r}") from None


OWN = OwnBatch()
