"""Reference for the kernels in plain torch, with transformers' roundings; also their stand-in on a CPU."""

import torch


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool):
    """(x [..., D] normalized, 1 / its root mean square [...] fp32). `offset`: Gemma's 1 + weight, in fp32."""
    exact = x.float()
    rstd = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (exact * rstd * (1.0 + weight_D.float())).to(x.dtype), rstd.squeeze(-1)
    return weight_D * (exact * rstd).to(x.dtype), rstd.squeeze(-1)


def rms_norm_backward(grad: torch.Tensor, x: torch.Tensor, weight_D: torch.Tensor, rstd: torch.Tensor, offset: bool):
    rstd = rstd.unsqueeze(-1)
    hat = x.float() * rstd
    weight = weight_D.float() + (1.0 if offset else 0.0)
    grad = grad.float() * weight
    return (rstd * (grad - hat * (hat * grad).mean(-1, keepdim=True))).to(x.dtype)


def sum_rms_norm(x: torch.Tensor, y: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool):
    """(x + y, that normalized, 1 / its root mean square)."""
    total = x + y
    return total, *rms_norm(total, weight_D, eps, offset)


def sum_rms_norm_backward(
    more: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, weight_D: torch.Tensor, rstd: torch.Tensor, offset: bool
):
    """The gradient of x, which has a gradient of its own, `more`, beside that of its norm."""
    return more + rms_norm_backward(grad, x, weight_D, rstd, offset)


def swiglu(gate: torch.Tensor, up: torch.Tensor):
    return torch.nn.functional.silu(gate) * up


def swiglu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor):
    sigmoid = torch.sigmoid(gate.float())
    of_silu = (grad * up).float() * sigmoid * (1.0 + gate.float() * (1.0 - sigmoid))
    return of_silu.to(gate.dtype), grad * torch.nn.functional.silu(gate)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float):
    """x cos + (-x2, x1) sin per head, x1 and x2 its halves; `sign` -1 turns back."""
    cos = cos.unsqueeze(1)
    sin = sign * sin.unsqueeze(1)
    return tuple((x * cos + _turned(x) * sin).contiguous() for x in (q, k))


def _turned(x: torch.Tensor):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
