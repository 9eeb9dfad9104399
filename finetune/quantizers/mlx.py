"""MLX's affine format in plain torch: the same packed bits as `mx.quantize`, on any device.

w = q * scale + bias per group of a row; the group's extremum of larger magnitude is exact (mlx 0.32,
`affine_quantize`). Scales and biases have the weight's dtype, as in MLX. O rows, I columns, K groups per row.
"""

import torch

from finetune.quantizers import affine, packing


def quantize(weight_OI: torch.Tensor, fmt) -> dict[str, torch.Tensor]:
    """{'packed' uint8 [O, I*bits/8], 'scales', 'biases': bits of [O, K]}. ValueError if groups do not fill a row."""
    rows, columns = weight_OI.shape
    size, most = fmt.group_size, 2**fmt.bits - 1
    affine.check_groups(columns, size, "mlx")
    packed = torch.empty(rows, columns * fmt.bits // 8, dtype=torch.uint8, device=weight_OI.device)
    scales, biases = (weight_OI.new_empty(rows, columns // size) for _ in range(2))
    step = max(1, packing.block_of(weight_OI.device) // columns)
    for start in range(0, rows, step):
        part = weight_OI[start : start + step].float().view(-1, columns // size, size)
        codes, scale, bias = affine.codes(torch, part, most)
        packed[start : start + step] = packing.pack(codes.to(torch.uint8).view(len(part), columns), fmt.bits)
        scales[start : start + step], biases[start : start + step] = scale, bias
    return {"packed": packed, "scales": packing.as_bits(scales), "biases": packing.as_bits(biases)}


def dequantize(tensors: dict, dtype: torch.dtype, shape: tuple, fmt) -> torch.Tensor:
    """The dequantized weight [O, I] in `dtype`, computed in the scales' dtype, rounding each operation as MLX does."""
    packed = tensors["packed"]
    kept = torch.float32 if tensors["scales"].dtype == torch.int32 else fmt.scale_dtype
    scales, biases = (packing.as_scales(tensors[name], kept).unsqueeze(-1) for name in ("scales", "biases"))
    codes = packing.unpack(packed, fmt.bits).to(kept).view(len(packed), -1, fmt.group_size)
    return codes.mul_(scales).add_(biases).view(len(packed), -1).to(dtype)
