"""Converts an adapter to llama.cpp's GGUF form, as a child process: its converter's classes say what becomes of each
name and row.

A base weight W becomes f(W), which for linears renames it and permutes its rows. Then f(W + s B A) = f(W) + s f(B) A,
which is tried on each layer. Tensors NAME.lora_a [R, I] and NAME.lora_b [O, R]; llama.cpp adds alpha/R times their
product.
"""

import sys
from pathlib import Path
from typing import Any

import gguf
import torch

from finetune.adapters.patterns import scaling_of
from finetune.adapters.saved import open_adapter
from finetune.torch_engine.lora.peft_format import PREFIX

A = ".lora_A.weight"
B = ".lora_B.weight"


def convert(base: Path, adapter: Path, file: Path, dtype: str) -> None:
    """Raises ValueError for an adapter that this form has no place for."""
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    config, tensors = open_adapter(adapter)
    odd = next((name for name in tensors if not name.endswith((A, B))), None)
    if odd:
        raise ValueError(f"llama.cpp has adapters of linear layers without DoRA only, not {odd.removeprefix(PREFIX)}")
    hparams = ModelBase.load_hparams(base, False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    model = kind(base, gguf.LlamaFileType.ALL_F32, file, eager=True, dry_run=True)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[model.model_arch])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    scaling = scaling_of(config["r"], config["lora_alpha"], bool(config.get("use_rslora")))
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, scaling * config["r"])
    for key in sorted(name for name in tensors if name.endswith(A)):
        module = key.removeprefix(PREFIX).removesuffix(A)
        a, b = (torch.from_numpy(tensors[PREFIX + module + leaf]) for leaf in (A, B))
        name, rows = _converted(model, b, f"{module}.weight")
        _, product = _converted(model, b @ a, f"{module}.weight")
        if not torch.equal(rows @ a, product) and (rows @ a - product).abs().max() > 1e-5 * product.abs().max():
            raise ValueError(f"llama.cpp stores {module} in another layout than rows of a matrix")
        for leaf, tensor in (("lora_a", a), ("lora_b", rows)):
            writer.add_tensor(f"{name}.{leaf}", tensor.contiguous().numpy().astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _converted(model: Any, tensor: torch.Tensor, name: str) -> tuple[str, torch.Tensor]:
    """The base's weight of that name, as llama.cpp's converter names and stores it."""
    block = next((int(part) for part in name.split(".") if part.isdecimal()), None)
    made = list(model.modify_tensors(tensor, name, block))
    if len(made) != 1 or made[0][1].shape != tensor.shape:
        raise ValueError(f"llama.cpp does not store {name} as one matrix of its shape")
    return made[0]


if __name__ == "__main__":
    try:
        adapter, base, target = map(Path, sys.argv[1:4])
        convert(adapter, base, target, sys.argv[4])
    except (ValueError, NotImplementedError, KeyError) as error:
        sys.exit(f"Error: {error}")
