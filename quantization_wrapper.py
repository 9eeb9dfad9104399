"""Quantization methods for frozen weights, and quantize_model, which applies one to a model.

`METHODS` has one row per method: to add one, add a file in finetune/quantizers/ and a row here. A method converts a
weight to integer tensors and back; the layer that holds them, and its autograd, are shared.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from finetune.backend.probes import PROBE_FAILURES
from finetune.errors import first_line


class QuantizationMethod(str, Enum):
    """Method names, including those of the older scripts."""

    NF4 = "nf4"
    BNB_NF4 = "bnb_nf4"
    BNB_FP4 = "bnb_fp4"
    BNB_INT8 = "bnb_int8"
    HQQ = "hqq"
    HQQ_4BIT = "hqq_4bit"
    MLX = "mlx"
    MLX_INT4 = "mlx_int4"
    MLX_INT8 = "mlx_int8"
    QUANTO = "quanto"
    QUANTO_INT2 = "quanto_int2"
    QUANTO_INT4 = "quanto_int4"
    QUANTO_INT8 = "quanto_int8"
    NONE = "none"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Stored:
    """A quantized weight [all_rows, columns], of which a rank holds `rows`. `scale_bytes`: per scale in the weight's
    dtype.
    """

    bits: int
    group_size: int
    double_quant: bool
    all_rows: int
    columns: int
    scale_bytes: int = 4
    ranks: int = 1

    @property
    def rows(self) -> int:
        return -(-self.all_rows // self.ranks)


def blocks_of_rows(w: Stored) -> int:
    """Bytes of rows padded to full blocks, with a scale per block."""
    blocks = -(-w.columns // w.group_size)
    if w.double_quant:
        scales = blocks + 8 * -(-blocks // 256)
    else:
        scales = 4 * blocks
    return w.rows * (blocks * w.group_size // 2 + scales)


def flat_blocks(w: Stored) -> int:
    """Bytes of blocks of the flattened matrix, with a scale per block."""
    numbers = w.all_rows * w.columns
    groups = _parts(_parts(numbers, w.group_size), 256)
    if w.columns % w.group_size == 0:
        codes = w.rows * w.columns // 2
        blocks = w.rows * w.columns // w.group_size
    else:
        codes = _parts(_parts(numbers, 2), w.ranks)
        blocks = _parts(_parts(numbers, w.group_size), w.ranks)
    if w.double_quant:
        return codes + blocks + 4 * _parts(groups, w.ranks) + 4
    return codes + 4 * blocks


def _parts(number: int, size: int) -> int:
    return -(-number // size)


def groups_of_rows(w: Stored) -> int:
    """Bytes of groups within rows, with a scale and a zero in fp32 per group."""
    return w.rows * w.columns * w.bits // 8 + w.rows * (w.columns // w.group_size) * 8


def groups_in_dtype(w: Stored) -> int:
    """The same with scale and zero in the weight's dtype."""
    return w.rows * w.columns * w.bits // 8 + w.rows * (w.columns // w.group_size) * 2 * w.scale_bytes


@dataclass(frozen=True)
class Method:
    """A row of METHODS. `module`: has quantize and dequantize.

    `quant_types`: quant types per bit width, the default first; none: per-channel scales (one per row). `package`: must
    be importable; `install`: its install command. `double_quant`: bit widths whose scales can be quantized too.
    `groups_fill_rows`: groups must fill a row. `needs_full_matrix`: bit widths whose result depends on the full matrix,
    not only on the row; `flat_blocks`: those whose blocks run over the flattened matrix. `solver_bytes`: bytes per
    weight of what its solver keeps of a full matrix while quantizing it.

    `stored_bytes`: of a weight whose scales are not per row. `pads_rows`: dequantized rows are padded to full groups.
    `dequantizing_bytes`: per weight while plain torch dequantizes it; None: fp32, and the result if that has another
    dtype. `cuda_kernel`: on CUDA one kernel writes the weight in the compute dtype; `triton_error` of its module says
    where it does not. `cpu_kernel`: on a CPU bitsandbytes' does, where it is installed. `offered`: {bits: the price at
    which a run that does not fit is offered them}. `names`: {member of QuantizationMethod: (bit widths, quant type if
    the name implies one)}, the default first; a method without older names needs none.
    """

    module: str
    quant_types: dict[int, tuple[str, ...]]
    group_sizes: tuple[int, ...]
    summary: str
    package: str | None = None
    install: str = ""
    double_quant: tuple[int, ...] = ()
    groups_fill_rows: bool = False
    needs_full_matrix: tuple[int, ...] = ()
    flat_blocks: tuple[int, ...] = ()
    solver_bytes: int = 0
    stored_bytes: Callable[[Stored], int] = groups_of_rows
    pads_rows: bool = False
    dequantizing_bytes: int | None = None
    cuda_kernel: bool = False
    cpu_kernel: bool = False
    offered: dict[int, str] = field(default_factory=dict)
    names: dict[QuantizationMethod, tuple[tuple[int, ...], str | None]] = field(default_factory=dict)

    @property
    def bits(self) -> tuple[int, ...]:
        """Bit widths, the default first."""
        return tuple(self.quant_types)


POWERS = tuple(2**i for i in range(4, 13))
METHODS = {
    "nf4": Method(
        "finetune.quantizers.nf4",
        {4: ("nf4",)},
        POWERS,
        double_quant=(4,),
        summary="NF4 in plain torch: any device, blocks within rows",
        stored_bytes=blocks_of_rows,
        pads_rows=True,
        dequantizing_bytes=6,
        cuda_kernel=True,
        cpu_kernel=True,
        names={QuantizationMethod.NF4: ((4,), "nf4")},
    ),
    "bnb": Method(
        "finetune.quantizers.bnb",
        {4: ("nf4", "fp4"), 8: ()},
        POWERS[1:],
        double_quant=(4,),
        needs_full_matrix=(4,),
        package="bitsandbytes",
        install="pip install bitsandbytes",
        summary="bitsandbytes' kernels: NF4, FP4, and INT8 with per-row scales",
        flat_blocks=(4,),
        stored_bytes=flat_blocks,
        cpu_kernel=True,
        names={
            QuantizationMethod.BNB_NF4: ((4,), "nf4"),
            QuantizationMethod.BNB_FP4: ((4,), "fp4"),
            QuantizationMethod.BNB_INT8: ((8,), None),
        },
    ),
    "hqq": Method(
        "finetune.quantizers.hqq",
        {bits: ("affine",) for bits in (4, 8, 3, 2)},
        POWERS[:7],
        needs_full_matrix=(4, 8, 3, 2),
        solver_bytes=4,
        package="hqq",
        install="pip install hqq",
        groups_fill_rows=True,
        summary="half-quadratic quantization: scales and zeros optimized per matrix",
        offered={2: "weights rounded to 2 bits: off by 43 % instead of 9 %, see docs/quantization.md"},
        names={QuantizationMethod.HQQ: ((4, 8, 3, 2), None), QuantizationMethod.HQQ_4BIT: ((4,), None)},
    ),
    "quanto": Method(
        "finetune.quantizers.quanto",
        {4: ("affine",), 8: (), 2: ("affine",)},
        POWERS[:7],
        package="optimum.quanto",
        install="pip install optimum-quanto",
        groups_fill_rows=True,
        summary="optimum-quanto: int4 and int2 per group, int8 with per-row scales",
        names={
            QuantizationMethod.QUANTO: ((4, 8, 2), None),
            QuantizationMethod.QUANTO_INT2: ((2,), None),
            QuantizationMethod.QUANTO_INT4: ((4,), None),
            QuantizationMethod.QUANTO_INT8: ((8,), None),
        },
    ),
    "mlx": Method(
        "finetune.quantizers.mlx",
        {bits: ("affine",) for bits in (4, 8, 6, 5, 3, 2)},
        (32, 64, 128),
        groups_fill_rows=True,
        summary="MLX's affine format in plain torch: the same packed bits as mx.quantize",
        stored_bytes=groups_in_dtype,
        names={
            QuantizationMethod.MLX: ((4, 8, 6, 5, 3, 2), None),
            QuantizationMethod.MLX_INT4: ((4,), None),
            QuantizationMethod.MLX_INT8: ((8,), None),
        },
    ),
}
# What `auto` tries, in this order. The first needs no package and takes any device and any width: a plan assumes it
# where nothing was probed.
AUTO_ORDER = tuple(METHODS)
FIRST_METHOD = AUTO_ORDER[0]
NONE = ("none", (16,), None)


def row_of(method: QuantizationMethod | str) -> tuple[str, tuple[int, ...], str | None]:
    """(row of METHODS, bit widths with the default first, quant type if the name implies one) of a method's name."""
    for word, row in METHODS.items():
        if method in row.names:
            return word, *row.names[QuantizationMethod(method)]
        if method == word and not row.names:
            return word, row.bits, None
    return NONE


@dataclass
class QuantizationConfig:
    """Settings of the quantization of frozen weights. `compute_dtype`: a torch dtype, or None for the input's dtype.

    `bits` None: the method's default. `block_size`: older name of group_size for nf4 and bnb. Raises ValueError for an
    unsupported combination, listing the supported values.
    """

    method: QuantizationMethod | str = QuantizationMethod.NF4
    bits: int | None = None
    group_size: int = 64
    compute_dtype: Any = None
    storage_dtype: Any = None
    double_quant: bool = False
    quant_type: str | None = None
    block_size: int = 64
    quant_zero: bool = True
    quant_scale: bool = False
    layer_configs: dict = field(default_factory=dict)
    skip_modules: list = field(default_factory=lambda: ["lm_head"])
    backend_options: dict = field(default_factory=dict)

    def __post_init__(self):
        name, widths, book = row_of(self.method)
        if name not in METHODS or METHODS[name].names:
            self.method = QuantizationMethod(self.method)
        if self.bits is None:
            self.bits = widths[0]
        if name in ("nf4", "bnb") and self.block_size != 64:
            if self.group_size not in (64, self.block_size):
                raise ValueError(f"block_size {self.block_size}: contradicts group_size {self.group_size}. Give one.")
            self.group_size = self.block_size
        if name in METHODS and self.quant_type in (None, "nf4"):  # older programs pass "nf4" by default
            books = METHODS[name].quant_types.get(self.bits) or (None,)
            self.quant_type = book or ("nf4" if "nf4" in books else books[0])
        issue = issue_of(self)
        if issue:
            raise ValueError(issue)

    @property
    def backend(self) -> str:
        """The METHODS row: nf4, bnb, ... or none."""
        return row_of(self.method)[0]


def issue_of(config: QuantizationConfig) -> str | None:
    """The error for a combination that its method does not support, listing what it does; else None."""
    name, widths, _ = row_of(config.method)
    if name == "none":
        return None
    if config.bits not in widths:
        return f"bits {config.bits}: {config.method} has {', '.join(map(str, widths))}."
    problem = unsupported(name, config.bits, config.quant_type, config.group_size, config.double_quant)
    if problem:
        return problem.removeprefix("--")
    return None


def unsupported(
    backend: str, bits: int, quant_type: str | None, group_size: int, double_quant: bool = False
) -> str | None:
    """The error for a combination that no machine supports, listing the supported values; else None."""
    have = "; ".join(f"{name} at {'/'.join(map(str, sorted(m.bits)))} bits" for name, m in METHODS.items())
    if backend not in METHODS:
        return f"--quantization_backend {backend}: unknown. Available: {have}."
    method = METHODS[backend]
    if bits not in method.bits:
        return f"--n_bits {bits}: {backend} supports {'/'.join(map(str, sorted(method.bits)))} bits. Available: {have}."
    books = method.quant_types[bits]
    if quant_type is not None and quant_type not in books:
        rest = "has no choice of quant_type. Omit the flag"
        if books:
            rest = f"supports {', '.join(books)}"
        return f"--quant_type {quant_type}: {backend} at {bits} bits {rest}."
    if group_size not in method.group_sizes and not per_channel(backend, bits):
        low = method.group_sizes[0]
        high = method.group_sizes[-1]
        return f"--group_size {group_size}: {backend} supports powers of two from {low} to {high}. Use 64."
    if double_quant and bits not in method.double_quant:
        those = " and ".join(name for name, m in METHODS.items() if m.double_quant)
        return (
            f"--double_quant true: not supported by {backend} at {bits} bits, only by {those} at 4 bits. Omit the flag."
        )
    return None


def per_channel(backend: str, bits: int) -> bool:
    """True for per-row scales (per-channel quantization), where the group size does not matter."""
    return not METHODS[backend].quant_types[bits]


def group_mismatch(backend: str, bits: int, group_size: int, columns: int) -> bool:
    """True if the group size does not divide `columns`, for a method that needs it to."""
    return METHODS[backend].groups_fill_rows and not per_channel(backend, bits) and bool(columns % group_size)


def weight_bytes(
    method: str,
    bits: int,
    group_size: int,
    double_quant: bool,
    rows: int,
    columns: int,
    scale_bytes: int = 4,
    ranks: int = 1,
) -> int:
    """Bytes of a quantized weight [rows, columns], scales included; with row-wise sharding over ranks, one rank's.
    `scale_bytes`: bytes per scale in the weight's dtype, as stored by mlx.
    """
    stored = Stored(
        bits, group_size, double_quant, all_rows=rows, columns=columns, scale_bytes=scale_bytes, ranks=ranks
    )
    if per_channel(method, bits):
        return stored.rows * columns + 4 * stored.rows
    return METHODS[method].stored_bytes(stored)


def config_for(
    backend: str, bits: int = 4, quant_type: str | None = None, group_size: int = 64, double_quant: bool = False
) -> QuantizationConfig:
    """The QuantizationConfig for the flags of train.py, `backend` being a METHODS row."""
    row = METHODS[backend]
    book = quant_type or next(iter(row.quant_types[row.bits[0]]), None)

    def fit(name: QuantizationMethod) -> tuple[bool, bool]:
        widths, implied = row.names[name]
        return bits in widths, implied == book

    method = max(row.names, key=fit, default=backend)
    return QuantizationConfig(
        method, bits=bits, group_size=group_size, double_quant=double_quant, quant_type=quant_type
    )


def settings_of(backend: str, bits: int | None = None) -> dict:
    """The flags of train.py for a row of METHODS and its default quant type. `bits` None: its default."""
    if bits is None:
        bits = METHODS[backend].bits[0]
    books = METHODS[backend].quant_types[bits] or (None,)
    return dict(quantization_backend=backend, n_bits=bits, quant_type=books[0])


def rows_independent(config: QuantizationConfig, columns: int) -> bool:
    """True if quantizing a slice of rows equals slicing the quantized matrix."""
    if config.bits in METHODS[config.backend].flat_blocks:
        return not config.double_quant and columns % config.group_size == 0
    return config.bits not in METHODS[config.backend].needs_full_matrix


def columns_independent(config: QuantizationConfig, columns: int, parts: int) -> bool:
    """True if quantizing each of `parts` slices of the columns equals slicing the quantized matrix."""
    assert config.bits is not None, "a config settles its bits"
    if per_channel(config.backend, config.bits) or config.double_quant:  # scales, or their range, of full rows
        return False
    return rows_independent(config, columns) and columns % (parts * config.group_size) == 0


def module_of(name: str):
    """The module of a row of METHODS."""
    return importlib.import_module(METHODS[name].module)


def quantized_linear(
    weight_OI: Any, bias: Any, config: QuantizationConfig, fan_in_fan_out: bool = False, out_features: int | None = None
):
    """Quantizes `weight_OI` into a QuantizedLinear by `config`. ValueError if the shape does not fit the method.
    `out_features`: of the full matrix, if `weight_OI` is a slice of its rows.
    """
    import torch

    from finetune.quantizers.linear import Format, QuantizedLinear

    module = module_of(config.backend)
    if weight_OI.dtype in (torch.bfloat16, torch.float16):
        kept = weight_OI.dtype
    else:
        kept = torch.float32
    assert config.bits is not None, "a config settles its bits"
    fmt = Format(config.bits, config.group_size, config.quant_type, config.double_quant, kept)
    shape = (weight_OI.shape[0] if out_features is None else out_features, weight_OI.shape[1])
    tensors = module.quantize(weight_OI, fmt)
    dequantize = partial(module.dequantize, shape=shape, fmt=fmt)
    return QuantizedLinear(tensors, shape, dequantize, bias, fan_in_fan_out, config.compute_dtype)


def config_of_layer(config: QuantizationConfig, name: str) -> QuantizationConfig:
    """`config` overridden by the layer's own settings, `config.layer_configs[name]`."""
    own = config.layer_configs.get(name)
    if not own:
        return config
    changed: dict[str, Any] = dict(own)
    if "method" in own and "bits" not in own:
        changed = {"bits": None, "quant_type": None} | changed
    return replace(config, **changed)


def is_conv1d(module: object) -> bool:
    """True for transformers' Conv1D: a linear whose weight is stored as [I, O]."""
    return type(module).__name__ == "Conv1D"


def quantize_model(model: Any, config: QuantizationConfig, names: list[str] | None = None, device: Any = None):
    """Replaces the model's linears with quantized ones, one layer at a time, and returns the model.

    `names`: modules to replace; None: every nn.Linear whose name contains none of `config.skip_modules`. `device`:
    where to quantize and keep them. `config.layer_configs[name]` overrides fields of QuantizationConfig per layer.
    ValueError names the layer whose shape does not fit the method.
    """
    from torch import nn

    wanted = None
    if names is not None:
        wanted = set(names)
    for name, module in list(model.named_modules()):
        linear = isinstance(module, nn.Linear) or is_conv1d(module)
        if wanted is not None:
            chosen = name in wanted
        else:
            chosen = not any(s in name for s in config.skip_modules)
        if not (linear and chosen):
            continue
        own = config_of_layer(config, name)
        if own.backend == "none":
            continue
        if isinstance(module, nn.Linear):
            weight_OI = module.weight.detach()
        else:
            weight_OI = module.weight.detach().t()
        if device is not None:
            weight_OI = weight_OI.to(device)
        try:
            layer = quantized_linear(weight_OI, module.bias, own, not isinstance(module, nn.Linear))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        model.set_submodule(name, layer)
    return model


# ---- probing


def pairs() -> list[tuple[str, int]]:
    """All (method, bits) pairs, in AUTO_ORDER."""
    return [(name, bits) for name in AUTO_ORDER for bits in sorted(METHODS[name].bits, reverse=True)]


def probe(name: str, bits: int, device: str) -> dict:
    """Probes one layer's forward and backward on `device` against its dequantized weight.

    {'error': None or the failure; 'weight_error': |w' - w| / |w| for normal weights; 'product_error': relative error of
    the output against the dense matmul; 'slowdown': forward and backward time relative to the unquantized layer, 256
    tokens through 1024 x 1024; 'bits_per_weight': scales included; 'kernel': what dequantizes; 'failed': {'bf16' or
    'fp16': why it is not right in that type, in which a run computes}}.
    """
    missing = not_installed(name)
    if missing:
        return {"error": missing}
    import torch

    generator = torch.Generator().manual_seed(0)
    try:
        weight = torch.randn(1024, 1024, generator=generator).to(device)
        x = torch.randn(256, 1024, generator=generator).to(device).requires_grad_()
        layer = quantized_linear(weight, None, config_for(name, bits))
        y = layer(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        dense = layer.weight_of(layer.stored(), torch.float32)
        failed = {word: error for word in HALVES if (error := _half_error(layer, x.detach(), dense, word))}
        slowdown = _seconds(layer, x) / _seconds(lambda t: torch.nn.functional.linear(t, dense), x)
    except PROBE_FAILURES as error:
        return {"error": f"failed on {device}: {first_line(error)}"}
    with torch.no_grad():
        expected = x @ dense.T
        off = ((y - expected).norm() / expected.norm()).item()
        off_back = ((grad - dense.sum(0)).norm() / (dense.sum(0).norm() * 16)).item()
        noise = ((dense - weight).norm() / weight.norm()).item()
    wrong = max(off, off_back) > 1e-3 or not noise < WEIGHT_ERROR[bits]
    return {
        "error": f"is wrong on {device}: product error {off:.1e}, weight error {noise:.0%}" if wrong else None,
        "weight_error": round(noise, 5),
        "product_error": float(f"{max(off, off_back):.1e}"),
        "slowdown": round(slowdown, 2),
        "kernel": kernel_of(name, device),
        "failed": failed,
        "bits_per_weight": round(8 * sum(p.nbytes for p in layer.parameters()) / weight.numel(), 3),
    }


HALVES = {"bf16": "bfloat16", "fp16": "float16"}


def _half_error(layer: Any, x: Any, dense: Any, word: str) -> str | None:
    """Reason that the layer is wrong in a 16-bit type, forward or backward; None if it is right."""
    import torch

    dtype = getattr(torch, HALVES[word])
    x = x.to(dtype).requires_grad_()
    try:
        y = layer(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    except PROBE_FAILURES as error:
        return first_line(error)
    with torch.no_grad():
        weight = dense.to(dtype).float()
        off = _off(y, x.float() @ weight.T), _off(grad, weight.sum(0).expand(x.shape))
    # Rounded inputs and results of 16 bits; sums are in fp32.
    limit = 4 * torch.finfo(dtype).eps
    if max(off) <= limit:
        return None
    return f"product error {max(off):.1e}"


def _off(found: Any, wanted: Any) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def kernel_of(name: str, device: str) -> str:
    """The kernel that dequantizes the weights of this method: a package's kernel, or plain torch."""
    module = module_of(name)
    if hasattr(module, "kernel_of"):
        return module.kernel_of(device)
    return METHODS[name].package or "plain torch"


# For normal weights in groups of 64 to 1024, optimal scalar quantizers reach 0.0049 .. 0.34 (Max 1960), uniform ones
# twice that.
WEIGHT_ERROR = {8: 0.02, 6: 0.06, 5: 0.1, 4: 0.15, 3: 0.3, 2: 0.7}


def not_installed(name: str) -> str | None:
    """The package that a method needs and that is missing, with its install command; None if it needs none."""
    method = METHODS[name]
    try:
        if method.package is None or importlib.util.find_spec(method.package) is not None:
            return None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        pass
    return f"{method.package} is not installed: {method.install}"


def _seconds(layer: Any, x: Any) -> float:
    """Minimum time of 5 runs of a forward and a backward."""
    import time

    import torch

    best = float("inf")
    synchronize = torch.get_device_module(x.device).synchronize
    for _ in range(5):
        start = time.perf_counter()
        torch.autograd.grad(layer(x).sum(), x)
        synchronize()
        best = min(best, time.perf_counter() - start)
    return best


OLDER_NAMES = (
    *("Backend", "validate_quantization_config", "get_recommended_config", "replace_linear_with_quantized"),
    *("create_quantization_adapter", "QuantizationAdapter", "BitsAndBytesAdapter", "HQQAdapter", "MLXAdapter"),
    "QuantoAdapter",
)


def __getattr__(name: str):
    """The names of the older scripts. Their file imports this one, so they are looked up when a program asks."""
    if name in OLDER_NAMES:
        return getattr(importlib.import_module("finetune.older.quantization"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
