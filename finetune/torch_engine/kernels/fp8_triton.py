"""Triton kernels that round matrices to e4m3. Reference: e4m3.scale_of and e4m3.rounded. Imported where triton is
installed only.
"""

import torch
import triton
import triton.language as tl

from finetune.torch_engine.kernels.e4m3 import E4M3, LARGEST, LEAST

BLOCK = 1024  # columns of a row at a time
TILE = 64  # rows and columns of a weight at a time


@triton.jit
def _scaled(x, out, scales, columns: tl.constexpr, largest: tl.constexpr, least: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        x_B = tl.load(x + row * columns + start + at, mask=inside, other=0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x_B))
    scale = tl.div_rn(tl.maximum(tl.max(most, 0), least), largest)
    tl.store(scales + row, scale)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        x_B = tl.load(x + row * columns + start + at, mask=inside, other=0).to(tl.float32)
        x_B = tl.minimum(tl.maximum(tl.div_rn(x_B, scale), -largest), largest)
        tl.store(out + row * columns + start + at, x_B.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _divided(w, scales, out, rows, columns, by_row, by_column, largest: tl.constexpr, TILE: tl.constexpr):
    row_R = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    at_C = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (row_R < rows)[:, None] & (at_C < columns)[None]
    w_RC = tl.load(w + row_R[:, None] * by_row + at_C[None] * by_column, mask=inside, other=0).to(tl.float32)
    scale_R = tl.load(scales + row_R, mask=row_R < rows, other=1)
    w_RC = tl.minimum(tl.maximum(tl.div_rn(w_RC, tl.broadcast_to(scale_R[:, None], (TILE, TILE))), -largest), largest)
    tl.store(out + row_R[:, None] * columns + at_C[None], w_RC.to(out.dtype.element_ty), mask=inside)


def scaled(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [N, K] in fp8, the scale of each [N, 1], fp32)."""
    count, columns = rows.shape
    out = torch.empty(rows.shape, dtype=E4M3, device=rows.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=rows.device)
    _scaled[(count,)](rows, out, scales, columns, LARGEST, LEAST, BLOCK=BLOCK)
    return out, scales


def divided(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A matrix of any strides in fp8, contiguous, each row divided by its scale."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=E4M3, device=weight.device)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    _divided[grid](weight, scale, out, rows, columns, weight.stride(0), weight.stride(1), LARGEST, TILE=TILE)
    return out
