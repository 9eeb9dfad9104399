"""Products of frozen weights in fp8: rows [N, I] by a weight [O, I], both in e4m3, summed in fp32.

Each row is divided by its largest magnitude, so that it fills the type's range; so is each row of the weight, and in
backward each of its columns, which are summed over there. A weight is rounded where it is used, from its own type, and
twice: what forward reads lies the other way round for backward, and what is kept would take as much memory again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch

from finetune.errors import first_line
from finetune.quantizers.nf4 import TRITON_FAILURES, triton_errors
from finetune.torch_engine.kernels.e4m3 import SMALLEST, rounded, scale_of

MULTIPLE = 16  # that sizes of torch._scaled_mm's factors are of


class Scaled(NamedTuple):
    """Rows in fp8 [N, K], and what each is to be multiplied by [N, 1], fp32. `dtype`: of the rows, and of products."""

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


@dataclass
class Switch:
    """Switch of all of a model's frozen products: in fp8 while it is `on`, else as the weights are."""

    on: bool = True


@dataclass(eq=False)
class FrozenFp8:
    """Products by one frozen weight. Scales of its rows [O, 1] and its columns [I, 1] stay once they are known."""

    switch: Switch
    of_rows: torch.Tensor | None = field(default=None, repr=False)
    of_columns: torch.Tensor | None = field(default=None, repr=False)

    def forward(self, rows: Scaled, weight_OI: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """rows W^T (+ b) [N, O]."""
        if self.of_rows is None:
            self.of_rows = scale_of(weight_OI)
        out = _product(rows, weight_OI, self.of_rows)
        if bias is not None:
            out += bias
        return out

    def backward(self, grad: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """grad W [N, I]."""
        if self.of_columns is None:
            self.of_columns = scale_of(weight_OI.t())
        return _product(scaled(grad), weight_OI.t(), self.of_columns)


def _product(rows: Scaled, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows [N, K] by the weight [M, K], of any strides, whose rows have these scales."""
    factor = divided(weight, scale)
    return torch._scaled_mm(
        rows.values, factor.t(), scale_a=rows.scale, scale_b=scale.t(), out_dtype=rows.dtype, use_fast_accum=False
    )


def scaled(rows: torch.Tensor) -> Scaled:
    """Rows [N, K] in fp8, each by its own scale."""
    rows = rows.contiguous()
    if rows.device.type == "cpu" or error_on(rows.device) is not None:
        scale = scale_of(rows)
        return Scaled(rounded(rows, scale), scale, rows.dtype)
    from finetune.torch_engine.kernels import fp8_triton

    return Scaled(*fp8_triton.scaled(rows), rows.dtype)


def divided(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight in fp8, contiguous whatever its strides are, each row divided by its scale."""
    if weight.device.type == "cpu" or error_on(weight.device) is not None:
        return rounded(weight, scale)
    from finetune.torch_engine.kernels import fp8_triton

    return fp8_triton.divided(weight, scale)


def takes(weight_shape: Sequence[int]) -> bool:
    """True if a weight of this shape can be multiplied in fp8."""
    return all(size % MULTIPLE == 0 for size in weight_shape)


@cache
def error_on(device: torch.device) -> str | None:
    """Reason not to round by the kernels on a device; None if no number of theirs is more than a step of e4m3 away from
    that of torch's operations. Tried once.
    """
    random = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        from finetune.torch_engine.kernels import fp8_triton

        scale = scale_of(random)
        here = random.to(device)
        pairs = [(fp8_triton.scaled(here)[0], rounded(random, scale))]
        for there, wanted in ((here, random), (here.t(), random.t())):
            by = scale_of(wanted)
            pairs.append((fp8_triton.divided(there, by.to(device)), rounded(wanted, by)))
        for found, wanted in pairs:
            differs = (found.cpu().float() - wanted.float()).abs() > wanted.float().abs() / 8 + SMALLEST
            if differs.any():
                return f"{differs.sum()} of {found.numel()} numbers are rounded otherwise"
    except (*TRITON_FAILURES, *triton_errors()) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def product_error(device: torch.device) -> str | None:
    """Reason why a device multiplies no rows in fp8; None if it does, within e4m3's rounding."""
    generator = torch.Generator().manual_seed(1)
    rows, weight = (torch.randn(size, 64, generator=generator).bfloat16() for size in (48, 32))
    try:
        found = FrozenFp8(Switch()).forward(scaled(rows.to(device)), weight.to(device), None).cpu().float()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {first_line(error)}"
    wanted = rows.float() @ weight.float().t()
    off = ((found - wanted).norm() / wanted.norm()).item()
    if not off < 0.06:  # two factors of three bits beside the first: 2^-4 / sqrt(3) each, at most
        return f"a product is off by {off:.2f} of its norm"
    return None
