"""optimum-quanto's weight formats: int8 with per-row scales; int4 and int2 with a scale and a shift per group.

Scales and codes come from its own optimizers and ops; they are packed here row-wise. w = q * scale - shift.
O rows, I columns, K groups per row; N groups of S numbers.
"""

import torch

from finetune.quantizers import affine, packing
from finetune.quantizers.linear import Format


def quantize(weight_OI: torch.Tensor, fmt: Format) -> dict[str, torch.Tensor]:
    """Quantized tensors of a weight. ValueError if groups do not fill a row.

    8 bits: {'packed' int8 [O, I], 'scale' int32 bits [O, 1]}; else {'packed' uint8 [O, I*bits/8], 'scale', 'shift':
    int32 bits of fp32 [O, K]}.
    """
    (rows, columns), device = weight_OI.shape, weight_OI.device
    if fmt.bits == 8:
        packed = torch.empty(rows, columns, dtype=torch.int8, device=device)
        scales = torch.empty(rows, 1, device=device)
        for part in packing.blocks(weight_OI):
            packed[part], scales[part] = _int8(weight_OI[part].float())
        return {"packed": packed, "scale": packing.as_bits(scales)}
    affine.check_groups(columns, fmt.group_size, "quanto")
    groups_NS = weight_OI.reshape(-1, fmt.group_size)
    packed = torch.empty(len(groups_NS), fmt.group_size * fmt.bits // 8, dtype=torch.uint8, device=device)
    scales, shifts = (torch.empty(len(groups_NS), 1, device=device) for _ in range(2))
    for part in packing.blocks(groups_NS):
        codes, scales[part], shifts[part] = _affine(groups_NS[part].float(), fmt.bits)
        packed[part] = packing.pack(codes, fmt.bits)
    scales, shifts = (packing.as_bits(values.view(rows, columns // fmt.group_size)) for values in (scales, shifts))
    return {"packed": packed.view(rows, columns * fmt.bits // 8), "scale": scales, "shift": shifts}


def _int8(weight_OI: torch.Tensor):
    """(int8 codes, scale per row) of fp32 rows."""
    from optimum.quanto import AbsmaxOptimizer, qint8

    scale = AbsmaxOptimizer()(weight_OI, qint8, axis=0).clamp_min(torch.finfo(torch.float32).tiny)
    if len(weight_OI) == 1:  # quanto has no per-axis scales for one row
        return (weight_OI / scale).round().clamp(-128, 127).to(torch.int8), scale.view(1, 1)
    return torch.ops.quanto.quantize_symmetric(weight_OI, dtype=torch.int8, axis=0, scale=scale), scale


def _affine(groups: torch.Tensor, bits: int):
    """(uint8 codes, scale, shift) of fp32 groups [number, size]."""
    from optimum.quanto import MaxOptimizer, qint2, qint4

    scale, shift = MaxOptimizer().optimize(groups, {4: qint4, 2: qint2}[bits], axis=0)
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # a group of equal weights has zero range
    codes = torch.ops.quanto.quantize_affine(groups, bits=bits, axis=0, group_size=None, scale=scale, shift=shift)
    return codes, scale, shift


def dequantize(tensors: dict, dtype: torch.dtype, shape: tuple, fmt: Format) -> torch.Tensor:
    """The dequantized weight [O, I] in `dtype`, computed in fp32."""
    packed = tensors["packed"]
    scale = packing.as_scales(tensors["scale"], torch.float32)
    if fmt.bits == 8:
        return (packed.float().mul_(scale)).to(dtype)
    codes = packing.unpack(packed, fmt.bits).float().view(len(packed), -1, fmt.group_size)
    shift = packing.as_scales(tensors["shift"], torch.float32)
    return codes.mul_(scale.unsqueeze(-1)).sub_(shift.unsqueeze(-1)).view(len(packed), -1).to(dtype)
