"""Reference for the kernels in plain torch, with transformers' roundings; also their stand-in on a CPU."""

import torch


def rms_norm(x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool):
    """(normalized rows, 1 / their root mean square [N] fp32). `offset`: Gemma's 1 + weight, in fp32."""
    exact = x_ND.float()
    rstd_N1 = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (exact * rstd_N1 * (1.0 + weight_D.float())).to(x_ND.dtype), rstd_N1.squeeze(-1)
    return weight_D * (exact * rstd_N1).to(x_ND.dtype), rstd_N1.squeeze(-1)


def rms_norm_backward(
    grad_ND: torch.Tensor, x_ND: torch.Tensor, weight_D: torch.Tensor, rstd_N: torch.Tensor, offset: bool
):
    hat_ND = x_ND.float() * rstd_N[:, None]
    weight = weight_D.float() + (1.0 if offset else 0.0)
    grad = grad_ND.float() * weight
    return (rstd_N[:, None] * (grad - hat_ND * (hat_ND * grad).mean(-1, keepdim=True))).to(x_ND.dtype)


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
