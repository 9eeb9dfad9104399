"""A model's adapters in one buffer and their gradients in another, in steps of one process or of replicas.

All are cast by one operation per step; A of linears that share an input is one matrix, by which the first of them
computes the products of all; gradients are added in place, so that autograd has none of them to collect.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from finetune.quantizers.linear import QuantizedLinear, as_dtype, compute_dtype
from finetune.torch_engine.kernels import ops
from finetune.torch_engine.kernels.fp8 import FrozenFp8
from finetune.torch_engine.lora.layers import LoRALinear, LoRAProduct, Products, cast_once

# Linears of one module that models give the same input, in the order in which they ask for it.
SHARE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("w1", "w3"))


class FlatAdapters:
    """The adapters of `groups` of linears, each of which may share an input. `offloaded`: weights are brought where
    autograd asks for what it saved of them; `recomputed`: layers are, in backward; `running`: in a step.
    """

    def __init__(self, groups: list[list[LoRALinear]], offloaded: bool = False, recomputed: bool = False):
        self.offloaded = offloaded
        self.recomputed = recomputed
        linears = [layer for group in groups for layer in group]
        self.parameters = [layer.lora_A for layer in linears] + [layer.lora_B for layer in linears]
        self.weights = self.parameters[0].new_empty(sum(p.numel() for p in self.parameters), requires_grad=False)
        self.cast: torch.Tensor | None = None  # the weights in the dtype of products
        self.gradients = torch.zeros_like(self.weights)
        self.anchor = self.weights.new_zeros(()).requires_grad_()  # stands for all factors in autograd's graph
        self.running = False
        self.places = dict(zip(self.parameters, _places(self.parameters), strict=True))
        for parameter, place in self.places.items():
            view = self.weights[place].view(parameter.shape)
            view.copy_(parameter.detach())
            if type(parameter) is nn.Parameter:  # one without values, of a trace, stays where it is
                parameter.data = view
        self.members = [Member(self, layer) for layer in linears]
        for group in groups:
            if len(group) > 1:
                Shared(self, group)

    def of(self, content: torch.Tensor, layers: Sequence[LoRALinear]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(A of these linears as one matrix, B of each), in a buffer of all adapters; parameters, as torch.compile
        takes the shapes of other tensors for symbols.
        """
        first = self.places[layers[0].lora_A]
        last = self.places[layers[-1].lora_A]
        a_RI = content[first.start : last.stop].view(-1, layers[0].in_features)
        bs = [content[self.places[layer.lora_B]].view(layer.lora_B.shape) for layer in layers]
        fixed: list[torch.Tensor] = [nn.Parameter(view, requires_grad=False) for view in (a_RI, *bs)]
        return fixed[0], fixed[1:]

    @contextlib.contextmanager
    def step(self, dtype: torch.dtype | None) -> Iterator[None]:
        """A context of microbatches whose gradients are summed, and become those of the parameters at its end. Adapters
        are cast to `dtype` once; None: before each use.
        """
        if dtype not in (None, self.weights.dtype):
            if self.cast is None:
                self.cast = torch.empty_like(self.weights, dtype=dtype)
            self.cast.copy_(self.weights)
        self.gradients.zero_()
        for member in self.members:
            member.reached = False
        self.running = True
        try:
            yield
        finally:
            self.running = False
        for member in self.members:
            if member.reached:
                member.give_gradients()


def _places(factors: Sequence[torch.Tensor]) -> Iterator[slice]:
    start = 0
    for factor in factors:
        yield slice(start, start + factor.numel())
        start += factor.numel()


class _Joined:
    """Linears with one input, as LoRAProduct takes them: with factors as they are, and once made, as they are cast."""

    def __init__(self, flat: FlatAdapters, layers: list[LoRALinear]):
        self.flat = flat
        self.layers = layers
        a_RI, bs = flat.of(flat.weights, layers)
        self.grad_a, self.grad_bs = flat.of(flat.gradients, layers)
        stored = [layer.stored() for layer in layers]
        self.exact = Products(
            [_weight_of(layer) for layer in layers],
            stored,
            [layer.bias for layer in layers],
            scaling=layers[0].scaling,
            a=a_RI,
            bs=bs,
            grad_a=self.grad_a,
            grad_bs=self.grad_bs,
            saved=[tensor for of_one in stored for tensor in of_one] if flat.offloaded else (),
            fp8=_fp8_of(layers),
        )
        self.cast: Products | None = None

    def of(self, x: torch.Tensor) -> Products:
        cast = self.flat.cast
        if cast is None or compute_dtype(x) != cast.dtype:
            return self.exact
        if self.cast is None:
            a_RI, bs = self.flat.of(cast, self.layers)
            self.cast = replace(self.exact, a=a_RI, bs=bs)
        return self.cast

    def apply(self, x: torch.Tensor) -> Any:
        return LoRAProduct.apply(x, None, self.of(x), self.flat.anchor)


def _fp8_of(layers: list[LoRALinear]) -> list[FrozenFp8]:
    """Frozen products in fp8, of linears that all have one."""
    found = [layer.fp8 for layer in layers if layer.fp8 is not None]
    if len(found) < len(layers):
        return []
    return found


class Member(_Joined):
    """One linear among all. `shares`: those that it gets its input with; `reached`: it has gradients in this step."""

    def __init__(self, flat: FlatAdapters, layer: LoRALinear):
        super().__init__(flat, [layer])
        self.shares: Shared | None = None
        self.reached = False
        layer.flat = self

    def runs(self) -> bool:
        return self.flat.running and torch.is_grad_enabled()

    def reach(self) -> None:
        if not torch.compiler.is_compiling():  # see `reach`
            self.reached = True

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, keep: torch.Tensor | None) -> torch.Tensor:
        """The linear's product, with this bias and dropout mask."""
        self.reach()
        of = self.of(x)
        if bias is not of.biases[0]:
            of = replace(of, biases=[bias])
        return LoRAProduct.apply(x, keep, of, self.flat.anchor)

    def give_gradients(self) -> None:
        (layer,) = self.layers
        for parameter, gradient in ((layer.lora_A, self.grad_a), (layer.lora_B, self.grad_bs[0])):
            if parameter.grad is not None:  # of model code that reads the weight
                gradient += parameter.grad
            parameter.grad = gradient


class Shared(_Joined):
    """Linears that get one input: the first of them computes for all, and the others ask for what is theirs. Where one
    of them is asked for another input, each computes its own from then on.
    """

    def __init__(self, flat: FlatAdapters, layers: list[LoRALinear]):
        super().__init__(flat, layers)
        self.members: list[Member] = [layer.flat for layer in layers]
        self.x: torch.Tensor | None = None
        self.left: dict[Member, torch.Tensor] = {}
        for member in self.members:
            member.shares = self

    def product(self, member: Member, x: torch.Tensor) -> torch.Tensor:
        if self.flat.recomputed and torch.compiler.is_compiling():  # a graph's recomputed part keeps nothing for others
            return member.apply(x)
        member.reach()
        if member is self.members[0]:
            self.x = x
            self.left = dict(zip(self.members, self.apply(x), strict=True))
        elif x is not self.x:
            for each in self.members:
                each.shares = None
            self.x = None
            self.left = {}
            return member.apply(x)
        out = self.left.pop(member)
        if not self.left:
            self.x = None
        return out


def _weight_of(layer: LoRALinear) -> Callable[..., torch.Tensor]:
    """A function of the stored tensors that makes the layer's weight, without the detours of generation."""
    if isinstance(layer.base, QuantizedLinear):
        return layer.base.weight_of
    if isinstance(layer.base, nn.Linear):
        return _as_it_is
    return layer.weight_of


def _as_it_is(stored: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return as_dtype(stored[0], dtype)


# ---- a SwiGLU, as one operation to autograd


class SwiGLUTogether:
    """The three linears of a SwiGLU, which have adapters."""

    def __init__(self, gate_and_up: Shared, down: Member):
        self.gate_and_up = gate_and_up
        self.down = down

    def runs(self) -> bool:
        (layer,) = self.down.layers
        return self.down.runs() and not layer.off

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        for member in (*self.gate_and_up.members, self.down):
            member.reach()
        return AdaptedSwiGLU.apply(x, self.gate_and_up.of(x), self.down.of(x), self.down.flat.anchor)


class AdaptedSwiGLU(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)) of linears whose adapters' gradients are added in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate_and_up: Products, down: Products, anchor: torch.Tensor):
        dtype = compute_dtype(x)
        (gate, up), rows, low_R = gate_and_up.forward(x, None, dtype)
        (out,), rows_down, low_down_R = down.forward(ops.call("swiglu", gate, up), None, dtype)
        ctx.of = (gate_and_up, down)
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(rows, low_R, gate, up, rows_down, low_down_R, *gate_and_up.saved, *down.saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        rows, low_R, gate, up, rows_down, low_down_R, *_ = ctx.saved_tensors
        gate_and_up, down = ctx.of
        grad_down, _ = down.backward((grad,), rows_down, low_down_R)
        grads = ops.call("swiglu_backward", grad_down.view(gate.shape), gate, up)
        grad_rows, _ = gate_and_up.backward(grads, rows, low_R, needs_rows=ctx.needs_input_grad[0])
        if grad_rows is not None:
            grad_rows = as_dtype(grad_rows, ctx.x_dtype).view(ctx.x_shape)
        return grad_rows, None, None, None


def _swiglu_of(gate: Any, up: Any, down: Any) -> SwiGLUTogether | None:
    if not all(isinstance(layer, LoRALinear) and _is_plain(layer) and not _hooked(layer) for layer in (gate, up, down)):
        return None
    shares = gate.flat.shares
    if shares is None or shares.layers != [gate, up]:
        return None
    return SwiGLUTogether(shares, down.flat)


def _hooked(layer: LoRALinear) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


# ---- of a model


def flatten(model: nn.Module) -> None:
    """Puts the adapters of a model that is distributed and stays where it is into one buffer, if they are of linears,
    in fp32 and trained.
    """
    everywhere = [m for m in model.modules() if isinstance(m, LoRALinear)]
    linears = [m for m in everywhere if not m.lora_A.is_meta] or everywhere  # not those of a pipeline's other stages
    learns = all(p.requires_grad and p.dtype == torch.float32 for m in linears for p in (m.lora_A, m.lora_B))
    holder: Any = model
    holder.flat_adapters = None
    if not (linears and learns):
        return
    offloaded = getattr(model, "base_offload", None) is not None
    recomputed = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    holder.flat_adapters = FlatAdapters(_grouped(model, set(linears)), offloaded, recomputed=recomputed)
    module: Any
    for module in model.modules():
        if hasattr(type(module), "takes_together"):
            module.together = _swiglu_of(module.gate_proj, module.up_proj, module.down_proj)


def reach(layer: Any) -> None:
    """Notes that the adapters of a compiled layer get gradients in this step, which its graph does not."""
    if "members" not in layer.__dict__:
        layer.members = [m.flat for m in layer.modules() if isinstance(m, LoRALinear) and m.flat is not None]
    for member in layer.members:
        member.reached = True


def _grouped(model: nn.Module, linears: set[LoRALinear]) -> list[list[LoRALinear]]:
    """The linears of a model, those together that share an input."""
    groups = []
    left = set(linears)
    for module in model.modules():
        children = {name: m for name, m in module.named_children() if isinstance(m, LoRALinear) and m in left}
        for names in SHARE_INPUT:
            found = [children[name] for name in names if name in children and _is_plain(children[name])]
            if len(found) > 1 and len({layer.scaling for layer in found}) == 1:
                groups.append(found)
                left -= set(found)
        groups += [[layer] for layer in children.values() if layer in left]
        left -= set(children.values())
    return groups


def _is_plain(layer: LoRALinear) -> bool:
    """True if a layer computes nothing but its product, in its own forward."""
    return not (layer.dropout or layer.lora_magnitude_vector is not None or "forward" in layer.__dict__)


def in_step(model: nn.Module, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """A context of the microbatches of a step, in which each adapter is cast to `dtype` once; None: before its use.
    Adapters in one buffer have their gradients when it ends.
    """
    flat = getattr(model, "flat_adapters", None)
    if flat is None:
        return cast_once(model, dtype)
    return flat.step(dtype)
