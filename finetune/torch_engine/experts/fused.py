"""Fused mixture-of-experts weights, one 3-D parameter per projection: quantization, LoRA in PEFT's layout, computation.

Every class that transformers marks with use_experts_implementation has [gate_]up_proj and down_proj of shape [E, O,
I] ([E, I, O] if is_transposed), biases [E, O] and a gate function. Experts wraps such a module and computes one
expert at a time.

E experts, T tokens, K experts per token, R rank, I in_features, O out_features, H hidden size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

import quantization_wrapper
from finetune.quantizers.linear import FrozenLinear, QuantizedLinear, compute_dtype
from finetune.torch_engine.device import uses_onednn
from finetune.torch_engine.experts import grouped
from finetune.torch_engine.lora.layers import LoRAProduct, Products

# oneDNN generates code for each number of rows, milliseconds each, and keeps little of it: an expert's rows are filled
# up with zeros to a multiple.
ROWS_OF_A_KERNEL = 32


class QuantizedExperts(nn.Module):
    """Quantized weights [O, I] of E experts, dequantized one expert at a time."""

    def __init__(self, weight_EOI: torch.Tensor, config: quantization_wrapper.QuantizationConfig):
        super().__init__()
        self.num_experts, self.out_features, self.in_features = weight_EOI.shape
        # Rows are quantized independently.
        whole = config.bits not in quantization_wrapper.METHODS[config.backend].needs_full_matrix
        if whole:
            weights = [weight_EOI.reshape(-1, self.in_features)]
        else:
            weights = list(weight_EOI)
        self.parts = nn.ModuleList(quantization_wrapper.quantized_linear(w, None, config) for w in weights)

    @classmethod
    def of_parts(cls, num_experts: int, out_features: int, in_features: int, num_parts: int) -> "QuantizedExperts":
        """Experts whose `num_parts` quantized weights are put into `parts` afterwards."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.num_experts = num_experts
        made.out_features = out_features
        made.in_features = in_features
        made.parts = nn.ModuleList(nn.Identity() for _ in range(num_parts))
        return made

    def linears(self) -> list[QuantizedLinear]:
        return [part for part in self.parts if isinstance(part, QuantizedLinear)]

    def of(self, expert: int):
        """(stored tensors of one expert, the function that dequantizes them to its weight [O, I])."""
        parts = self.linears()
        if len(parts) == self.num_experts:
            return parts[expert].stored(), parts[expert].weight_of
        rows = slice(expert * self.out_features, (expert + 1) * self.out_features)
        return parts[0].stored(), partial(parts[0].weight_of, rows=rows)

    def all(self) -> tuple:
        """(stored tensors of all experts, the function that dequantizes them to their weights [E, O, I])."""
        return tuple(tensor for part in self.linears() for tensor in part.stored()), self._weights_of

    def _weights_of(self, stored: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        each = len(stored) // len(self.parts)
        weights = [part.weight_of(stored[i * each : (i + 1) * each], dtype) for i, part in enumerate(self.linears())]
        if len(weights) == 1:
            stacked = weights[0]
        else:
            stacked = torch.cat(weights)
        return stacked.view(-1, self.out_features, self.in_features)


class ExpertsPair(nn.Module):
    """A and B of one 3-D parameter in PEFT's layout: A [E * R, I], B [O, R * E], expert index varying fastest."""

    def __init__(self, experts: int, rank: int, shape: tuple[int, int], device: torch.device | None):
        super().__init__()
        self.num_experts = experts
        self.rank = rank
        self.start: tuple[torch.Tensor, ...] | None = None
        self.lora_A = nn.Parameter(torch.zeros(experts * rank, shape[1], device=device))
        self.lora_B = nn.Parameter(torch.zeros(shape[0], rank * experts, device=device))
        self.base_layer: ExpertsPair | None = None

    def factors(self) -> list[tuple]:
        """[(A [R, I], B [O, R])] per expert, differentiable; gradients are collected once, not once per expert."""
        held = len(self.lora_A) // self.rank  # expert parallelism: those of this rank
        a = self.lora_A.view(held, self.rank, -1).unbind(0)
        b = self.lora_B.view(-1, self.rank, held).permute(2, 0, 1).unbind(0)
        return list(zip(a, b, strict=True))


class Experts(ExpertsPair):
    """Wraps a transformers experts module and computes its matmuls.

    Adapters nest as in PEFT: those of the last parameter are here, those of the one before in `base_layer`.
    """

    def __init__(self, base: Any):
        nn.Module.__init__(self)
        self.base = base
        self.num_experts = base.num_experts
        self.start = None
        self.adapted: tuple[str, ...] = ()
        self.scaling = 1.0
        self.base_layer = None
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)

    def adapt(self, names: list[str], rank: int, scaling: float) -> None:
        """Adds a zero adapter to each of the named weights."""
        self.adapted = tuple(n for n in weight_names(self.base) if n in names)
        self.scaling = scaling
        shapes = {n: shape_of(self.base, n) for n in self.adapted}
        device = next(self.base.parameters()).device
        pairs = {n: ExpertsPair(self.num_experts, rank, shapes[n], device) for n in self.adapted}
        last = pairs[self.adapted[-1]]
        self.lora_A = last.lora_A
        self.lora_B = last.lora_B
        self.rank = rank
        if len(self.adapted) > 1:
            self.base_layer = pairs[self.adapted[0]]

    def pairs(self) -> dict[str, ExpertsPair]:
        holders: list[ExpertsPair] = [self]
        if self.base_layer is not None:
            holders.insert(0, self.base_layer)
        if self.adapted:
            return dict(zip(self.adapted, holders, strict=True))
        return {}

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        return weighted_sum(self.base, self.run, hidden, top_k_index, top_k_weights)

    def run(self, inputs: torch.Tensor, counts: list[int] | torch.Tensor, last_bias: bool = True):
        """Outputs of the adapted experts, see run_experts."""
        if torch.is_tensor(counts):
            product = partial(self.grouped_product, grouped.ends(counts))
            return run_experts(self.base, product, inputs, counts, last_bias)
        factors = {name: pair.factors() for name, pair in self.pairs().items()}
        return run_experts(self.base, partial(self.product, factors), inputs, counts, last_bias)

    def product(
        self,
        factors: dict[str, list[tuple[torch.Tensor, torch.Tensor]]],
        name: str,
        expert: int,
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ):
        """Applies one expert's weight, this bias and its adapter to x.
        Saves x and the stored tensors for backward, nothing dense.
        """
        stored, weight_of = frozen_weight(self.base, name, expert)
        if name not in factors:
            return FrozenLinear.apply(x, bias, None, weight_of, *stored)
        a, b = factors[name][expert]
        of = Products((weight_of,), (stored,), (bias,), scaling=self.scaling, a=a, bs=(b,))
        return LoRAProduct.apply(x, None, of, a, b, *stored)

    def grouped_product(self, ends_E: torch.Tensor, name: str, x: torch.Tensor):
        """Applies each row's expert's weight and adapter."""
        stored, weights_of = frozen_weights(self.base, name)
        pair = self.pairs().get(name)
        if pair is None:
            return grouped.GroupedProduct.apply(x, ends_E, None, None, 1.0, weights_of, *stored)
        a = pair.lora_A
        b = pair.lora_B
        return grouped.GroupedProduct.apply(x, ends_E, a, b, self.scaling, weights_of, *stored)


def run_trained(base: Any, inputs: torch.Tensor, counts: list[int] | torch.Tensor, last_bias: bool = True):
    """Outputs of a transformers module whose own weights train, as in Experts.run: each gradient is collected once."""
    if torch.is_tensor(counts):
        return run_experts(base, partial(_trained_product, base, grouped.ends(counts)), inputs, counts, last_bias)
    weights = {name: getattr(base, name).unbind(0) for name in weight_names(base)}

    def product(name: str, expert: int, x: torch.Tensor, bias: torch.Tensor | None):
        weight = weights[name][expert]
        return F.linear(x, weight.t() if base.is_transposed else weight, bias)

    return run_experts(base, product, inputs, counts, last_bias)


def _trained_product(base: Any, ends_E: torch.Tensor, name: str, x: torch.Tensor):
    weights_EOI = getattr(base, name)
    if base.is_transposed:
        weights_EOI = weights_EOI.transpose(1, 2)
    dtype = compute_dtype(x)
    return grouped.products(x.to(dtype), weights_EOI.to(dtype), ends_E)


def weighted_sum(
    base: Any,
    run: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
):
    """[T, H] -> [T, H]: weighted sum of each token's K experts, summed in the order of transformers' grouped_mm.
    `run(inputs, counts)`: the experts' outputs for inputs sorted by expert, counts[e] of expert e; a tensor on the
    device where it multiplies the experts' rows in groups.
    """
    num_chosen = top_k_index.shape[-1]
    sorted_TK, order_TK = torch.sort(top_k_index.reshape(-1), stable=True)
    chosen_E = grouped.count_choices(sorted_TK, base.num_experts)
    counts: torch.Tensor | list[int] = chosen_E
    if not grouped.works(hidden.device, compute_dtype(hidden)):
        counts = grouped.on_host(chosen_E, len(sorted_TK))
    out = run(hidden[order_TK // num_chosen], counts)
    if base.has_post_expert_norm:
        out = base.post_expert_norm(out)
    out = out * top_k_weights.reshape(-1)[order_TK].unsqueeze(-1)
    back = torch.empty_like(order_TK)
    back[order_TK] = torch.arange(len(order_TK), device=order_TK.device)
    return out[back].view(len(hidden), num_chosen, -1).sum(1).to(hidden.dtype)


def run_experts(
    base: Any,
    product: Callable[..., torch.Tensor],
    inputs: torch.Tensor,
    counts: list[int] | torch.Tensor,
    last_bias: bool,
):
    """The experts' outputs for `inputs`, counts[e] rows of expert e, in order.

    `product(weight name, expert, x, bias)`, or, where `counts` is a tensor, `product(weight name, x)` of all experts;
    `last_bias`: the bias of the outputs is added here, not on another rank.
    """
    first, last = weight_names(base)
    biased = {first: base.has_bias, last: base.has_bias and last_bias}
    if torch.is_tensor(counts):

        def with_bias(name: str, x: torch.Tensor):
            out = product(name, x)
            if biased[name]:
                return out + getattr(base, name + "_bias")[experts_N].to(out.dtype)
            return out

        experts_N = None
        if base.has_bias:
            experts_N = grouped.expert_of_rows(len(inputs), grouped.ends(counts))
        up = with_bias(first, inputs)
        return with_bias(last, base._apply_gate(up) if base.has_gate else base.act_fn(up))
    # Gradients are collected once, not once per expert.
    biases = {n: getattr(base, n + "_bias").unbind(0) if biased[n] else [None] * len(counts) for n in biased}
    # One at least, so that on a rank without a token there is a graph to go back through.
    hit = [e for e in range(len(counts)) if counts[e]] or [0]
    outputs = []
    generates = generates_kernels(inputs)
    for expert, x in zip(hit, inputs.split([counts[e] for e in hit]), strict=True):
        num_rows = len(x)
        if generates:
            x = F.pad(x, (0, 0, 0, -num_rows % ROWS_OF_A_KERNEL))
        up = product(first, expert, x, biases[first][expert])
        if base.has_gate:
            inner = base._apply_gate(up)
        else:
            inner = base.act_fn(up)
        outputs.append(product(last, expert, inner, biases[last][expert])[:num_rows])
    return torch.cat(outputs)


def generates_kernels(x: torch.Tensor) -> bool:
    """True if oneDNN multiplies `x`."""
    real = x.device.type == "cpu" and not isinstance(x, FakeTensor)
    return real and (compute_dtype(x).itemsize == 2 or uses_onednn())


def frozen_weight(base: Any, name: str, expert: int):
    """(stored tensors of one expert's weight, the function that returns it as [O, I] in a dtype)."""
    weight = getattr(base, name)
    if isinstance(weight, QuantizedExperts):
        return weight.of(expert)
    return (weight,), partial(_dense, expert=expert, turned=base.is_transposed)


def frozen_weights(base: Any, name: str):
    """(stored tensors of all experts' weights, the function that returns them as [E, O, I] in a dtype)."""
    weight = getattr(base, name)
    if isinstance(weight, QuantizedExperts):
        return weight.all()
    return (weight,), partial(_all_dense, turned=base.is_transposed)


def _all_dense(stored: Sequence[torch.Tensor], dtype: torch.dtype, turned: bool):
    weights = stored[0].to(dtype)
    if turned:
        return weights.transpose(1, 2)
    return weights


def _dense(stored: Sequence[torch.Tensor], dtype: torch.dtype, expert: int, turned: bool):
    weight = stored[0][expert].to(dtype)
    if turned:
        return weight.t()
    return weight


def weight_names(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def shape_of(module: nn.Module, name: str) -> tuple[int, int]:
    """(O, I) of one expert's weight."""
    weight = getattr(module, name)
    if isinstance(weight, QuantizedExperts):
        return weight.out_features, weight.in_features
    return tuple(weight.shape[:0:-1] if module.is_transposed else weight.shape[1:])


def unwrapped(module: nn.Module) -> nn.Module:
    """The model's own experts: those that adapters wrap, or the module itself."""
    return module.base if isinstance(module, Experts) else module


def reachable(model: nn.Module) -> dict[str, nn.Module]:
    """{name: module} of experts with transformers' experts interface, wrapped or not."""
    found = {}
    for name, module in model.named_modules():
        inner = unwrapped(module)
        marks = ("has_gate", "is_transposed", "has_bias", "has_post_expert_norm", "num_experts")
        if all(hasattr(inner, mark) for mark in marks) and not name.endswith(".base"):
            weights = [getattr(inner, n, None) for n in weight_names(inner)]
            if all(isinstance(w, QuantizedExperts) or getattr(w, "ndim", 0) == 3 for w in weights):
                found[name] = module
    return found


def has_experts(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, k, None) for k in ("num_local_experts", "num_experts", "n_routed_experts"))


def unreached(model: PreTrainedModel) -> list[str]:
    """Names of 3-D expert parameters without that interface, which stay frozen and unquantized."""
    known = tuple(name + "." for name in reachable(model))
    convolutions = tuple(n + "." for n, m in model.named_modules() if isinstance(m, nn.Conv1d))
    three_d = []
    if has_experts(model):
        three_d = [n for n, p in model.named_parameters() if p.ndim == 3]
    return [n for n in three_d if not n.startswith(known + convolutions)]


def parameter_names(model: nn.Module) -> list[str]:
    """Names (as in transformers) of the 3-D parameters that can be adapted."""
    return [
        f"{name}.{weight}" for name, module in reachable(model).items() for weight in weight_names(unwrapped(module))
    ]


def wrapped(model: nn.Module, name: str) -> Experts:
    """The Experts wrapper of the named module, installed if needed."""
    module = model.get_submodule(name)
    if not isinstance(module, Experts):
        module = Experts(module)
        model.set_submodule(name, module)
    return module


def hold(module: Any, weight_name: str, weight: torch.Tensor, config: quantization_wrapper.QuantizationConfig) -> None:
    """Quantizes a 3-D weight of a transformers experts module by `config`."""
    delattr(module, weight_name)
    if module.is_transposed:
        weight = weight.transpose(1, 2).contiguous()
    setattr(module, weight_name, QuantizedExperts(weight, config))


def quantize(
    model: nn.Module,
    config: quantization_wrapper.QuantizationConfig,
    names: list[str],
    device: torch.device | None = None,
) -> None:
    """Quantizes the weights of the named modules by `config`, one projection at a time."""
    for name in names:
        module = wrapped(model, name).base
        for weight_name in weight_names(module):
            hold(module, weight_name, getattr(module, weight_name).detach().to(device), config)


def quantized_parts(model: nn.Module) -> list[QuantizedLinear]:
    return [part for m in model.modules() if isinstance(m, QuantizedExperts) for part in m.linears()]
