"""A linear with a LoRA, rsLoRA or DoRA adapter.

R rank, I in_features, O out_features. Adapters have PEFT's shapes, A [R, I] and B [O, R], so nothing is transposed
between a checkpoint and the engine; they are fp32, and products run in the input's dtype.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from finetune.mlx_engine.layers import features, weight_of


class DropoutKeys:
    """State that all adapters share: the random key of each in the present microbatch, so that a recomputed layer draws
    the same mask again, and whether they are `off`.
    """

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self.keys: mx.array | None = None
        self.off = False

    def begin(self, key: mx.array | None) -> None:
        """Sets the microbatch's key; None: no dropout."""
        if key is None:
            self.keys = None
        else:
            self.keys = mx.random.split(key, self.num_layers)


class LoRALinear(nn.Module):
    """A frozen linear with an adapter. `keys`: shared by all adapters; `number`: this one's place in it."""

    def __init__(self, base: Any, rank: int, scaling: float, dropout: float, keys: DropoutKeys, number: int):
        super().__init__()
        columns, rows = features(base)
        self.base = base
        self.lora_A = mx.zeros((rank, columns))
        self.lora_B = mx.zeros((rows, rank))
        self.scaling = scaling
        self.dropout = dropout
        self._keys = keys
        self._number = number
        self._row_square_O: mx.array | None = None

    def start_magnitude(self) -> None:
        """Adds DoRA's magnitudes: the norm of each row of the weight."""
        self._row_square_O = mx.square(weight_of(self.base, mx.float32)).sum(1)
        self.lora_magnitude_vector = self.weight_norm()
        mx.eval(self._row_square_O, self.lora_magnitude_vector)

    def weight_norm(self) -> mx.array:
        """|w + s B A| per row [O], fp32, a constant in backward (DoRA, Liu et al. 2024, section 4.3).

        Expanded as |w|^2 + 2 s b.(A w) + s^2 |b A|^2, which avoids a second matrix of the weight's size.
        """
        a = mx.stop_gradient(self.lora_A)
        b = mx.stop_gradient(self.lora_B)
        s = self.scaling
        cross = ((weight_of(self.base, mx.float32) @ a.T) * b).sum(1)
        assert self._row_square_O is not None, "start_magnitude comes first"
        square_O = self._row_square_O + 2 * s * cross + s * s * ((b @ (a @ a.T)) * b).sum(1)
        return mx.sqrt(mx.maximum(square_O, 0))

    def merged_weight(self) -> mx.array:
        """Base and adapter merged: weight [O, I], fp32."""
        weight_OI = weight_of(self.base, mx.float32) + self.scaling * (self.lora_B @ self.lora_A)
        if "lora_magnitude_vector" in self:
            weight_OI = weight_OI * (self.lora_magnitude_vector / self.weight_norm())[:, None]
        return weight_OI

    def __call__(self, x: mx.array):
        if self._keys.off:
            return self.base(x)
        dropped = self._dropped(x)
        low = (dropped @ self.lora_A.astype(x.dtype).T) * self.scaling
        delta = low @ self.lora_B.astype(x.dtype).T
        out = self.base(x)
        if "lora_magnitude_vector" not in self:
            return out + delta
        bias = None
        if "bias" in self.base:
            bias = self.base["bias"].astype(out.dtype)
        if bias is None:
            plain = out
        else:
            plain = out - bias
        gain_O = (self.lora_magnitude_vector / self.weight_norm()).astype(out.dtype)
        if dropped is x:
            both = (plain + delta) * gain_O
        else:  # as PEFT: base(x) + (gain - 1) W drop(x) + gain s B A drop(x)
            kept = dropped @ weight_of(self.base, x.dtype).T
            both = plain - kept + (kept + delta) * gain_O
        if bias is None:
            return both
        return both + bias

    def _dropped(self, x: mx.array):
        """The adapter's input: x itself, or with dropout while it trains."""
        if not self.dropout or self._keys.keys is None:
            return x
        keep = mx.random.bernoulli(1 - self.dropout, x.shape, key=self._keys.keys[self._number])
        return mx.where(keep, x / (1 - self.dropout), mx.zeros_like(x))
