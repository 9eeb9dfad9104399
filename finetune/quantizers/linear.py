"""The quantized linear layer of all methods: integer parameters sharded row-wise, which alone are saved for backward.

Scales are stored as integer bits, so that no dtype policy or `model.to(dtype)` can change them.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Format:
    """Format of one weight, passed to `quantize` and `dequantize`. `scale_dtype`: dtype of the original weight."""

    bits: int
    group_size: int
    quant_type: str | None
    double_quant: bool
    scale_dtype: torch.dtype


def autocasts(x: torch.Tensor) -> bool:
    """True inside torch.autocast of x's device; weights on meta are in none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of products of x: autocast's, else its own."""
    if autocasts(x):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which each tensor keeps its dtype."""
    if autocasts(x):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, without a call of torch's if it is."""
    if x.dtype == dtype:
        return x
    return x.to(dtype)


def rows_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [..., I] as rows [N, I] in `dtype`."""
    return as_dtype(x, dtype).reshape(-1, x.shape[-1])


def can_pack(weight: torch.Tensor) -> bool:
    """True if oneDNN has an order of its own for this weight, in which a product of few rows takes half the time."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packed(weight_OI: torch.Tensor) -> torch.Tensor:
    """The weight in oneDNN's order, which `product` takes and `to_dense` undoes: the same bits."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())


def product(rows_NI: torch.Tensor, weight_OI: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """rows W^T (+ b) [N, O] in the rows' dtype, with a weight as it is stored, or packed."""
    if bias is not None:
        bias = as_dtype(bias, rows_NI.dtype)
    if weight_OI.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(rows_NI, weight_OI, bias, "none", [], "")
    if bias is None:
        return torch.mm(rows_NI, weight_OI.t())
    return torch.addmm(bias, rows_NI, weight_OI.t())


UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def shaped_like(out_NO: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The rows [N, O] as [..., O], like x. Not a view to autograd: model code may change it in place."""
    return UNSAFE_VIEW(out_NO, (*x.shape[:-1], out_NO.shape[-1]))


class FrozenLinear(torch.autograd.Function):
    """y = x W^T (+ b) with W frozen, dequantized by `weight_of(tensors, dtype)` in forward and again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        own_dtype: torch.dtype | None,
        weight_of: Callable[..., torch.Tensor],
        *stored: torch.Tensor,
    ) -> torch.Tensor:
        dtype = own_dtype or compute_dtype(x)
        ctx.weight_of = weight_of
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(*stored)
        out = product(rows_of(x, dtype), weight_of(stored, dtype), bias)
        return shaped_like(out, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        stored = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ ctx.weight_of(stored, grad.dtype)).to(ctx.x_dtype)
        return grad_x, None, None, None, *(None for _ in stored)


class QuantizedLinear(nn.Module):
    """A frozen linear whose weight [O, I] is stored in integer parameters of `method` (a key of METHODS).

    `tensors`: the method's quantized tensors; `dequantize(tensors, dtype)` returns the weight. `compute_dtype`:
    dtype of matmuls; None: the input's, or autocast's.
    """

    def __init__(
        self,
        tensors: dict,
        shape: tuple,
        dequantize: partial[torch.Tensor],
        bias: torch.Tensor | None = None,
        fan_in_fan_out: bool = False,
        compute_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.compute_dtype = compute_dtype
        self.fan_in_fan_out = fan_in_fan_out  # the replaced layer stored its weight as [I, O], like GPT-2's Conv1D
        self.out_features, self.in_features = shape
        self.names = tuple(tensors)
        self.dequantize = dequantize
        self.cached: torch.Tensor | None = None
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.viewed: dict[
            str, tuple[torch.dtype, int]
        ] = {}  # {name: (dtype, bytes per row)} of parameters viewed as floats: see hold_as

    def stored(self) -> tuple:
        return tuple(self._stored(name) for name in self.names)

    def _stored(self, name: str):
        tensor = getattr(self, name)
        if name not in self.viewed:
            return tensor
        dtype, width = self.viewed[name]
        content = tensor.view(torch.uint8)
        if content.shape[-1] != width:
            content = content[..., :width].contiguous()
        return content.view(dtype)

    def hold_as(self, dtype: torch.dtype) -> None:
        """Views the bytes as parameters of this floating-point dtype, for wrappers without integer parameters. Rows
        that are not a multiple of its size are padded.
        """
        for name in self.names:
            tensor = getattr(self, name).detach().contiguous()
            content = tensor.view(torch.uint8)
            width = content.shape[-1]
            if width % dtype.itemsize:
                content = nn.functional.pad(content, (0, -width % dtype.itemsize))
            self.viewed[name] = (tensor.dtype, width)
            setattr(self, name, nn.Parameter(content.view(dtype), requires_grad=False))

    def cache(self, dtype: torch.dtype) -> None:
        """Caches the dequantized weight until `cached` is set to None: faster, but as large as unquantized."""
        self.cached = self.weight_of(self.stored(), dtype)

    def weight_of(self, stored: Sequence[torch.Tensor], dtype: torch.dtype, rows: slice | None = None) -> torch.Tensor:
        """The dequantized weight [O, I], or a slice of its rows (only for methods that quantize rows independently)."""
        if self.cached is not None:
            return (self.cached if rows is None else self.cached[rows]).to(dtype)
        tensors = dict(zip(self.names, stored, strict=True))
        return self.dequantize(tensors if rows is None else {n: t[rows] for n, t in tensors.items()}, dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight as the replaced layer stored it, for model code that reads it."""
        weight_OI = self.weight_of(self.stored(), self.dequantize.keywords["fmt"].scale_dtype)
        if self.fan_in_fan_out:
            return weight_OI.t()
        return weight_OI

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer's output with this bias."""
        return FrozenLinear.apply(x, bias, self.compute_dtype, self.weight_of, *self.stored())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, stored={self.names}"
