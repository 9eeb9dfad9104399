"""MLX's affine format in plain torch: the same packed bits as `mx.quantize`, on any device.

w = q * scale + bias per group of a row; the group's extremum of larger magnitude is exact (mlx 0.32,
`affine_quantize`). Scales and biases have the weight's dtype, as in MLX. O rows, I columns, K groups per row;
N groups of S numbers.
"""

import torch

from finetune.quantizers import affine, packing
from finetune.quantizers.linear import Format


def quantize(weight_OI: torch.Tensor, fmt: Format) -> dict[str, torch.Tensor]:
    """{'packed' uint8 [O, I*bits/8], 'scales', 'biases': bits of [O, K]}. ValueError if groups do not fill a row."""
    rows, columns = weight_OI.shape
    size = fmt.group_size
    most = 2**fmt.bits - 1
    affine.check_groups(columns, size, "mlx")
    groups_NS = weight_OI.reshape(-1, size)
    packed = torch.empty(len(groups_NS), size * fmt.bits // 8, dtype=torch.uint8, device=weight_OI.device)
    scales, biases = (weight_OI.new_empty(len(groups_NS)) for _ in range(2))
    for part in packing.blocks(groups_NS):
        codes, scales[part], biases[part] = affine.codes(torch, groups_NS[part].float(), most)
        packed[part] = packing.pack(codes.to(torch.uint8), fmt.bits)
    scales, biases = (packing.as_bits(values.view(rows, columns // size)) for values in (scales, biases))
    return {"packed": packed.view(rows, columns * fmt.bits // 8), "scales": scales, "biases": biases}


def dequantize(tensors: dict, dtype: torch.dtype, shape: tuple, fmt: Format) -> torch.Tensor:
    """The dequantized weight [O, I] in `dtype`, computed in the scales' dtype, rounding each operation as MLX does."""
    packed = tensors["packed"]
    if tensors["scales"].dtype == torch.int32:
        kept = torch.float32
    else:
        kept = fmt.scale_dtype
    scales, biases = (packing.as_scales(tensors[name], kept).unsqueeze(-1) for name in ("scales", "biases"))
    codes = packing.unpack(packed, fmt.bits).to(kept).view(len(packed), -1, fmt.group_size)
    return codes.mul_(scales).add_(biases).view(len(packed), -1).to(dtype)
