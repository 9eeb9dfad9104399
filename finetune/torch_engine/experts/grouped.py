"""All experts' products at once, by torch's grouped matmul: the device knows how many tokens an expert has, and the
host does not ask.

Rows are sorted by expert; `ends_E` is the first row after each expert's. Frozen weights are dequantized for all experts
of a projection together. A CPU, and a device without such a kernel, computes one expert at a time (fused.py).

E experts, N rows, R rank, I in_features, O out_features.
"""

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from finetune.errors import is_out_of_memory
from finetune.quantizers.linear import compute_dtype, without_autocast
from finetune.torch_engine.device import WITHOUT_VALUES

ALIGNED = 8  # numbers of 16 bits in the 16 bytes that every stride must be a multiple of


def count_choices(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Number of choices per expert: int64 [E] on the device of `chosen`, without torch.bincount's GPU sync, nor its
    break of a graph.
    """
    flat = chosen.reshape(-1)
    traced = torch.compiler.is_compiling() or isinstance(flat, FakeTensor)
    if flat.device.type == "cpu" and not traced:
        return torch.bincount(flat, minlength=num_experts)
    return (flat.unsqueeze(1) == torch.arange(num_experts, device=flat.device)).sum(0)


def on_host(counts_E: torch.Tensor, num_rows: int) -> list[int]:
    """The counts as numbers; of tensors without values, those of balanced routers."""
    if isinstance(counts_E, FakeTensor):
        each, more = divmod(num_rows, len(counts_E))
        return [each + (expert < more) for expert in range(len(counts_E))]
    return counts_E.tolist()


@torch.compiler.assume_constant_result  # as lora.layers.multiplies_to_fp32
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """True if `device` multiplies groups of rows in `dtype` as exactly as one product each, without a wait for it.
    Tried once per device and type.
    """
    if device.type == "cpu" or not hasattr(F, "grouped_mm"):
        return False
    return device.type in WITHOUT_VALUES or _tried(device, dtype)


@cache
def _tried(device: torch.device, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    counts = (5, 0, 11, 1)
    size = 16
    rows, grad = (torch.randn(sum(counts), size, generator=generator).to(dtype) for _ in range(2))
    weights = torch.randn(len(counts), size, size, generator=generator).to(dtype)
    exact = rows.double(), weights.double(), grad.double()
    parts = [[part.double() for part in x.split(counts)] for x in (rows, grad)]
    out = torch.cat([x @ w.t() for x, w in zip(parts[0], exact[1], strict=True)])
    back = torch.cat([g @ w for g, w in zip(parts[1], exact[1], strict=True)])
    of_weights = torch.stack([g.t() @ x for x, g in zip(*parts, strict=True)])
    ends_E = torch.tensor(counts).cumsum(0).to(device, torch.int32)
    rows, grad, weights = (t.to(device) for t in (rows, grad, weights))
    try:
        with _waits_are_errors(device):
            found = [products(rows, weights, ends_E), products(grad, weights, ends_E, False)]
            found.append(outer(grad, rows, ends_E))
        errors = [_error(mine, right) for mine, right in zip(found, (out, back, of_weights), strict=True)]
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        return False
    return max(errors) <= 4 * torch.finfo(dtype).eps  # sums of 16 terms in fp32, rounded once to `dtype`


@contextlib.contextmanager
def _waits_are_errors(device: torch.device):
    """Raises on a GPU if the host waits for it: kernels for other dtypes copy `ends_E` to the host."""
    module = torch.get_device_module(device)
    before = None
    if hasattr(module, "get_sync_debug_mode"):
        before = module.get_sync_debug_mode()
    if before is not None:
        module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if before is not None:
            module.set_sync_debug_mode(before)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.cpu().double() - exact).abs().max() / exact.abs().max()).item()


def ends(counts_E: torch.Tensor) -> torch.Tensor:
    return counts_E.cumsum(0).to(torch.int32)


def products(
    rows: torch.Tensor, weights_EOI: torch.Tensor, ends_E: torch.Tensor, transposed: bool = True
) -> torch.Tensor:
    """rows [N, I] @ weights^T -> [N, O]; with `transposed` False, rows [N, O] @ weights -> [N, I]."""
    if transposed:
        weights = weights_EOI.transpose(1, 2)
    else:
        weights = weights_EOI
    return F.grouped_mm(rows.contiguous(), weights, offs=ends_E)


def outer(left_NO: torch.Tensor, right_NI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """[E, O, I]: per expert, left^T @ right over its rows; zeros for one without rows."""
    return F.grouped_mm(left_NO.contiguous().t(), right_NI.contiguous(), offs=ends_E)


def expert_of_rows(num_rows: int, ends_E: torch.Tensor) -> torch.Tensor:
    """Expert of each row: int64 [N]."""
    return torch.searchsorted(ends_E, torch.arange(num_rows, device=ends_E.device, dtype=torch.int32), right=True)


class GroupedProduct(torch.autograd.Function):
    """x W_e^T of frozen weights, `weights_of(stored, dtype)` [E, O, I] in forward and again in backward; with an
    adapter, A [E * R, I] and B [O, R * E], s (x A_e^T) B_e^T is added. Saves x and the stored tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ends_E: torch.Tensor,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scaling: float,
        weights_of: Callable[..., torch.Tensor],
        *stored: torch.Tensor,
    ):
        dtype = compute_dtype(x)
        with without_autocast(x):
            rows = x.to(dtype)
            out = products(rows, weights_of(stored, dtype), ends_E)
            low = None
            if lora_a is not None:
                a_ERI, b_EOR = _factors(lora_a, lora_b, len(ends_E), dtype)
                low = products(rows, a_ERI, ends_E)
                out = out.add_(products(low, b_EOR, ends_E), alpha=scaling)
        ctx.weights_of = weights_of
        ctx.scaling = scaling
        ctx.dtype = dtype
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(rows, ends_E, low, lora_a, lora_b, *stored)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        rows, ends_E, low, lora_a, lora_b, *stored = ctx.saved_tensors
        grad = grad.to(ctx.dtype).contiguous()
        grad_x = None
        grad_a = None
        grad_b = None
        with without_autocast(grad):
            if ctx.needs_input_grad[0]:
                grad_x = products(grad, ctx.weights_of(stored, ctx.dtype), ends_E, False)
            if lora_a is not None:
                a_ERI, b_EOR = _factors(lora_a, lora_b, len(ends_E), ctx.dtype)
                grad_low = products(grad, b_EOR, ends_E, False) * ctx.scaling
                if grad_x is not None:
                    grad_x = grad_x.add_(products(grad_low, a_ERI, ends_E, False))
                rank = len(lora_a) // len(ends_E)
                grad_a = outer(grad_low, rows, ends_E)[:, :rank].reshape(lora_a.shape).to(lora_a.dtype)
                grad_b = outer(grad, low, ends_E)[:, :, :rank].permute(1, 2, 0).reshape(lora_b.shape).to(lora_b.dtype)
                grad_b = grad_b * ctx.scaling
        if grad_x is None:
            grad_x = None
        else:
            grad_x = grad_x.to(ctx.x_dtype)
        return grad_x, None, grad_a, grad_b, None, None, *(None for _ in stored)


def _factors(
    lora_a: torch.Tensor, lora_b: torch.Tensor, experts: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, R, I] and B [E, O, R] of PEFT's A [E * R, I] and B [O, R * E], R padded by zeros to what kernels take."""
    rank = len(lora_a) // experts
    a_ERI = lora_a.to(dtype).view(experts, rank, -1)
    b_EOR = lora_b.to(dtype).view(-1, rank, experts).permute(2, 0, 1)
    padding = -rank % ALIGNED
    return F.pad(a_ERI, (0, 0, 0, padding)).contiguous(), F.pad(b_EOR, (0, padding)).contiguous()
