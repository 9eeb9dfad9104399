"""Folders of the older block expansion script: weight files named as the base's, and nothing else.

Its trainer took config and tokenizer from --model_name and the added layers from the folder's name,
blk_exp-<old>-<new>. Here they are completed once, in place, and are model folders from then on.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from finetune.errors import PlanError
from finetune.model_files.llama_pro import TensorSource, layers_prefix, read_record, read_sources, resized, split
from finetune.system.files import replace

INDEX = "model.safetensors.index.json"


def is_bare(folder: Path) -> bool:
    """True for a folder with safetensors files and no config.json."""
    return folder.is_dir() and not (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def expanded_config(folder: Path, base_config: dict, said: str) -> tuple[dict, list[TensorSource]]:
    """(config of the expanded model, its tensors), checked against each other. Raises PlanError."""
    new = read_record(folder, said)["new_layers"]
    num_layers = base_config.get("num_hidden_layers")
    tensors = read_sources(sorted(folder.glob("*.safetensors")))
    names = [tensor.name for tensor in tensors]
    if not isinstance(num_layers, int):
        raise PlanError(f"{said}: --model_name's config has no num_hidden_layers. Give the model it was made from.")
    total = num_layers + len(new)
    prefix = layers_prefix(names, total)
    if prefix is None or len(set(names)) < len(names):
        found = {at[0] for at in (split(name, "model.layers") for name in names) if at}
        raise PlanError(
            f"{said}: its files have {len(found)} layers, --model_name {num_layers} and its name adds {len(new)}. "
            "Give the model it was made from, or expand it again with expand.py."
        )
    order = [i - sum(n <= i for n in new) for i in range(total)]
    return resized(base_config, "num_hidden_layers", order), tensors


def complete(
    folder: Path, config: dict, tensors: list[TensorSource], tokenizer_files: Iterable[Path], said: str
) -> list[str]:
    """Writes what the folder lacks, config.json last; returns the names. PlanError if it is not writable."""
    written = []
    try:
        for file in tokenizer_files:
            shutil.copyfile(file, folder / file.name)
            written.append(file.name)
        files = {t.path.name for t in tensors if t.path}
        if files != {"model.safetensors"} and not (folder / INDEX).exists():
            total = sum(tensor.num_bytes for tensor in tensors)
            index = {"metadata": {"total_size": total}, "weight_map": {t.name: t.path.name for t in tensors if t.path}}
            _write(folder / INDEX, index)
            written.append(INDEX)
        _write(folder / "config.json", config)
    except OSError as error:
        raise PlanError(
            f"{said}: has no config.json, and none can be written there ({error.strerror}). Copy the folder to where "
            "it can."
        ) from None
    return [*written, "config.json"]


def _write(file: Path, content: dict) -> None:
    with replace(file) as opened:
        opened.write((json.dumps(content, indent=1) + "\n").encode())
