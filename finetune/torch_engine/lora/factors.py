"""Residual adapter initializations, which change the base (PiSSA, OLoRA, LoftQ), and their conversion to plain LoRA.

Each gives A_0, B_0 for a weight W; the base becomes W - s B_0 A_0, quantized under qlora, so training starts from the
original model. Saved as LoRA of twice the rank on the original base: A' = [A; A_0], B' = [B, -B_0], as s (B' A') =
s (B A - B_0 A_0), the same form as PEFT's conversion.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from finetune.adapters.start import seed_of

LOFTQ_STEPS = 5  # Li et al. 2023, section 4.1
# Power iterations of the randomized SVD. Meng et al. 2024, section 4.3, find 16 as good as a full SVD; in LoftQ each
# step corrects the error of the one before.
PISSA_POWER_STEPS = 16
LOFTQ_POWER_STEPS = 4
MORE_RANK = 8


@dataclass(frozen=True)
class Start:
    """Rank and scaling of the adapter of one layer, and the seed and name by which it is drawn."""

    rank: int
    scaling: float
    seed: int
    name: str


# Each takes (fp32 weight [O, I], start, quantized) and returns (A_0 [R, I], B_0 [O, R]) in fp32. `quantized(weight) ->
# weight`: quantizes and dequantizes as the run's base. If the weight has a lower rank, the rest is drawn as in LoRA.


@torch.no_grad()
def pissa(weight_OI: torch.Tensor, start: Start, quantized: Callable[[torch.Tensor], torch.Tensor]) -> tuple:
    """Meng et al. 2024, eq. 2-3: the R largest singular values, their square roots on each side."""
    a, b = _leading_factors(weight_OI, start, PISSA_POWER_STEPS)
    return _scaled(a, b, start)


@torch.no_grad()
def olora(weight_OI: torch.Tensor, start: Start, quantized: Callable[[torch.Tensor], torch.Tensor]) -> tuple:
    """Büyükakyüz 2024: the first R columns of Q and rows of R of W = QR."""
    q, r = torch.linalg.qr(weight_OI)
    return _padded(r[: start.rank], q[:, : start.rank], start)


@torch.no_grad()
def loftq(weight_OI: torch.Tensor, start: Start, quantized: Callable[[torch.Tensor], torch.Tensor]) -> tuple:
    """Li et al. 2023, algorithm 1: LOFTQ_STEPS alternations of quantizing W minus the adapter, and fitting the adapter
    to the error.
    """
    a, b = _leading_factors(weight_OI - quantized(weight_OI).float(), start, LOFTQ_POWER_STEPS)
    for _ in range(LOFTQ_STEPS - 1):
        a, b = _leading_factors(weight_OI - quantized(weight_OI - b @ a).float(), start, LOFTQ_POWER_STEPS)
    return _scaled(a, b, start)


def _scaled(a: torch.Tensor, b: torch.Tensor, start: Start):
    half = math.sqrt(start.scaling)
    return _padded(a / half, b / half, start)


def _leading_factors(weight_OI: torch.Tensor, start: Start, steps: int):
    """Best approximation of `weight_OI` as B A of the start's rank, by a randomized SVD seeded by seed and name."""
    rank = start.rank
    most = min(weight_OI.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(start.seed, start.name))
        u, s, v = torch.svd_lowrank(weight_OI, q=min(most, rank + MORE_RANK), niter=steps)
    u = u[:, :rank]
    root = s[:rank].sqrt()
    v = v[:, :rank]
    return root.unsqueeze(1) * v.t(), u * root


def _padded(a: torch.Tensor, b: torch.Tensor, start: Start):
    missing = start.rank - a.shape[0]
    if missing <= 0:
        return a.contiguous(), b.contiguous()
    generator = torch.Generator().manual_seed(seed_of(start.seed, start.name))
    bound = 1 / math.sqrt(a.shape[1])
    rows = torch.empty(missing, a.shape[1]).uniform_(-bound, bound, generator=generator).to(a.device)
    return torch.cat([a, rows]), torch.cat([b, b.new_zeros(b.shape[0], missing)], 1)


# ---- on disk: E experts share one pair of matrices, A [E * R, I] and B [O, R * E]; E is 1 for a linear


def doubled_a(a: torch.Tensor, start_a: torch.Tensor, experts: int = 1):
    """[A; A_0] per expert."""
    parts = (a.view(experts, -1, a.shape[1]), start_a.view(experts, -1, a.shape[1]))
    return torch.cat(parts, 1).reshape(-1, a.shape[1])


def doubled_b(b: torch.Tensor, start_b: torch.Tensor, experts: int = 1):
    """[B, -B_0] per expert."""
    parts = (b.view(b.shape[0], -1, experts), -start_b.view(b.shape[0], -1, experts))
    return torch.cat(parts, 1).reshape(b.shape[0], -1)


def halves_a(both: torch.Tensor, experts: int = 1):
    """Inverse of doubled_a: (A, A_0)."""
    a, start = both.view(experts, -1, both.shape[1]).chunk(2, 1)
    return a.reshape(-1, both.shape[1]), start.reshape(-1, both.shape[1])


def halves_b(both: torch.Tensor, experts: int = 1):
    """Inverse of doubled_b: (B, B_0)."""
    b, start = both.view(both.shape[0], -1, experts).chunk(2, 1)
    return b.reshape(both.shape[0], -1), -start.reshape(both.shape[0], -1)
