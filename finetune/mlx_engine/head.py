"""Summed cross-entropy at target positions, in chunks of rows: the full logits never exist.
T target positions, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from finetune.model_files.logit_scaling import logit_scaling
from finetune.parts.engine_limits import logits_rows

PIECE = 16  # numbers that log_sum_exp sums one after the other


@dataclass(frozen=True)
class Head:
    """An output layer without an adapter, with its config's scaling: softcap * tanh(x * scale / softcap)."""

    layer: nn.Module
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, layer: Any, config: dict) -> "Head":
        return cls(layer, *logit_scaling(config.get("text_config") or config))

    def weight(self, dtype: mx.Dtype) -> mx.array:
        """The weight [V, H] in `dtype`."""
        layer = self.layer
        if "scales" in layer:
            dense = mx.dequantize(
                layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode
            )
            return mx.stop_gradient(dense.astype(dtype))
        return layer.weight

    def logits(self, hidden_TH: mx.array, weight_VH: mx.array | None = None) -> mx.array:
        """fp32 logits [T, V]."""
        if weight_VH is None:
            weight_VH = self.weight(hidden_TH.dtype)
        logits = hidden_TH @ weight_VH.astype(hidden_TH.dtype).T
        if "bias" in self.layer:
            logits = logits + self.layer["bias"].astype(logits.dtype)
        logits = logits.astype(mx.float32)
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is None:
            return logits
        return mx.tanh(logits / self.softcap) * self.softcap

    def nll(
        self,
        hidden_TH: mx.array,
        labels_T: mx.array,
        weights_T: mx.array | None = None,
        trains: bool = False,
        learning: bool = True,
        smoothing: float = 0.0,
    ) -> mx.array:
        """Summed nll over T, differentiable in the hidden states and, if it `trains`, in the head.

        Gradients are computed in forward, from each chunk's logits, so that no logits are kept for backward.
        `weights_T`: 0 at rows that only fill the shape. `learning` False: no gradients. `smoothing`: the target's
        weight that is spread over the vocabulary.
        """
        weight_VH = self.weight(hidden_TH.dtype)
        if not learning:
            return self._chunks(hidden_TH, weight_VH, labels_T, weights_T, False, False, smoothing)[0]

        custom: Any = mx.custom_function

        @custom
        def chunked(hidden_TH: mx.array, *head: mx.array):
            own = weight_VH
            if head:
                (own,) = head
            return self._chunks(hidden_TH, own, labels_T, weights_T, True, bool(head), smoothing)

        @chunked.vjp
        def chunked_vjp(primals: Any, cotangents: Any, outputs: Any):
            if not isinstance(primals, tuple | list):
                primals = (primals,)
            found = tuple((g * cotangents[0]).astype(p.dtype) for g, p in zip(outputs[1:], primals, strict=True))
            if len(found) > 1:
                return found
            return found[0]

        return chunked(hidden_TH, *((weight_VH,) if trains else ()))[0]

    def log_probs(self, hidden_TH: mx.array, labels_T: mx.array, trains: bool, temperature: float = 1.0) -> mx.array:
        """log p(label) of each position [T], fp32, of logits that are divided by the `temperature`; see of_logits."""

        def log_probs(logits_TV: mx.array, labels_T1: mx.array):
            return log_probs_of_logits(logits_TV, labels_T1, temperature)

        return self.of_logits(log_probs, hidden_TH, [labels_T[:, None]], trains=trains)

    def of_logits(self, work: Callable, hidden_TH: mx.array, arrays: list[mx.array], trains: bool) -> mx.array:
        """`work(logits, *arrays)` of chunks of positions [T, ...], fp32, differentiable in the hidden states, and in
        the head if it `trains`. Backward computes a chunk's logits again, as its gradient needs the upstream of each
        position.
        """
        weight_VH = self.weight(hidden_TH.dtype)
        size = logits_rows(weight_VH.shape[0])
        parts: list[mx.array] = []
        for start in range(0, len(hidden_TH), size):
            part = hidden_TH[start : start + size]
            if parts:  # one chunk after another
                (part,) = mx.depends([part], [parts[-1]])
            of_part = [array[start : start + size] for array in arrays]
            parts.append(self._recomputed(work, part, weight_VH, of_part, trains=trains))
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]

    def _recomputed(
        self, work: Callable, part: mx.array, weight_VH: mx.array, arrays: list[mx.array], trains: bool
    ) -> mx.array:
        """`work` of a chunk, of which nothing is kept for backward."""

        def computed(part: mx.array, *head: mx.array):
            return work(self.logits(part, head[0] if head else weight_VH), *arrays)

        checkpoint: Any = mx.checkpoint  # which takes gradients of all that it is given
        return checkpoint(computed)(part, *((weight_VH,) if trains else ()))

    def _chunks(
        self,
        hidden_TH: mx.array,
        weight_VH: mx.array,
        labels_T: mx.array,
        weights_T: mx.array | None,
        of_hidden: bool,
        of_weight: bool,
        smoothing: float,
    ) -> tuple:
        """(summed nll, its gradient in the hidden states if asked for, in the weight if asked for)."""
        total = mx.zeros(())
        hidden_grads = []
        weight_grad = None
        if of_weight:
            weight_grad = mx.zeros(())
        size = logits_rows(weight_VH.shape[0])
        previous = None
        for start in range(0, len(labels_T), size):
            part = hidden_TH[start : start + size]
            if previous is not None:  # one chunk after another
                (part,) = mx.depends([part], [previous])
            if weights_T is None:
                weights = None
            else:
                weights = weights_T[start : start + size]
            labels = labels_T[start : start + size, None]
            nll, grad = self._chunk(part, weight_VH, labels, weights, of_hidden, smoothing)
            total = previous = total + nll
            if of_hidden:
                grad = grad.astype(part.dtype)
                previous = grad @ weight_VH.astype(part.dtype)
                hidden_grads.append(previous)
            if of_weight:
                weight_grad = weight_grad + (grad.T @ part).astype(mx.float32)
        grads: tuple = ()
        if of_hidden:
            grads = (mx.concatenate(hidden_grads) if len(hidden_grads) > 1 else hidden_grads[0],)
        if of_weight:
            return (total, *grads, weight_grad)
        return (total, *grads)

    def _chunk(
        self,
        part: mx.array,
        weight_VH: mx.array,
        labels: mx.array,
        weights: mx.array | None,
        learning: bool,
        smoothing: float,
    ):
        """(summed nll, its gradient in the product of part and weight, fp32)."""
        logits = self.logits(part, weight_VH)
        log_sum = log_sum_exp(logits)
        nll = smoothed_nll(logits, log_sum, labels, smoothing)
        if not learning:
            return (nll if weights is None else nll * weights).sum(), None
        grad = mx.exp(logits - log_sum)
        grad = mx.put_along_axis(grad, labels, mx.take_along_axis(grad, labels, axis=-1) - (1 - smoothing), axis=-1)
        if smoothing:
            grad = grad - smoothing / logits.shape[-1]
        if weights is not None:
            nll = nll * weights
            grad = grad * weights[:, None]
        if self.softcap is not None:
            grad = grad * (1 - mx.square(logits / self.softcap))
        return nll.sum(), grad if self.scale == 1 else grad * self.scale


def log_probs_of_logits(logits_TV: mx.array, labels_T1: mx.array, temperature: float = 1.0) -> mx.array:
    """log p(label) of each position [T], of logits that are divided by the temperature."""
    if temperature != 1:
        logits_TV = logits_TV / temperature
    return (mx.take_along_axis(logits_TV, labels_T1, axis=-1) - log_sum_exp(logits_TV)).squeeze(-1)


def smoothed_nll(logits_TV: mx.array, log_sum_T1: mx.array, labels_T1: mx.array, smoothing: float) -> mx.array:
    """-log p(label) [T], or its mean with the vocabulary's -log p that label smoothing takes."""
    nll_T1 = log_sum_T1 - mx.take_along_axis(logits_TV, labels_T1, axis=-1)
    if smoothing:
        nll_T1 = (1 - smoothing) * nll_T1 + smoothing * (log_sum_T1 - logits_TV.mean(axis=-1, keepdims=True))
    return nll_T1.squeeze(-1)


def log_sum_exp(logits_TV: mx.array) -> mx.array:
    """log of the sum of exponentials over the columns, [T, 1].

    MLX sums a row one number after the other on a CPU: 49,152 columns at once lose 1e-4. So pieces of PIECE, and
    pieces of those, are summed, below the row's maximum, where a piece's own rounding is small.
    """
    top = mx.stop_gradient(logits_TV.max(axis=-1, keepdims=True))
    left = logits_TV - top
    while (columns := left.shape[-1]) > PIECE:
        padding = -columns % PIECE  # of the last piece, never of a whole one
        if padding:
            left = mx.pad(left, [(0, 0), (0, padding)], constant_values=-mx.inf)
        left = mx.logsumexp(left.reshape(len(logits_TV), -1, PIECE), axis=-1)
    return mx.logsumexp(left, axis=-1, keepdims=True) + top


def sum_of_rows(values_TV: mx.array) -> mx.array:
    """The sum over the columns, [T, 1], in pieces as log_sum_exp has them."""
    left = values_TV
    while (columns := left.shape[-1]) > PIECE:
        padding = -columns % PIECE
        if padding:
            left = mx.pad(left, [(0, 0), (0, padding)])
        left = left.reshape(len(values_TV), -1, PIECE).sum(axis=-1)
    return left.sum(axis=-1, keepdims=True)
