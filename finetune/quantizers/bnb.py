"""bitsandbytes' 4-bit formats (NF4, FP4) and INT8, through its functional kernels, stored as plain integer tensors.

4-bit blocks span the flattened matrix, and double quantization shares one mean over all of it. INT8 has per-row scales
(LLM.int8, Dettmers et al. 2022); outlier columns depend on activations, and matmuls here use the dequantized weight, so
there is no outlier decomposition.
"""

import logging
from functools import cache

import torch

from finetune.quantizers import packing
from finetune.quantizers.linear import Format


@cache
def functional():
    """bitsandbytes.functional. What the package prints while it is imported (missing kernels) stays off the screen."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional

    return bitsandbytes.functional


def dequantize_blocks(
    packed: torch.Tensor, absmax: torch.Tensor, shape: tuple, block: int, quant_type: str | None, dtype: torch.dtype
) -> torch.Tensor:
    """level[code] * absmax of the flattened 4-bit codes, by bitsandbytes' kernel for the device: [shape] in `dtype`.
    `absmax`: fp32, one per `block` weights.
    """
    functional()
    call = torch.ops.bitsandbytes.dequantize_4bit.default
    return call(packed.reshape(-1, 1), absmax.reshape(-1), block, quant_type, list(shape), dtype)


@cache
def _dynamic_map(device: torch.device) -> torch.Tensor:
    """The 256 levels of quantized scales."""
    return functional().create_dynamic_map().to(device)


def quantize(weight_OI: torch.Tensor, fmt: Format) -> dict[str, torch.Tensor]:
    """Quantized tensors of a weight.

    8 bits: {'packed' int8 [O, I], 'absmax' int32 bits [O, 1]}. 4 bits: {'packed' uint8 [O, I/2] (flat if blocks cross
    rows), 'absmax' int32 bits of fp32}; with double_quant 'absmax' uint8, 'absmax2' and 'offset' int32 bits.
    """
    if fmt.bits == 8:
        return _quantize_int8(weight_OI)
    rows, columns = weight_OI.shape
    packed, absmax = _quantize_4bit(weight_OI, fmt)
    by_rows: tuple[int, ...]
    if columns % fmt.group_size == 0:
        by_rows = (rows, -1)
    else:
        by_rows = (-1,)
    tensors = {"packed": packed.view(by_rows)}
    if not fmt.double_quant:
        return tensors | {"absmax": _bits(absmax).view(by_rows)}
    bnb = functional()
    offset = absmax.mean()  # as quantize_4bit's compress_statistics: over the full matrix
    codes, state = bnb.quantize_blockwise(absmax - offset, blocksize=256)
    return tensors | {"absmax": codes.view(by_rows), "absmax2": _bits(state.absmax), "offset": _bits(offset.reshape(1))}


def _quantize_int8(weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-row INT8, blocks of rows at a time. The library quantizes only from fp16."""
    bnb = functional()
    packed = torch.empty(weight_OI.shape, dtype=torch.int8, device=weight_OI.device)
    absmax = torch.empty(len(weight_OI), 1, dtype=torch.float32, device=weight_OI.device)
    for rows in packing.blocks(weight_OI):
        codes, scales, _ = bnb.int8_vectorwise_quant(weight_OI[rows].to(torch.float16).contiguous())
        packed[rows], absmax[rows] = codes, scales.reshape(-1, 1)
    return {"packed": packed, "absmax": _bits(absmax)}


def _quantize_4bit(weight_OI: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes of the flattened matrix, fp32 scale per block), some blocks at a time: the library's temporaries take 20
    bytes per weight.
    """
    bnb = functional()
    flat = weight_OI.reshape(-1)
    size = fmt.group_size
    packed = torch.empty(-(-len(flat) // 2), dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(-(-len(flat) // size), dtype=torch.float32, device=flat.device)
    full = flat[: len(flat) // size * size].view(-1, size)
    for blocks in packing.blocks(full) if len(full) else ():
        codes, state = bnb.quantize_4bit(full[blocks].float(), blocksize=size, quant_type=fmt.quant_type)
        packed[blocks.start * size // 2 : blocks.stop * size // 2] = codes.view(-1)
        absmax[blocks] = state.absmax
    rest = flat[full.numel() :]
    if len(rest):
        codes, state = bnb.quantize_4bit(rest.float(), blocksize=size, quant_type=fmt.quant_type)
        packed[full.numel() // 2 :], absmax[len(full) :] = codes.view(-1), state.absmax
    return packed, absmax


def dequantize(tensors: dict, dtype: torch.dtype, shape: tuple, fmt: Format) -> torch.Tensor:
    """The dequantized weight [O, I] in `dtype`, by bitsandbytes' kernel for the device."""
    bnb = functional()
    if fmt.bits == 8:
        return bnb.int8_vectorwise_dequant(tensors["packed"], _floats(tensors["absmax"])).to(dtype)
    absmax = tensors["absmax"].reshape(-1)
    if "absmax2" in tensors:
        scales = _floats(tensors["absmax2"])
        code = _dynamic_map(absmax.device)
        nested = bnb.QuantState(absmax=scales, code=code, blocksize=256, dtype=torch.float32)
        absmax = bnb.dequantize_blockwise(absmax, nested) + _floats(tensors["offset"])
    else:
        absmax = _floats(absmax)
    by_rows = shape[1] % fmt.group_size == 0  # then `tensors` may hold a slice of rows
    if by_rows:
        rows = len(tensors["packed"])
    else:
        rows = shape[0]
    return dequantize_blocks(tensors["packed"], absmax, (rows, shape[1]), fmt.group_size, fmt.quant_type, dtype)


def _bits(tensor: torch.Tensor):
    if tensor.is_floating_point():
        return tensor.float().view(torch.int32)
    return tensor


def _floats(tensor: torch.Tensor):
    return tensor.view(torch.float32)
