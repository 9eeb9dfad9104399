"""Weights that other programs stored quantized, decoded to bf16 as they are read.

fp8, mxfp4, GPTQ, AWQ, compressed-tensors.

`decoded` names the tensors a plain folder would have; everything after it (conversion, quantization, sharding) sees
those. Formulas: fp8 by blocks, Liu et al. 2024 (DeepSeek-V3); mxfp4, OCP Microscaling Formats 1.0; GPTQ, Frantar et al.
2022; AWQ, Lin et al. 2023, both in AutoGPTQ's and AutoAWQ's packing; compressed-tensors' own formats.

O out_features, I in_features, E experts, G groups of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPE = torch.bfloat16
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the column at each place of a word of 4-bit codes is stored
IGNORED = ("input_scale", "input_zero_point", "k_scale", "v_scale", "q_scale", "output_scale")


@dataclass(frozen=True)
class Decoded:
    """One weight: the stored tensors it is made of, its shape, and how."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    decode: Callable  # (*tensors) -> the weight, fp32


def decoded(shapes: dict[str, tuple], config: dict) -> dict[str, Decoded]:
    """{name a plain folder would have: how it is decoded} of a folder's tensors; empty for plain folders.
    `shapes`: of the tensors in its files; `config`: its quantization_config.
    """
    found = {}
    for name, shape in shapes.items():
        head, _, leaf = name.rpartition(".")
        made = _of(name, head, leaf, shape, shapes, config)
        if made is not None:
            found[made[0]] = made[1]
    return found


def parts_of(found: dict[str, Decoded], shapes: dict[str, tuple]) -> set[str]:
    """Stored tensors that no plain folder has: the parts of weights, and scales of activations."""
    parts = {part for one in found.values() for part in one.parts} - found.keys()
    return parts | {n for n in shapes if found and n.rpartition(".")[2] in IGNORED}


def _of(name, head, leaf, shape, shapes, config) -> tuple[str, Decoded] | None:
    if leaf.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in shapes:  # gpt_oss
        plain = name.removesuffix("_blocks")
        return plain, Decoded((name, f"{plain}_scales"), (shape[0], 32 * shape[2], shape[1]), mxfp4)
    if leaf == "qweight" and {f"{head}.qzeros", f"{head}.scales"} <= shapes.keys():
        return _packed_words(head, shape, shapes, config)
    if leaf == "weight_packed" and f"{head}.weight_scale" in shapes:
        return _packed_rows(head, shape, shapes, config)
    scale = next((n for n in (f"{name}_scale_inv", f"{name}_scale") if n in shapes), None)
    if leaf == "weight" and scale:
        zero = f"{head}.weight_zero_point"
        more = (zero,) if zero in shapes else ()
        blocks = tuple(config.get("weight_block_size") or ())
        return name, Decoded((name, scale, *more), shape, lambda *t: scaled(*t, blocks=blocks))
    return None


def _packed_words(head, shape, shapes, config) -> tuple[str, Decoded] | None:
    """GPTQ [I * bits / 32, O] and AWQ [I, O * bits / 32], int32."""
    bits = config.get("bits") or config.get("w_bit") or 4
    parts = tuple(f"{head}.{n}" for n in ("qweight", "qzeros", "scales"))
    if config.get("quant_method") == "awq":
        weight_shape = shape[1] * 32 // bits, shape[0]
        return f"{head}.weight", Decoded(parts, weight_shape, lambda q, z, s: awq(q, z, s, bits))
    older = config.get("checkpoint_format", "gptq") != "gptq_v2"
    order = (f"{head}.g_idx",) if f"{head}.g_idx" in shapes else ()
    weight_shape = shape[1], shape[0] * 32 // bits
    return f"{head}.weight", Decoded((*parts, *order), weight_shape, lambda *t: gptq(*t, bits=bits, older=older))


def _packed_rows(head, shape, shapes, config) -> tuple[str, Decoded]:
    """compressed-tensors' pack-quantized: [O, I * bits / 32], int32, beside weight_shape."""
    groups = config.get("config_groups") or {}
    bits = next((g["weights"]["num_bits"] for g in groups.values() if g.get("weights")), 4)
    weight_shape = shape[0], shape[1] * 32 // bits
    more = [n for n in ("weight_zero_point", "weight_g_idx") if f"{head}.{n}" in shapes]
    parts = tuple(f"{head}.{n}" for n in ("weight_packed", "weight_scale", "weight_shape", *more))

    def decode(packed, scale, shape, *rest):
        named = dict(zip(more, rest, strict=True))
        return packed_rows(packed, scale, shape, *map(named.get, ("weight_zero_point", "weight_g_idx")), bits=bits)

    return f"{head}.weight", Decoded(parts, weight_shape, decode)


# ---- formulas


def scaled(codes_OI, scale, zero=None, group_of_I=None, blocks: tuple = ()) -> torch.Tensor:
    """fp8 or int8 codes times their scale: one number, one per row, or one per block of rows and columns.
    `group_of_I`: each column's group, where columns were ordered by activation.
    """
    codes, scale = codes_OI.float(), scale.float()
    if group_of_I is not None and (group_of_I >= 0).all():
        scale = scale[:, group_of_I.long()]
        zero = None if zero is None else zero[:, group_of_I.long()]
    if zero is not None:
        codes = codes - spread(zero.float(), codes.shape, blocks)
    return codes * spread(scale, codes.shape, blocks)


def spread(scale, shape: tuple[int, int], blocks: tuple = ()) -> torch.Tensor:
    """Scales [], [O], [O, G] or [O / a, I / b] at every weight of [O, I]; the last block may be cut.

    `blocks`: (a, b), if the config gives them. ValueError if the scales do not fit the weight.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    scale = scale.unsqueeze(1) if scale.ndim == 1 else scale
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            count = scale.shape[axis]
            block = blocks[axis] if blocks else size // count if count and size % count == 0 else 128
            if not count or -(-size // block) != count:
                raise ValueError(f"its scales are {list(scale.shape)} for a weight of {list(shape)}")
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    return scale


def mxfp4(blocks_EOGB, scales_EOG) -> torch.Tensor:
    """Two codes a byte, low nibble first; a block of 32 shares the exponent scale - 127. [E, O, G, 16] -> [E, I, O]."""
    values = torch.tensor(MXFP4_VALUES)
    codes = torch.stack((blocks_EOGB & 15, blocks_EOGB >> 4), -1).flatten(-2).long()
    exponents = scales_EOG.to(torch.int32) - 127
    return torch.ldexp(values[codes], exponents.unsqueeze(-1)).flatten(2).transpose(1, 2)


def unpacked(words, bits: int, axis: int) -> torch.Tensor:
    """Codes from int32 words along `axis`, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(-2) if axis == 1 else codes.transpose(1, 2).flatten(0, 1)


def gptq(qweight, qzeros, scales_GO, group_of_I=None, bits: int = 4, older: bool = True) -> torch.Tensor:
    """W[i, o] = s[g(i), o] * (q[i, o] - z[g(i), o]), transposed to [O, I]; the older format stores z - 1."""
    codes_IO, zeros_GO = unpacked(qweight, bits, 0), unpacked(qzeros, bits, 1) + (1 if older else 0)
    if group_of_I is None:
        group_of_I = torch.arange(len(codes_IO)) // (len(codes_IO) // len(scales_GO))
    group = group_of_I.long()
    if not (0 <= group.min() and group.max() < len(scales_GO)):
        raise ValueError(f"its g_idx names groups that its {len(scales_GO)} scales do not have")
    return ((codes_IO - zeros_GO[group]).float() * scales_GO.float()[group]).t()


def awq(qweight, qzeros, scales_GO, bits: int = 4) -> torch.Tensor:
    """W[i, o] = s[g(i), o] * (q[i, o] - z[g(i), o]), transposed to [O, I]; columns of a word are interleaved."""
    codes_IO, zeros_GO = (_in_order(unpacked(words, bits, 1)) for words in (qweight, qzeros))
    size = len(codes_IO) // len(scales_GO)
    codes = codes_IO - zeros_GO.repeat_interleave(size, 0)
    return (codes.float() * scales_GO.float().repeat_interleave(size, 0)).t()


def _in_order(codes):
    return codes.unflatten(1, (-1, len(AWQ_ORDER)))[..., AWQ_ORDER].flatten(1)


def packed_rows(words, scale_OG, shape, zero=None, group_of_I=None, bits: int = 4) -> torch.Tensor:
    """compressed-tensors' packed integers: codes are stored plus half their range, zero points packed along rows."""
    rows, columns = shape.tolist()
    codes = unpacked(words, bits, 1)[:rows, :columns] - 2 ** (bits - 1)
    if zero is not None:
        zero = unpacked(zero, bits, 0)[:rows] - 2 ** (bits - 1)
    return scaled(codes, scale_OG, zero, group_of_I)
