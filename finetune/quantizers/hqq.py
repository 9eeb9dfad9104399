"""HQQ (Badri and Shaji 2023) through its own library, with codes repacked row-wise.

Its solver stops on an error over the full matrix, so a matrix is quantized in full and may be sharded row-wise
afterwards. Groups of `group_size` lie within rows. w = (q - zero) * scale.
"""

import torch

from finetune.quantizers import packing


def quantize(weight_OI: torch.Tensor, fmt) -> dict[str, torch.Tensor]:
    """{'packed' uint8 [O, I*bits/8], 'scale', 'zero': int32 bits of fp32 [O, K]}. ValueError if groups cross rows."""
    from hqq.core.quantize import Quantizer

    rows, columns = weight_OI.shape
    if columns % fmt.group_size:
        raise ValueError(f"group_size {fmt.group_size}: does not divide a row of {columns} columns, which hqq requires")
    codes, meta = Quantizer.quantize(
        weight_OI.float(),
        nbits=fmt.bits,
        group_size=fmt.group_size,
        axis=1,
        bitpack=False,
        compute_dtype=torch.float32,
        device=str(weight_OI.device),
    )
    scale, zero = (meta[name].float().reshape(rows, -1) for name in ("scale", "zero"))
    return {
        "packed": packing.pack(codes.to(torch.uint8).view(rows, columns), fmt.bits),
        "scale": packing.as_bits(scale),
        "zero": packing.as_bits(zero),
    }


def dequantize(tensors: dict, dtype: torch.dtype, shape: tuple, fmt) -> torch.Tensor:
    """The dequantized weight [O, I] in `dtype`, computed in fp32."""
    packed = tensors["packed"]
    scale, zero = (packing.as_scales(tensors[name], torch.float32).unsqueeze(-1) for name in ("scale", "zero"))
    codes = packing.unpack(packed, fmt.bits).float().view(len(packed), -1, fmt.group_size)
    return codes.sub_(zero).mul_(scale).view(len(packed), -1).to(dtype)
