"""Manifests: which files a folder of weights or a checkpoint has, with size and sha256."""

import os
from pathlib import Path

from finetune.errors import CheckpointDamagedError, PlanError
from finetune.system.files import is_plain_name
from finetune.system.json_files import JsonFileError, read_json

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MANIFEST_SCHEMA = {
    "format_version": int,
    "published?": bool,
    "step": int,
    "run_id": str,
    "files": {str: {"size": int, "sha256": str}},
}
# What readers of published weights open, by patterns.
PUBLISHED = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "base_model.json",
    "trained_blocks.safetensors",
    "trained_blocks.json",
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# The same, of which manifests of earlier versions name none: they are read where a manifest leaves them out.
PUBLISHED_TOO = ("head.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def read_manifest(folder: Path, required: tuple = ()) -> dict:
    """The manifest of the checkpoint in `folder`, which names every file there and those `required`, with its size.
    Raises CheckpointDamagedError naming file and fact.
    """
    try:
        manifest = read_json(folder / MANIFEST, MANIFEST_SCHEMA)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{folder}: has no {MANIFEST}; it was not completed") from None
    except JsonFileError as error:
        raise CheckpointDamagedError(str(error)) from None
    version = manifest["format_version"]
    step = manifest["step"]
    entries = manifest["files"]
    if version > FORMAT_VERSION:
        raise CheckpointDamagedError(
            f"{folder}: format version {version} is newer than {FORMAT_VERSION}, which this version reads"
        )
    published = manifest.get("published", False)
    if not published and folder.name.startswith(("step-", "step_")) and folder.name[5:] != str(step):
        raise CheckpointDamagedError(f"{folder}: its manifest is for step {step}")
    patterns: tuple[str, ...] = ("*.json", "*.safetensors")
    if published:
        patterns = PUBLISHED
    ours = {p.name for pattern in patterns for p in folder.glob(pattern)} - {MANIFEST}
    for name in (*required, *sorted(ours)):
        if name not in entries:
            raise CheckpointDamagedError(f"{folder / MANIFEST}: does not name {name}")
    for name, entry in entries.items():
        path = folder / name
        if not is_plain_name(name) or not os.path.isfile(path):
            raise CheckpointDamagedError(f"{path}: is missing")
        if path.stat().st_size != entry["size"]:
            raise CheckpointDamagedError(f"{path}: has {path.stat().st_size} bytes, {entry['size']} were written")
    return manifest


def unreadable(path: Path, error: OSError) -> PlanError | CheckpointDamagedError:
    """The error of a file of a checkpoint that cannot be read: missing permissions are not damage."""
    if isinstance(error, PermissionError):
        return PlanError(f"{path}: permission denied. Change its permissions.")
    return CheckpointDamagedError(f"{path}: cannot be read ({error.strerror or error})")
