"""MLX's affine codes, computed by one function for torch and numpy alike, so that both engines quantize to equal bits.
O rows, I columns, K groups per row. No framework is imported here.
"""

from typing import Any

import numpy as np

LEAST_SCALE = 1e-7
CHUNK = 2**18  # weights quantized at a time: 1 MiB of fp32, which fits in the CPU cache


def codes(xp: Any, groups: Any, most: int):
    """(codes, scale, bias) of fp32 groups [..., K, size]; codes are whole fp32 numbers; scale and bias [..., K].

    `xp`: torch or numpy. The group's extremum of larger magnitude is exact (mlx 0.32, `affine_quantize`).
    """
    low = xp.amin(groups, -1)
    high = xp.amax(groups, -1)
    scale = xp.clip((high - low) / most, LEAST_SCALE, None)
    lower = xp.abs(low) > xp.abs(high)
    scale = xp.where(lower, scale, -scale)
    edge = xp.where(lower, low, high)
    zero = xp.round(edge / scale)
    exact = zero != 0
    scale = xp.where(exact, edge / xp.where(exact, zero, 1), scale)
    bias = xp.where(exact, edge, 0)
    return xp.clip(xp.round((groups - bias[..., None]) / scale[..., None]), 0, most), scale, bias


def check_groups(columns: int, group_size: int, method: str) -> None:
    """Raises ValueError if groups do not fill a row."""
    if columns % group_size:
        raise ValueError(
            f"group_size {group_size}: does not divide a row of {columns} columns, which {method} requires"
        )


def quantize(weight_OI: np.ndarray, bits: int, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(uint32 words [O, I*bits/32], fp32 scales [O, K], fp32 biases [O, K]) of an fp32 weight, as mx.quantize packs.
    ValueError if groups do not fill a row.
    """
    rows, columns = weight_OI.shape
    check_groups(columns, group_size, "mlx")
    words = np.empty((rows, columns * bits // 32), np.uint32)
    scales, biases = (np.empty((rows, columns // group_size), np.float32) for _ in range(2))
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = weight_OI[start : start + step].reshape(-1, columns // group_size, group_size)
        found, scales[start : start + step], biases[start : start + step] = codes(np, part, 2**bits - 1)
        words[start : start + step] = _packed(found.astype(np.uint8).reshape(len(part), columns), bits)
    return words, scales, biases


def _packed(codes_OI: np.ndarray, bits: int) -> np.ndarray:
    """One bit stream per row, the first code in the lowest bits, as little-endian words."""
    if bits == 8:
        return codes_OI.view(np.uint32)
    stream = np.unpackbits(codes_OI[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(stream.reshape(len(codes_OI), -1), axis=-1, bitorder="little").view(np.uint32)
