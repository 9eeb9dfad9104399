"""One operation each, forward and backward, for RMSNorm, SwiGLU and RoPE: on a GPU by Triton.

As operations of torch they are one launch to whoever counts or traces them. Weights of norms get no gradient: layers
whose norm trains keep transformers' own.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from finetune.quantizers.nf4 import TRITON_FAILURES, triton_errors
from finetune.torch_engine.device import WITHOUT_VALUES
from finetune.torch_engine.kernels import formulas

LIBRARY = torch.library.Library("finetune_kernels", "DEF")
SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor weight, float eps, bool offset) -> (Tensor, Tensor)",
    "rms_norm_backward": "(Tensor grad, Tensor x, Tensor weight, Tensor rstd, bool offset) -> Tensor",
    "sum_rms_norm": "(Tensor x, Tensor y, Tensor weight, float eps, bool offset) -> (Tensor, Tensor, Tensor)",
    "sum_rms_norm_backward": "(Tensor more, Tensor grad, Tensor x, Tensor weight, Tensor rstd, bool offset) -> Tensor",
    "swiglu": "(Tensor gate, Tensor up) -> Tensor",
    "swiglu_backward": "(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    "rope": "(Tensor q, Tensor k, Tensor cos, Tensor sin, float sign) -> (Tensor, Tensor)",
}
FAKES: dict[str, Callable] = {
    "rms_norm": lambda x, weight, eps, offset: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)),
    "rms_norm_backward": lambda grad, x, weight, rstd, offset: torch.empty_like(x),
    "sum_rms_norm": lambda x, y, *rest: (torch.empty_like(x), *FAKES["rms_norm"](x, *rest)),
    "sum_rms_norm_backward": lambda more, *rest: torch.empty_like(more),
    "swiglu": lambda gate, up: torch.empty_like(gate),
    "swiglu_backward": lambda grad, gate, up: (torch.empty_like(gate), torch.empty_like(up)),
    "rope": lambda q, k, cos, sin, sign: (_tokens_first(q), _tokens_first(k)),
}


def _tokens_first(x_1HTD: torch.Tensor):
    batch, heads, tokens, size = x_1HTD.shape
    return x_1HTD.new_empty(batch, tokens, heads, size).transpose(1, 2)


def _implementation(name: str):
    def run(*arguments: Any):
        if arguments[0].device.type == "cpu":
            found = getattr(formulas, name)(*arguments)
            if name == "rope":
                return tuple(_tokens_first(x).copy_(x) for x in found)
            return found
        from finetune.torch_engine.kernels import triton_kernels

        return getattr(triton_kernels, name)(*arguments)

    return run


for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _implementation(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"finetune_kernels::{_name}", FAKES[_name], lib=LIBRARY)
OPS = torch.ops.finetune_kernels
KERNELS = {name: _implementation(name) for name in SCHEMAS}


def call(name: str, *arguments: Any) -> Any:
    """The operation; where nobody traces or counts, its implementation, without torch's detour."""
    if torch.compiler.is_compiling() or arguments[0].device.type in WITHOUT_VALUES:
        return getattr(OPS, name)(*arguments)
    return KERNELS[name](*arguments)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool):
        x = x.contiguous()
        out, rstd = call("rms_norm", x, weight, eps, offset)
        ctx.offset = offset
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        x, weight, rstd = ctx.saved_tensors
        return call("rms_norm_backward", grad.contiguous(), x, weight, rstd, ctx.offset), None, None, None


class SumRMSNorm(torch.autograd.Function):
    """(x + y, its norm), whose two gradients are summed by the norm's kernel. y None: (x, its norm)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: bool):
        x = x.contiguous()
        if y is None:
            total = x.detach()  # not x itself, which would be a view of it to autograd
            out, rstd = call("rms_norm", x, weight, eps, offset)
        else:
            total, out, rstd = call("sum_rms_norm", x, y.contiguous(), weight, eps, offset)
        ctx.offset = offset
        ctx.has_y = y is not None
        ctx.save_for_backward(total, weight, rstd)
        return total, out

    @staticmethod
    def backward(ctx: Any, more: torch.Tensor, grad: torch.Tensor):
        total, weight, rstd = ctx.saved_tensors
        more = more.contiguous()
        grad_x = call("sum_rms_norm_backward", more, grad.contiguous(), total, weight, rstd, ctx.offset)
        if ctx.has_y:
            return grad_x, grad_x, None, None, None
        return grad_x, None, None, None, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor):
        gate = gate.contiguous()
        up = up.contiguous()
        ctx.save_for_backward(gate, up)
        return call("swiglu", gate, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return call("swiglu_backward", grad.contiguous(), *ctx.saved_tensors)


class RoPE(torch.autograd.Function):
    """Queries [1, H, T, D] and keys [1, K, T, D] turned by cos and sin [1, T, D], whose halves are equal."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        cos = cos.contiguous()
        sin = sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return call("rope", _dense(q), _dense(k), cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor):
        return *call("rope", _dense(grad_q), _dense(grad_k), *ctx.saved_tensors, -1.0), None, None


def _dense(x: torch.Tensor):
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


@cache
def error_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason not to use the kernels on a device in `dtype`; None if they equal the formulas there, to rounding. Tried
    once per device and dtype.
    """
    if device.type in WITHOUT_VALUES:
        return None
    try:
        from finetune.torch_engine.kernels import triton_kernels

        for name, arguments in _trials(dtype):
            wanted = getattr(formulas, name)(*arguments)
            here = [x.to(device) if torch.is_tensor(x) else x for x in arguments]
            found = getattr(triton_kernels, name)(*here)
            pairs = zip(*((x,) if torch.is_tensor(x) else x for x in (found, wanted)), strict=True)
            off = max(((a.cpu().float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in pairs)
            if not off <= 2 * torch.finfo(dtype).eps:  # sums of a row in another order; exp of another library
                return f"{name} is off by {off:.1e} in {str(dtype).removeprefix('torch.')}"
    except (*TRITON_FAILURES, *triton_errors()) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return None


def _trials(dtype: torch.dtype) -> list[tuple]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int):
        return torch.randn(*shape, generator=generator).to(dtype)

    x = random(5, 100)
    grad = random(5, 100)
    weight = random(100)
    gate = random(7, 300)
    up = random(7, 300)
    angles = torch.rand(1, 9, 20, generator=generator).mul(6).repeat(1, 1, 2)
    q = random(1, 9, 6, 40).transpose(1, 2)
    k = random(1, 9, 2, 40).transpose(1, 2)
    rstd = formulas.rms_norm(x, weight, 1e-6, False)[1]
    norms: list[tuple] = [("rms_norm", (x, weight, 1e-6, offset)) for offset in (False, True)]
    norms += [("rms_norm_backward", (grad, x, weight, rstd, offset)) for offset in (False, True)]
    norms += [("sum_rms_norm", (x, grad, weight, 1e-6, offset)) for offset in (False, True)]
    norms += [("sum_rms_norm_backward", (random(5, 100), grad, x, weight, rstd, offset)) for offset in (False, True)]
    ropes = [("rope", (q, k, angles.cos().to(dtype), angles.sin().to(dtype), sign)) for sign in (1.0, -1.0)]
    return [*norms, ("swiglu", (gate, up)), ("swiglu_backward", (random(7, 300), gate, up)), *ropes]
