"""bitsandbytes' 4-bit formats (NF4, FP4) and INT8, through its functional kernels, stored as plain integer tensors.

4-bit blocks span the flattened matrix, and double quantization shares one mean over all of it. INT8 has per-row scales
(LLM.int8, Dettmers et al. 2022); outlier columns depend on activations, and matmuls here use the dequantized weight, so
there is no outlier decomposition.
"""

import torch


def quantize(weight_OI: torch.Tensor, fmt) -> dict[str, torch.Tensor]:
    """Quantized tensors of a weight.

    8 bits: {'packed' int8 [O, I], 'absmax' int32 bits [O, 1]}. 4 bits: {'packed' uint8 [O, I/2] (flat if blocks cross
    rows), 'absmax' int32 bits of fp32}; with double_quant 'absmax' uint8, 'absmax2' and 'offset' int32 bits.
    """
    import bitsandbytes.functional as bnb

    if fmt.bits == 8:  # the library quantizes only from fp16
        codes, absmax, _ = bnb.int8_vectorwise_quant(weight_OI.to(torch.float16).contiguous())
        return {"packed": codes, "absmax": _bits(absmax.reshape(-1, 1))}
    rows, columns = weight_OI.shape
    packed, state = bnb.quantize_4bit(
        weight_OI.float().contiguous(),
        blocksize=fmt.group_size,
        quant_type=fmt.quant_type,
        compress_statistics=fmt.double_quant,
    )
    by_rows = (rows, -1) if columns % fmt.group_size == 0 else (-1,)
    tensors = {"packed": packed.reshape(by_rows), "absmax": _bits(state.absmax).reshape(by_rows)}
    if fmt.double_quant:
        tensors |= {"absmax2": _bits(state.state2.absmax), "offset": _bits(state.offset.reshape(1))}
    return tensors


def dequantize(tensors: dict, dtype: torch.dtype, shape: tuple, fmt) -> torch.Tensor:
    """The dequantized weight [O, I] in `dtype`, by bitsandbytes' kernel for the device."""
    import bitsandbytes.functional as bnb

    if fmt.bits == 8:
        return bnb.int8_vectorwise_dequant(tensors["packed"], _floats(tensors["absmax"])).to(dtype)
    absmax = tensors["absmax"].reshape(-1)
    if "absmax2" in tensors:
        code = bnb.create_dynamic_map().to(absmax.device)
        nested = bnb.QuantState(absmax=_floats(tensors["absmax2"]), code=code, blocksize=256, dtype=torch.float32)
        absmax = bnb.dequantize_blockwise(absmax, nested) + _floats(tensors["offset"])
    else:
        absmax = _floats(absmax)
    by_rows = shape[1] % fmt.group_size == 0  # then `tensors` may hold a slice of rows
    state = bnb.QuantState(
        absmax=absmax.float(),
        shape=torch.Size((len(tensors["packed"]), shape[1]) if by_rows else shape),
        code=bnb.get_4bit_type(fmt.quant_type, device=absmax.device),
        blocksize=fmt.group_size,
        quant_type=fmt.quant_type,
        dtype=dtype,
    )
    return bnb.dequantize_4bit(tensors["packed"].reshape(-1, 1), state)


def _bits(tensor):
    return tensor.float().view(torch.int32) if tensor.is_floating_point() else tensor


def _floats(tensor):
    return tensor.view(torch.float32)
