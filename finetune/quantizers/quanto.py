"""optimum-quanto's weight formats: int8 with per-row scales; int4 and int2 with a scale and a shift per group.

Scales and codes come from its own optimizers and ops; they are packed here row-wise. w = q * scale - shift.
"""

import torch

from finetune.quantizers import packing


def quantize(weight_OI: torch.Tensor, fmt) -> dict[str, torch.Tensor]:
    """Quantized tensors of a weight. ValueError if groups do not fill a row.

    8 bits: {'packed' int8 [O, I], 'scale' int32 bits [O, 1]}; else {'packed' uint8 [O, I*bits/8], 'scale', 'shift':
    int32 bits of fp32 [O, K]}.
    """
    from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qint2, qint4, qint8

    weight, rows = weight_OI.float(), weight_OI.shape[0]
    if fmt.bits == 8:
        scale = AbsmaxOptimizer()(weight, qint8, axis=0).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (
            torch.ops.quanto.quantize_symmetric(weight, dtype=torch.int8, axis=0, scale=scale)
            if rows > 1
            else ((weight / scale).round().clamp(-128, 127).to(torch.int8))
        )
        return {"packed": codes, "scale": packing.as_bits(scale.view(rows, 1))}
    if weight.shape[1] % fmt.group_size:
        raise ValueError(
            f"group_size {fmt.group_size}: does not divide a row of {weight.shape[1]} columns, which quanto requires"
        )
    kind = {4: qint4, 2: qint2}[fmt.bits]
    groups = weight.reshape(-1, fmt.group_size)
    scale, shift = MaxOptimizer().optimize(groups, kind, axis=0)
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # a group of equal weights has zero range
    codes = torch.ops.quanto.quantize_affine(groups, bits=fmt.bits, axis=0, group_size=None, scale=scale, shift=shift)
    return {
        "packed": packing.pack(codes.view(rows, -1), fmt.bits),
        "scale": packing.as_bits(scale.view(rows, -1)),
        "shift": packing.as_bits(shift.view(rows, -1)),
    }


def dequantize(tensors: dict, dtype: torch.dtype, shape: tuple, fmt) -> torch.Tensor:
    """The dequantized weight [O, I] in `dtype`, computed in fp32."""
    packed, scale = tensors["packed"], packing.as_scales(tensors["scale"], torch.float32)
    if fmt.bits == 8:
        return (packed.float().mul_(scale)).to(dtype)
    codes = packing.unpack(packed, fmt.bits).float().view(len(packed), -1, fmt.group_size)
    shift = packing.as_scales(tensors["shift"], torch.float32)
    return codes.mul_(scale.unsqueeze(-1)).sub_(shift.unsqueeze(-1)).view(len(packed), -1).to(dtype)
