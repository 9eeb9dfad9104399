"""bitsandbytes' 4-bit formats (NF4, FP4) through its own functional kernels, held as plain integer tensors.

Its blocks of 64 run over the flattened matrix, and its double quantization shares one mean over the whole of it.
"""

import torch


def quantize(
    weight_OI: torch.Tensor, quant_type: str, block: int, double_quant: bool
) -> dict[str, torch.Tensor]:
    """{'packed' uint8 [O, I/2] (flat where a row is no whole number of blocks), 'absmax' int32 bits of fp32}; with
    double_quant 'absmax' uint8, 'absmax2' and 'offset' int32 bits.
    """
    import bitsandbytes.functional as bnb

    rows, columns = weight_OI.shape
    packed, state = bnb.quantize_4bit(
        weight_OI.float().contiguous(),
        blocksize=block,
        quant_type=quant_type,
        compress_statistics=double_quant,
    )
    by_rows = (rows, -1) if columns % block == 0 else (1, -1)
    tensors = {"packed": packed.reshape(by_rows), "absmax": _bits(state.absmax).reshape(by_rows)}
    if double_quant:
        tensors |= {"absmax2": _bits(state.state2.absmax), "offset": _bits(state.offset.reshape(1))}
    return tensors


def dequantize(tensors: dict, shape: tuple, quant_type: str, block: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [O, I] in `dtype`, by bitsandbytes' kernel for the device."""
    import bitsandbytes.functional as bnb

    absmax = tensors["absmax"].reshape(-1)
    if "absmax2" in tensors:
        code = bnb.create_dynamic_map().to(absmax.device)
        nested = bnb.QuantState(
            absmax=_floats(tensors["absmax2"]), code=code, blocksize=256, dtype=torch.float32
        )
        absmax = bnb.dequantize_blockwise(absmax, nested) + _floats(tensors["offset"])
    else:
        absmax = _floats(absmax)
    state = bnb.QuantState(
        absmax=absmax.float(),
        shape=torch.Size(shape),
        code=bnb.get_4bit_type(quant_type, device=absmax.device),
        blocksize=block,
        quant_type=quant_type,
        dtype=dtype,
    )
    return bnb.dequantize_4bit(tensors["packed"].reshape(-1, 1), state)


def _bits(tensor):
    return tensor.float().view(torch.int32) if tensor.is_floating_point() else tensor


def _floats(tensor):
    return tensor.view(torch.float32)
