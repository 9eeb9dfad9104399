"""The half of quantization_wrapper that only programs written for the older scripts use."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from finetune.backend.capabilities import Backend
from quantization_wrapper import (
    AUTO_ORDER,
    METHODS,
    QuantizationConfig,
    QuantizationMethod,
    config_for,
    issue_of,
    not_installed,
    quantize_model,
    quantized_linear,
)

# Memory of a model's weights in 16 bits per billion parameters, and what a run takes beside them, as a factor.
GB_PER_BILLION = 2.0
BESIDE_WEIGHTS = 1.2


def validate_quantization_config(config: QuantizationConfig, backend: Backend | str | None = None) -> list[str] | None:
    """Raises ValueError for an unsupported combination, listing the values the method supports.

    With `backend`, a list of issues instead, empty if there are none; the backend's own too: a package that is not
    installed, a method that mlx lacks.
    """
    issue = issue_of(config)
    name = config.backend
    if backend is None:
        if issue:
            raise ValueError(issue)
        return None
    issues = []
    if issue:
        issues = [issue]
    if name == "none":
        return issues
    if str(Backend(str(backend))) == "mlx" and name != "mlx":
        issues.append(f"method {name}: backend mlx has mlx only.")
    missing = not_installed(name)
    if missing:
        return [*issues, f"method {name}: {missing}"]
    return issues


def get_recommended_config(
    backend: Backend | str | None = "cpu",
    model_size_b: float | None = None,
    available_memory_gb: float | None = None,
    *,
    bits: int | None = None,
) -> QuantizationConfig:
    """Config of the first method in AUTO_ORDER with `bits` (mlx: only its own).

    Or, as in the older scripts, from a model's size and the memory for it: none if 16 bits fit with a fifth to spare,
    else 8 bits if those fit, else 4. Raises ValueError for bits that no method has, and if one of the two is missing.
    """
    if (model_size_b is None) != (available_memory_gb is None):
        raise ValueError(
            f"get_recommended_config({backend}, {model_size_b or available_memory_gb}): is that a size or bits? Give "
            "model_size_b and available_memory_gb, or bits=."
        )
    if model_size_b is not None and available_memory_gb is not None:
        if bits is not None:
            raise ValueError("bits: contradicts model_size_b and available_memory_gb. Give one of them.")
        needed = GB_PER_BILLION * BESIDE_WEIGHTS * model_size_b
        bits = 16 if needed <= available_memory_gb else 8 if needed / 2 <= available_memory_gb else 4
    if bits == 16:
        return QuantizationConfig(QuantizationMethod.NONE)
    names = AUTO_ORDER
    if str(backend) == "mlx":
        names = ("mlx",)
    for name in names:
        if (bits or 4) in METHODS[name].bits:
            return config_for(name, bits or 4)
    raise ValueError(f"bits {bits}: not supported by any method on {backend}.")


def replace_linear_with_quantized(model: Any, config: Any, skip_modules: Iterable[str] | None = None):
    """Older name of quantize_model. `config`: a QuantizationConfig or a QuantizationAdapter."""
    if isinstance(config, QuantizationAdapter):
        config = config.config
    return quantize_model(model, config if skip_modules is None else replace(config, skip_modules=list(skip_modules)))


def config_and_backend(
    where: str, args: tuple, config: Any, backend: Backend | str | None
) -> tuple[QuantizationConfig, Backend | str | None]:
    """The two among arguments in either order; the older scripts gave the backend first. Raises ValueError."""
    for value in args:
        if isinstance(value, QuantizationConfig) and config is None:
            config = value
        elif isinstance(value, str | Backend) and backend is None:
            backend = value
        elif value is not None:
            raise ValueError(f"{where}: {value!r} is neither a QuantizationConfig nor a backend.")
    if not isinstance(config, QuantizationConfig):
        raise ValueError(f"{where}: has no QuantizationConfig. Give (backend, config) or (config).")
    return config, backend


class QuantizationAdapter:
    """A config and the backend it is for, as the older scripts pass them around."""

    methods = tuple(METHODS)

    def __init__(self, *args: object, config: QuantizationConfig | None = None, backend: Backend | str | None = None):
        config, backend = config_and_backend(type(self).__name__, args, config, backend)
        if config.backend not in (*self.methods, "none"):
            raise ValueError(f"{type(self).__name__}: is for {', '.join(self.methods)}, not for {config.backend}.")
        self.config = config
        if backend is None:
            self.backend = None
        else:
            self.backend = Backend(str(backend))

    def quantize_model(self, model: Any):
        return quantize_model(model, self.config)

    def quantize_linear(self, linear: Any):
        """Quantizes one nn.Linear."""
        return quantized_linear(linear.weight.detach(), linear.bias, self.config)

    def load_quantized_model(self, path: object, config: QuantizationConfig | dict | None = None):
        """Raises ValueError with what loads a quantized model instead. `config`: as the older scripts saved it."""
        backend = (config if isinstance(config, QuantizationConfig) else self.config).backend
        raise ValueError(
            f"load_quantized_model: use `python train.py --model_name {path} --train_type qlora "
            f"--quantization_backend {backend}`, which quantizes while it loads, or quantize_model on a loaded model."
        )


class BitsAndBytesAdapter(QuantizationAdapter):
    methods = ("bnb", "nf4")


class HQQAdapter(QuantizationAdapter):
    methods = ("hqq",)


class MLXAdapter(QuantizationAdapter):
    methods = ("mlx",)


class QuantoAdapter(QuantizationAdapter):
    methods = ("quanto",)


ADAPTERS = {"bnb": BitsAndBytesAdapter, "hqq": HQQAdapter, "mlx": MLXAdapter, "quanto": QuantoAdapter}


def create_quantization_adapter(
    *args: object, config: Any = None, backend: Backend | str | None = None
) -> QuantizationAdapter:
    """The adapter of a config: (backend, config), as in the older scripts, or (config)."""
    config, backend = config_and_backend("create_quantization_adapter", args, config, backend)
    return ADAPTERS.get(config.backend, QuantizationAdapter)(config, backend)
