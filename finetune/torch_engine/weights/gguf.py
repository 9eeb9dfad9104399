"""Converts a GGUF file to a Hugging Face folder, as a child process of demo_model.py, to free the dense copy."""

import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.system.files import locked, new_folder


def gguf_to_folder(gguf_file: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors (bf16, tied weights once), generation config, tokenizer and chat template.
    Atomic, even with concurrent writers; an existing folder with a config.json is left unchanged.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f".{folder.name}.convert.lock"):
        if (folder / "config.json").is_file():
            return
        with new_folder(folder) as beside:
            write(gguf_file, beside)
            shutil.rmtree(folder, ignore_errors=True)


def write(gguf_file: Path, folder: Path) -> None:
    # transformers parses the full file three times, seconds each: for tokenizer, config and weights.
    module: Any = gguf
    module.GGUFReader = functools.cache(gguf.GGUFReader)
    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    if model.config.tie_word_embeddings:
        tied = set(model._tied_weights_keys or ())
    else:
        tied = set()
    tensors = {n: t.to(torch.bfloat16).contiguous() for n, t in model.state_dict().items() if n not in tied}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    # A model loaded from GGUF rejects save_pretrained, and its config would require the GGUF reader again.
    own = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = {k: v for k, v in model.config.to_diff_dict().items() if k not in own}
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    gguf_to_folder(Path(sys.argv[1]), Path(sys.argv[2]))
