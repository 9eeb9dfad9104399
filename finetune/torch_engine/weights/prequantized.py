"""Prequantized checkpoints: MLX folders, and bitsandbytes 4-bit and 8-bit folders.

Codes and scales are loaded unchanged into QuantizedLinear, or dequantized if the model needs the dense weight, as
for an embedding. `part` of a weight: a companion tensor with its scales.
"""

import json
from functools import partial
from types import ModuleType

import torch

from finetune.quantizers import bnb, mlx, packing
from finetune.quantizers.linear import Format, QuantizedLinear
from finetune.torch_engine.weights.interfaces import StoredTensors

BNB4_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def owner(name: str, checkpoint: StoredTensors) -> tuple[str, bool]:
    """(weight that a tensor belongs to, True if it is a part and not the weight itself)."""
    head, _, leaf = name.rpartition(".")
    if leaf in ("scales", "biases") and f"{head}.weight" in checkpoint.file_of:
        return f"{head}.weight", True
    if leaf in ("SCB", "weight_format") and f"{head}.weight" in checkpoint.file_of:
        return f"{head}.weight", True
    stem, dot, rest = name.partition(".weight.")
    if dot and (rest in BNB4_PARTS or rest.startswith("quant_state.bitsandbytes__")):
        return f"{stem}.weight", True
    return name, False


def parts(name: str, checkpoint: StoredTensors) -> str | None:
    """Storage format of a weight: 'mlx', 'bnb4', 'bnb8', or None for a plain tensor, by its companion tensors."""
    head, _, leaf = name.rpartition(".")
    if leaf != "weight":
        return None
    if f"{head}.scales" in checkpoint.file_of or f"{head}.biases" in checkpoint.file_of:
        return "mlx"
    if any(f"{name}.{part}" in checkpoint.file_of for part in BNB4_PARTS) or _quant_state(name, checkpoint):
        return "bnb4"
    if f"{head}.SCB" in checkpoint.file_of or f"{head}.weight_format" in checkpoint.file_of:
        return "bnb8"
    return None


def _quant_state(name: str, checkpoint: StoredTensors) -> str | None:
    return next(
        (
            found
            for kind in ("nf4", "fp4")
            if (found := f"{name}.quant_state.bitsandbytes__{kind}") in checkpoint.file_of
        ),
        None,
    )


def read(name: str, checkpoint: StoredTensors, expected: tuple) -> tuple:
    """(quantizer module, tensors, shape [O, I], Format) of a prequantized weight and its parts.
    Raises ValueError if a part is missing or does not match the expected shape.
    """
    kind = parts(name, checkpoint)
    assert kind is not None, name
    head = name.rpartition(".")[0]
    needed = {
        "mlx": (f"{head}.scales", f"{head}.biases"),
        "bnb4": (f"{name}.absmax", _quant_state(name, checkpoint) or f"{name}.quant_state.bitsandbytes__nf4"),
        "bnb8": (f"{head}.SCB",),
    }[kind]
    for part in needed:
        if part not in checkpoint.file_of:
            raise ValueError(f"{part} is missing next to the weight whose scales it holds")
    found = _READ[kind](name, checkpoint)
    if found[2] != expected:
        raise ValueError(f"it is {list(found[2])} in its files, {list(expected)} by config.json")
    return found


def layer(module: ModuleType, tensors: dict, shape: tuple, fmt: Format) -> QuantizedLinear:
    """QuantizedLinear from the result of `read`, with unchanged codes."""
    return QuantizedLinear(tensors, shape, partial(module.dequantize, shape=shape, fmt=fmt))


def dense(module: ModuleType, tensors: dict, shape: tuple, fmt: Format) -> torch.Tensor:
    """The dequantized weight from the result of `read`."""
    return module.dequantize(tensors, fmt.scale_dtype, shape, fmt)


def _mlx(name: str, checkpoint: StoredTensors):
    head = name.rpartition(".")[0]
    words, scales, biases = (checkpoint.read(n) for n in (name, f"{head}.scales", f"{head}.biases"))
    packed = words.view(torch.uint8)
    # bits * columns = 8 * bytes per row, columns = groups * group_size: the config gives the value that files lack.
    bits, group_size = checkpoint.mlx_format(head)
    if scales.shape != biases.shape or scales.shape[0] != words.shape[0]:
        raise ValueError(
            f"its codes have {words.shape[0]} rows, its scales {list(scales.shape)}, its biases {list(biases.shape)}"
        )
    shape = (words.shape[0], scales.shape[1] * group_size)
    if packed.shape[1] * 8 != shape[1] * bits:
        raise ValueError(
            f"its codes have {packed.shape[1]} bytes per row, which is not {bits} bits for {shape[1]} columns"
        )
    tensors = {"packed": packed, "scales": packing.as_bits(scales), "biases": packing.as_bits(biases)}
    return mlx, tensors, shape, Format(bits, group_size, "affine", False, scales.dtype)


def _bnb4(name: str, checkpoint: StoredTensors):
    stated = _quant_state(name, checkpoint)
    assert stated is not None, name
    state = json.loads(bytes(checkpoint.read(stated).tolist()))
    shape = tuple(state["shape"])
    block = state["blocksize"]
    nested = "nested_blocksize" in state
    by_rows: tuple[int, ...]
    if shape[1] % block == 0:
        by_rows = (shape[0], -1)
    else:
        by_rows = (-1,)
    packed = checkpoint.read(name)
    absmax = checkpoint.read(f"{name}.absmax")
    if packed.nbytes * 2 != shape[0] * shape[1]:
        raise ValueError(
            f"its codes have {packed.nbytes} bytes, but its shape {list(shape)} needs {shape[0] * shape[1] // 2}"
        )
    blocks = shape[0] * shape[1] // block
    if absmax.numel() != blocks:
        raise ValueError(f"it has {absmax.numel()} scales, but its shape {list(shape)} needs {blocks}")
    tensors = {"packed": packed.view(torch.uint8).reshape(by_rows)}
    if nested:
        if state["nested_blocksize"] != 256:
            raise ValueError(
                f"its scales are quantized in blocks of {state['nested_blocksize']}, only 256 is supported"
            )
        offset = torch.tensor([state["nested_offset"]], dtype=torch.float32)
        tensors |= {
            "absmax": absmax.reshape(by_rows),
            "absmax2": checkpoint.read(f"{name}.nested_absmax").float().view(torch.int32),
            "offset": offset.view(torch.int32),
        }
    else:
        tensors["absmax"] = absmax.float().view(torch.int32).reshape(by_rows)
    dtype = getattr(torch, state["dtype"])
    return bnb, tensors, shape, Format(4, block, state["quant_type"], nested, dtype)


def _bnb8(name: str, checkpoint: StoredTensors):
    codes = checkpoint.read(name)
    absmax = checkpoint.read(name.removesuffix("weight") + "SCB")
    if absmax.numel() != codes.shape[0]:
        raise ValueError(f"it has {absmax.numel()} scales for {codes.shape[0]} rows")
    tensors = {"packed": codes, "absmax": absmax.float().reshape(-1, 1).view(torch.int32)}
    return bnb, tensors, tuple(codes.shape), Format(8, 64, None, False, torch.float16)


_READ = {"mlx": _mlx, "bnb4": _bnb4, "bnb8": _bnb8}
