"""Weights that other programs stored quantized, decoded to bf16 as they are read.

fp8, mxfp4, GPTQ, AWQ, compressed-tensors.

`decoded` names the tensors a plain folder would have; everything after it (conversion, quantization, sharding) sees
those. Formulas: fp8 by blocks, Liu et al. 2024 (DeepSeek-V3); mxfp4, OCP Microscaling Formats 1.0; GPTQ, Frantar et al.
2022; AWQ, Lin et al. 2023, both in AutoGPTQ's and AutoAWQ's packing; compressed-tensors' own formats.

O out_features, I in_features, E experts, G groups of a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

DTYPE = torch.bfloat16
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the column at each place of a word of 4-bit codes is stored
IGNORED = ("input_scale", "input_zero_point", "k_scale", "v_scale", "q_scale", "output_scale")


FLOATS = ("F32", "F16", "BF16")
FP8 = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2"}
INTEGERS = ("I32", "I64")
OF_TENSOR = ((), (1,), (1, 1))  # shapes of one scale for all


@dataclass(frozen=True)
class Part:
    """A stored tensor that a weight is made of, and the dtypes and shapes that config.json leaves it.
    `argument`: of the formula; `kinds`: safetensors' dtypes.
    """

    argument: str
    name: str
    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    needed: bool = True


@dataclass(frozen=True)
class Decoded:
    """One weight: the stored tensors it is made of, its shape, and how."""

    parts: dict[str, str]  # {argument of the formula: stored tensor}
    shape: tuple[int, ...]
    formula: Callable  # -> the weight, fp32


def decoded(stored: dict[str, tuple[str, tuple]], config: dict) -> dict[str, Decoded]:
    """{name a plain folder would have: how it is decoded} of a folder's tensors; empty for plain folders.

    `stored`: {tensor in its files: (safetensors dtype, shape)}; `config`: its quantization_config. ValueError for a
    tensor that is missing, or of another dtype or shape than config.json announces.
    """
    found = {}
    for name, (_, shape) in stored.items():
        head, _, leaf = name.rpartition(".")
        layouts = _layouts(name, head, leaf, shape, stored, config)
        if layouts:
            if leaf.endswith("_blocks"):
                plain = name.removesuffix("_blocks")
            else:
                plain = f"{head}.weight"
            found[plain] = _first_that_fits(layouts, stored)
    return found


def _first_that_fits(layouts: list, stored: dict) -> Decoded:
    """The weight by the first (parts, shape, formula) whose parts are all as announced; ValueError of the first."""
    faults = [next((f for part in parts if (f := _fault(part, stored))), None) for parts, _, _ in layouts]
    if None not in faults:
        raise ValueError(faults[0])
    parts, shape, formula = layouts[faults.index(None)]
    return Decoded({part.argument: part.name for part in parts if part.name in stored}, shape, formula)


def _fault(part: Part, stored: dict) -> str | None:
    """Difference between a stored tensor and its declaration in config.json; None if there is none."""
    if part.name not in stored:
        if part.needed:
            return f"{part.name} is missing, and config.json announces it"
        return None
    kind, shape = stored[part.name]
    if kind not in part.kinds:
        return f"{part.name} is {kind}, must be {' or '.join(part.kinds)}"
    if tuple(shape) not in part.shapes:
        return f"{part.name} is {list(shape)}, must be {' or '.join(str(list(s)) for s in part.shapes)}"
    return None


def parts_of(found: dict[str, Decoded], stored: Mapping[str, tuple[str, tuple]]) -> set[str]:
    """Stored tensors that no plain folder has: the parts of weights, and scales of activations."""
    parts = {part for one in found.values() for part in one.parts.values()} - found.keys()
    return parts | {n for n in stored if found and n.rpartition(".")[2] in IGNORED}


def _layouts(
    name: str, head: str, leaf: str, shape: tuple, stored: Mapping[str, tuple[str, tuple]], config: Any
) -> list[tuple[list[Part], tuple, Callable]]:
    """Possible layouts of this tensor's weight: (parts, its shape, decoder); none if the tensor is plain."""
    method = config.get("quant_method")
    if method == "mxfp4" and leaf.endswith("_blocks"):
        return [_mxfp4(name, shape)]
    if method in ("gptq", "awq"):
        if leaf == "qweight":
            return [_packed_words(head, shape, stored, config)]
        return []
    schemes = [g["weights"] for g in (config.get("config_groups") or {}).values() if g.get("weights")] or [{}]
    if leaf == "weight_packed":
        return [_packed_rows(head, shape, scheme) for scheme in schemes]
    scale = next((n for n in (f"{name}_scale_inv", f"{name}_scale") if n in stored), None)
    if leaf != "weight" or scale is None:
        return []
    if len(shape) != 2:
        raise ValueError(f"{name} is {list(shape)} beside scales, must be a matrix")
    if method == "fp8":
        return [_fp8(name, scale, shape, config)]
    return [_codes(head, shape, s) for s in schemes]


def _mxfp4(name: str, shape: tuple):
    """gpt_oss: [E, O, G, 16] beside [E, O, G]."""
    if len(shape) != 4 or shape[3] != 16:
        raise ValueError(f"{name} is {list(shape)}, must be [experts, out_features, groups, 16]")
    scales = Part("scales_EOG", f"{name.removesuffix('_blocks')}_scales", ("U8",), (tuple(shape[:3]),))
    return [Part("blocks_EOGB", name, ("U8",), (shape,)), scales], (shape[0], 32 * shape[2], shape[1]), mxfp4


def _packed_words(head: str, shape: tuple, stored: Mapping[str, tuple[str, tuple]], config: Any):
    """GPTQ [I * bits / 32, O] and AWQ [I, O * bits / 32], int32."""
    bits = config.get("bits") or config.get("w_bit") or 4
    is_awq = config.get("quant_method") == "awq"
    per = 32 // bits
    columns, rows = (shape[0], shape[1] * per) if is_awq else (shape[0] * per, shape[1])
    size = config.get("group_size", config.get("q_group_size"))
    if size is None:
        size = columns // stored.get(f"{head}.scales", ("", (1,)))[1][0]
    size = columns if size == -1 else size
    groups = -(-columns // size)
    parts = [
        Part("qweight", f"{head}.qweight", ("I32",), (shape,)),
        Part("qzeros", f"{head}.qzeros", ("I32",), ((groups, rows // per),)),
        Part("scales_GO", f"{head}.scales", FLOATS, ((groups, rows),)),
    ]
    if is_awq:
        return parts, (rows, columns), partial(awq, bits=bits, size=size)
    parts.append(
        Part("group_of_I", f"{head}.g_idx", INTEGERS, ((columns,),), bool(config.get("desc_act")) and groups > 1)
    )
    older = config.get("checkpoint_format", "gptq") != "gptq_v2"
    return parts, (rows, columns), partial(gptq, bits=bits, older=older, size=size)


def _scales_of(scheme: dict, rows: int, columns: int) -> tuple[tuple, tuple]:
    """(shapes that compressed-tensors' scales may have, rows and columns that share one) of a scheme."""
    size: Any = scheme.get("group_size")
    strategy = scheme.get("strategy")
    of_rows = (rows, 1), (rows,)
    if strategy == "block":
        a, b = scheme["block_structure"]
        return ((-(-rows // a), -(-columns // b)),), (a, b)
    if strategy in ("group", "tensor_group") or strategy is None and size not in (None, -1):
        return ((rows, -(-columns // size)),), (1, size)
    named = {"tensor": OF_TENSOR, "channel": of_rows, "token": of_rows}
    return named[strategy] if strategy else of_rows if size == -1 else (*OF_TENSOR, *of_rows), ()


def _more(head: str, scheme: dict, zero_kind: str, zero_shapes: tuple, columns: int) -> list[Part]:
    """Zero points of an asymmetric scheme and groups of columns ordered by activation, in this order."""
    ordered = scheme.get("actorder") in ("group", "dynamic", True)
    return [
        Part("zero", f"{head}.weight_zero_point", (zero_kind,), zero_shapes, scheme.get("symmetric") is False),
        Part("group_of_I", f"{head}.weight_g_idx", INTEGERS, ((columns,),), ordered),
    ]


def _packed_rows(head: str, shape: tuple, scheme: dict):
    """compressed-tensors' pack-quantized: [O, I * bits / 32], int32, beside weight_shape."""
    bits = scheme.get("num_bits", 4)
    rows = shape[0]
    columns = shape[1] * 32 // bits
    shapes, blocks = _scales_of(scheme, rows, columns)
    zeros = tuple((-(-s[0] * bits // 32), *s[1:]) if s else s for s in shapes)  # packed along rows
    parts = [
        Part("words", f"{head}.weight_packed", ("I32",), (shape,)),
        Part("scale_OG", f"{head}.weight_scale", FLOATS, shapes),
        Part("shape", f"{head}.weight_shape", INTEGERS, ((2,),)),
        *_more(head, scheme, "I32", zeros, columns),
    ]
    return parts, (rows, columns), partial(packed_rows, bits=bits, blocks=blocks)


def _codes(head: str, shape: tuple, scheme: dict):
    """compressed-tensors' other formats: a code per weight, fp8 or int8."""
    named: dict[str | None, tuple[str, ...]] = {"float": (FP8["e4m3"],), "int": ("I8",)}
    kinds = named.get(scheme.get("type"), (FP8["e4m3"], "I8"))
    shapes, blocks = _scales_of(scheme, *shape)
    parts = [
        Part("codes_OI", f"{head}.weight", kinds, (shape,)),
        Part("scale", f"{head}.weight_scale", FLOATS, shapes),
        *_more(head, scheme, "I8", shapes, shape[1]),
    ]
    return parts, shape, partial(scaled, blocks=blocks)


def _fp8(name: str, scale: str, shape: tuple, config: Any):
    """fp8 with one scale per block of weight_block_size, or without one per tensor, row or 128 x 128."""
    a, b = blocks = tuple(config.get("weight_block_size") or (128, 128))
    shapes: tuple = ((-(-shape[0] // a), -(-shape[1] // b)),)
    if not config.get("weight_block_size"):
        shapes = (*shapes, *OF_TENSOR, (shape[0], 1), (shape[0],))
    codes = Part("codes_OI", name, (FP8.get(config.get("fmt") or "e4m3", ""),), (shape,))
    return [codes, Part("scale", scale, (*FLOATS, "F8_E8M0"), shapes)], shape, partial(scaled, blocks=blocks)


# ---- formulas


def scaled(
    codes_OI: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    group_of_I: torch.Tensor | None = None,
    blocks: tuple = (),
) -> torch.Tensor:
    """fp8 or int8 codes times their scale: one number, one per row, or one per block of rows and columns.
    `group_of_I`: each column's group, where columns were ordered by activation.
    """
    codes = codes_OI.float()
    scale = scale.float()
    if group_of_I is not None and not (group_of_I == -1).all():  # -1: columns are in order
        check_groups(group_of_I, scale.shape[1])
        scale = scale[:, group_of_I.long()]
        if zero is None:
            zero = None
        else:
            zero = zero[:, group_of_I.long()]
    if zero is not None:
        codes = codes - spread(zero.float(), codes.shape, blocks)
    return codes * spread(scale, codes.shape, blocks)


def spread(scale: torch.Tensor, shape: tuple[int, ...], blocks: tuple = ()) -> torch.Tensor:
    """Scales [], [O], [O, G] or [O / a, I / b] at every weight of [O, I]; the last block may be cut.

    `blocks`: (a, b), if the config gives them. ValueError if the scales do not fit the weight.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.ndim == 1:
        scale = scale.unsqueeze(1)
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            count = scale.shape[axis]
            if blocks:
                block = blocks[axis]
            elif count and size % count == 0:
                block = size // count
            else:
                block = 128
            if not count or -(-size // block) != count:
                raise ValueError(f"its scales are {list(scale.shape)} for a weight of {list(shape)}")
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    return scale


def mxfp4(blocks_EOGB: torch.Tensor, scales_EOG: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, low nibble first; a block of 32 shares the exponent scale - 127. [E, O, G, 16] -> [E, I, O]."""
    values = torch.tensor(MXFP4_VALUES)
    codes = torch.stack((blocks_EOGB & 15, blocks_EOGB >> 4), -1).flatten(-2).long()
    exponents = scales_EOG.to(torch.int32) - 127
    return torch.ldexp(values[codes], exponents.unsqueeze(-1)).flatten(2).transpose(1, 2)


def unpacked(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Codes from int32 words along `axis`, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    if axis == 1:
        return codes.flatten(-2)
    return codes.transpose(1, 2).flatten(0, 1)


def check_groups(group_of_I: torch.Tensor, count: int) -> None:
    """Raises ValueError for columns in a group that has no scale."""
    if not (0 <= group_of_I.min() and group_of_I.max() < count):
        raise ValueError(f"its g_idx names groups that its {count} scales do not have")


def gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales_GO: torch.Tensor,
    group_of_I: torch.Tensor | None = None,
    bits: int = 4,
    older: bool = True,
    size: int | None = None,
) -> torch.Tensor:
    """W[i, o] = s[g(i), o] * (q[i, o] - z[g(i), o]), transposed to [O, I]; the older format stores z - 1."""
    codes_IO = unpacked(qweight, bits, 0)
    zeros_GO = unpacked(qzeros, bits, 1) + (1 if older else 0)
    if group_of_I is None:
        group_of_I = torch.arange(len(codes_IO)) // (size or len(codes_IO) // len(scales_GO))
    check_groups(group_of_I, len(scales_GO))
    group = group_of_I.long()
    return ((codes_IO - zeros_GO[group]).float() * scales_GO.float()[group]).t()


def awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales_GO: torch.Tensor, bits: int = 4, size: int | None = None
) -> torch.Tensor:
    """W[i, o] = s[g(i), o] * (q[i, o] - z[g(i), o]), transposed to [O, I]; columns of a word are interleaved."""
    codes_IO, zeros_GO = (_in_order(unpacked(words, bits, 1)) for words in (qweight, qzeros))
    group = torch.arange(len(codes_IO)) // (size or len(codes_IO) // len(scales_GO))
    return ((codes_IO - zeros_GO[group]).float() * scales_GO.float()[group]).t()


def _in_order(codes: torch.Tensor):
    return codes.unflatten(1, (-1, len(AWQ_ORDER)))[..., AWQ_ORDER].flatten(1)


def packed_rows(
    words: torch.Tensor,
    scale_OG: torch.Tensor,
    shape: torch.Tensor,
    zero: torch.Tensor | None = None,
    group_of_I: torch.Tensor | None = None,
    bits: int = 4,
    blocks: tuple = (),
) -> torch.Tensor:
    """compressed-tensors' packed integers: codes are stored plus half their range, zero points packed along rows."""
    rows, columns = shape.tolist()
    if rows != len(words) or -(-columns * bits // 32) != words.shape[1]:
        raise ValueError(f"its weight_shape is {[rows, columns]}, its codes are {list(words.shape)} of {bits} bits")
    codes = unpacked(words, bits, 1)[:rows, :columns] - 2 ** (bits - 1)
    if zero is not None:
        zero = unpacked(zero, bits, 0)[:rows] - 2 ** (bits - 1)
    return scaled(codes, scale_OG, zero, group_of_I, blocks)
