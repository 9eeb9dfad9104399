"""Atomic checkpoints on disk: one exists only if its manifest verifies, and the newest valid one is never at risk.

Written to a temporary sibling folder, fsynced, manifest last, then renamed; then `latest` is replaced and old ones are
deleted. Tensors are safetensors, everything else is JSON; no pickle anywhere. See docs/checkpoint_format.md.
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune import safetensors_io
from finetune.checkpoint.signed import is_as_signed
from finetune.errors import CheckpointDamagedError, NonFiniteError, PlanError, StorageError
from finetune.model_files.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    MANIFEST_SCHEMA,
    PUBLISHED,
    read_manifest,
    unreadable,
)
from finetune.safetensors_io import digest_of
from finetune.system.files import check_listable, open_file, replace, sync_folder
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.owned_files import OwnedFiles, kind_of, remove_tree

LATEST = "latest"  # names the newest checkpoint
ASIDE = "aside-"  # name prefix of a checkpoint that no resume takes
PRETRAINED = "all_config.yaml"  # the settings of pretrain.py, in the folder of each of its runs


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A verified checkpoint on disk."""

    folder: Path
    step: int
    manifest: dict

    def json(self, name: str, schema: Any) -> dict:
        return verified_json(self.folder, self.manifest, name, schema)

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        return {tensor: stored[...] for tensor, stored in self.slices(name).items()}

    def slices(self, name: str) -> safetensors_io.CheckpointTensors:
        """{tensor: lazy slice reader} of a file, or of its per-rank shards. Raises CheckpointDamagedError."""
        from safetensors import SafetensorError

        try:
            return safetensors_io.CheckpointTensors(self.folder, name)
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{self.folder / name}: is missing") from None
        except (SafetensorError, JsonFileError, ValueError, KeyError) as error:
            raise CheckpointDamagedError(f"{self.folder / name}: cannot be read ({error})") from None


@contextlib.contextmanager
def storage(path: Path):
    """Converts a failed write under `path` into a StorageError that names the cause and the free bytes."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) or error.errno is None:
            raise
        where = path
        free = "unknown"
        while not os.path.exists(where) and where != where.parent:
            where = where.parent
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(where).free:,} bytes free"
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise PlanError(f"--output_dir {path}: is a file, or is inside one. Give a folder.") from error
        if error.errno == errno.ELOOP:
            raise PlanError(
                f"{error.filename or path}: is a link, and links are not followed there. Remove it."
            ) from error
        if error.errno == errno.ENOENT:
            raise StorageError(
                f"{error.filename or path}: is gone: it was moved or removed while the run went on, which cannot write "
                "there."
            ) from error
        cause = error.strerror or error
        if error.errno == errno.EFBIG:
            cause = f"{cause} for its file system or the limit of a file's size (ulimit -f), which can be raised"
        elif error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            cause = f"{cause} ({free})"
        raise StorageError(f"{path}: {cause}. Earlier checkpoints are intact.") from error


def make_folder(path: Path) -> bool:
    """Creates a folder and its parents; True if it did not exist. Not recursive, so any depth will do."""
    existed = path.exists()
    if not existed:
        for folder in (*reversed(path.parents), path):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return not existed


def numbered(path: Path) -> Iterator[Path]:
    """The path, then path-2, path-3 and so on, for what must not meet its like."""
    return (path if i == 1 else path.with_name(f"{path.name}-{i}") for i in itertools.count(1))


def save_checkpoint(output_dir: Path, step: int, tensors: dict, texts: dict, keep_last: int, run_id: str) -> Path:
    """Writes and commits checkpoints/step-N atomically. Raises NonFiniteError, StorageError.

    `tensors`: {file: {name: array}}; `texts`: {file: str}. The caller holds the Lock. After a crash at any point, the
    newest valid checkpoint is the previous one or this one.
    """
    for file, arrays in tensors.items():
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise NonFiniteError(f"{file}: tensor {name} at step {step} is not finite; nothing was saved")
    beside = begin_checkpoint(output_dir, step, run_id)
    with storage(folder_of_step(output_dir, step)):
        written = {
            file: safetensors_io.write_file(beside / file, safetensors_io.shards_of_arrays(arrays))
            for file, arrays in tensors.items()
        }
    return commit_checkpoint(output_dir, step, beside, written, texts, keep_last, run_id)


def steps_folder(output_dir: Path) -> tuple[Path, str]:
    """(folder of a run's checkpoints, prefix of their names): checkpoints/step-N.

    Runs of pretrain.py are in a folder `checkpoints` themselves, so theirs are step_N beside their settings.
    """
    if (output_dir / PRETRAINED).is_file():
        return output_dir, "step_"
    return output_dir / "checkpoints", "step-"


def folder_of_step(output_dir: Path, step: int) -> Path:
    """Folder of the checkpoint of `step`."""
    folder, prefix = steps_folder(output_dir)
    return folder / f"{prefix}{step}"


def begin_checkpoint(output_dir: Path, step: int, run_id: str) -> Path:
    """Creates the temporary folder that `commit` turns into checkpoints/step-N. The caller holds the Lock.
    `run_id`: of the folder's list of files, by which what a kill leaves is known.
    """
    target = folder_of_step(output_dir, step)
    beside = target.with_name(f".tmp-{run_id}-{target.name}")
    with storage(target):
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    return beside


def write_parts(beside: Path, rank: int, tensors: dict) -> dict:
    """Writes one rank's shards, {file: [Part]}, and syncs them to disk; {file: size and digest}."""
    written = {}
    with storage(beside):
        for file, found in tensors.items():
            name = safetensors_io.file_of_rank(file, rank)
            if found:
                written[name] = safetensors_io.write_file(beside / name, found)
        sync_folder(beside)
    return written


def commit_checkpoint(
    output_dir: Path, step: int, beside: Path, written: dict, texts: dict, keep_last: int, run_id: str
) -> Path:
    """Renames `beside` to checkpoints/step-N after writing `texts` and the manifest.
    `written`: {file: size and digest} of the files already in it.
    """
    target = folder_of_step(output_dir, step)
    with storage(target):
        entries = dict(written)
        for file, text in texts.items():
            _write_text(beside / file, text)
            entries[file] = {"size": (beside / file).stat().st_size, "sha256": digest_of(beside / file)}
        for file, entry in written.items():
            size = (beside / file).stat().st_size
            if size != entry["size"]:
                raise StorageError(
                    f"{beside / file}: has {size} bytes, {entry['size']} were written. Earlier checkpoints are intact."
                )
        manifest = {"format_version": FORMAT_VERSION, "step": step, "run_id": run_id, "files": entries}
        _write_text(beside / MANIFEST, json.dumps(manifest, indent=1))
        sync_folder(beside)
        if is_of_a_run(target):
            _to_trash(target, run_id)
        elif os.path.lexists(target):
            _set_aside(target)
        beside.rename(target)
        sync_folder(target.parent)
        replace_text(target.parent / LATEST, target.name, run_id)
        rotate(output_dir, keep_last, target, run_id)
    return target


def _tensor_bytes(arrays: dict) -> bytes:
    from safetensors.numpy import save

    return save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, metadata={"format": "pt"})


def _write_text(path: Path, text: str) -> None:
    with open_file(path, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str, run_id: str = "") -> None:
    """Replaces the text of `path` atomically: a reader sees the old text or the new one."""
    replace_bytes(path, text.encode(), run_id)


def replace_bytes(path: Path, data: bytes, run_id: str = "") -> None:
    with storage(path), replace(path, durable=True, mark=run_id) as file:
        file.write(data)


def replace_tensors(path: Path, arrays: dict) -> None:
    """Writes a safetensors file atomically."""
    replace_bytes(path, _tensor_bytes(arrays))


def verified_json(folder: Path, manifest: dict, name: str, schema: Any) -> dict:
    """Content of a JSON file of a checkpoint, under its digest in the manifest. Raises CheckpointDamagedError."""
    check_file(folder, manifest, name)
    try:
        return read_json(folder / name, schema)
    except (JsonFileError, FileNotFoundError) as error:
        raise CheckpointDamagedError(str(error)) from None


def _check_digest(path: Path, digest: str) -> None:
    try:
        found = digest_of(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if found != digest:
        raise CheckpointDamagedError(f"{path}: its content has changed (sha256 differs)")


def check_file(folder: Path, manifest: dict, name: str) -> None:
    """Raises CheckpointDamagedError unless a file's content is that which the manifest names."""
    _check_digest(folder / name, manifest["files"][name]["sha256"])


def check_index(folder: Path, manifest: dict) -> VerifiedCheckpoint:
    """The checkpoint, whose files are verified. Raises CheckpointDamagedError unless parts.json agrees with them."""
    entries = manifest["files"]
    if safetensors_io.INDEX in entries:  # the digests of the per-rank shards are in both
        try:
            index = safetensors_io.read_index(folder)
        except PlanError as error:
            raise CheckpointDamagedError(str(error)) from None
        for name, entry in index["files"].items():
            if entries.get(name) != entry:
                raise CheckpointDamagedError(f"{folder / name}: does not match its digest in {safetensors_io.INDEX}")
    return VerifiedCheckpoint(folder, manifest["step"], manifest)


def verify_checkpoint(folder: Path, required: tuple = ()) -> VerifiedCheckpoint:
    """The checkpoint in `folder`, with the digest of every file verified, and of the files that are `required`.
    Raises CheckpointDamagedError naming file and fact.
    """
    manifest = read_manifest(folder, required)
    for name in manifest["files"]:
        check_file(folder, manifest, name)
    return check_index(folder, manifest)


def steps_of(output_dir: Path) -> list[Path]:
    """step-N folders (step_N of a pretraining run), newest first, valid or not. Raises PlanError for a folder that may
    not be listed.
    """
    root, prefix = steps_folder(output_dir)
    check_listable(root)
    found = [p for p in root.glob(f"{prefix}*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(found, key=lambda p: -int(p.name[5:]))


def newest_checkpoint(output_dir: Path, required: tuple = ()) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """(newest checkpoint that verifies, or None; one line per newer one that was skipped)."""
    skipped: list[str] = []
    for folder in steps_of(output_dir):
        try:
            return verify_checkpoint(folder, required), skipped
        except CheckpointDamagedError as error:
            skipped.append(str(error))
    return None, skipped


def keep_aside(output_dir: Path, step: int) -> list[tuple[str, str]]:
    """Renames checkpoints after `step`, from which a run resumes, so that no later resume takes them.

    They belong to an abandoned branch, are damaged, or were written by a newer version: none of these is a reason to
    delete them. Returns (old name, new name) of each.
    """
    moved = []
    for folder in steps_of(output_dir):
        if int(folder.name[5:]) > step:
            with storage(folder):
                moved.append((folder.name, _set_aside(folder).name))
    return moved


def _set_aside(path: Path) -> Path:
    aside = next(p for p in numbered(path.with_name(f"{ASIDE}{path.name}")) if not os.path.lexists(p))
    path.rename(aside)
    return aside


def _to_trash(folder: Path, run_id: str) -> None:
    folder.rename(folder.with_name(f".trash-{run_id}-{folder.name}-{time.time_ns()}"))


def is_of_a_run(folder: Path) -> bool:
    """True if a manifest says that a run wrote this checkpoint, and nothing else is in it. It may be damaged."""
    try:
        named = read_json(folder / MANIFEST, MANIFEST_SCHEMA)["files"]
    except (JsonFileError, FileNotFoundError):
        return False
    found = [entry for entry in folder.iterdir() if entry.name not in named and entry.name != MANIFEST]
    return not found and not folder.is_symlink() and all(kind_of(entry) == "a file" for entry in folder.iterdir())


def rotate(output_dir: Path, keep_last: int, committed: Path, run_id: str) -> None:
    """Deletes all but `committed` and the newest before it, `keep_last` in all, if a run wrote them.

    Those with wrong file sizes do not count towards them. A later one is never this run's, and stays.
    """
    kept = 1
    for folder in steps_of(output_dir):
        if int(folder.name[5:]) >= int(committed.name[5:]):
            continue
        if kept < keep_last:
            kept += _complete(folder)
        elif is_of_a_run(folder):
            _to_trash(folder, run_id)
    for trash in steps_folder(output_dir)[0].glob(f".trash-{run_id}-*"):
        remove_tree(trash)


def _complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointDamagedError:
        return False
    return True


def holds_a_run(output_dir: Path) -> bool:
    return (output_dir / "run_plan.json").exists() or bool(steps_of(output_dir))


PAGE = "report.html"
# Names that runs give the files they write, in the output_dir and in best/, but for some tokenizers' own.
NAMES_OF_RUNS = (
    *("run_plan.json", "train_state.json", "metrics.jsonl", "samples.jsonl", PAGE, "trackers.json"),
    *("metrics.csv", "reference_log_probs.json", "stacks/rank-*.txt"),
    *(PRETRAINED, MANIFEST, *PUBLISHED),
)


def owned_files(output_dir: Path) -> OwnedFiles:
    """The files in an output_dir that runs wrote. A run made before there were lists owns those of its known names."""
    present = names_present(output_dir)
    proved = False
    with contextlib.suppress(JsonFileError, FileNotFoundError):
        proved = bool(read_json(output_dir / "run_plan.json", {"requested": dict, "settled": dict}))
    proved = proved or any(is_of_a_run(folder) for folder in steps_of(output_dir))
    owned = OwnedFiles(output_dir, f"--output_dir {output_dir}", present if proved else ())
    page = output_dir / PAGE
    if owned.names and kind_of(page) == "a file" and is_as_signed(page):  # report.py draws cut runs too
        owned.names.add(PAGE)
    return owned


def names_present(output_dir: Path) -> list[str]:
    """Files of an output_dir under names that runs give, relative to it."""
    latest = steps_folder(output_dir)[0] / LATEST
    found = [path for folder in ("", "best") for name in NAMES_OF_RUNS for path in (output_dir / folder).glob(name)]
    return [str(path.relative_to(output_dir)) for path in (*found, *([latest] if os.path.lexists(latest) else ()))]


def check_unowned(output_dir: Path, owned: OwnedFiles) -> None:
    """Raises PlanError for what a new run would write here and no run wrote: files, and checkpoints of any step."""
    owned.check(names_present(output_dir))
    folder, prefix = steps_folder(output_dir)
    for path in sorted(folder.glob(f"{prefix}*")):
        if path.name[5:].isdigit() and not is_of_a_run(path):
            name = path.relative_to(output_dir)
            raise PlanError(f"{owned.said}: holds {name}, which is not of a run. Give another folder, or move it away.")


def clean_leftovers(output_dir: Path, owned: OwnedFiles) -> None:
    """Removes what killed runs left under temporary names. The caller holds the Lock."""
    owned.clean(subfolders(output_dir))


def subfolders(output_dir: Path) -> set[str]:
    """Folders that a run writes, relative to its output_dir."""
    return {".", "best", str(steps_folder(output_dir)[0].relative_to(output_dir))}


def clear_run(output_dir: Path, owned: OwnedFiles) -> None:
    """Removes the files of a previous run and nothing else (--overwrite).

    Raises StorageError if one cannot be removed: a checkpoint that stays would be taken for the new run's.
    """
    with storage(output_dir):
        folder, prefix = steps_folder(output_dir)
        for found in (f for pattern in (f"{prefix}*", f"{ASIDE}*") for f in folder.glob(pattern)):
            if is_of_a_run(found):
                shutil.rmtree(found)
        owned.remove(last="run_plan.json")


def check_not_removed(output_dir: Path, read: Iterable[tuple[str, Path]], folder: str, by: str) -> None:
    """Raises PlanError for what a run reads and would remove first. `read`: (flag and value, path); `folder`: the flag
    of output_dir, `by`: that by which it is emptied.
    """
    root = output_dir.resolve()
    owned = owned_files(root)
    for said, path in read:
        place = path.resolve()
        if not path.exists() or not place.is_relative_to(root):
            continue
        name = str(place.relative_to(root))
        inside = [each for each in (place, *place.parents) if each != root and each.is_relative_to(root)]
        is_owned = any(name in (".", other) or other.startswith(f"{name}/") for other in owned.names)
        if is_owned or any(map(is_of_a_run, inside)):
            raise PlanError(
                f"{said}: is of the run in {output_dir}, which {by} removes before it is read. Give another {folder}."
            )


def newest_run(root: Path) -> Path | None:
    """The most recent output_dir under `root`: the choice of --resume auto without --output_dir."""
    runs = [(p.stat().st_mtime, p) for p in (*root.glob("*/run_plan.json"), *root.glob("*/checkpoints"))]
    if runs:
        return max(runs)[1].parent
    return None
