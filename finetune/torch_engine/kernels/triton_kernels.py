"""Triton kernels of a decoder layer's elementwise work, each with the roundings of transformers' operations.
Reference: formulas.py. Imported where triton is installed only.

Rows of D numbers; a program takes one row, all of it at once.
"""

import torch
import triton
import triton.language as tl

OPTIONS = {"enable_fp_fusion": False}  # no fused multiply-add: products are rounded as torch rounds them


@triton.jit
def _rms_norm(
    x, y, total, weight, out, rstd, columns, eps, sums: tl.constexpr, offset: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < columns
    kind = out.dtype.element_ty
    x_D = tl.load(x + row * columns + at, mask=inside, other=0).to(tl.float32)
    if sums:
        y_D = tl.load(y + row * columns + at, mask=inside, other=0).to(tl.float32)
        x_D = (x_D + y_D).to(kind).to(tl.float32)
        tl.store(total + row * columns + at, x_D.to(kind), mask=inside)
    scale = 1 / tl.sqrt_rn(tl.sum(x_D * x_D, 0) / columns + eps)
    w_D = tl.load(weight + at, mask=inside, other=0)
    if offset:  # Gemma: (1 + w) in fp32, one rounding
        y_D = (x_D * scale * (1.0 + w_D.to(tl.float32))).to(kind)
    else:
        y_D = (w_D.to(tl.float32) * (x_D * scale).to(kind).to(tl.float32)).to(kind)
    tl.store(out + row * columns + at, y_D, mask=inside)
    tl.store(rstd + row, scale)


@triton.jit
def _rms_norm_backward(
    more, grad, x, weight, rstd, out, columns, sums: tl.constexpr, offset: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < columns
    x_D = tl.load(x + row * columns + at, mask=inside, other=0).to(tl.float32)
    w_D = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    grad_D = tl.load(grad + row * columns + at, mask=inside, other=0).to(tl.float32)
    scale = tl.load(rstd + row)
    if offset:
        w_D += 1.0
    hat_D = x_D * scale
    grad_D = grad_D * w_D
    mean = tl.sum(hat_D * grad_D, 0) / columns
    kind = out.dtype.element_ty
    grad_D = (scale * (grad_D - hat_D * mean)).to(kind)
    if sums:
        more_D = tl.load(more + row * columns + at, mask=inside, other=0).to(tl.float32)
        grad_D = (more_D + grad_D.to(tl.float32)).to(kind)
    tl.store(out + row * columns + at, grad_D, mask=inside)


@triton.jit
def _swiglu(gate, up, out, total, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < total
    kind = out.dtype.element_ty
    g = tl.load(gate + at, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + at, (silu * u).to(kind), mask=inside)


@triton.jit
def _swiglu_backward(grad, gate, up, grad_gate, grad_up, total, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < total
    kind = grad_gate.dtype.element_ty
    d = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    silu = (g * sigmoid).to(kind).to(tl.float32)
    of_silu = (d * u).to(kind).to(tl.float32)
    tl.store(grad_up + at, (d * silu).to(kind), mask=inside)
    tl.store(grad_gate + at, (of_silu * sigmoid * (1.0 + g * (1.0 - sigmoid))).to(kind), mask=inside)


@triton.jit
def _rope(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    q_heads,
    q_head,
    q_token,
    k_head,
    k_token,
    q_out_head,
    q_out_token,
    k_out_head,
    k_out_token,
    sign,
    half,
    SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < half
    kind = q_out.dtype.element_ty
    of_q = head < q_heads
    if of_q:
        source = q + head * q_head + token * q_token
        target = q_out + head * q_out_head + token * q_out_token
    else:
        source = k + (head - q_heads) * k_head + token * k_token
        target = k_out + (head - q_heads) * k_out_head + token * k_out_token
    first = tl.load(source + at, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + half + at, mask=inside, other=0).to(tl.float32)
    table = 2 * half * token
    cos_1 = tl.load(cos + table + at, mask=inside, other=0).to(tl.float32)
    cos_2 = tl.load(cos + table + half + at, mask=inside, other=0).to(tl.float32)
    sin_1 = tl.load(sin + table + at, mask=inside, other=0).to(tl.float32) * sign
    sin_2 = tl.load(sin + table + half + at, mask=inside, other=0).to(tl.float32) * sign
    out_1 = (first * cos_1).to(kind).to(tl.float32) + (-second * sin_1).to(kind).to(tl.float32)
    out_2 = (second * cos_2).to(kind).to(tl.float32) + (first * sin_2).to(kind).to(tl.float32)
    tl.store(target + at, out_1.to(kind), mask=inside)
    tl.store(target + half + at, out_2.to(kind), mask=inside)


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool):
    return _norm(x, None, weight_D, eps=eps, offset=offset)[1:]


def sum_rms_norm(x: torch.Tensor, y: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool):
    return _norm(x, y, weight_D, eps=eps, offset=offset)


def _norm(x: torch.Tensor, y: torch.Tensor | None, weight_D: torch.Tensor, eps: float, offset: bool):
    out = torch.empty_like(x)
    total = x if y is None else torch.empty_like(x)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    columns = x.shape[-1]
    size = triton.next_power_of_2(columns)
    _rms_norm[(rstd.numel(),)](
        x, y, total, weight_D, out, rstd, columns, eps, sums=y is not None, offset=offset, SIZE=size, **OPTIONS
    )
    return total, out, rstd


def rms_norm_backward(grad: torch.Tensor, x: torch.Tensor, weight_D: torch.Tensor, rstd: torch.Tensor, offset: bool):
    return _norm_backward(None, grad, x, weight_D=weight_D, rstd=rstd, offset=offset)


def sum_rms_norm_backward(
    more: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, weight_D: torch.Tensor, rstd: torch.Tensor, offset: bool
):
    return _norm_backward(more, grad, x, weight_D=weight_D, rstd=rstd, offset=offset)


def _norm_backward(
    more: torch.Tensor | None,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    rstd: torch.Tensor,
    offset: bool,
):
    out = torch.empty_like(x)
    columns = x.shape[-1]
    size = triton.next_power_of_2(columns)
    _rms_norm_backward[(rstd.numel(),)](
        more, grad, x, weight_D, rstd, out, columns, sums=more is not None, offset=offset, SIZE=size, **OPTIONS
    )
    return out


BLOCK = 1024


def swiglu(gate: torch.Tensor, up: torch.Tensor):
    out = torch.empty_like(gate)
    total = gate.numel()
    _swiglu[(triton.cdiv(total, BLOCK),)](gate, up, out, total, SIZE=BLOCK, **OPTIONS)
    return out


def swiglu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor):
    grad_gate = torch.empty_like(gate)
    grad_up = torch.empty_like(up)
    total = gate.numel()
    grid = (triton.cdiv(total, BLOCK),)
    _swiglu_backward[grid](grad, gate, up, grad_gate, grad_up, total, SIZE=BLOCK, **OPTIONS)
    return grad_gate, grad_up


def rope(q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, cos_1TD: torch.Tensor, sin_1TD: torch.Tensor, sign: float):
    """Queries and keys rotated, by one launch; tokens first in memory, as attention reads them."""
    outs = [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format) for x in (q_1HTD, k_1KTD)]
    outs = [out.transpose(1, 2) for out in outs]
    (_, heads, tokens, size), kv_heads = q_1HTD.shape, k_1KTD.shape[1]
    strides = [stride for x in (q_1HTD, k_1KTD, *outs) for stride in x.stride()[1:3]]
    _rope[(tokens, heads + kv_heads)](
        q_1HTD,
        k_1KTD,
        *outs,
        cos_1TD,
        sin_1TD,
        heads,
        *strides,
        sign,
        size // 2,
        SIZE=triton.next_power_of_2(size // 2),
        **OPTIONS,
    )
    return tuple(outs)
