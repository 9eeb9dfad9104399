"""Codes of a row as one stream of bits, and scales as integer bits: what the affine formats share.

The first code of a row sits in the lowest bits of its first byte. Read as little-endian 32-bit words the stream is the
one that MLX packs. O rows, I columns, K groups of a row, B bytes of a row.
"""

import torch

# Codes and bytes of the smallest whole number of bytes that holds whole codes.
_UNIT = {2: (4, 1), 3: (8, 3), 4: (2, 1), 5: (8, 5), 6: (4, 3), 8: (1, 1)}


def pack(codes_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [O, B] of uint8 codes [O, I]; I * bits must be whole bytes."""
    if bits == 8:
        return codes_OI.to(torch.uint8).contiguous()
    num_codes, num_bytes = _UNIT[bits]
    kind = torch.uint8 if num_bytes == 1 else torch.int64
    units = codes_OI.to(kind).view(codes_OI.shape[0], -1, num_codes)
    word = units[..., 0].clone()
    for i in range(1, num_codes):
        word |= units[..., i] << (bits * i)
    if num_bytes == 1:
        return word
    return torch.stack([(word >> (8 * i)) & 255 for i in range(num_bytes)], -1).to(torch.uint8).flatten(1)


def unpack(packed_OB: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [O, I] of what pack made."""
    if bits == 8:
        return packed_OB
    num_codes, num_bytes = _UNIT[bits]
    mask = 2**bits - 1
    word = packed_OB
    if num_bytes > 1:
        parts = packed_OB.view(packed_OB.shape[0], -1, num_bytes).to(torch.int64)
        word = sum(parts[..., i] << (8 * i) for i in range(num_bytes))
    codes = torch.stack([(word >> (bits * i)) & mask for i in range(num_codes)], -1)
    return codes.to(torch.uint8).flatten(1)


def as_bits(scales_OK: torch.Tensor) -> torch.Tensor:
    """The scales' bits as integers: int32 [O, K] of fp32, uint8 [O, 2K] of a 16-bit type (Gloo sends no int16)."""
    scales_OK = scales_OK.contiguous()
    return scales_OK.view(torch.int32 if scales_OK.dtype == torch.float32 else torch.uint8)


def as_scales(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scales [O, K] of their bits; `dtype` is their own type."""
    return bits.view(dtype)
