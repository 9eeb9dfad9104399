"""The manifest of published weights, and what every program that reads a folder verifies by its manifest.

A checkpoint's manifest is in store.py. That of published weights is removed before the first of their files is replaced
and written after the last, so that it never names files of two steps; a folder without one is read as it is.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from finetune.errors import CheckpointDamagedError, PlanError
from finetune.model_files.digest import file_digest
from finetune.model_files.manifest import FORMAT_VERSION, MANIFEST, PUBLISHED, PUBLISHED_TOO, read_manifest, unreadable
from finetune.safetensors_io import digest_of
from finetune.system.files import check_listable, sync_folder
from finetune.system.threads import Pool

OF_TRAINING = ("optimizer", "rng")  # how the files of a checkpoint begin that only a resumed run reads
NUM_THREADS = 4  # hashlib releases the GIL


def is_checkpoint(folder: Path) -> bool:
    """True for a step's folder: its manifest names random state, which published weights do not have."""
    return (folder / MANIFEST).is_file() and (folder / "rng.safetensors").exists()


def remove_manifest(folder: Path) -> None:
    """Takes back that the folder's files are published: they are about to change."""
    if (folder / MANIFEST).exists():
        (folder / MANIFEST).unlink()
        sync_folder(folder)


def check_is_latest(folder: Path, said: str) -> None:
    """Raises PlanError for the folder of a run that went on and did not finish: its weights are of before. Without
    checkpoints, a folder is as it is.
    """
    is_of_run, *ended = ((folder / name).is_file() for name in ("run_plan.json", "train_state.json", MANIFEST))
    if not is_of_run or any(ended):
        return
    check_listable(folder / "checkpoints")
    steps = [file.parent for file in folder.glob("checkpoints/step-*/manifest.json") if file.parent.name[5:].isdigit()]
    if steps:
        newest = max(steps, key=lambda step: int(step.name[5:]))
        raise PlanError(
            f"{said}: holds weights from before the run went on, which did not finish. Give {newest}, or finish the "
            "run with --resume."
        )


def manifest_of(folder: Path, step: int, run_id: str) -> str:
    """Names the weights, configs and tokenizer files in the folder, with size and sha256, as JSON."""
    found = sorted({file for pattern in (*PUBLISHED, *PUBLISHED_TOO) for file in folder.glob(pattern)})
    files = {file.name: {"size": file.stat().st_size, "sha256": digest_of(file)} for file in found}
    content = {"format_version": FORMAT_VERSION, "published": True, "step": step, "run_id": run_id, "files": files}
    return json.dumps(content, indent=1) + "\n"


@contextlib.contextmanager
def verified(folder: Path, files: Iterable[Path]) -> Iterator[None]:
    """Verifies those of the folder's `files` that its manifest names. They are hashed beside what the context does.
    CheckpointDamagedError at its end, in the place of an error that the damage has caused.
    """
    with _with_remedy(folder), Pool(NUM_THREADS) as pool:
        digests = _digests(folder)
        hashed = {file: pool.submit(file_digest, file) for file in files if file.name in digests}
        try:
            yield
        finally:
            for file, digest in hashed.items():
                try:
                    same = digest.result() == digests[file.name]
                except OSError as error:
                    raise unreadable(file, error) from None
                if not same:
                    raise CheckpointDamagedError(f"{file}: its content has changed (sha256 differs)")


def verify_texts(folder: Path) -> None:
    """Verifies what a folder with a manifest has beside its tensors, and that all it names is there, by size."""
    with verified(folder, (p for p in folder.iterdir() if p.suffix != ".safetensors")):
        pass


def is_as_published(folder: Path) -> bool:
    """False if a file differs from what the manifest of published weights names; True without a manifest."""
    try:
        with verified(folder, folder.iterdir()):
            return True
    except CheckpointDamagedError:
        return False


def _digests(folder: Path) -> dict[str, str]:
    """{file: sha256} by the manifest of a folder, without what only a resumed run reads; empty without a manifest."""
    if not (folder / MANIFEST).is_file():
        return {}
    entries = read_manifest(folder)["files"]
    return {name: entry["sha256"] for name, entry in entries.items() if not name.startswith(OF_TRAINING)}


@contextlib.contextmanager
def _with_remedy(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointDamagedError as error:
        if is_checkpoint(folder):
            raise
        remedy = f"Restore it, or delete {folder / MANIFEST} to use the files as they are."
        raise CheckpointDamagedError(f"{str(error).rstrip('.')}. {remedy}") from None
