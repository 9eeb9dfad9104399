"""Attention of packed documents by kernels that take their bounds: no padding, no gather, no plan per shape.

A kernel has the signature of torch.nn.attention.varlen.varlen_attn: query [T, H, D], key and value [T, K, D], bounds
[N + 1] int32 of queries and of keys, the longest of each, then scale, window_size and enable_gqa. It is tried on the
device first, against products in fp32 on the host: outputs and the three gradients.

T tokens, N documents, H heads, K key/value heads, D head size.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from finetune.errors import PlanError, first_line, is_out_of_memory
from finetune.parts.attention import AttentionPlan
from finetune.torch_engine.attention.blocks import (
    BlockKernel,
    Scoring,
    as_kernel_of_bounds,
    asks_for_grouped_heads,
    torch_kernel,
)
from finetune.torch_engine.device import WITHOUT_VALUES

# of FlashAttention's kernels
MAX_HEAD_SIZE = 256
HEAD_SIZE_MULTIPLE = 8
FAILURES = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, ImportError, AssertionError)
WHOLE = -1  # a window without a limit to the left
# Lengths of a trial, around the 64 and 128 tokens that kernels take at a time, and its window.
LENGTHS = (1, 70, 131, 40)
WINDOW = 24
# Of a result's norm: rounding of 16-bit products is below one eps, a window off by one token some 4 %.
TRIAL_EPS = 3


class Kernel(NamedTuple):
    """Attention kernel: its loader, the dtypes it supports, and whether it runs on a CPU. `blocks`: loads the variant
    with log-sum-exp, for attention over ranks.
    """

    load: Callable[[], Callable]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    on_cpu: bool = False
    blocks: Callable[[], BlockKernel] | None = None


class Found(NamedTuple):
    """A kernel by its name, or None and why."""

    kernel: Callable | BlockKernel | None
    said: str


class Attention:
    """The kernels that a plan allows, and what each kind of layer got: known once every layer has run.

    `own_products`: documents of a CPU may be computed by matrix products, where those are faster than SDPA.
    """

    def __init__(self, plan: AttentionPlan = AttentionPlan(), kernels: dict | None = None):  # noqa: B008  frozen
        self.plan = plan
        self.own_products = plan.own_products
        self.kernels = KERNELS if kernels is None else kernels
        self.found: dict[tuple, Found] = {}

    def takes_bounds(self, device: torch.device) -> bool:
        """True if a kernel may take the documents' bounds there."""
        return any(device.type != "cpu" or self.kernels[name].on_cpu for name in self.plan.kernels)

    def kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, of_blocks: bool = False
    ) -> Callable | BlockKernel | None:
        """The kernel for a layer with queries [1, H, T, D], keys and values [1, K, T, D]; None: groups.
        PlanError if the plan names a kernel and the layer cannot have it. `of_blocks`: one that gives log-sum-exp.
        """
        windowed = scoring.window is not None
        heads = query.shape[1]
        kv_heads = key.shape[1]
        plain = scoring.softcap is None and scoring.sinks_H is None and not scoring.dropout
        kind = query.device, query.dtype, query.shape[3], value.shape[3], heads // kv_heads, windowed, plain, of_blocks
        if kind not in self.found:
            self.found[kind] = self._find(kind)
        return self.found[kind].kernel

    def _find(self, kind: tuple) -> Found:
        device, dtype, size, value_size, per_key, windowed, plain, of_blocks = kind
        why = unsuited(size, value_size, plain)
        tried: dict[str, str | None] = {}
        for name in () if why else self.plan.kernels:
            kernel = self.kernels[name]
            if not of_blocks:
                load = kernel.load
            else:
                load = kernel.blocks and as_one(kernel.blocks)
            tried[name] = f"computes in 16 bits, not in {str(dtype).removeprefix('torch.')}"
            if load is None:
                tried[name] = "gives no log-sum-exp, which --cp_degree needs"
            elif dtype in kernel.dtypes:
                tried[name] = trial(load, device, dtype, size, per_key, windowed)
            if tried[name] is None:
                return Found(loaded(kernel.blocks if of_blocks else kernel.load), name)
        why = why or "; ".join(f"{name}: {error}" for name, error in tried.items())
        if self.plan.required:
            raise PlanError(f"--attention {self.plan.word}: not for this model here ({why}). Use --attention auto.")
        return Found(None, why)

    def used(self) -> tuple[str, str] | None:
        """(a word of --attention, why) of what the layers got; None if no layer has run."""
        if not self.found:
            return None
        named = sorted({found.said for found in self.found.values() if found.kernel})
        groups = sorted({found.said for found in self.found.values() if not found.kernel})
        if not named:
            return "groups" if self.own_products else "sdpa", "; ".join(groups)
        word = "varlen" if named == ["varlen"] else "flash"
        passed = f"{', '.join(named)}: its trial on this device gives the outputs and gradients of fp32 products"
        return word, passed + (f"; some layers by groups ({'; '.join(groups)})" if groups else "")


def unsuited(size: int, value_size: int, plain: bool) -> str | None:
    """Reason that no kernel supports such a layer; None if one may."""
    if not plain:
        return "softcap, sinks or dropout of scores"
    if size != value_size:
        return f"keys have {size} numbers per head, values {value_size}"
    if size > MAX_HEAD_SIZE or size % HEAD_SIZE_MULTIPLE:
        return f"heads of {size}; kernels take multiples of {HEAD_SIZE_MULTIPLE} up to {MAX_HEAD_SIZE}"
    return None


def window_of(scoring: Scoring) -> tuple[int, int]:
    """(tokens before a query that it sees, tokens after it); transformers' window counts the query itself."""
    return (WHOLE if scoring.window is None else scoring.window - 1, 0)


def attend(
    kernel: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scoring: Scoring,
) -> torch.Tensor:
    """[1, H, T, D], [1, K, U, D] twice -> [1, T, H, D]; `bounds` and `longest`: of queries and of keys."""
    q, k, v = TokensFirst.apply(query, key, value)
    options = {
        "scale": scoring.scaling,
        "window_size": window_of(scoring),
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    return kernel(q, k, v, *bounds, *longest, **options).unsqueeze(0)


class TokensFirst(torch.autograd.Function):
    """Views [T, H, D] of [1, H, T, D], as one operation to autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor):
        return tuple(x.squeeze(0).transpose(0, 1) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return tuple(grad.transpose(0, 1).unsqueeze(0) for grad in grads)


# ---- a trial on the device


@cache
def trial(
    load: Callable[[], Callable], device: torch.device, dtype: torch.dtype, size: int, per_key: int, windowed: bool
) -> str | None:
    """Reason not to use the kernel for such layers; None if it is right. Tried once per device and kind of layer."""
    try:
        kernel = load()
        if device.type in WITHOUT_VALUES:
            return None
        heads = 2 * per_key
        kv_heads = 2
        total = sum(LENGTHS)
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randn(total, n, size, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads, heads)]
        window = (WINDOW - 1 if windowed else WHOLE, 0)
        options = {"scale": size**-0.5, "window_size": window, "enable_gqa": per_key > 1}
        bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
        wanted = _with_gradients(in_products, [x.float() for x in rows], bounds, options)
        found = _with_gradients(kernel, [x.to(device) for x in rows], bounds.to(device), options)
    except FAILURES as error:
        if is_out_of_memory(error):
            raise
        return first_line(error)
    limit = TRIAL_EPS * torch.finfo(dtype).eps
    for what, mine, right in zip(("outputs", "dq", "dk", "dv"), found, wanted, strict=True):
        off = ((mine.cpu().float() - right).norm() / right.norm()).item()
        if not off <= limit:
            return f"{what} are off by {off:.1e} of their norm, more than rounding explains ({limit:.1e})"
    return None


def _with_gradients(
    kernel: Callable, rows: list[torch.Tensor], bounds: torch.Tensor, options: dict
) -> list[torch.Tensor]:
    *inputs, upstream = (x.detach().requires_grad_() for x in rows)
    # Within a layer that is recomputed, what a trial saves is not the layer's.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        out = kernel(*inputs, bounds, bounds, max(LENGTHS), max(LENGTHS), **options)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream.detach())]


def in_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
):
    """Reference for the kernels, on any device: matmuls and a softmax per document.

    If a document has fewer queries than keys, the last query sees the last key, as in FlashAttention.
    """
    per_key = query.shape[1] // key.shape[1]
    out = []
    assert enable_gqa or per_key == 1, "fewer key/value heads without enable_gqa"
    starts_q = bounds_q.tolist()
    starts_k = bounds_k.tolist()
    for i in range(len(starts_q) - 1):
        q = query[starts_q[i] : starts_q[i + 1]].transpose(0, 1)
        k, v = (x[starts_k[i] : starts_k[i + 1]].repeat_interleave(per_key, 1).transpose(0, 1) for x in (key, value))
        assert q.shape[1] <= longest_q and k.shape[1] <= longest_k, "a document longer than the longest"
        ahead = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device).unsqueeze(1)
        ahead = ahead - (k.shape[1] - q.shape[1])
        left, right = window_size
        if right >= 0:
            seen = ahead <= right
        else:
            seen = torch.ones_like(ahead, dtype=torch.bool)
        if left >= 0:
            seen = seen & (ahead >= -left)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        out.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
    return torch.cat(out)


# ---- kernels, each loaded when it is first tried


def _torch_varlen() -> Callable:
    from torch.nn.attention.varlen import varlen_attn

    if asks_for_grouped_heads():
        return varlen_attn
    return partial(_without_enable_gqa, varlen_attn)


def _without_enable_gqa(function: Callable, *inputs: Any, enable_gqa: bool, **options: Any):
    return function(*inputs, **options)


def _flash_attention_3() -> Callable:
    from flash_attn_interface import flash_attn_varlen_func

    return partial(_flash, flash_attn_varlen_func)


def _flash_attention_3_of_kernels() -> Callable:
    """Fetched from the Hub by the package `kernels`."""
    from kernels import get_kernel

    return partial(_flash, get_kernel("kernels-community/flash-attn3").flash_attn_varlen_func)


def _flash_attention_4() -> Callable:
    """The package flash-attn-4, for Hopper and Blackwell."""
    from flash_attn.cute import flash_attn_varlen_func

    return partial(_flash, flash_attn_varlen_func, whole=None)


def _flash_attention_2() -> Callable:
    from flash_attn import flash_attn_varlen_func

    return partial(_flash, flash_attn_varlen_func)


def _flash(
    function: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    whole: int | None = WHOLE,
):
    """flash-attn's names for the arguments, whose order differs between its versions; it takes fewer key/value heads
    without being told. `whole`: its word for a window without a limit.
    """
    out = function(
        query,
        key,
        value,
        cu_seqlens_q=bounds_q,
        cu_seqlens_k=bounds_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        softmax_scale=scale,
        causal=True,
        window_size=tuple(whole if limit == WHOLE else limit for limit in window_size),
    )
    if isinstance(out, tuple):
        return out[0]
    return out


loaded = cache(lambda load: load())
as_one = cache(lambda load: partial(as_kernel_of_bounds, load))
KERNELS = {
    "flash-attention 3": Kernel(_flash_attention_3),
    "flash-attention 3 of kernels": Kernel(_flash_attention_3_of_kernels),
    "flash-attention 4": Kernel(_flash_attention_4),
    "varlen": Kernel(_torch_varlen, blocks=torch_kernel),
    "flash-attention 2": Kernel(_flash_attention_2),
}
