"""Files that all ranks need: each hashes a share of the checkpoint to resume from; others are rank 0's alone."""

import base64
import contextlib
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from finetune.checkpoint.store import VerifiedCheckpoint, check_file, check_index
from finetune.distributed.launcher import ERRORS_BY_CODE
from finetune.engine import Engine
from finetune.errors import CheckpointDamagedError, PlanError, StorageError
from finetune.model_files.manifest import read_manifest
from finetune.system.files import open_file

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def newest_of_all_ranks(
    engine: Engine, step_folders: list[Path], required: tuple, view: list
) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """store.newest_checkpoint of `step_folders`, on each rank of what it sees. Collective.

    `view`: equal on ranks that read the same files, see `view_of`. These divide the files of a checkpoint among them;
    a copy that only one rank sees is hashed by that rank alone. PlanError if a file may not be read.
    """
    views = engine.all_gather_object(view)
    here = {folder.name: folder for folder in step_folders}
    members = [rank for rank, other in enumerate(views) if other == view]
    names = {name for of_rank in engine.all_gather_object(list(here)) for name in of_rank}
    found = None
    skipped = []
    for name in sorted(names, key=_step_of, reverse=True):
        if found:
            folder = None
        else:
            folder = here.get(name)
        failed = None
        if folder:
            failed = _failure_in_share(folder, required, members.index(engine.rank), len(members))
        answers = engine.all_gather_object([found is not None, failed])
        if all(has_found for has_found, _ in answers):
            break
        if folder is None:
            continue
        failures = [answers[rank][1] for rank in members if answers[rank][1]]
        try:
            if failures:
                _, code, text = min(failures)
                raise ERRORS_BY_CODE[code](text)
            found = check_index(folder, read_manifest(folder, required))
        except CheckpointDamagedError as error:
            skipped.append(str(error))
    return found, skipped


def _step_of(name: str) -> int:
    """The step in the name of a checkpoint's folder; 0 of one that was copied under another name."""
    if name[5:].isdigit():
        return int(name[5:])
    return 0


def _failure_in_share(folder: Path, required: tuple, place: int, members: int) -> list | None:
    """The first failure in the manifest and in this rank's share of the files, as [its position, exit code, text]."""
    position = -1
    try:
        manifest = read_manifest(folder, required)
        entries = manifest["files"]
        mine = shares({name: entry["size"] for name, entry in entries.items()}, members)[place]
        for name in sorted(mine, key=list(entries).index):
            position = list(entries).index(name)
            check_file(folder, manifest, name)
    except (CheckpointDamagedError, PlanError) as error:
        return [position, error.exit_code, str(error)]
    return None


def shares(sizes: dict[str, int], members: int) -> list[list[str]]:
    """Files divided into `members` shares of about the same size: the largest first, to the share with the fewest
    bytes.
    """
    divided: list[list[str]] = [[] for _ in range(members)]
    held = [0] * members
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = held.index(min(held))
        divided[least].append(name)
        held[least] += sizes[name]
    return divided


def view_of(folder: Path, rank: int) -> list:
    """An identity shared by the ranks of one host that read the same folder, and by no others."""
    if BOOT_ID.exists():
        kernel = BOOT_ID.read_text().strip()
    else:
        kernel = platform.node()
    try:
        found = os.stat(folder)
    except OSError:
        return ["rank", rank]
    return [kernel, found.st_dev, found.st_ino]


def shared_view(engine: Engine, folder: Path, lock_text: str | None) -> list:
    """`view_of`, which is also equal on ranks of several hosts that read an output_dir in a shared file system: they
    see the lock that rank 0 holds. `lock_text`: what rank 0 wrote into it. Collective.
    """
    held = engine.broadcast_object(lock_text)
    seen = None
    with contextlib.suppress(OSError), open_file(folder / ".lock", "r", errors="replace") as file:
        seen = file.read(len(held) + 1)
    if seen == held:
        return ["shared"]
    return view_of(folder, engine.rank)


def of_rank_0(engine: Engine, read: Callable[[], Any]) -> Any:
    """The JSON value that `read` gives on rank 0, whose failure is raised on all. Collective."""
    found = failed = None
    if engine.rank == 0:
        try:
            found = read()
        except (CheckpointDamagedError, StorageError, PlanError) as error:
            failed = [error.exit_code, str(error)]
    found, failed = engine.broadcast_object([found, failed])
    if failed:
        code, text = failed
        raise ERRORS_BY_CODE[code](text)
    return found


def arrays_of_rank_0(engine: Engine, read: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays that `read` gives on rank 0, on every rank, one after the other. Collective."""
    here: dict[str, np.ndarray] = {}

    def described() -> dict[str, list]:
        here.update(read())
        return {name: [str(array.dtype), array.shape] for name, array in here.items()}

    found = {}
    for name, (dtype, shape) in of_rank_0(engine, described).items():
        sent = engine.broadcast_object(base64.b64encode(here[name].tobytes()).decode() if here else None)
        found[name] = np.frombuffer(base64.b64decode(sent), dtype).reshape(shape).copy()
    return found
