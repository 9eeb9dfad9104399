"""LoRA, rsLoRA and DoRA layers around a frozen linear, dense or quantized, and around an embedding.

R rank, I in_features, O out_features, V vocabulary, H hidden size. Adapter weights are fp32; matmuls run in the input's
dtype.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from finetune.adapters.patterns import scaling_of
from finetune.quantizers.linear import (
    QuantizedLinear,
    as_dtype,
    compute_dtype,
    product,
    rows_of,
    shaped_like,
    without_autocast,
)
from finetune.torch_engine.device import WITHOUT_VALUES
from finetune.torch_engine.kernels.fp8 import FrozenFp8, scaled


@dataclass(eq=False, slots=True)
class Products:
    """Linears that share an input, as their product takes them. Of each: what makes its weight of what is `stored`, and
    its bias. `a`, `bs`: factors in the dtype of products, or as they are; A of all linears is one matrix. `grad_a`,
    `grad_bs`: where their gradients are added; None: they are returned. `saved`: of what is stored, what backward has
    to ask autograd for. `fp8`: of each, its frozen product in fp8; none: as the weight is.
    """

    weights_of: Sequence[Callable[..., torch.Tensor]]
    stored: Sequence[Sequence[torch.Tensor]]
    biases: Sequence[torch.Tensor | None]
    scaling: float
    a: torch.Tensor
    bs: Sequence[torch.Tensor]
    grad_a: torch.Tensor | None = None
    grad_bs: Sequence[torch.Tensor] = ()
    saved: Sequence[torch.Tensor] = ()
    fp8: Sequence[FrozenFp8] = ()

    def _in_fp8(self) -> Sequence[FrozenFp8]:
        """The frozen products that are in fp8 now."""
        if self.fp8 and self.fp8[0].switch.on:
            return self.fp8
        return ()

    def _parts(self, of_all: torch.Tensor, dim: int = 1) -> Sequence[torch.Tensor]:
        """The part of each linear's adapter."""
        if len(self.bs) == 1:
            return (of_all,)
        return of_all.split([b.shape[1] for b in self.bs], dim)

    def forward(
        self, x: torch.Tensor, keep: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """(the products in `dtype`, like x; its rows [N, I]; their part in the adapters [N, R of all], scaled).
        `keep`: dropout mask of the adapters' input.
        """
        with without_autocast(x):
            rows = rows_of(x, dtype)
            dropped = rows if keep is None else rows * keep
            # Scaling costs no launch of its own here, and none later.
            low_R = _scaled(dropped, as_dtype(self.a, dtype).t(), self.scaling)
            outs = []
            lows = self._parts(low_R)
            in_fp8 = self._in_fp8()
            rounded = scaled(rows) if in_fp8 else None
            for i, b in enumerate(self.bs):
                weight = self.weights_of[i](self.stored[i], dtype)
                if rounded is None:
                    out = product(rows, weight, self.biases[i])
                else:
                    out = in_fp8[i].forward(rounded, weight, self.biases[i])
                out.addmm_(lows[i], as_dtype(b, dtype).t())
                outs.append(shaped_like(out, x))
            return outs, rows, low_R

    def backward(
        self,
        grads: Sequence[torch.Tensor],
        rows: torch.Tensor,
        low_R: torch.Tensor,
        keep: torch.Tensor | None = None,
        needs_rows: bool = True,
        factor_dtype: torch.dtype = torch.float32,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """(gradient of the rows, those of A and B of each linear in `factor_dtype` if they are not added in place)."""
        dtype = rows.dtype
        dropped = rows if keep is None else rows * keep
        grads = [as_dtype(grad.reshape(-1, grad.shape[-1]), dtype) for grad in grads]
        grad_low_R = torch.empty_like(low_R)
        of_factors: list[torch.Tensor | None] = []
        lows = self._parts(low_R)
        for i, mine in enumerate(self._parts(grad_low_R)):
            mine.addmm_(grads[i], as_dtype(self.bs[i], dtype), beta=0, alpha=self.scaling)
            if self.grad_a is None:
                of_factors += [None, _product(grads[i].t(), lows[i], factor_dtype)]
        if self.grad_a is None:
            grad_a = _product(grad_low_R.t(), dropped, factor_dtype)
            of_factors[::2] = self._parts(grad_a, 0)
        else:
            _add_product(self.grad_a, grad_low_R.t(), dropped)
            for i, grad_b in enumerate(self.grad_bs):
                _add_product(grad_b, grads[i].t(), lows[i])
        if not needs_rows:
            return None, of_factors
        in_fp8 = self._in_fp8()
        grad_rows: torch.Tensor | None = None
        for i, grad in enumerate(grads):
            weight = self.weights_of[i](self.stored[i], dtype)
            if not in_fp8 and grad_rows is not None:
                grad_rows.addmm_(grad, weight)
                continue
            added = in_fp8[i].backward(grad, weight) if in_fp8 else grad @ weight
            grad_rows = added if grad_rows is None else grad_rows.add_(added)
        assert grad_rows is not None, "of one linear at least"
        if keep is None:
            grad_rows.addmm_(grad_low_R, as_dtype(self.a, dtype))
        else:
            grad_rows += (grad_low_R @ as_dtype(self.a, dtype)) * keep
        return grad_rows, of_factors


class LoRAProduct(torch.autograd.Function):
    """z = x W^T + b + s (x A^T) B^T with W frozen, of each linear in `of`: saves x once, no gradient for W, no
    accidental fp32 matmul.

    `keep`: dropout mask of the adapter's input. `tensors`: A and B of the one linear, then what it stores, which are
    saved; or, where gradients are added in place, what stands for all factors, and what is stored stays where it is.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: torch.Tensor | None, of: Products, *tensors: torch.Tensor):
        dtype = compute_dtype(x)  # autocast's, else that of x
        if keep is not None:
            keep = as_dtype(keep, dtype)
        outs, rows, low_R = of.forward(x, keep, dtype)
        ctx.of = of
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        ctx.factor_dtype = tensors[0].dtype
        if of.grad_a is None:
            ctx.save_for_backward(rows, low_R, keep, *tensors[2:])
        else:
            ctx.save_for_backward(rows, low_R, keep, *of.saved)
        if len(outs) == 1:
            return outs[0]
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        of: Products = ctx.of
        rows, low_R, keep, *stored = ctx.saved_tensors
        grads_of_stored: list[None] = []
        if of.grad_a is None:
            of = replace(of, stored=(stored,))
            grads_of_stored = [None] * len(stored)
        grad_rows, of_factors = of.backward(
            grads, rows, low_R, keep=keep, needs_rows=ctx.needs_input_grad[0], factor_dtype=ctx.factor_dtype
        )
        if grad_rows is not None:
            grad_rows = as_dtype(grad_rows, ctx.x_dtype).view(ctx.x_shape)
        return grad_rows, None, None, *(of_factors or [None]), *grads_of_stored


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right, whose dtype may be narrower."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif multiplies_to_fp32(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _scaled(left: torch.Tensor, right: torch.Tensor, scaling: float) -> torch.Tensor:
    """scaling * left @ right, in one operation."""
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0, alpha=scaling)


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left @ right in `dtype`, which may be wider than theirs."""
    if dtype == torch.float32 and left.dtype.itemsize == 2 and multiplies_to_fp32(left.device, left.dtype):
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(dtype)


@torch.compiler.assume_constant_result  # torch 2.11 traces into a function with @cache, whatever it is marked as
def multiplies_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """True if `device` gives a product of 16-bit matrices in fp32, unrounded. Tried once per device and type."""
    return _tried_product(device, dtype)


@cache
def _tried_product(device: torch.device, dtype: torch.dtype) -> bool:
    left, right = (torch.linspace(-1, 1, 64 * 64).view(64, 64).roll(i, 0).to(dtype) for i in (0, 7))
    try:
        found = torch.zeros(64, 64, device=device)
        torch.addmm(found, left.to(device), right.to(device), out_dtype=torch.float32, out=found)
        torch.addmm(found, left.to(device), right.to(device), out_dtype=torch.float32, out=found, beta=-1, alpha=2)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    if device.type in WITHOUT_VALUES:
        return True
    exact = left.double() @ right.double()
    return ((found.cpu().double() - exact).abs().max() / exact.abs().max()).item() < 1e-5


@contextlib.contextmanager
def cast_once(model: nn.Module, dtype: torch.dtype | None):
    """A context in which each adapter is cast to `dtype` once, while its weights do not change: the microbatches of a
    step. A sharded one is cast when its layer first runs, gathered. None: nothing is cast before its use.
    """
    if dtype is None:
        held = []
    else:
        held = [m for m in model.modules() if isinstance(m, LoRALinear)]
    pairs = [(m, name, getattr(m, name)) for m in held for name in ("lora_A", "lora_B")]
    whole = [(m, name, p) for m, name, p in pairs if type(p) is nn.Parameter and p.numel() and p.dtype != dtype]
    try:
        for m in held:
            m.casts = {}
            m.cast_dtype = dtype
        if whole:
            copies = [torch.empty_like(p, dtype=dtype, requires_grad=False) for *_, p in whole]
            with torch.no_grad():
                torch._foreach_copy_(copies, [p.detach() for *_, p in whole])
            for (m, name, _), copied in zip(whole, copies, strict=True):
                assert m.casts is not None, name
                m.casts[name] = copied
        yield
    finally:
        for m in held:
            m.casts = None


@contextlib.contextmanager
def adapters_in_fp32(model: nn.Module):
    """A context of many small forwards without gradients, in 16 bits on a CPU: the adapters' part is computed in fp32,
    as oneDNN takes longer to begin a product in 16 bits than it takes. Not by the number of rows, which ranks divide.
    """
    held = [m for m in model.modules() if isinstance(m, LoRALinear)]
    for m in held:
        m.in_fp32 = True
    try:
        yield
    finally:
        for m in held:
            m.in_fp32 = False


class LoRALinear(nn.Module):
    """A frozen linear with an adapter. `base` is nn.Linear, transformers' Conv1D or QuantizedLinear."""

    num_experts = 1

    def __init__(self, base: Any, rank: int, alpha: float, dropout: float, use_rslora: bool, use_dora: bool):
        super().__init__()
        self.base = base
        self.in_features, self.out_features = features(base)
        device = next(base.parameters()).device
        self.lora_A = nn.Parameter(torch.zeros(rank, self.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, dtype=torch.float32, device=device))
        self.scaling = scaling_of(rank, alpha, use_rslora)
        self.dropout = dropout
        self.casts: dict[str, torch.Tensor] | None = None  # {name: factor cast before its use}, see cast_once
        self.cast_dtype: torch.dtype | None = None
        self.start: tuple[torch.Tensor, ...] | None = (
            None  # (A, B) whose product was subtracted from the base: see lora/init.py
        )
        self.lora_magnitude_vector: nn.Parameter | None = None
        self.row_square_O: torch.Tensor | None = None  # |w|^2 per row of the frozen weight, computed once
        self.merged: torch.Tensor | None = None  # base and adapter merged into one dense weight during generation
        self.packed: torch.Tensor | None = None  # the dense base in oneDNN's order, see generate.dense_weights
        self.in_fp32 = False  # the adapter's part, see adapters_in_fp32
        self.off = False  # only the base computes, see adapters_off
        self.fp8: FrozenFp8 | None = None  # the frozen product while it trains, see lora/frozen_fp8.py
        self.flat: Any = None  # its place among all adapters, see lora/flat.py
        # Of row-parallel linears (parallel/tensor.py): number of input shards, this one, all-reduce of squared norms.
        self.pieces = 1
        self.mask_piece: slice | None = None
        self.across: Callable | None = None
        if use_dora:
            self.lora_magnitude_vector = nn.Parameter(self._first_magnitude(device))

    def _first_magnitude(self, device: torch.device) -> torch.Tensor:
        """|w| per row; for weights on meta it is computed later (parallelize.start_magnitudes)."""
        if device.type == "meta":
            return torch.empty(self.out_features, device=device)
        return self.weight_norm().detach().clone()

    def stored(self) -> tuple:
        if isinstance(self.base, QuantizedLinear):
            return self.base.stored()
        return (self.base.weight,)

    def weight_of(self, stored: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The frozen weight [O, I] in `dtype`."""
        if isinstance(self.base, QuantizedLinear):
            return self.base.weight_of(stored, dtype)
        if self.packed is not None and dtype == self.packed.dtype:
            return self.packed
        weight = stored[0].to(dtype)
        if isinstance(self.base, nn.Linear):
            return weight
        return weight.t()

    def exact_weight(self) -> torch.Tensor:
        """The frozen weight in fp32, dequantized from storage, not from a 16-bit cache."""
        if isinstance(self.base, QuantizedLinear) and self.base.cached is not None:
            if self.base.cached.dtype != torch.float32:
                return self.base.dequantize(dict(zip(self.base.names, self.base.stored(), strict=True)), torch.float32)
        return self.weight_of(self.stored(), torch.float32)

    @torch.no_grad()
    def weight_norm(self) -> torch.Tensor:
        weight_OI = self.exact_weight()
        if self.row_square_O is None:
            self.row_square_O = weight_OI.square().sum(1)
        return weight_norm(weight_OI, self.lora_A, self.lora_B, self.scaling, self.row_square_O, self.across)

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """Base and adapter merged: weight [O, I], fp32."""
        weight_OI = torch.addmm(self.exact_weight(), self.lora_B.float(), self.lora_A.float(), alpha=self.scaling)
        if self.lora_magnitude_vector is not None:
            weight_OI *= (self.lora_magnitude_vector / self.weight_norm()).unsqueeze(1)
        return weight_OI

    @property
    def weight(self) -> torch.Tensor:
        """Base and adapter merged, differentiable, as the base stores its weight: for model code that reads it.
        Without dropout.
        """
        base = self.base.weight
        if self.off:
            return base
        added_OI = self.scaling * (self.lora_B @ self.lora_A)
        if isinstance(self.base, QuantizedLinear):
            turned = self.base.fan_in_fan_out
        else:
            turned = not isinstance(self.base, nn.Linear)
        merged = base + (added_OI.t() if turned else added_OI).to(base.dtype)
        if self.lora_magnitude_vector is None:
            return merged
        gain_O = (self.lora_magnitude_vector / self.weight_norm()).to(base.dtype)
        return merged * (gain_O if turned else gain_O.unsqueeze(1))

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x: torch.Tensor):
        if self.off:
            return self.base(x)
        if self.flat is not None and self.flat.shares is not None and self.flat.runs():
            return self.flat.shares.product(self.flat, x)
        return self.product(x, self.base.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None):
        """The layer's output with this bias."""
        if self.merged is not None:
            return F.linear(x, self.merged, bias)
        keep = None
        if self.dropout and self.training:
            keep = self.dropout_mask(x)
        if self.lora_magnitude_vector is None:
            return self._with_adapter(x, bias, keep)
        gain_O = self.lora_magnitude_vector / self.weight_norm()
        if keep is None:
            both = self._with_adapter(x)
            out = both * gain_O.to(both.dtype)
        else:  # PEFT applies dropout only to the adapter's input: base(x) + (gain - 1) W drop(x) + gain s B A drop(x)
            x_kept = x * keep.view(x.shape)
            both = self._with_adapter(x_kept)
            plain, kept = (F.linear(t, self.weight_of(self.stored(), t.dtype)) for t in (x, x_kept))
            out = plain - kept + both * gain_O.to(both.dtype)
        if bias is None:
            return out
        return out + bias.to(out.dtype)

    def _with_adapter(self, x: torch.Tensor, bias: torch.Tensor | None = None, keep: torch.Tensor | None = None):
        """Base and adapter, without magnitudes."""
        if self.flat is not None and self.flat.runs():
            return self.flat.product(x, bias, keep)
        dtype = compute_dtype(x)
        stored = self.stored()
        learns = torch.is_grad_enabled()  # each token of an answer comes here, and autograd's part takes as long
        if not learns and self.in_fp32 and keep is None:
            return self._adapted_in_fp32(x, bias, dtype)
        a = self._cast("lora_A", dtype)
        b = self._cast("lora_B", dtype)
        in_fp8 = (self.fp8,) if self.fp8 is not None and self.training else ()
        of = Products((self.weight_of,), (stored,), (bias,), scaling=self.scaling, a=a, bs=(b,), fp8=in_fp8)
        if learns:
            return LoRAProduct.apply(x, keep, of, self.lora_A, self.lora_B, *stored)
        if keep is not None:
            keep = as_dtype(keep, dtype)
        return of.forward(x, keep, dtype)[0][0]

    def _adapted_in_fp32(self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype):
        """Base and adapter, the adapter's part in fp32."""
        with without_autocast(x):
            rows = rows_of(x, dtype)
            added = (rows.float() @ self.lora_A.float().t()) @ self.lora_B.float().t()
            out = product(rows, self.weight_of(self.stored(), dtype), bias)
            return shaped_like(out.add_(added, alpha=self.scaling), x)

    def _cast(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The factor, in the dtype of products if it is kept in it."""
        if self.casts is None or dtype != self.cast_dtype:
            return getattr(self, name)
        if name not in self.casts:
            self.casts[name] = getattr(self, name).detach().to(self.cast_dtype)
        return self.casts[name]

    def dropout_mask(self, x: torch.Tensor):
        """Dropout mask [rows of x, I], 0 or 1 / (1 - p); an input shard gets its slice of the full mask."""
        rows = x.numel() // x.shape[-1]
        piece = self.mask_piece
        if piece is None:
            width = x.shape[-1]
        else:
            width = x.shape[-1] * self.pieces
        keep = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        keep.bernoulli_(1 - self.dropout).div_(1 - self.dropout)
        if piece is None:
            return keep
        return keep[:, piece].contiguous()


class LoRAEmbedding(nn.Module):
    """A frozen embedding [V, H] with an adapter in PEFT's layout: A [R, V] starts at zero, B [H, R] at random."""

    num_experts = 1

    def __init__(self, base: nn.Embedding, rank: int, alpha: float, use_rslora: bool, use_dora: bool):
        super().__init__()
        self.base = base
        device = base.weight.device
        self.lora_embedding_A = nn.Parameter(torch.zeros(rank, base.num_embeddings, device=device))
        self.lora_embedding_B = nn.Parameter(torch.zeros(base.embedding_dim, rank, device=device))
        self.scaling = scaling_of(rank, alpha, use_rslora)
        self.start: tuple[torch.Tensor, ...] | None = None
        self.off = False
        self.lora_magnitude_vector: nn.Parameter | None = None
        self.row_square_O: torch.Tensor | None = None
        self.across: Callable | None = (
            None  # all-reduce of squared norms over ranks that each hold rows (parallel/vocabulary.py)
        )
        if use_dora:  # a magnitude per column of the embedding, H in all
            meta = device.type == "meta"
            if meta:
                norm = torch.empty(base.embedding_dim, device=device)
            else:
                norm = self.weight_norm().clone()
            self.lora_magnitude_vector = nn.Parameter(norm)

    @property
    def weight(self):
        return self.base.weight

    @torch.no_grad()
    def weight_norm(self) -> torch.Tensor:
        if self.row_square_O is None:
            self.row_square_O = self.base.weight.float().square().sum(0)
        return weight_norm(
            self.base.weight.float().t(),
            self.lora_embedding_A,
            self.lora_embedding_B,
            self.scaling,
            self.row_square_O,
            self.across,
        )

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """Base and adapter merged: embedding [V, H], fp32."""
        table_VH = torch.addmm(
            self.base.weight.float(), self.lora_embedding_A.t(), self.lora_embedding_B.t(), alpha=self.scaling
        )
        if self.lora_magnitude_vector is not None:
            table_VH *= self.lora_magnitude_vector / self.weight_norm()
        return table_VH

    def forward(self, ids: torch.Tensor):
        out = self.base(ids)
        if self.off:
            return out
        low = F.embedding(ids, self.lora_embedding_A.t(), padding_idx=self.base.padding_idx)
        added = (low @ self.lora_embedding_B.t()) * self.scaling
        scale = getattr(self.base, "embed_scale", None)  # Gemma scales in the embedding's forward
        if scale is not None:
            added = added * torch.as_tensor(scale, device=added.device).to(added.dtype)
        both = out + added
        if self.lora_magnitude_vector is not None:
            both = both * (self.lora_magnitude_vector / self.weight_norm())
        return both.to(out.dtype)


@torch.no_grad()
def weight_norm(
    weight_OI: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    s: float,
    row_square_O: torch.Tensor,
    across: Callable | None = None,
) -> torch.Tensor:
    """|w + s B A| per row [O], fp32. DoRA (Liu et al. 2024, eq. 6) treats it as a constant in backward (section 4.3).

    Expanded as |w|^2 + 2 s b.(A w) + s^2 |b A|^2, which avoids a second matrix of the weight's size. `across`: all-
    reduce of the squares over ranks that each hold an input shard.
    """
    a = a.float()
    b = b.float()
    cross = ((weight_OI @ a.t()) * b).sum(1)
    square_O = row_square_O + 2 * s * cross + s * s * ((b @ (a @ a.t())) * b).sum(1)
    return (square_O if across is None else across(square_O)).clamp_min(0).sqrt()


def features(base: Any) -> tuple[int, int]:
    """(in_features, out_features); Conv1D stores its weight transposed."""
    if isinstance(base, (nn.Linear, QuantizedLinear)):
        return base.in_features, base.out_features
    return tuple(base.weight.shape)


def layers(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if n.rpartition(".")[2].startswith("lora_")}
