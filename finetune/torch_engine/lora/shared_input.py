"""One product for the linears that a model applies to one input: q, k and v, or gate and up.

Their factors A are one matrix: the input is read once, and its gradient is one sum. Which linears these are is seen in
forwards of the model before its first step, not known by their names: linears of one module, called one after the other
with the same tensor. A later call with another tensor, as after a hook, is computed alone.

R rank, I in_features, O out_features, N rows.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from finetune.quantizers.linear import compute_dtype, rows_of, shaped_like, without_autocast
from finetune.torch_engine.lora.layers import LoRALinear, product_in, scales_in_product


class SharedInput:
    """Linears of one input. The first computes the outputs of all; those of the others wait here for their calls."""

    def __init__(self, members: list[LoRALinear]):
        self.members = members
        self.input: torch.Tensor | None = None
        self.waiting: list[torch.Tensor | None] = []
        self.cast_a: torch.Tensor | None = None
        self.scaling = members[0].scaling
        self.ranks = tuple(member.lora_A.shape[0] for member in members)
        self.weights_of = tuple(member.weight_of for member in members)

    def product(self, member: LoRALinear, x: torch.Tensor) -> torch.Tensor:
        """The output of a member for x: a waiting one, one of all together, or its own."""
        place = member.place
        if place == 0:
            return self._first(member, x)
        if x is not self.input:
            self.forget()
            return member.product(x, member.base.bias)
        out = self.waiting[place]
        self.waiting[place] = None
        if place == len(self.members) - 1:
            self.forget()
        assert out is not None, "each output is taken once"
        return out

    def _first(self, member: LoRALinear, x: torch.Tensor) -> torch.Tensor:
        for each in self.members:
            if each.merged is not None or each.off:
                return member.product(x, member.base.bias)
        outs = self._together(x)
        self.input = x
        self.waiting = [None, *outs[1:]]
        return outs[0]

    def _together(self, x: torch.Tensor) -> list[torch.Tensor]:
        members = self.members
        plain = members[0].lora_magnitude_vector is None
        biases: tuple = (None,) * len(members)
        if plain:
            biases = tuple(member.base.bias for member in members)
        casts = self._casts(x)
        stored = tuple(member.stored() for member in members)
        outs = LoRAProducts.apply(x, self.scaling, self.weights_of, self.ranks, stored, biases, casts, *self.factors())
        if plain:
            return list(outs)
        return [member.with_magnitude(out, member.base.bias) for member, out in zip(members, outs, strict=True)]

    def factors(self) -> Sequence[torch.Tensor]:
        """A of all, then B of all."""
        return [member.lora_A for member in self.members] + [member.lora_B for member in self.members]

    def join_casts(self) -> None:
        """Puts the casts of all A one below the other, if they are cast before their use: see layers.cast_once."""
        casts = [member.casts["lora_A"] for member in self.members if member.casts and "lora_A" in member.casts]
        if len(casts) == len(self.members):
            self.cast_a = torch.cat(casts)

    def _casts(self, x: torch.Tensor) -> tuple | None:
        """(all A one below the other, B of each), cast before their use; None if they are not kept in the dtype of x's
        products.
        """
        if self.members[0].casts is None or compute_dtype(x) != self.members[0].cast_dtype:
            return None
        kept = [(member.kept_cast("lora_A"), member.kept_cast("lora_B")) for member in self.members]
        if self.cast_a is None:  # of sharded weights, which are cast when their layer first runs
            self.cast_a = torch.cat([a for a, _ in kept])
        return self.cast_a, *(b for _, b in kept)

    def forget(self) -> None:
        """Drops what waits."""
        self.input = None
        self.waiting = []


class LoRAProducts(torch.autograd.Function):
    """LoRAProduct of several linears with one input and one scaling, without dropout: a tuple of outputs.

    `stored`, `biases`: of each linear; frozen, so within tuples, where autograd need not look at them. `casts`: see
    SharedInput. `factors`: A of each, then B of each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scaling: float,
        weights_of: tuple[Callable[..., torch.Tensor], ...],
        ranks: tuple[int, ...],
        stored: tuple[tuple[torch.Tensor, ...], ...],
        biases: tuple[torch.Tensor | None, ...],
        casts: tuple[torch.Tensor, ...] | None,
        *factors: torch.Tensor,
    ):
        dtype = compute_dtype(x)
        in_product = scales_in_product(x.device)
        number = len(ranks)
        outs = []
        with without_autocast(x):
            rows = rows_of(x, dtype)
            if casts is None:
                casts = _cast(factors, number, dtype)
            a_RI = casts[0]
            if in_product:
                low_NR = rows.new_empty(rows.shape[0], a_RI.shape[0])
                low_NR = torch.addmm(low_NR, rows, a_RI.t(), beta=0, alpha=scaling)
                alpha = 1.0
            else:
                low_NR = rows @ a_RI.t()
                alpha = scaling
            start = 0
            for i in range(number):
                bias = biases[i]
                if bias is not None and bias.dtype != dtype:
                    bias = bias.to(dtype)
                out = F.linear(rows, weights_of[i](stored[i], dtype), bias)
                out.addmm_(low_NR[:, start : start + ranks[i]], casts[1 + i].t(), alpha=alpha)
                start += ranks[i]
                outs.append(shaped_like(out, x))
        ctx.weights_of = weights_of
        ctx.ranks = ranks
        ctx.scaling = scaling
        ctx.in_product = in_product
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        ctx.dtype = dtype
        ctx.factor_dtype = factors[0].dtype
        ctx.counts = tuple(len(tensors) for tensors in stored)
        if casts[1].dtype == factors[0].dtype:
            casts = factors
        ctx.number_of_casts = len(casts)
        ctx.save_for_backward(rows, low_NR, *casts, *(tensor for tensors in stored for tensor in tensors))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        rows, low_NR, *saved = ctx.saved_tensors
        casts = saved[: ctx.number_of_casts]
        stored = saved[ctx.number_of_casts :]
        dtype = ctx.dtype
        number = len(grads)
        if len(casts) == 2 * number:
            casts = _cast(casts, number, dtype)
        grad_low_NR = torch.empty_like(low_NR)
        alpha = 1.0
        if ctx.in_product:
            alpha = ctx.scaling
        grads_NO = []
        grads_b = []
        start = 0
        for i in range(number):
            grad = grads[i].reshape(-1, grads[i].shape[-1])
            if grad.dtype != dtype:
                grad = grad.to(dtype)
            grads_NO.append(grad)
            part = slice(start, start + ctx.ranks[i])
            start = part.stop
            grad_low_NR[:, part].addmm_(grad, casts[1 + i], beta=0, alpha=alpha)
            grads_b.append(product_in(grad.t(), low_NR[:, part], ctx.factor_dtype))
        if not ctx.in_product:
            grad_low_NR *= ctx.scaling
            for grad_b in grads_b:
                grad_b *= ctx.scaling
        grads_a = product_in(grad_low_NR.t(), rows, ctx.factor_dtype).split(ctx.ranks)
        grad_x = None
        if ctx.needs_input_grad[0]:
            start = 0
            for i in range(number):
                weight_OI = ctx.weights_of[i](stored[start : start + ctx.counts[i]], dtype)
                start += ctx.counts[i]
                if grad_x is None:
                    grad_x = grads_NO[i] @ weight_OI
                else:
                    grad_x.addmm_(grads_NO[i], weight_OI)
            assert grad_x is not None, "at least two linears"
            grad_x.addmm_(grad_low_NR, casts[0])
            grad_x = grad_x.to(ctx.x_dtype).view(ctx.x_shape)
        return grad_x, None, None, None, None, None, None, *grads_a, *grads_b


def _cast(factors: Sequence[torch.Tensor], number: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(all A one below the other, B of each) in `dtype`."""
    return torch.cat(list(factors[:number])).to(dtype), *(b.to(dtype) for b in factors[number:])


# ---- which linears these are


@contextlib.contextmanager
def joined_by(model: nn.Module) -> Iterator[None]:
    """A context around forwards of the model, at whose end linears that each had one input become a SharedInput."""
    calls: list[tuple[LoRALinear, torch.Tensor]] = []
    parents = {}
    hooks = []
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, LoRALinear) and "forward" not in child.__dict__:
                parents[child] = parent
                hooks.append(child.register_forward_pre_hook(partial(_record, calls)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    runs: list[list[LoRALinear]] = []
    for i, (module, x) in enumerate(calls):
        if i and calls[i - 1][1] is x and parents[calls[i - 1][0]] is parents[module]:
            runs[-1].append(module)
        else:
            runs.append([module])
    seen: dict[LoRALinear, list[LoRALinear]] = {}
    for run in runs:
        for module in run:
            if seen.setdefault(module, run) != run:  # in another company before: it stays alone
                seen[module] = []
    for run in runs:
        if all(seen[module] == run for module in run) and can_share(run):
            share(run)


def _record(calls: list, module: nn.Module, inputs: tuple) -> None:
    if len(inputs) == 1:
        calls.append((module, inputs[0]))


def can_share(run: list[LoRALinear]) -> bool:
    """True if the linears differ in nothing that one product has to know: scaling, magnitudes, dropout."""
    first = run[0]
    alike = all(
        module.scaling == first.scaling
        and (module.lora_magnitude_vector is None) == (first.lora_magnitude_vector is None)
        and not module.dropout
        and module.pieces == 1
        for module in run
    )
    return len(run) == len(set(run)) > 1 and alike


def share(run: list[LoRALinear]) -> None:
    shared = SharedInput(run)
    for place, module in enumerate(run):
        module.shared = shared
        module.place = place


def forget_waiting(model: nn.Module) -> None:
    """Drops outputs that wait for a call that never came, after an error in a forward."""
    for module in model.modules():
        if isinstance(module, LoRALinear) and module.shared is not None:
            module.shared.forget()
