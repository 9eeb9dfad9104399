"""Faults of a packed base: its files cannot be written, are edited between starts, or change while a run reads them."""

import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from finetune.data.collate import microbatches
from finetune.model_files.files import find_model
from finetune.torch_engine.lora.layers import adapter_parameters
from tests.rig import intercept, mutate
from tests.rig.batch import Finding, Mutant
from tests.rig.cache_cases import put_odd
from tests.rig.children import start_run
from tests.rig.kill_cases import finish
from tests.rig.materials import Place
from tests.rig.oracle import Outcome
from tests.support import tiny
from tests.support.build import load_model, torch_engine
from tests.support.engines import CPU
from tests.support.planned import settings_of

FINISHED, KILLED, STORAGE, DAMAGED = 0, -9, 74, 76
FAULTS = ("kill before", "kill after", "EIO once", "EIO on", "ENOSPC on", "short write")
CALLS = 80  # a little more than packing and the first steps make
STARTS = 5
ROWS = tiny.dataset((20, 17, 12, 30), vocab=90)


def packed_fault(seed: int, place: Place) -> Outcome:
    """Starts of a run whose packed base meets a fault at a call, one after the other: then it ends as one whose base is
    in memory.
    """
    rng, folder = random.Random(f"packed-faults {seed}"), place.empty()
    packed = place.root / f"packed-{place.worker}"
    shutil.rmtree(packed, ignore_errors=True)
    flags = place.flags("offloaded", folder / "run") | dict(packed_cache=packed)
    outcome = Outcome(tried=0)
    for number in range(STARTS):
        armed = (packed, rng.randint(1, CALLS), rng.choice(FAULTS))
        ended = start_run(flags, folder, name=f"run{number}", armed=armed).end()
        outcome.tried += ended.code != FINISHED
        allowed = (FINISHED, KILLED, STORAGE, DAMAGED)
        if not outcome.judge(ended, allowed, f"start {number + 1}: {armed[1:]}"):
            break
    return finish(outcome, place, "nf4", flags)


@dataclass
class PackedBatch:
    """argv: "amid" if the edit comes between two steps; an odd thing in the place of a file, its name."""

    variants: tuple = ()
    expected: list = field(default_factory=list)
    names: list = field(default_factory=list)

    def prepare(self, place: Place):
        model, whole = place.deep_model(), place.own / "whole"
        self.expected = list(_steps(_engine(model, "none", "none")))
        assert list(_steps(_engine(model, whole, "disk"))) == self.expected
        self.names = sorted(str(file.relative_to(whole)) for file in whole.rglob("*.*") if file.suffix != ".lock")
        return model, whole

    def mutant(self, rng: random.Random, context) -> Mutant:
        _, whole = context
        name = rng.choice(self.names)
        when = rng.choice(("at the start", "amid"))
        kind = rng.randrange(5)
        if kind == 0:
            return Mutant({}, (when, rng.choice(("missing", "pipe", "link", "folder", "empty", "zero")), name))
        data = (whole / name).read_bytes()
        if kind == 1:
            other = rng.choice([n for n in self.names if n.endswith(Path(name).suffix)])
            return Mutant({name: (whole / other).read_bytes()}, (when,))
        return Mutant({name: mutate.mutated_bytes(rng, data)}, (when,))

    def check(self, mutant: Mutant, folder: Path, context) -> None:
        model, whole = context
        cache = folder / "cache"
        shutil.copytree(whole, cache)
        if mutant.argv[0] == "amid":
            engine = _engine(model, cache, "disk")
            steps = _steps(engine)
            found = [next(steps)]
            _edit(mutant, cache)
            found += steps
        else:
            _edit(mutant, cache)
            found = list(_steps(_engine(model, cache, "disk")))
        if found != self.expected:
            raise Finding("differing_bits", "an edited file was taken")


def _edit(mutant: Mutant, cache: Path) -> None:
    time.sleep(0.002)  # another moment than the last write's
    for name, data in mutant.files.items():
        (cache / name).write_bytes(data)
    if not mutant.files:
        put_odd(cache / mutant.argv[2], mutant.argv[1])


def _engine(model: Path, cache, word: str):
    settings = settings_of("qlora", "fp32", packed_cache=str(cache), base_offload=word, quantization_backend="nf4")
    loaded = load_model(model, settings, CPU, say=lambda line: None, files=find_model(str(model)))
    engine = torch_engine(loaded, settings, CPU)
    engine.verify("padding_free")
    return engine


def _steps(engine):
    """[loss, norm] of two steps, then the adapters' bytes."""
    batches = microbatches(ROWS, range(len(ROWS)), engine.layout, 4, 60, 0)
    for _ in range(2):
        result = engine.train_step(batches, 1e-2)
        yield [result.nll, result.grad_norm]
    yield [p.detach().numpy().tobytes() for p in adapter_parameters(engine.model).values()]


PACKED = PackedBatch()
assert set(FAULTS) <= set(intercept.FAULTS)
