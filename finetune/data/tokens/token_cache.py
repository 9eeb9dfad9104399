"""Tokens on disk, so that a second start and the other ranks of a host need not make them again.

An entry is found by everything that decides it: the digests of the rows' files, how they are read, the tokenizer with
its template, the settings, and this code. Everything in it is verified by its digest when it is opened.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from finetune.arrays import Named
from finetune.data.chat_template import today
from finetune.data.columns import RowOptions
from finetune.data.tokens.tokenize import ASKED, DESIRABLE, Limits, TokenizedDataset, asked_of, labels_of
from finetune.errors import first_line
from finetune.model_files.digest import file_digest
from finetune.model_files.plain_tokenizer import PlainTokenizer
from finetune.model_files.tokenizer import Tokenizer
from finetune.safetensors_io import digest_of
from finetune.system.files import cache_folder, locked_in_cache, new_folder, open_file
from finetune.system.json_files import JsonFileError, check, read_json
from finetune.system.untrusted import untrusted

LEAST_BYTES = 4 * 2**20  # of a dataset's files; fewer are tokenized in the time it takes to look
MOST_BYTES = 20 * 2**30  # of all entries; the least recently used go first
ARRAYS = ("tokens", "is_target", "offsets", "full_lengths")
META = "dataset.json"
FACTS_SCHEMA: dict = {
    "sources": [str],
    "counts": {str: int},
    "description": str,
    "skipped": [str],
    "notices": [str],
    "first": {str: str},
    "noted": {str: int},
    "documents_per_row": int,
}
META_SCHEMA = {"facts": FACTS_SCHEMA, "digests": {str: str}, "example": (dict, type(None)), "sha256": str}
DTYPES = {
    "tokens": "int32",
    "is_target": "bool",
    "offsets": "int64",
    "full_lengths": "int32",
    DESIRABLE: "bool",
    ASKED: "int64",
}
IN_MEMORY_BYTES = 64 * 2**20  # of an array; a larger one is mapped


class TokenCache:
    """The entries of one dataset, read in one way. `files`: (path, label) of each; `reading`: what else decides it."""

    def __init__(self, files: list[tuple], reading: list, options: RowOptions):
        what = [[label, file_digest(path)] for path, label in files] + [reading, asdict(options), _code_digest()]
        self.root = cache_folder("tokens")
        self.folder = self.root / _key(what)
        of_some = {DESIRABLE: options.labels, ASKED: options.mask_reasoning}
        self.arrays = (*ARRAYS, *(name for name, is_there in of_some.items() if is_there))

    def holds_some(self) -> bool:
        """True if the rows were read and tokenized before, by whatever tokenizer."""
        return bool(self._metas())

    def _metas(self) -> list[Path]:
        """The files that describe its entries; none where another user keeps them."""
        try:
            return list(self.folder.glob(f"*/{META}"))
        except PermissionError:
            return []

    def columns(self) -> list[str]:
        """Columns of a row that is kept with the tokens; of no damaged entry."""
        for meta in self._metas():
            with contextlib.suppress(JsonFileError, OSError):
                row = (read_json(meta, META_SCHEMA)["example"] or {}).get("row")
                if isinstance(row, dict):
                    return list(row)
        return []

    def entry(self, tokenizer: Tokenizer, limits: Limits) -> Path:
        """The folder of the entry for this tokenizer and these settings."""
        described = PlainTokenizer.described(tokenizer)
        day = ""
        if "strftime_now" in described:
            day = today()
        return self.folder / _key([described, asdict(limits), day])

    def locked(self, entry: Path):
        """A context in which no other process makes this entry; the one that comes second finds it made."""
        return locked_in_cache(entry.with_suffix(".lock"))

    def get(
        self, entry: Path, vocab_size: int | None, say: Callable[[str], object] = lambda line: None
    ) -> tuple[TokenizedDataset, tuple[str, dict] | None] | None:
        """(the dataset, (the source of one of its rows, the row)), None if there is no entry.

        One that is not as it was written is set aside, which `say` is told.
        """
        if not os.access(entry / META, os.R_OK):  # there is none, or it is another user's
            return None
        try:
            return self._read(entry, vocab_size)
        except FileNotFoundError:
            if not (entry / META).exists():
                return None
            fact = "a file is missing"
        except (OSError, EOFError, ValueError) as error:
            fact = first_line(error)
        say(f"note: the tokens in {entry} are not as they were written ({fact}): they are made again")
        aside = entry.with_name(f"{entry.name}.damaged")
        with contextlib.suppress(OSError):
            shutil.rmtree(aside, ignore_errors=True)
            entry.rename(aside)
        return None

    def _read(self, entry: Path, vocab_size: int | None) -> tuple[TokenizedDataset, tuple[str, dict] | None]:
        """Raises ValueError, OSError for an entry that is not as it was written."""
        meta = read_json(entry / META, META_SCHEMA)
        digest = meta.pop("sha256")
        if digest != _key(meta):
            raise ValueError(f"{META}: its content has changed")
        arrays: dict = {name: read_array(entry / f"{name}.npy", meta["digests"].get(name)) for name in self.arrays}
        facts = meta["facts"]
        _check(arrays, facts, vocab_size)
        with contextlib.suppress(OSError):  # another user's
            os.utime(entry / META)
        for name in ("sources", "skipped", "notices"):
            facts[name] = tuple(facts[name])
        example = meta["example"]
        if example is not None:
            check(example, {"source": str, "row": dict}, META, "example")
        beside: dict[str, Named] = {}
        if DESIRABLE in arrays:
            beside |= labels_of(arrays.pop(DESIRABLE))
        if ASKED in arrays:
            beside |= asked_of(arrays.pop(ASKED))
        return TokenizedDataset(**arrays, arrays=beside, **facts), example and (example["source"], example["row"])

    def put(self, entry: Path, dataset: TokenizedDataset, example: tuple[str, dict] | None) -> None:
        """Writes an entry, complete or not at all. A disk that is full or read-only costs time, not the run."""
        with contextlib.suppress(OSError):
            with new_folder(entry) as beside:
                for name in self.arrays:
                    array = dataset.arrays[name].values if name in dataset.arrays else getattr(dataset, name)
                    np.save(beside / f"{name}.npy", array)
                digests = {name: digest_of(beside / f"{name}.npy") for name in self.arrays}
                facts = {name: getattr(dataset, name) for name in FACTS_SCHEMA}
                content = {
                    "facts": facts,
                    "digests": digests,
                    "example": example and {"source": example[0], "row": example[1]},
                }
                content = json.loads(json.dumps(content, default=str))
                (beside / META).write_text(json.dumps(content | {"sha256": _key(content)}), encoding="utf-8")
            self._prune(entry)

    def _prune(self, kept: Path) -> None:
        entries = sorted(self.root.glob(f"*/*/{META}"), key=lambda meta: meta.stat().st_mtime, reverse=True)
        total = 0
        for meta in entries:
            total += sum(file.stat().st_size for file in meta.parent.iterdir())
            if total > MOST_BYTES and meta.parent != kept:
                shutil.rmtree(meta.parent, ignore_errors=True)


def read_array(file: Path, digest: str | None, in_memory_bytes: int = IN_MEMORY_BYTES) -> np.ndarray:
    """The array in a file, from a copy that nobody else can cut: a mapped file that is cut ends its reader by SIGBUS.

    A small one is copied to memory, a large one to a file without a name. Raises ValueError if the digest differs.
    """
    with open_file(file, "rb") as source, contextlib.ExitStack() as stack:
        copy: IO[bytes] = io.BytesIO()
        found = hashlib.sha256()
        if os.fstat(source.fileno()).st_size > in_memory_bytes:
            with contextlib.suppress(OSError):
                copy = stack.enter_context(tempfile.TemporaryFile(dir=file.parent))
        while block := source.read(2**20):
            found.update(block)
            copy.write(block)
        if found.hexdigest() != digest:
            raise ValueError(f"{file.name}: its content has changed")
        copy.seek(0)
        with untrusted(f"{file.name}: is not an array", "Delete it."):  # numpy's header is parsed as Python
            if isinstance(copy, io.BytesIO):
                return np.load(copy, allow_pickle=False)
            np.lib.format.read_magic(copy)
            shape, _, dtype = np.lib.format.read_array_header_1_0(copy)
        offset = copy.tell()
        copy.flush()
        return np.memmap(copy, dtype, "r", offset, shape)


def _check(arrays: dict, facts: dict, vocab_size: int | None) -> None:
    """Raises ValueError for arrays that no tokenization makes."""
    number, (tokens, offsets) = len(facts["sources"]), (arrays[name] for name in ("tokens", "offsets"))
    sizes = {"tokens": tokens.size, "is_target": tokens.size, "offsets": number + 1}
    for name, array in arrays.items():
        # those before rows were dropped
        if name == "full_lengths":
            size = array.size
        else:
            size = sizes.get(name, number)
        if array.shape != (size,) or array.dtype.name != DTYPES[name]:
            raise ValueError(f"{name} is {array.dtype} {array.shape}")
    if facts["documents_per_row"] not in (1, 2) or number % facts["documents_per_row"]:
        raise ValueError(f"{number} documents, {facts['documents_per_row']} per row")
    if offsets[0] != 0 or offsets[-1] != tokens.size or (np.diff(offsets) < 0).any():
        raise ValueError("the offsets are not those of documents")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < (vocab_size or np.inf):
        raise ValueError(f"it has tokens {tokens.min()} to {tokens.max()}; {vocab_size} are known")


def _key(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _code_digest() -> str:
    """Digest of the modules that encode rows: another version of them makes its own entries."""
    folder = Path(__file__).parent.parent  # finetune/data, templates and columns too
    return _key([file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))])
