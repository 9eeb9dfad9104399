"""Damaged rows of pairs and labels, read and tokenized as a run does it, and kills of runs that learn from them."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.config import TrainConfig
from finetune.data.prepare import load_data, read_datasets
from finetune.parts.parts import Parts
from tests.rig import mutate
from tests.rig.batch import Mutant
from tests.rig.data_cases import DataBatch, make_json, make_jsonl, make_parquet
from tests.rig.kill_cases import killed_at_random
from tests.rig.materials import PREFERENCES, Place
from tests.rig.oracle import Outcome

PAIRS = [{"prompt": f"{i} plus {i}? ", "chosen": f"{2 * i}", "rejected": "no " * (i % 3 + 1)} for i in range(6)]
LABELS = [{"prompt": f"{i} plus {i}? ", "completion": f"{i}", "label": bool(i % 2)} for i in range(6)]
CHATS = [
    {
        "prompt": [{"role": "user", "content": f"hi {i}"}],
        "chosen": [{"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    for i in range(4)
]
WHOLE = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in CHATS]
MAKERS = {".jsonl": make_jsonl, ".json": make_json, ".parquet": make_parquet}


@dataclass
class PreferenceBatch(DataBatch):
    """argv: the method, and how the rows are read."""

    suffix: str = ""
    make: object = None

    def mutant(self, rng: random.Random, context) -> Mutant:
        rows, suffix = [dict(row) for row in rng.choice((PAIRS, LABELS, CHATS, WHOLE))], rng.choice(list(MAKERS))
        if rng.random() < 0.7:
            rows = mutate.mutated_json(rng, rows, most=2)
        data = MAKERS[suffix](rng, rows)
        data = mutate.mutated_bytes(rng, data) if rng.random() < 0.3 else data
        return Mutant({f"rows{suffix}": data}, (rng.choice(("dpo", "orpo", "kto")), rng.choice(("", "skip", "split"))))

    def check(self, mutant: Mutant, folder: Path, context) -> None:
        files, tokenizer, _ = context
        (name,), (method, how) = mutant.files, mutant.argv
        more = {"skip": dict(skip_bad_rows=3), "split": dict(validation_split=0.3)}.get(how, {})
        settings = replace(TrainConfig(), dataset=str(folder / name), context_length=64, model_name="m", **more)
        data = Parts(replace(settings, preference=method, batch_size=2)).data
        found = load_data(data, read_datasets(data), tokenizer, files).train
        assert len(found) == found.num_rows * (1 if method == "kto" else 2), (len(found), found.num_rows)


def preference_kills(seed: int, place: Place) -> Outcome:
    return killed_at_random(f"preference-kills {seed}", place, PREFERENCES)


ROWS = PreferenceBatch()
