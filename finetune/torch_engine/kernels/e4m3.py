"""Rows rounded to e4m3 by torch's operations: the reference of the kernels."""

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST = 2.0**-9  # above zero, in e4m3
LEAST = 1e-12  # of a row's largest magnitude: a row of zeros is divided by something
AT_ONCE = 2**18  # numbers that are divided without a kernel


def scale_of(rows: torch.Tensor) -> torch.Tensor:
    """Scales of a matrix's rows [rows, 1], fp32: divided by its own, each fits in e4m3."""
    least, most = rows.aminmax(dim=1, keepdim=True)
    return torch.maximum(most, -least).float().clamp_min(LEAST) / LARGEST


def rounded(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The rows divided, contiguous. Some at a time: the quotients of all take four times the memory of what is kept."""
    out = torch.empty(rows.shape, dtype=E4M3, device=rows.device)
    count = max(1, AT_ONCE // rows.shape[1])
    for part in (slice(start, start + count) for start in range(0, len(rows), count)):
        out[part] = (rows[part] / scale[part]).clamp_(-LARGEST, LARGEST)
    return out
