"""Tokens on disk, so that a second start and the other ranks of a host need not make them again.

An entry is found by everything that decides it: the digests of the rows' files, how they are read, the tokenizer with
its template, the settings, and this code. Every array is verified by its digest when it is opened, and memory-mapped.
"""

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from datetime import date
from pathlib import Path

import numpy as np

from finetune.data.columns import RowOptions
from finetune.data.tokens.tokenize import Limits, TokenizedDataset
from finetune.model_files.digest import cache_root, file_digest
from finetune.model_files.plain_tokenizer import PlainTokenizer
from finetune.safetensors_io import digest_of
from finetune.system.files import locked_in_cache, new_folder
from finetune.system.json_files import JsonFileError, read_json

LEAST_BYTES = 4 * 2**20  # of a dataset's files; fewer are tokenized in the time it takes to look
MOST_BYTES = 20 * 2**30  # of all entries; the least recently used go first
ARRAYS = ("tokens", "is_target", "offsets", "full_lengths")
FACTS = ("sources", "counts", "description", "skipped", "notices", "first", "noted", "documents_per_row")
META = "dataset.json"
META_SCHEMA = {"facts": {str: object}, "digests": {str: str}, "example": object}


class TokenCache:
    """The entries of one dataset, read in one way. `files`: (path, label) of each; `reading`: what else decides it."""

    def __init__(self, files: list[tuple], reading: list, options: RowOptions):
        what = [[label, file_digest(path)] for path, label in files] + [reading, asdict(options), _code_digest()]
        self.root = cache_root() / "finetune" / "tokens"
        self.folder = self.root / _key(what)
        self.arrays = ARRAYS + (("desirable",) if options.labels else ())

    def holds_some(self) -> bool:
        """True if the rows were read and tokenized before, by whatever tokenizer."""
        return any(self.folder.glob(f"*/{META}"))

    def entry(self, tokenizer, limits: Limits) -> Path:
        """The folder of the entry for this tokenizer and these settings."""
        described = PlainTokenizer.described(tokenizer)
        today = str(date.today()) if "strftime_now" in described else ""
        return self.folder / _key([described, asdict(limits), today])

    def locked(self, entry: Path):
        """A context in which no other process makes this entry; the one that comes second finds it made."""
        return locked_in_cache(entry.with_suffix(".lock"))

    def get(self, entry: Path) -> tuple[TokenizedDataset, tuple[str, dict] | None] | None:
        """(the dataset, (the source of one of its rows, the row)), None if there is no entry or it is damaged."""
        try:
            meta = read_json(entry / META, META_SCHEMA)
            arrays = {}
            for name in self.arrays:
                file = entry / f"{name}.npy"
                if digest_of(file) != meta["digests"].get(name):
                    return None
                arrays[name] = np.load(file, mmap_mode="r")
            facts = {name: meta["facts"][name] for name in FACTS}
            os.utime(entry / META)
        except (OSError, JsonFileError, ValueError, KeyError):
            return None
        for name in ("sources", "skipped", "notices"):
            facts[name] = tuple(facts[name])
        example = meta["example"]
        return TokenizedDataset(**arrays, **facts), example and (example[0], example[1])

    def put(self, entry: Path, dataset: TokenizedDataset, example: tuple[str, dict] | None) -> None:
        """Writes an entry, complete or not at all. A disk that is full or read-only costs time, not the run."""
        with contextlib.suppress(OSError):
            with new_folder(entry) as beside:
                for name in self.arrays:
                    np.save(beside / f"{name}.npy", getattr(dataset, name))
                digests = {name: digest_of(beside / f"{name}.npy") for name in self.arrays}
                facts = {name: getattr(dataset, name) for name in FACTS}
                content = json.dumps({"facts": facts, "digests": digests, "example": example}, default=str)
                (beside / META).write_text(content, encoding="utf-8")
                shutil.rmtree(entry, ignore_errors=True)
            self._prune(entry)

    def _prune(self, kept: Path) -> None:
        entries = sorted(self.root.glob(f"*/*/{META}"), key=lambda meta: meta.stat().st_mtime, reverse=True)
        total = 0
        for meta in entries:
            total += sum(file.stat().st_size for file in meta.parent.iterdir())
            if total > MOST_BYTES and meta.parent != kept:
                shutil.rmtree(meta.parent, ignore_errors=True)


def _key(content) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _code_digest() -> str:
    """Of the modules that decide what rows become: another version of them makes its own entries."""
    folder = Path(__file__).parent
    return _key([file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))])
