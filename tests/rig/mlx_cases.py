"""Edits of checkpoints that the MLX engine opens: refused in one line, or the loss that torch computes from them."""

import json
import random
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from finetune.data.collate import microbatches
from finetune.errors import EXPECTED
from finetune.open_checkpoint import open_engine
from tests.rig import mutate
from tests.rig.batch import Finding, Mutant
from tests.rig.materials import Place
from tests.rig.model_cases import ADAPTER, WEIGHTS, make_safetensors
from tests.rig.reader_cases import CONFIG, copied
from tests.support import tiny

CLOSE = 1e-4  # of a loss: the engines differ by 1e-6


@dataclass
class MLXBatch:
    """argv: what is edited."""

    variants: tuple = ("lora", "full")

    def prepare(self, place: Place) -> Place:
        return place

    def mutant(self, rng: random.Random, place: Place) -> Mutant:
        kind = rng.choice(("adapter", "tensors", "config", "weights", "published"))
        run, full = place.whole("lora") / "run", place.whole("full") / "run"
        if kind == "adapter":
            config = json.loads((run / CONFIG).read_text())
            return Mutant({CONFIG: mutate.json_text(rng, mutate.mutated_json(rng, config, most=2))}, (kind,))
        if kind == "config":
            config = json.loads((full / "config.json").read_text())
            return Mutant({"config.json": mutate.json_text(rng, mutate.mutated_json(rng, config, most=2))}, (kind,))
        if kind == "published":
            data = bytearray((full / WEIGHTS).read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return Mutant({WEIGHTS: bytes(data)}, (kind,))
        wanted = ADAPTER if kind == "tensors" else WEIGHTS
        while True:
            found = make_safetensors(rng, place)
            if list(found.files) == [wanted]:
                return Mutant(found.files, (kind,))

    def check(self, mutant: Mutant, folder: Path, place: Place) -> None:
        kind = mutant.argv[0]
        whole = place.whole("lora" if kind in ("adapter", "tensors") else "full") / "run"
        copied(whole, folder, *([] if kind == "published" else ["manifest.json"]))
        mine = nll_of(folder, "mlx")
        if kind == "published":
            raise Finding("differing_bits", "a flipped bit of a published file was taken")
        try:
            theirs = nll_of(folder, "cpu")
        except EXPECTED as error:
            if kind == "config":  # fields that transformers checks, and that MLX does not read
                return
            raise Finding("wrong_code", f"MLX opens what torch refuses: {error}") from None
        if not abs(mine - theirs) <= CLOSE * abs(theirs):
            raise Finding("differing_bits", f"loss {mine}, torch's is {theirs}")


def nll_of(folder: Path, device: str) -> float:
    """The loss per token of a few documents by the checkpoint in `folder`, opened as the programs open it."""
    engine, *_ = open_engine(Namespace(checkpoint=str(folder), device=device, precision="fp32", n_bits=None))
    documents = tiny.dataset((5, 17, 9), vocab=60)
    return engine.evaluate(microbatches(documents, range(3), "padded", 3, 0, 0)).loss


MLX = MLXBatch()
