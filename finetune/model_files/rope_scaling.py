"""--rope_scaling: a base whose RoPE takes longer rows than it was trained on, as a folder with a config of its own.

Every reader of the result (transformers, PEFT, vLLM, llama.cpp, mlx-lm) computes frequencies from config.json, so what
is trained is a base of that config: its weights are those of the model, linked or copied.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.errors import PlanError
from finetune.model_files.digest import file_digest
from finetune.model_files.files import INDEX, PROCESSOR_FILES, ModelFiles
from finetune.model_files.rope_names import with_older_names
from finetune.model_files.tokenizer import GENERATION
from finetune.system.untrusted import untrusted

FOLDER = "scaled_base"


def scaled(files: ModelFiles, word: str, factor: float, said: str) -> ModelFiles:
    """The files with a config of this scaling. Raises PlanError as rope_of does."""
    rope, limit = rope_of(files, said)
    config = json.loads(json.dumps(files.config))
    part = config
    if isinstance(config.get("text_config"), dict):
        part = config["text_config"]
    part.pop("rope_scaling", None)
    part["rope_parameters"] = rope | {"rope_type": word, "factor": factor}
    if word == "yarn":
        part["rope_parameters"]["original_max_position_embeddings"] = limit
    part["max_position_embeddings"] = round(limit * factor)
    return replace(files, config=with_older_names(config))


def rope_of(files: ModelFiles, said: str) -> tuple[dict[str, Any], int]:
    """(RoPE's settings, the positions that the model was trained on). Raises PlanError."""
    from transformers import AutoConfig

    values = {key: value for key, value in files.config.items() if key != "model_type"}
    with untrusted(f"{said}: the config of {files.name} does not load", "Give another model."):
        text = AutoConfig.for_model(files.config["model_type"], **values).get_text_config()
    rope = getattr(text, "rope_parameters", None)
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(rope, dict) or not rope or not limit or getattr(text, "alibi", False):
        raise PlanError(f"{said}: the positions of {files.name} are not RoPE's. Use rows within its length.")
    if any(isinstance(value, dict) for value in rope.values()) or "mrope_section" in rope:
        fact = "has RoPE of several kinds, by layer or by axis"
        raise PlanError(f"{said}: {files.name} {fact}, whose scaling is not built here. Use another model.")
    kind = rope.get("rope_type") or "default"
    if kind != "default":
        raise PlanError(f"{said}: the RoPE of {files.name} is scaled already ({kind}). Omit it.")
    return {key: value for key, value in rope.items() if key != "type"}, int(limit)


def write_scaled(files: ModelFiles, folder: Path) -> None:
    """Writes the base of a scaled config into an empty folder. What it has of the model are the same files on a file
    system that links, else copies.
    """
    beside = [files.folder / name for name in (INDEX, GENERATION, *PROCESSOR_FILES)]
    for file in (*files.weight_files, *files.tokenizer_files, *beside):
        if file.is_file() and not (folder / file.name).exists():
            _same_file(file.resolve(), folder / file.name)
    text = json.dumps(files.config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def is_scaled(files: ModelFiles, folder: Path) -> bool:
    """True if a folder holds what write_scaled writes of these files."""
    try:
        if json.loads((folder / "config.json").read_text(encoding="utf-8")) != files.config:
            return False
    except (OSError, ValueError):
        return False
    written = [folder / file.name for file in files.weight_files]
    if not all(file.is_file() for file in written):
        return False
    pairs = zip(written, files.weight_files, strict=True)
    return all(os.path.samefile(a, b.resolve()) or file_digest(a) == file_digest(b) for a, b in pairs)


def _same_file(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
