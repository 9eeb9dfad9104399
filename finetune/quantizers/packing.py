"""Bit packing of codes, and scales as integer bits, shared by the affine formats.

A row is one bit stream; its first code is in the lowest bits of its first byte. As little-endian 32-bit words this is
MLX's packing. O rows, I columns, K groups per row, B bytes per row.
"""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

import torch

# Weights quantized at a time: 512 KiB of fp32, which fits in a CPU's cache; on a device, enough for its kernels.
CPU_BLOCK = 2**17
DEVICE_BLOCK = 2**24
META_BLOCK = ContextVar("META_BLOCK", default=DEVICE_BLOCK)
# Number of codes and bytes in the smallest run of full bytes that contains full codes.
_UNIT = {2: (4, 1), 3: (8, 3), 4: (2, 1), 5: (8, 5), 6: (4, 3), 8: (1, 1)}


def block_of(device: torch.device) -> int:
    """Weights quantized at a time on a device."""
    if device.type == "meta":
        return META_BLOCK.get()
    return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK


@contextlib.contextmanager
def one_block_on_meta():
    """A context in which a tensor on meta is one block, whatever its size: its values take no memory and no time."""
    before = META_BLOCK.set(sys.maxsize)
    try:
        yield
    finally:
        META_BLOCK.reset(before)


def blocks(tensor: torch.Tensor) -> Iterator[slice]:
    """Slices of a tensor's rows, each of at least CPU_BLOCK numbers (on a device DEVICE_BLOCK), as few as it can. Pass
    groups as rows where they can be: temporaries of one size take the same holes of the heap each time.
    """
    step = -(-block_of(tensor.device) // max(1, tensor.shape[1:].numel()))
    for start in range(0, len(tensor), step):
        yield slice(start, min(start + step, len(tensor)))


def pack(codes_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs uint8 codes [O, I] into uint8 [O, B]; I * bits must be a multiple of 8."""
    if bits == 8:
        return codes_OI.to(torch.uint8).contiguous()
    num_codes, num_bytes = _UNIT[bits]
    units = codes_OI.to(torch.uint8).view(codes_OI.shape[0], -1, num_codes)
    parts = [units[..., 0].clone(), *units.new_zeros(num_bytes - 1, *units.shape[:2])]
    for i in range(1, num_codes):
        byte, shift = divmod(bits * i, 8)
        parts[byte] |= units[..., i] << shift
        if shift + bits > 8:
            parts[byte + 1] |= units[..., i] >> (8 - shift)
    return torch.stack(parts, -1).flatten(1)


def unpack(packed_OB: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of pack: uint8 codes [O, I]."""
    if bits == 8:
        return packed_OB
    num_codes, num_bytes = _UNIT[bits]
    units = packed_OB.view(packed_OB.shape[0], -1, num_bytes)
    codes = []
    for i in range(num_codes):
        byte, shift = divmod(bits * i, 8)
        code = units[..., byte] >> shift
        if shift + bits > 8:
            code |= units[..., byte + 1] << (8 - shift)
        codes.append(code.bitwise_and_(2**bits - 1))
    return torch.stack(codes, -1).flatten(1)


def as_bits(scales_OK: torch.Tensor) -> torch.Tensor:
    """The scales' bits as integers: int32 [O, K] for fp32, uint8 [O, 2K] for 16-bit dtypes (Gloo has no int16)."""
    scales_OK = scales_OK.contiguous()
    return scales_OK.view(torch.int32 if scales_OK.dtype == torch.float32 else torch.uint8)


def as_scales(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of as_bits: scales [O, K] in their dtype `dtype`."""
    return bits.view(dtype)
