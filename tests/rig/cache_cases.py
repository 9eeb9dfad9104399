"""Edits of token cache entries and of their locks: the tokens of the rows, or an entry that is made again."""

import json
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from finetune.data.columns import RowOptions
from finetune.data.prepare import DatasetSource, tokenized_once
from finetune.data.reading.mixture import Source
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.overlong import Cut
from finetune.data.tokens.token_cache import META, TokenCache, _key
from finetune.data.tokens.tokenize import Limits
from finetune.model_files.tokenizer import load_tokenizer
from finetune.safetensors_io import digest_of
from tests.rig import mutate
from tests.rig.batch import Finding, Mutant
from tests.rig.materials import Place

LIMITS = Limits(Cut(64), False, 400)
DTYPES = ("int8", "int32", "int64", "float64", "bool", "<U3", "complex64")


@dataclass
class CacheBatch:
    """argv: "signed" if the entry's digests are made to fit the edit; an odd thing in the place of a file, its name."""

    variants: tuple = ()
    names: list = field(default_factory=list)  # of the entry's files

    def prepare(self, place: Place):
        tokenizer, whole = load_tokenizer(place.model()), place.own / "whole"
        os.environ["XDG_CACHE_HOME"] = str(whole)
        first, entry = _tokens(place, tokenizer)
        self.names = sorted(file.name for file in entry.iterdir())
        return place, tokenizer, whole, entry.relative_to(whole), first.digest()

    def mutant(self, rng: random.Random, context) -> Mutant:
        _, _, whole, entry, _ = context
        kind, name = rng.randrange(5), rng.choice([*self.names, META, META])
        signed = ("signed",) if rng.random() < 0.5 else ()
        if kind == 0:
            odd = rng.choice(("missing", "pipe", "link", "folder", "empty", "zero"))
            name = f"{entry}/{name}" if rng.random() < 0.6 else f"{entry}.lock"
            return Mutant({}, (*signed, odd, name))
        data = (whole / entry / name).read_bytes()
        if name == META and kind < 4:
            tree = mutate.mutated_json(rng, json.loads(data))
            if signed and isinstance(tree, dict):
                tree["sha256"] = _key({k: v for k, v in tree.items() if k != "sha256"})
            return Mutant({f"{entry}/{name}": json.dumps(tree).encode()}, signed)
        if name != META and kind < 3:
            return Mutant({f"{entry}/{name}": _edited_array(rng, whole / entry / name)}, signed)
        return Mutant({f"{entry}/{name}": mutate.mutated_bytes(rng, data)}, signed)

    def check(self, mutant: Mutant, folder: Path, context) -> None:
        place, tokenizer, whole, entry, expected = context
        os.environ["XDG_CACHE_HOME"] = str(folder)
        shutil.copytree(whole, folder, dirs_exist_ok=True, ignore=lambda _, names: [n for n in names if "lock" in n])
        for name, data in mutant.files.items():
            (folder / name).write_bytes(data)
        if not mutant.files:
            put_odd(folder / mutant.argv[-1], mutant.argv[-2])
        elif "signed" in mutant.argv:
            _sign(folder / entry)
        found, _ = _tokens(place, tokenizer)
        if found.digest() != expected and "signed" not in mutant.argv:
            raise Finding("differing_bits", "an edited entry was taken")


def _tokens(place: Place, tokenizer):
    """(the tokens of the rows, from the cache if it has them, their entry)."""
    file = place.rows() / "rows.jsonl"
    cache = TokenCache([(file, file.name)], [1], RowOptions())
    source = DatasetSource(Source("a"), RowOptions(), lambda: read_rows(str(file)), cache)
    found = tokenized_once(source, tokenizer, LIMITS)
    assert len(found.sources) == len(found.offsets) - 1
    return found, cache.entry(tokenizer, LIMITS)


def _edited_array(rng: random.Random, file: Path) -> bytes:
    array, kind, beside = np.load(file), rng.randrange(5), file.with_name("edited")
    if kind == 0:
        array = array.astype(rng.choice(DTYPES))
    elif kind == 1:
        array = array[: rng.randrange(len(array) + 1)]
    elif kind == 2:
        array = rng.choice((array.reshape(1, -1), np.concatenate([array, array]), array[::-1], np.array(5)))
    else:
        array[rng.randrange(len(array))] = rng.choice((-1, 0, 1, 127, 399, 2**31 - 1)) % 2 ** (8 * array.itemsize - 1)
    with open(beside, "wb") as out:
        np.save(out, array)
    data = beside.read_bytes()
    beside.unlink()
    return data


def _sign(entry: Path) -> None:
    """Makes the digests of an entry's description those of its arrays, as far as it has any."""
    try:
        tree = json.loads((entry / META).read_bytes())
        tree["digests"] = {name: digest_of(entry / f"{name}.npy") for name in tree["digests"]}
        tree["sha256"] = _key({k: v for k, v in tree.items() if k != "sha256"})
    except (ValueError, TypeError, KeyError, OSError):
        return
    (entry / META).write_text(json.dumps(tree))


def put_odd(file: Path, odd: str) -> None:
    if file.exists():
        file.unlink()
    if odd == "pipe":
        os.mkfifo(file)
    elif odd == "link":
        file.symlink_to("/dev/zero")
    elif odd == "folder":
        file.mkdir()
    elif odd == "empty":
        file.touch()
    elif odd == "zero":
        file.write_bytes(bytes(5000))


CACHES = CacheBatch()
