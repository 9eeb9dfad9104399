"""Folders that another program stored quantized."""

import shutil
import warnings

import torch
import transformers
from mlx_lm import convert
from safetensors.torch import load_file, save_file


def theirs_of(folder, dtype, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **options).eval()


def edited(folder, change):
    """Rewrites model.safetensors of a folder after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BNB = {
    "bnb nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bnb nf4 double": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "bnb fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb int8": dict(load_in_8bit=True),
}


def stored_folder(kind, dense_folder, folder):
    """The tiny model as another program stores it quantized: mlx-lm's convert, or transformers with bitsandbytes."""
    if kind.startswith("mlx"):
        bits = int(kind.split()[1])
        convert(str(dense_folder), mlx_path=str(folder), quantize=True, q_bits=bits, q_group_size=32)
        return folder
    theirs_of(
        dense_folder, torch.bfloat16, quantization_config=transformers.BitsAndBytesConfig(**BNB[kind])
    ).save_pretrained(folder)
    for file in dense_folder.glob("*token*"):
        shutil.copy(file, folder)
    return folder
