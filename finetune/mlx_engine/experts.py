"""Adapters of a mixture's experts on mlx-lm's SwitchGLU, in PEFT's layout of transformers' fused weights.

E experts, R rank, I in_features, F features of an expert, N pairs of a token and an expert, K experts per token.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from finetune.adapters.formats import EXPERTS
from finetune.mlx_engine.lora import DropoutKeys
from finetune.mlx_engine.mlx_lm_internals import SwitchGLU, gather_sort, scatter_unsort

FUSED = "mlp.experts"  # where transformers has them
FIRST, LAST = WEIGHTS = ("gate_up_proj", "down_proj")
SORTED_FROM = 64  # pairs from which on mlx-lm sorts them by expert


class Pair(nn.Module):
    """A and B of all experts of one fused weight: A [E * R, I], B [O, R * E], the expert's number varying fastest."""

    def __init__(self, num_experts: int, rank: int, columns: int, rows: int):
        super().__init__()
        self.lora_A = mx.zeros((num_experts * rank, columns))
        self.lora_B = mx.zeros((rows, rank * num_experts))
        self._num_experts = num_experts

    def __call__(self, x: mx.array, experts_N: mx.array, scaling: float, is_sorted: bool) -> mx.array:
        """The adapters' part [N, 1, O] of the product of x [N, 1, I] with the experts of these numbers."""
        num_experts = self._num_experts
        a_EIR = self.lora_A.reshape(num_experts, -1, self.lora_A.shape[1]).swapaxes(1, 2).astype(x.dtype)
        b_ERO = self.lora_B.reshape(len(self.lora_B), -1, num_experts).transpose(2, 1, 0).astype(x.dtype)
        low = mx.gather_mm(x, a_EIR, rhs_indices=experts_N, sorted_indices=is_sorted) * scaling
        return mx.gather_mm(low, b_ERO, rhs_indices=experts_N, sorted_indices=is_sorted)


class AdaptedExperts(nn.Module):
    """mlx-lm's experts with adapters of the weights in `ranks`. Nested as PEFT nests them: those of the last weight are
    here, those of the one before in `base_layer`.
    """

    def __init__(self, base: Any, ranks: dict[str, int], scaling: float, keys: DropoutKeys):
        super().__init__()
        self.base = base
        self._scaling = scaling
        self._keys = keys
        self._adapted = tuple(name for name in WEIGHTS if name in ranks)
        shapes = {
            FIRST: (base.gate_proj.input_dims, 2 * base.gate_proj.output_dims),
            LAST: (base.down_proj.input_dims, base.down_proj.output_dims),
        }
        pairs = {name: Pair(base.gate_proj.num_experts, ranks[name], *shapes[name]) for name in self._adapted}
        self.last = pairs[self._adapted[-1]]
        if len(pairs) > 1:
            self.base_layer = pairs[FIRST]

    def pairs(self) -> dict[str, Pair]:
        """{name of the weight: its adapters}."""
        if "base_layer" in self:
            return {FIRST: self.base_layer, LAST: self.last}
        return {self._adapted[0]: self.last}

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Outputs [..., K, I] of the experts `indices` [..., K] for x [..., I], as SwitchGLU's."""
        if self._keys.off:
            return self.base(x, indices)
        pairs = self.pairs()
        x = mx.expand_dims(x, (-2, -3))
        indices = mx.stop_gradient(indices)
        chosen = indices
        back = None
        is_sorted = indices.size >= SORTED_FROM
        if is_sorted:
            x, chosen, back = gather_sort(x, indices)
        up = self.base.up_proj(x, chosen, sorted_indices=is_sorted)
        gate = self.base.gate_proj(x, chosen, sorted_indices=is_sorted)
        if FIRST in pairs:
            of_gate, of_up = mx.split(pairs[FIRST](x, chosen, self._scaling, is_sorted), 2, axis=-1)
            gate = gate + of_gate
            up = up + of_up
        inner = self.base.activation(up, gate)
        out = self.base.down_proj(inner, chosen, sorted_indices=is_sorted)
        if LAST in pairs:
            out = out + pairs[LAST](inner, chosen, self._scaling, is_sorted)
        if back is not None:
            out = scatter_unsort(out, back, indices.shape)
        return out.squeeze(-2)


def experts_of(model: nn.Module, model_type: str) -> dict[str, str]:
    """{name of a fused weight as transformers has it: path of its experts}, of models that formats.EXPERTS lists."""
    place = EXPERTS.get(model_type)
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if place and isinstance(module, SwitchGLU) and path.endswith(place):
            owner = path.removesuffix(place) + FUSED
            found |= {f"{owner}.{weight}": path for weight in WEIGHTS}
    return found


def peft_names(path: str, module: AdaptedExperts, owner: str) -> dict[str, str]:
    """{PEFT's key without its prefix: path} of the adapters."""
    found = {f"{owner}.{leaf}.weight": f"{path}.last.{leaf}" for leaf in ("lora_A", "lora_B")}
    if "base_layer" in module:
        found |= {f"{owner}.base_layer.{leaf}.weight": f"{path}.base_layer.{leaf}" for leaf in ("lora_A", "lora_B")}
    return found


def owner_of(path: str, model_type: str) -> str:
    """The name on disk of the experts at this path."""
    return path.removesuffix(EXPERTS[model_type]) + FUSED
