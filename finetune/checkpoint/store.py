"""Atomic checkpoints on disk: one exists only if its manifest verifies, and the newest valid one is never at risk.

Written to a temporary sibling folder, fsynced, manifest last, then renamed; then `latest` is replaced and old ones are
deleted. Tensors are safetensors, everything else is JSON; no pickle anywhere. See docs/checkpoint_format.md.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune import safetensors_io
from finetune.errors import CheckpointDamagedError, NonFiniteError, OutputDirInUseError, PlanError, StorageError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
WRITING = ".writing-"  # name prefix of an incomplete file


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A verified checkpoint on disk."""

    folder: Path
    step: int
    manifest: dict

    def json(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        return {tensor: stored[...] for tensor, stored in self.slices(name).items()}

    def slices(self, name: str) -> safetensors_io.CheckpointTensors:
        """{tensor: lazy slice reader} of a file, or of its per-rank shards."""
        return safetensors_io.CheckpointTensors(self.folder, name)


class Lock:
    """Exclusive lock on an output_dir: an flock, which the kernel releases however the process ends."""

    def __init__(self, output_dir: Path):
        self.file = output_dir / ".lock"
        with storage(output_dir):
            output_dir.mkdir(parents=True, exist_ok=True)
            self.handle = open(self.file, "a+")  # noqa: SIM115  open as long as the lock is held
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.handle.seek(0)
            owner = self.handle.read().strip() or "another process"
            self.handle.close()
            raise OutputDirInUseError(
                f"--output_dir {output_dir}: in use by {owner}. Wait for it, or give another folder."
            ) from None
        except OSError as error:
            raise StorageError(
                f"--output_dir {output_dir}: its file system does not support locks ({error.strerror})."
            ) from error
        self.handle.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self.handle.write(f"pid {os.getpid()} on {os.uname().nodename}, started {started}")
        self.handle.flush()

    def release(self) -> None:
        self.handle.close()


@contextlib.contextmanager
def storage(path: Path):
    """Converts a failed write under `path` into a StorageError that names the cause and the free bytes."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) or error.errno is None:
            raise
        where, free = path, "unknown"
        while not where.exists() and where != where.parent:
            where = where.parent
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(where).free:,} bytes free"
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise PlanError(f"--output_dir {path}: is a file, or is inside one. Give a folder.") from error
        raise StorageError(f"{path}: {error.strerror or error} ({free}). Earlier checkpoints are intact.") from error


def save_checkpoint(output_dir: Path, step: int, tensors: dict, texts: dict, keep_last: int, run_id: str) -> Path:
    """Writes and commits checkpoints/step-N atomically. Raises NonFiniteError, StorageError.

    `tensors`: {file: {name: array}}; `texts`: {file: str}. The caller holds the Lock. After a crash at any point, the
    newest valid checkpoint is the previous one or this one.
    """
    for file, arrays in tensors.items():
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise NonFiniteError(f"{file}: tensor {name} at step {step} is not finite; nothing was saved")
    beside = begin_checkpoint(output_dir, step)
    with storage(_target(output_dir, step)):
        written = {
            file: safetensors_io.write_file(beside / file, safetensors_io.shards_of_arrays(arrays))
            for file, arrays in tensors.items()
        }
    return commit_checkpoint(output_dir, step, beside, written, texts, keep_last, run_id)


def _target(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step-{step}"


def begin_checkpoint(output_dir: Path, step: int) -> Path:
    """Creates the temporary folder that `commit` turns into checkpoints/step-N. The caller holds the Lock."""
    target = _target(output_dir, step)
    beside = target.with_name(f".tmp-{target.name}-{os.getpid()}")
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
        _sync(beside)
    return written


def commit_checkpoint(
    output_dir: Path, step: int, beside: Path, written: dict, texts: dict, keep_last: int, run_id: str
) -> Path:
    """Renames `beside` to checkpoints/step-N after writing `texts` and the manifest.

    `written`: {file: size and digest} of the files already in it.
    """
    target = _target(output_dir, step)
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
        _sync(beside)
        if target.exists():
            _to_trash(target)
        beside.rename(target)
        _sync(target.parent)
        replace_text(target.parent / "latest", target.name)
        rotate(output_dir, keep_last)
    return target


def _tensor_bytes(arrays: dict) -> bytes:
    from safetensors.numpy import save

    return save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, metadata={"format": "pt"})


def _write_text(path: Path, text: str) -> None:
    _write_bytes(path, text.encode())


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replaces the text of `path` atomically: a reader sees the old text or the new one."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    with storage(path):
        beside = path.with_name(f"{WRITING}{os.getpid()}-{path.name}")
        _write_bytes(beside, data)
        beside.replace(path)
        _sync(path.parent)


def replace_tensors(path: Path, arrays: dict) -> None:
    """Writes a safetensors file atomically."""
    replace_bytes(path, _tensor_bytes(arrays))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)


def _sha256(file) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while chunk := file.read(2**20):
        digest.update(chunk)
    return digest.hexdigest()


def verify_checkpoint(folder: Path) -> VerifiedCheckpoint:
    """The checkpoint in `folder`, with the digest of every file verified.

    Raises CheckpointDamagedError naming file and fact.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, step = manifest["format_version"], manifest["step"]
        entries = {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{folder}: has no {MANIFEST}; it was not completed") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointDamagedError(f"{folder / MANIFEST}: cannot be read ({error})") from None
    if version > FORMAT_VERSION:
        raise CheckpointDamagedError(
            f"{folder}: format version {version} is newer than {FORMAT_VERSION}, which this version reads"
        )
    if folder.name.startswith("step-") and folder.name != f"step-{step}":
        raise CheckpointDamagedError(f"{folder}: its manifest is for step {step}")
    for name, (size, digest) in entries.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointDamagedError(f"{path}: is missing")
        if path.stat().st_size != size:
            raise CheckpointDamagedError(f"{path}: has {path.stat().st_size} bytes, {size} were written")
        if digest_of(path) != digest:
            raise CheckpointDamagedError(f"{path}: its content has changed (sha256 differs)")
    if safetensors_io.INDEX in entries:  # the digests of the per-rank shards are in both
        for name, entry in safetensors_io.read_index(folder)["files"].items():
            if entries.get(name) != (entry["size"], entry["sha256"]):
                raise CheckpointDamagedError(f"{folder / name}: does not match its digest in {safetensors_io.INDEX}")
    return VerifiedCheckpoint(folder, step, manifest)


def steps_of(output_dir: Path) -> list[Path]:
    """step-N folders, newest first, valid or not."""
    root = output_dir / "checkpoints"
    found = [p for p in root.glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(found, key=lambda p: -int(p.name[5:]))


def newest_checkpoint(output_dir: Path) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """(newest checkpoint that verifies, or None; one line per newer one that was skipped)."""
    skipped = []
    for folder in steps_of(output_dir):
        try:
            return verify_checkpoint(folder), skipped
        except CheckpointDamagedError as error:
            skipped.append(str(error))
    return None, skipped


def drop_newer(output_dir: Path, step: int) -> list[str]:
    """Deletes checkpoints after `step`, from which a run resumes: they belong to an abandoned branch.

    Returns their names.
    """
    newer = [folder for folder in steps_of(output_dir) if int(folder.name[5:]) > step]
    for folder in newer:
        shutil.rmtree(_to_trash(folder), ignore_errors=True)
    return [folder.name for folder in newer]


def _to_trash(folder: Path) -> Path:
    trash = folder.with_name(f".trash-{folder.name}-{os.getpid()}-{time.time_ns()}")
    folder.rename(trash)
    return trash


def rotate(output_dir: Path, keep_last: int) -> None:
    """Deletes all but the newest `keep_last` checkpoints; those with wrong file sizes do not count towards them."""
    kept = 0
    for folder in steps_of(output_dir):
        if kept >= keep_last:
            _to_trash(folder)
        elif _whole(folder):
            kept += 1
    for trash in (output_dir / "checkpoints").glob(".trash-*"):
        shutil.rmtree(trash, ignore_errors=True)


def _whole(folder: Path) -> bool:
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / n).stat().st_size == e["size"] for n, e in files.items())
    except (OSError, ValueError, KeyError):
        return False


def clean_leftovers(output_dir: Path) -> None:
    """Removes incomplete files and folders left by a crash. The caller holds the Lock."""
    root = output_dir / "checkpoints"
    for folder in (output_dir, output_dir / "best", root):
        for leftover in (*folder.glob(".tmp-*"), *folder.glob(".trash-*")):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in folder.glob(f"{WRITING}*"):
            leftover.unlink(missing_ok=True)


def holds_a_run(output_dir: Path) -> bool:
    return (output_dir / "run_plan.json").exists() or bool(steps_of(output_dir))


def clear_run(output_dir: Path) -> None:
    """Removes the files of a previous run and nothing else (--overwrite); a no-op if the folder holds no run."""
    if not holds_a_run(output_dir):
        return
    for folder in ("checkpoints", "best"):
        shutil.rmtree(output_dir / folder, ignore_errors=True)
    ours = (
        "run_plan.json",
        "train_state.json",
        "metrics.jsonl",
        "adapter_model.safetensors",
        "adapter_config.json",
        "base_model.json",
        "trained_blocks.safetensors",
        "trained_blocks.json",
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    )
    for name in (*ours, *(p.name for p in output_dir.glob("model*.safetensors"))):
        (output_dir / name).unlink(missing_ok=True)


def newest_run(root: Path) -> Path | None:
    """The most recent output_dir under `root`: the choice of --resume auto without --output_dir."""
    runs = [p.parent for p in root.glob("*/run_plan.json")]
    return max(runs, key=lambda p: (p / "run_plan.json").stat().st_mtime, default=None)
