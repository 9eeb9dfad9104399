"""Digest of a model: of every byte of its config and weights. Each file is hashed once and then remembered.

A file is known again by its path, size, times and inode. One modified within the last moments is not remembered: a
later change in the same tick of the file system's clock would go unnoticed.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from pathlib import Path

from finetune.errors import PlanError
from finetune.model_files.config_values import AGAIN
from finetune.safetensors_io import digest_of
from finetune.system.files import cache_folder, locked_in_cache, replace
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.threads import Pool

PREFIX = "sha256:"  # digests without it are of the earlier kind, see sampled_digest
SETTLED_S = 2.0
ENTRY_SCHEMA = {"file": [int], "sha256": str}
NUM_SAMPLES = 64
SAMPLE_BYTES = 4096
LARGEST_BY_SHA1 = 64 * 2**20  # bytes


def model_digest(folder: Path, weight_files: tuple[Path, ...]) -> str:
    """sha256 over config.json and the name and sha256 of each weight file. PlanError for one in the Hub's cache that is
    not what the Hub has.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    with Pool(4) as pool:  # hashlib releases the GIL
        for path, found in zip(weight_files, pool.map(file_digest, weight_files), strict=True):
            check_blob(path, found)
            digest.update(f"{path.name} {found}\n".encode())
    return PREFIX + digest.hexdigest()


def remedy_of(path: Path) -> str:
    """The remedy for a damaged file of a model: one of the Hub's cache is downloaded again once it is gone."""
    blob = path.resolve()
    if blob.parent.name == "blobs":
        return f"Remove {blob}, and it is downloaded again."
    return AGAIN


def check_blob(path: Path, digest: str | None = None) -> None:
    """Raises PlanError for a file of the Hub's cache whose name is another digest than its content has: nothing else
    finds a download that was changed on its way, or by a disk that lost power. `digest`: its sha256, if it is known.

    Large files are named by their sha256, others by the sha1 of Git, with a header before it, or of mirrors without.
    """
    blob = path.resolve()
    if blob.parent.name != "blobs":
        return
    kind = ""
    if re.fullmatch("[0-9a-f]{64}", blob.name) and blob.name != (digest or file_digest(path)):
        kind = "sha256"
    if re.fullmatch("[0-9a-f]{40}", blob.name) and blob.stat().st_size <= LARGEST_BY_SHA1:
        if not is_blob(blob.read_bytes(), blob.name):
            kind = "sha1"
    if kind:
        raise PlanError(f"{path}: is not the file that the Hub has (its {kind} differs). {remedy_of(path)}")


def is_blob(content: bytes, name: str) -> bool:
    """True if a name is a content's sha256, or its sha1 as Git has it, or as some mirrors have it: without a header."""
    if len(name) == 64:
        return name == hashlib.sha256(content).hexdigest()
    return name in (hashlib.sha1(begin + content).hexdigest() for begin in (b"blob %d\0" % len(content), b""))


def sampled_digest(folder: Path, weight_files: tuple[Path, ...]) -> str:
    """The digest that earlier versions saved: config.json and, per weight file, name, size, header and 64 samples of 4
    KiB.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            length = int.from_bytes(head := file.read(8), "little")
            digest.update(head + file.read(length))
            for i in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file, from the cache if it has not changed since. A cache that can't be written only costs time."""
    path = path.resolve()
    entry = cache_folder("digests") / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:24]}.json"
    with locked_in_cache(entry.with_suffix(".lock")):  # the ranks of a host wait for the first, which hashes it
        before = _identity(path)
        known = _read(entry)
        if known and known["file"] == before:
            return known["sha256"]
        found = digest_of(path)
        if _identity(path) == before and time.time_ns() - max(before[1:3]) > SETTLED_S * 1e9:
            with contextlib.suppress(OSError), replace(entry) as file:
                file.write(json.dumps({"file": before, "sha256": found}).encode())
        return found


def _identity(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _read(entry: Path) -> dict | None:
    try:
        return read_json(entry, ENTRY_SCHEMA)
    except (JsonFileError, FileNotFoundError):
        return None
