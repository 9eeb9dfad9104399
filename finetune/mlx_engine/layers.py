"""Frozen linears of the MLX engine, quantized in MLX's affine format or dense, and blocks that recompute in backward.

O out_features, I in_features.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

SUMMED = 256  # numbers that sum_of_squares sums one after the other


def leaves(tree: Any) -> list[tuple[str, mx.array]]:
    """(path, array) of each of a module's parameters."""
    found: Any = tree_flatten(tree)
    return found


def as_bits(array: mx.array) -> np.ndarray:
    """The array as numpy can hold it: bf16 as its bits."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def as_numpy(array: mx.array) -> np.ndarray:
    """The array as fp32."""
    return np.array(array.astype(mx.float32))


class AffineLinear(nn.QuantizedLinear):
    """MLX's quantized linear, frozen. `dequantizes`: multiplies by the dequantized weight instead of the packed one.

    MLX's CPU kernel for packed weights is scalar: dequantizing and a BLAS product take a seventh of its time.
    """

    _cached: mx.array | None

    def __call__(self, x: mx.array):
        if self._dequantizes:
            out = frozen_product(x, self.dense)
        else:
            out = mx.quantized_matmul(
                x,
                self["weight"],
                scales=self["scales"],
                biases=self.get("biases"),
                transpose=True,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
            )
        if "bias" in self:
            return out + self["bias"].astype(out.dtype)
        return out

    def dense(self, dtype: mx.Dtype | None = None) -> mx.array:
        """The dequantized weight [O, I], cast to `dtype` if given."""
        weight = self._cached
        if weight is None:
            weight = mx.dequantize(
                self["weight"], self["scales"], self.get("biases"), self.group_size, self.bits, self.mode
            )
        if dtype is None:
            return weight
        return weight.astype(dtype)

    def cache(self, dtype: mx.Dtype) -> None:
        """Keeps the dense weight: faster, but as large as unquantized."""
        self._cached = self.dense(dtype)
        mx.eval(self._cached)

    @classmethod
    def of(
        cls,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        bias: mx.array | None,
        group_size: int,
        bits: int,
        mode: str,
        dequantizes: bool,
    ):
        """A layer of packed tensors; `biases` None in modes without them."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.group_size = group_size
        layer.bits = bits
        layer.mode = mode
        layer._dequantizes = dequantizes
        layer._cached = None
        layer.weight = weight
        layer.scales = scales
        if biases is not None:
            layer.biases = biases
        if bias is not None:
            layer.bias = bias
        layer.freeze()
        return layer


def frozen_product(x: mx.array, dense: Callable[[mx.Dtype], mx.array]) -> mx.array:
    """x W^T with W = dense(dtype) frozen and computed again for backward: no dense weight is kept in between."""

    @mx.custom_function
    def product(x: mx.array):
        return x @ dense(x.dtype).T

    @product.vjp
    def product_vjp(primals: Any, cotangents: Any, outputs: Any):
        return cotangents @ dense(cotangents.dtype)

    frozen: Any = product
    return frozen(x)


def weight_of(linear: Any, dtype: mx.Dtype) -> mx.array:
    """The frozen weight [O, I] of a linear, dense or quantized, without a gradient."""
    if isinstance(linear, AffineLinear):
        dense = linear.dense(dtype)
    else:
        dense = linear.weight.astype(dtype)
    return mx.stop_gradient(dense)


def features(linear: Any) -> tuple[int, int]:
    """(in_features, out_features)."""
    rows, columns = linear.weight.shape
    return (columns * 32 // linear.bits if isinstance(linear, nn.QuantizedLinear) else columns), rows


def recompute(layer: Any) -> None:
    """Makes one block recompute its activations in backward: the object gets a class of its own, no other changes.

    What its routers record comes out of it as its output does: only so it has a gradient.
    """
    kind = type(layer)

    def forward(self, *args: Any, **kwargs: Any):
        recorder = self._recorder
        if recorder is not None and not recorder.recording:
            recorder = None

        def inner(trainable: dict, *args: Any, **kwargs: Any):
            self.update(trainable)
            if recorder is None:
                return [kind.__call__(self, *args, **kwargs)]
            with recorder.apart() as recorded:
                out = kind.__call__(self, *args, **kwargs)
            return [out, *recorded]

        checkpoint: Any = mx.checkpoint
        out, *recorded = checkpoint(inner)(self.trainable_parameters(), *args, **kwargs)
        if recorder is not None:
            recorder.logits += recorded
        return out

    layer.__class__ = type(f"Recomputed{kind.__name__}", (kind,), {"__call__": forward, "_recorder": None})


def sum_of_squares(array: mx.array) -> mx.array:
    """The sum of an array's squares, in pieces: MLX sums one number after the other on a CPU, and 28 million at once
    lose 6 %.
    """
    left = mx.square(array).reshape(-1)
    while left.size > SUMMED:
        padding = -left.size % SUMMED
        if padding:
            left = mx.pad(left, [(0, padding)])
        left = left.reshape(-1, SUMMED).sum(axis=-1)
    return left.sum()
