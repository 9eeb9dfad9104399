"""Other people's files in the folder that a run writes: it trains or is refused in one line, and each file stays."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.rig.batch import Finding, Mutant
from tests.rig.materials import NUM_STEPS, Place
from tests.rig.own_cases import start

NAMES = (
    *("adapter_model.safetensors", "model.safetensors", "config.json", "tokenizer.json", "vocab.json", "metrics.jsonl"),
    *("notes.txt", ".tmp-notes", ".trash-1", ".writing-1-metrics.jsonl", ".written.json", ".lock", "all_config.yaml"),
    *("train_state.json", "run_plan.json", "base_model.json", "stacks/rank-0.txt", "step_3", "step-3", "latest"),
)
FOLDERS = ("", "", "", "best", "checkpoints", "checkpoints/step-3", f"checkpoints/step-{NUM_STEPS}", "checkpoints/mine")
WAYS = ("plain", "overwrite", "resume")


@dataclass
class WriterBatch:
    variants: tuple = ("lora",)

    def prepare(self, place: Place) -> Place:
        return place

    def mutant(self, rng: random.Random, place: Place) -> Mutant:
        """argv: how the run is started, and whether the folder holds a run already."""
        names = {f"{rng.choice(FOLDERS)}/{rng.choice(NAMES)}".lstrip("/") for _ in range(rng.randrange(1, 4))}
        return Mutant({f"run/{name}": rng.randbytes(rng.choice((0, 9, 300))) for name in names}, _way(rng))

    def check(self, mutant: Mutant, folder: Path, place: Place) -> None:
        run, way = folder / "run", mutant.argv[0]
        shutil.rmtree(run)  # the files are put there below, where the run's own leave them room
        if mutant.argv[1] == "on a run":
            shutil.copytree(place.whole("lora") / "run", run, ignore=shutil.ignore_patterns(".lock"))
        written = {}
        for name, data in mutant.files.items():
            if not (folder / name).exists() and not any(p.is_file() for p in (folder / name).parents):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
                written[name] = data
        changes = {"overwrite": dict(overwrite=True), "resume": dict(resume="auto", max_steps=None)}
        flags = place.flags("lora", run) | dict(resume=None, max_steps=1, save_every=1)
        try:
            start(flags | changes.get(way, {}))
        finally:
            for name, data in written.items():
                if not name.endswith("/.lock") or data:  # an empty one is taken
                    self._stays(folder, name, data)

    @staticmethod
    def _stays(folder: Path, name: str, data: bytes) -> None:
        """A whole folder may be set aside under another name."""
        step = Path(name).parent
        places = (folder / name, *folder.glob(f"{step.parent}/aside-{step.name}*/{Path(name).name}"))
        if not any(place.is_file() and place.read_bytes() == data for place in places):
            raise Finding("payload_or_escape", f"{name} was replaced or removed")


def _way(rng: random.Random) -> tuple[str, str]:
    return rng.choice(WAYS), rng.choice(("alone", "on a run"))


WRITERS = WriterBatch()
