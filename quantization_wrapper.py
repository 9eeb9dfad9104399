"""Which quantizer stores the frozen weights, and one call that applies it to a model.

`METHODS` has a row for each: adding one is a file in finetune/quantizers/ and a row here. Every method turns a weight into
integer tensors and back; the layer that holds them, and its autograd, are the same for all.
"""

import importlib.util
from dataclasses import dataclass, field
from enum import Enum
from functools import partial


class QuantizationMethod(str, Enum):
    """The names users of the older scripts import, and ours."""

    NF4 = "nf4"
    BNB_NF4 = "bnb_nf4"
    BNB_INT8 = "bnb_int8"
    HQQ = "hqq"
    HQQ_4BIT = "hqq_4bit"
    MLX_INT4 = "mlx_int4"
    MLX_INT8 = "mlx_int8"
    QUANTO_INT2 = "quanto_int2"
    QUANTO_INT4 = "quanto_int4"
    QUANTO_INT8 = "quanto_int8"
    NONE = "none"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Method:
    """A row of METHODS. `package` must be importable; `install` is the line that makes it so."""

    bits: tuple[int, ...]
    quant_types: tuple[str, ...]
    package: str | None
    install: str
    summary: str


METHODS = {
    "nf4": Method((4,), ("nf4",), None, "", "our NF4: plain torch, any device, blocks inside rows"),
    "bnb": Method((4,), ("nf4", "fp4"), "bitsandbytes", "pip install bitsandbytes", "bitsandbytes' kernels"),
}
# The enum's names in terms of METHODS; a method that METHODS lacks is not in this version.
METHOD_OF = {
    QuantizationMethod.NF4: ("nf4", (4,)),
    QuantizationMethod.BNB_NF4: ("bnb", (4,)),
    QuantizationMethod.BNB_INT8: ("bnb", (8,)),
    QuantizationMethod.HQQ: ("hqq", (8, 4, 3, 2)),
    QuantizationMethod.HQQ_4BIT: ("hqq", (4,)),
    QuantizationMethod.MLX_INT4: ("mlx", (4,)),
    QuantizationMethod.MLX_INT8: ("mlx", (8,)),
    QuantizationMethod.QUANTO_INT2: ("quanto", (2,)),
    QuantizationMethod.QUANTO_INT4: ("quanto", (4,)),
    QuantizationMethod.QUANTO_INT8: ("quanto", (8,)),
    QuantizationMethod.NONE: ("none", (16,)),
}
AUTO_ORDER = ("nf4", "bnb", "hqq", "quanto", "mlx")


@dataclass
class QuantizationConfig:
    """How to store frozen weights. Usable on any torch build; dtypes may be torch dtypes or None (the model's own).

    Raises ValueError where the method lacks the bits, naming those it has.
    """

    method: QuantizationMethod = QuantizationMethod.NF4
    bits: int = 4
    group_size: int = 64
    compute_dtype: object = None
    storage_dtype: object = None
    double_quant: bool = False
    quant_type: str = "nf4"
    block_size: int = 64
    quant_zero: bool = True
    quant_scale: bool = False
    layer_configs: dict = field(default_factory=dict)
    skip_modules: list = field(default_factory=lambda: ["lm_head"])
    backend_options: dict = field(default_factory=dict)

    def __post_init__(self):
        self.method = QuantizationMethod(self.method)
        validate_quantization_config(self)

    @property
    def backend(self) -> str:
        """The METHODS row: nf4, bnb, ... or none."""
        return METHOD_OF[self.method][0]


def validate_quantization_config(config: QuantizationConfig) -> None:
    """Raises ValueError naming what the method has, where it lacks the bits or the code book asked for."""
    name, bits = METHOD_OF[config.method]
    if name != "none" and config.bits not in bits:
        raise ValueError(f"bits {config.bits}: {config.method} has {', '.join(map(str, bits))}.")
    if name in METHODS and config.quant_type not in METHODS[name].quant_types:
        raise ValueError(
            f"quant_type {config.quant_type}: {name} has {', '.join(METHODS[name].quant_types)}."
        )
    if config.group_size < 2 or config.group_size & (config.group_size - 1):
        raise ValueError(f"group_size {config.group_size}: must be a power of two.")


def unsupported(backend: str, bits: int, quant_type: str | None, group_size: int) -> str | None:
    """Why the pair cannot be had in this version, with what can; None where it can."""
    have = "; ".join(f"{name} at {'/'.join(map(str, m.bits))} bits" for name, m in METHODS.items())
    if backend not in METHODS:
        return (
            f"--quantization_backend {backend}: is not in this version, which has {have}. Use one of these."
        )
    method = METHODS[backend]
    if bits not in method.bits:
        return (
            f"--n_bits {bits}: {backend} has {'/'.join(map(str, method.bits))} bits. This version has {have}."
        )
    if quant_type not in (None, *method.quant_types):
        return f"--quant_type {quant_type}: {backend} has {', '.join(method.quant_types)}. Use one of these."
    if group_size < 16 or group_size & (group_size - 1):
        return f"--group_size {group_size}: must be a power of two from 16. Use 64."
    if backend == "bnb" and group_size not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        return f"--group_size {group_size}: bnb has 32 to 4096. Use 64."
    return None


def config_for(
    backend: str, quant_type: str | None, group_size: int, double_quant: bool
) -> QuantizationConfig:
    method = {"nf4": QuantizationMethod.NF4, "bnb": QuantizationMethod.BNB_NF4}[backend]
    return QuantizationConfig(
        method, bits=4, group_size=group_size, double_quant=double_quant, quant_type=quant_type or "nf4"
    )


def get_recommended_config(backend="cpu", bits: int = 4) -> QuantizationConfig:
    """The first method of AUTO_ORDER that this version has at these bits."""
    for name in AUTO_ORDER:
        if name in METHODS and bits in METHODS[name].bits:
            return config_for(name, None, 64, False)
    raise ValueError(f"bits {bits}: no method of this version has them on {backend}.")


def quantized_linear(weight_OI, bias, config: QuantizationConfig, fan_in_fan_out: bool = False):
    """A QuantizedLinear that holds `weight_OI` as `config` says."""
    from finetune.quantizers.linear import QuantizedLinear

    shape = tuple(weight_OI.shape)
    if config.backend == "nf4":
        from finetune.quantizers import nf4

        tensors = nf4.quantize(weight_OI, config.group_size, config.double_quant)
        back = partial(_nf4_back, columns=shape[1], block=config.group_size)
    elif config.backend == "bnb":
        from finetune.quantizers import bnb

        tensors = bnb.quantize(weight_OI, config.quant_type, config.group_size, config.double_quant)
        back = partial(_bnb_back, shape=shape, quant_type=config.quant_type, block=config.group_size)
    else:
        raise ValueError(f"method {config.method}: is not in this version, which has {', '.join(METHODS)}.")
    return QuantizedLinear(tensors, shape, back, bias, fan_in_fan_out)


def _nf4_back(tensors, dtype, columns, block):
    from finetune.quantizers import nf4

    return nf4.dequantize(tensors, columns, block, dtype)


def _bnb_back(tensors, dtype, shape, quant_type, block):
    from finetune.quantizers import bnb

    return bnb.dequantize(tensors, shape, quant_type, block, dtype)


def quantize_model(model, config: QuantizationConfig, names=None, device=None):
    """Replaces the model's linears by quantized ones, a layer at a time, and returns the model.

    `names`: the modules to replace; None: every nn.Linear outside `config.skip_modules`. `device`: where to quantize and
    keep them. A layer's own settings stand in `config.layer_configs[name]` as fields of QuantizationConfig.
    """
    from dataclasses import replace

    from torch import nn

    wanted = set(names) if names is not None else None
    for name, module in list(model.named_modules()):
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        chosen = (
            name in wanted
            if wanted is not None
            else not any(s in name.split(".") for s in config.skip_modules)
        )
        if not (linear and chosen):
            continue
        own = replace(config, **config.layer_configs.get(name, {}))
        weight_OI = module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().t()
        if device is not None:
            weight_OI = weight_OI.to(device)
        parent, _, leaf = name.rpartition(".")
        setattr(
            model.get_submodule(parent),
            leaf,
            quantized_linear(weight_OI, module.bias, own, not isinstance(module, nn.Linear)),
        )
    return model


def replace_linear_with_quantized(model, config: QuantizationConfig, skip_modules=None):
    """The older name of quantize_model."""
    from dataclasses import replace

    return quantize_model(
        model, config if skip_modules is None else replace(config, skip_modules=list(skip_modules))
    )


def probe_methods(device: str) -> dict:
    """{method: None, or why it failed}: one layer forward and backward on `device` against its dequantized weight."""
    return {name: probe(name, device) for name in METHODS}


def probe(name: str, device: str) -> str | None:
    method = METHODS[name]
    if method.package and importlib.util.find_spec(method.package) is None:
        return f"{method.package} is not installed: {method.install}"
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=generator).to(device)
    x = torch.randn(8, 128, generator=generator).to(device).requires_grad_()
    try:
        layer = quantized_linear(weight, None, config_for(name, None, 64, False))
        y = layer(x)
        y.square().sum().backward()
        dense = layer.weight_of(layer.stored(), torch.float32)
    except (RuntimeError, ImportError, NotImplementedError, AttributeError, OSError) as error:
        return f"failed on {device}: {str(error).splitlines()[0]}"
    expected = x.detach() @ dense.T
    off = max((y - expected).abs().max().item(), (x.grad - 2 * expected @ dense).abs().max().item() / 100)
    noise = ((dense - weight).norm() / weight.norm()).item()
    if off > 1e-3 or noise > 0.2:
        return f"is wrong on {device}: product off by {off:.1e}, weight by {noise:.0%}"
    return None


def weight_bytes(method: str, bits: int, group_size: int, double_quant: bool, rows: int, columns: int) -> int:
    """Bytes that `method` (a row of METHODS) stores for a weight of rows x columns, scales included."""
    blocks = -(-columns // group_size)
    if method == "bnb" and columns % group_size:  # its blocks run over the whole matrix
        rows, blocks = 1, -(-rows * columns // group_size)
    packed = rows * blocks * group_size * bits // 8
    if not double_quant:
        return packed + 4 * rows * blocks
    if method == "bnb":
        return packed + rows * blocks + 4 * -(-rows * blocks // 256) + 4
    return packed + rows * blocks + 8 * rows * -(-blocks // 256)
