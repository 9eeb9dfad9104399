"""NF4 in plain torch, on any device: 4-bit codes with one scale per block of a row.

Dettmers et al. 2023 (QLoRA), appendix E: 16 levels at equal-mass quantiles of a normal distribution. Blocks never cross
rows, so weights can be sharded row-wise; the same bytes dequantize identically on every device. Without double
quantization, and if the block size divides in_features, bitwise equal to bitsandbytes' NF4. Double quantization is not
bitsandbytes': scales become uint8, linear between the least and the largest of 256 blocks of a row.

O out_features, I in_features, P I padded to full blocks, B bytes of a row (P / 2), K blocks per row (P / block), G
groups of 256 blocks.
"""

import importlib.util
import subprocess
from collections.abc import Callable
from functools import cache

import torch

from finetune.quantizers import bnb, packing
from finetune.quantizers.linear import Format

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
SCALES_GROUP = 256
BITSANDBYTES_BELOW = 2048  # from here on bitsandbytes runs compiled torch operations, not its kernel
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What Triton raises without a compiler, without Python's headers, or on a device that it does not compile for.
TRITON_FAILURES: tuple[type[Exception], ...] = (
    *(RuntimeError, ImportError, OSError, AttributeError, TypeError, ValueError, AssertionError),
    *(NotImplementedError, subprocess.SubprocessError),
)


def quantize(weight_OI: torch.Tensor, fmt: Format) -> dict[str, torch.Tensor]:
    """{'packed' uint8 [O, P/2], 'absmax' int32 bits of fp32 [O, K]}; with double_quant, 'absmax' uint8 [O, K] and
    'absmax_range' int32 bits [O, 2G] instead. The first of two codes is in the high nibble. Quantizes chunks of rows.
    """
    (rows, cols), block = weight_OI.shape, fmt.group_size
    blocks = -(-cols // block)
    packed = torch.empty(rows, blocks * block // 2, dtype=torch.uint8, device=weight_OI.device)
    absmax = torch.empty(rows, blocks, dtype=torch.float32, device=weight_OI.device)
    levels = torch.tensor(LEVELS, device=weight_OI.device)
    middles = (levels[1:] + levels[:-1]) / 2
    for own in packing.blocks(weight_OI):
        part = weight_OI[own].float()
        part = torch.nn.functional.pad(part, (0, blocks * block - cols)).view(-1, blocks, block)
        absmax[own] = part.abs().amax(-1)
        scale = absmax[own].clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        # Times the reciprocal, as bitsandbytes: a quotient falls on another side of a midpoint once in 2e7 values.
        codes = _nearest_levels((part * (1 / scale)).flatten(1), middles)
        packed[own] = (codes[:, 0::2] << 4) | codes[:, 1::2]
    if not fmt.double_quant:
        return {"packed": packed, "absmax": absmax.view(torch.int32)}
    codes_OK, range_O2G = _quantize_absmax(absmax)
    return {"packed": packed, "absmax": codes_OK, "absmax_range": range_O2G.view(torch.int32)}


def _nearest_levels(values: torch.Tensor, middles: torch.Tensor) -> torch.Tensor:
    """torch.bucketize(values, middles) for values in [-1, 1], ten times as fast on a CPU.

    Values are binned into cells that contain at most one of `middles`: a table lookup and one comparison.
    """
    cells = 64
    last = 128
    index = ((values + 1) * cells).to(torch.int32).clamp_(0, last).flatten()
    cell_of_middle = ((middles + 1) * cells).to(torch.int64)
    below = (cell_of_middle < torch.arange(last + 1, device=values.device).unsqueeze(1)).sum(1, dtype=torch.uint8)
    own = torch.full((last + 1,), torch.inf, device=values.device)
    own[cell_of_middle] = middles
    above = values.flatten() > own.index_select(0, index)
    return (below.index_select(0, index) + above).view(values.shape)


def _quantize_absmax(absmax_OK: torch.Tensor):
    """8-bit codes of the scales between the minimum and maximum of each 256 in a row, and those two values."""
    rows, blocks = absmax_OK.shape
    groups = -(-blocks // SCALES_GROUP)
    pad = groups * SCALES_GROUP - blocks
    grouped = torch.cat([absmax_OK, absmax_OK[:, -1:].expand(rows, pad)], 1).view(rows, groups, SCALES_GROUP)
    low = grouped.amin(-1, keepdim=True)
    high = grouped.amax(-1, keepdim=True)
    step = ((high - low) / 255).clamp_min(torch.finfo(torch.float32).tiny)
    codes = ((grouped - low) / step).round().to(torch.uint8)
    return codes.view(rows, -1)[:, :blocks].contiguous(), torch.cat([low, high], -1).view(rows, -1)


def dequantize(tensors: dict, dtype: torch.dtype, shape: tuple, fmt: Format) -> torch.Tensor:
    """The dequantized weight [O, I]: level[code] * absmax in fp32, cast to `dtype`.

    On a GPU one Triton kernel, on a CPU bitsandbytes' kernel, where they are there and give the same bits.
    """
    function: Callable = torch.ops.finetune.nf4_dequantize
    if tensors["packed"].device.type == "cpu" and not torch.compiler.is_compiling():
        function = _dequantize
    return function(tensors["packed"], tensors["absmax"], tensors.get("absmax_range"), shape[1], fmt.group_size, dtype)


def _dequantize(
    packed_OB: torch.Tensor,
    absmax: torch.Tensor,
    absmax_range: torch.Tensor | None,
    columns: int,
    block: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    device = packed_OB.device
    tensors = {"packed": packed_OB, "absmax": absmax} | ({} if absmax_range is None else {"absmax_range": absmax_range})
    if device.type != "cpu" and triton_error(device, dtype) is None:
        from finetune.quantizers import nf4_triton

        return nf4_triton.dequantize(tensors, _levels(device), columns, block, dtype)
    absmax_OK = _absmax(tensors)
    if device.type == "cpu" and block < BITSANDBYTES_BELOW and _bitsandbytes_is_equal():
        padded = (len(packed_OB), 2 * packed_OB.shape[1])
        return bnb.dequantize_blocks(packed_OB, absmax_OK, padded, block, "nf4", dtype)[:, :columns]
    return in_plain_torch(packed_OB, absmax_OK, block)[:, :columns].to(dtype)


# One operation to whoever traces or counts: torch.compile, and tensors on meta. Its result is contiguous.
TORCH_OPS = torch.library.Library("finetune", "FRAGMENT")
TORCH_OPS.define(
    "nf4_dequantize(Tensor packed, Tensor absmax, Tensor? absmax_range, SymInt columns, int block, ScalarType dtype) "
    "-> Tensor"
)


@torch.library.impl(TORCH_OPS, "nf4_dequantize", "CompositeExplicitAutograd")
def _nf4_dequantize(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    absmax_range: torch.Tensor | None,
    columns: int,
    block: int,
    dtype: torch.dtype,
):
    return _dequantize(packed, absmax, absmax_range, columns, block, dtype).contiguous()


@torch.library.register_fake("finetune::nf4_dequantize", lib=TORCH_OPS)
def _nf4_dequantize_on_meta(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    absmax_range: torch.Tensor | None,
    columns: int,
    block: int,
    dtype: torch.dtype,
):
    return packed.new_empty(packed.shape[0], columns, dtype=dtype)


def kernel_of(device: str) -> str:
    """The kernel of `dequantize` on a device."""
    where = torch.device(device)
    if where.type == "cpu":
        return "bitsandbytes' kernel, equal bit for bit" if _bitsandbytes_is_equal() else "plain torch"
    error = triton_error(where, torch.float32)
    if error:
        return f"plain torch (our Triton kernel: {error})"
    return "our Triton kernel"


@cache
def triton_error(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason not to use the Triton kernel for `dtype` on a device; None if it is bitwise equal to plain torch.

    Tried once per device and type: all 256 bytes under several scales, of 4 and of 8 bits. Triton compiles when it
    first runs, which needs a C compiler and Python's headers.
    """
    if not importlib.util.find_spec("triton"):
        return "triton is not installed"
    try:
        from finetune.quantizers import nf4_triton

        for tensors in _trial_tensors(device):
            found = nf4_triton.dequantize(tensors, _levels(device), TRIAL_COLUMNS, 64, dtype)
            wanted = in_plain_torch(tensors["packed"], _absmax(tensors), 64)[:, :TRIAL_COLUMNS].to(dtype)
            if not torch.equal(found, wanted):
                return f"other numbers than plain torch's in {str(dtype).removeprefix('torch.')}"
    except (*TRITON_FAILURES, *triton_errors()) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return None


TRIAL_COLUMNS = 250


def _trial_tensors(device: torch.device | str) -> list[dict[str, torch.Tensor]]:
    packed = torch.arange(256, dtype=torch.uint8).repeat(3).view(6, 128)
    absmax = torch.tensor([1.0, 0.0123, 3e-7, 1.7, 250.0, 0.0]).repeat(4).view(6, 4)
    codes_OK, range_O2G = _quantize_absmax(absmax)
    single = {"packed": packed, "absmax": absmax.view(torch.int32)}
    double = {"packed": packed, "absmax": codes_OK, "absmax_range": range_O2G.view(torch.int32)}
    return [{name: tensor.to(device) for name, tensor in kind.items()} for kind in (single, double)]


def triton_errors() -> tuple[type[Exception], ...]:
    """Triton's own: what its compiler raises is no RuntimeError."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


def in_plain_torch(packed_OB: torch.Tensor, absmax_OK: torch.Tensor, block: int) -> torch.Tensor:
    """The dequantized weight [O, P] in fp32, by operations that every device has."""
    # One lookup decodes both codes of a byte: a pair of fp32 levels is one 8-byte element.
    pairs = _level_pairs(packed_OB.device)
    weight = torch.index_select(pairs, 0, packed_OB.reshape(-1).int()).view(torch.float32)
    return weight.view(len(packed_OB), -1, block).mul_(absmax_OK.unsqueeze(-1)).view(len(packed_OB), -1)


@cache
def _bitsandbytes_is_equal() -> bool:
    """True if bitsandbytes is installed and dequantizes all 256 bytes under several scales to the bits of plain torch.
    Its rounding to 16 bits is part of the comparison.
    """
    if not importlib.util.find_spec("bitsandbytes"):
        return False
    single, _ = _trial_tensors("cpu")
    packed = single["packed"]
    absmax = single["absmax"].view(torch.float32)
    own = in_plain_torch(packed, absmax, 64)
    try:
        theirs = (bnb.dequantize_blocks(packed, absmax, (6, 256), 64, "nf4", dtype) for dtype in DTYPES)
        return all(torch.equal(own.to(found.dtype), found) for found in theirs)
    except (ImportError, RuntimeError, AttributeError, OSError):  # another version, or its library does not load
        return False


@cache
def _levels(device: torch.device) -> torch.Tensor:
    """The codebook on a device. Made once: the copy of a Python list waits for the device."""
    return torch.tensor(LEVELS, device=device)


@cache
def _level_pairs(device: torch.device) -> torch.Tensor:
    levels = _levels(device)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], -1)
    return pairs.view(torch.int64).reshape(-1)


def _absmax(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    if "absmax_range" not in tensors:
        return tensors["absmax"].view(torch.float32)
    codes_OK = tensors["absmax"]
    range_O2G = tensors["absmax_range"].view(torch.float32)
    low_OG, high_OG = range_O2G.view(len(codes_OK), -1, 2).unbind(-1)
    step_OG = (high_OG - low_OG) / 255
    absmax_OK = codes_OK.float()
    for i, group in enumerate(absmax_OK.split(SCALES_GROUP, 1)):
        group.mul_(step_OG[:, i : i + 1]).add_(low_OG[:, i : i + 1])
    return absmax_OK
