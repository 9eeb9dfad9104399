"""HQQ (Badri and Shaji 2023) through its own library, with codes repacked row-wise.

Its solver stops on an error over the full matrix, so a matrix is quantized in full and may be sharded row-wise
afterwards. Its steps work within groups and run on some of them at a time; only the error has the matrix's size.
Groups of `group_size` lie within rows. w = (q - zero) * scale.
O rows, I columns, K groups per row; N groups of S numbers.
"""

import torch

from finetune.quantizers import affine, packing
from finetune.quantizers.linear import Format


def quantize(weight_OI: torch.Tensor, fmt: Format) -> dict[str, torch.Tensor]:
    """{'packed' uint8 [O, I*bits/8], 'scale', 'zero': int32 bits of fp32 [O, K]}. ValueError if groups cross rows."""
    rows, columns = weight_OI.shape
    affine.check_groups(columns, fmt.group_size, "hqq")
    groups_NS = weight_OI.reshape(-1, fmt.group_size)
    scale, zero = _solve(groups_NS, 2**fmt.bits - 1)
    packed = torch.empty(len(groups_NS), fmt.group_size * fmt.bits // 8, dtype=torch.uint8, device=weight_OI.device)
    for part in packing.blocks(groups_NS):
        codes = (groups_NS[part].float() * scale[part] + zero[part]).round_().clamp_(0, 2**fmt.bits - 1)
        packed[part] = packing.pack(codes.to(torch.uint8), fmt.bits)
    return {
        "packed": packed.view(rows, columns * fmt.bits // 8),
        "scale": packing.as_bits((1.0 / scale).float().view(rows, columns // fmt.group_size)),
        "zero": packing.as_bits(zero.float().view(rows, columns // fmt.group_size)),
    }


def _solve(groups_NS: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale as a factor, zero) per group [N, 1] for codes up to `most`, on CUDA in fp16 as in the library.

    The start is hqq.core.quantize's, the steps and their parameters those of its default solver,
    optimize_weights_proximal_legacy.
    """
    from hqq.core.optimize import optimize_weights_proximal_legacy_step as step

    number = len(groups_NS)
    device = groups_NS.device
    if device.type == "cuda":
        dtype = torch.float16
    else:
        dtype = torch.float32
    scale, zero = (torch.empty(number, 1, device=device) for _ in range(2))
    for part in packing.blocks(groups_NS):
        groups = groups_NS[part].float()
        low = groups.amin(1, keepdim=True)
        high = groups.amax(1, keepdim=True)
        factor = most / (high - low)
        factor = torch.where((high - low).abs() <= 1e-4, torch.ones_like(factor), factor).clamp(max=2e4)
        scale[part], zero[part] = factor, -low * factor
    scale = scale.to(dtype)
    zero = zero.to(dtype)
    error = torch.empty_like(groups_NS, dtype=dtype)
    beta = 10.0
    least = torch.tensor(torch.inf, device=device)
    for _ in range(20):
        for part in packing.blocks(groups_NS):
            groups = groups_NS[part].to(dtype)
            restored, _, zero[part], _ = step(groups, scale[part], zero[part], [0, most], beta, 0.7, 1)
            error[part] = (groups - restored).abs_()
        mean = error.mean().float()
        if not mean < least:
            break
        least = mean
    return scale, zero


def dequantize(tensors: dict, dtype: torch.dtype, shape: tuple, fmt: Format) -> torch.Tensor:
    """The dequantized weight [O, I] in `dtype`, computed in fp32."""
    packed = tensors["packed"]
    scale, zero = (packing.as_scales(tensors[name], torch.float32).unsqueeze(-1) for name in ("scale", "zero"))
    codes = packing.unpack(packed, fmt.bits).float().view(len(packed), -1, fmt.group_size)
    return codes.sub_(zero).mul_(scale).view(len(packed), -1).to(dtype)
