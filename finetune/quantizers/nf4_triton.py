"""NF4 dequantization in one Triton kernel on CUDA: reads the codes once, writes the weight once. Reference: nf4.py.

O rows, P padded columns, K blocks per row (P / block), G groups of 256 blocks.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _dequantize(
    packed,
    absmax,
    absmax_range,
    levels,
    out,
    columns,
    padded,
    blocks,
    groups,
    block: tl.constexpr,
    double: tl.constexpr,
    BYTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * BYTES + tl.arange(0, BYTES)
    inside = at < padded // 2
    codes = tl.load(packed + row * (padded // 2) + at, mask=inside, other=0).to(tl.int32)
    k = 2 * at // block
    scale = tl.load(absmax + row * blocks + k, mask=inside, other=0).to(tl.float32)
    if double:
        pair = absmax_range + row * 2 * groups + 2 * (k // 256)
        low = tl.load(pair, mask=inside, other=0)
        high = tl.load(pair + 1, mask=inside, other=0)
        scale = low + scale * ((high - low) / 255)
    first = tl.load(levels + (codes >> 4))
    second = tl.load(levels + (codes & 15))
    weights = tl.interleave(first * scale, second * scale)
    column = part * 2 * BYTES + tl.arange(0, 2 * BYTES)
    tl.store(out + row * columns + column, weights.to(out.dtype.element_ty), mask=column < columns)


def dequantize(tensors: dict, levels: torch.Tensor, columns: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """The dequantized weight [O, columns] in `dtype`. `levels`: the codebook, 16 fp32 values on the tensors' device."""
    packed = tensors["packed"]
    rows = packed.shape[0]
    padded = 2 * packed.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    double = "absmax_range" in tensors
    if double:
        absmax = tensors["absmax"]
        ranges = tensors["absmax_range"].view(torch.float32)
    else:
        absmax = tensors["absmax"].view(torch.float32)
        ranges = absmax
    size = min(1024, triton.next_power_of_2(padded // 2))
    # No fused multiply-add, so that the result is bitwise equal to nf4.py.
    _dequantize[(rows, triton.cdiv(padded // 2, size))](
        packed,
        absmax,
        ranges,
        levels,
        out,
        columns,
        padded,
        absmax.shape[1],
        ranges.shape[1] // 2,
        block=block,
        double=double,
        BYTES=size,
        enable_fp_fusion=False,
    )
    return out
