"""Optimizers of the recursive model: AdamW or AdamATan2, signed SGD of puzzle embeddings, and the moving average."""

import contextlib
from collections.abc import Callable, Iterable

import numpy as np
import torch

from finetune.errors import PlanError
from finetune.torch_engine.device import fused_optimizer
from recursive.config import PretrainConfig


def build_optimizer(named: dict, settings: PretrainConfig, device: torch.device):
    """AdamW or AdamATan2 over {name: parameter}; biases do not decay."""
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": settings.weight_decay, "ratio": 1.0},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0, "ratio": 1.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = settings.beta1, settings.beta2
    if settings.optimizer == "adam_atan2":
        return AdamATan2(groups, lr=settings.lr, betas=betas)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, **fused_optimizer(device))


class AdamATan2(torch.optim.Optimizer):
    """AdamW with lr * atan2(m, sqrt(v)) in place of lr * m / (sqrt(v) + eps) (Everett et al. 2024): no epsilon.
    m and v are corrected for their start as in Adam.
    """

    def __init__(
        self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                step = int(state["step"].item())
                m = state["exp_avg"]
                v = state["exp_avg_sq"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.sub_(torch.atan2(m / (1 - beta1**step), (v / (1 - beta2**step)).sqrt_()), alpha=group["lr"])


class SignSGD:
    """w <- (1 - lr * decay) * w - lr * sign(grad), for rows that have a gradient: a table of which a step uses few."""

    def __init__(self, parameters: list, lr: float, weight_decay: float):
        self.parameters = parameters
        self.lr = lr
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, ratio: float) -> None:
        """`ratio`: of the schedule, 1 at its peak."""
        lr = self.lr * ratio
        for p in self.parameters:
            if p.grad is None:
                continue
            used = p.grad.ne(0).any(1)
            p[used] = p[used] * (1 - lr * self.weight_decay) - lr * p.grad[used].sign()


class Average:
    """The exponential moving average of the trained weights: ema <- rate * ema + (1 - rate) * weight.

    While few updates are done the rate is (1 + t) / (10 + t), so that a short run's average is not its start.
    """

    def __init__(self, weights: dict, rate: float):
        self.weights = weights
        self.rate = rate
        self.updates = 0
        self.shadow = {name: p.detach().clone() for name, p in weights.items()}

    def rate_at(self, update: int) -> float:
        return min(self.rate, (1 + update) / (10 + update))

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        torch._foreach_lerp_(list(self.shadow.values()), list(self.weights.values()), 1 - self.rate_at(self.updates))

    @contextlib.contextmanager
    def applied(self):
        """The model computes with the average inside; weights and average swap their memory, nothing is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self.weights.items():
            parameter.data, self.shadow[name] = self.shadow[name], parameter.data

    def load(self, averages: dict, updates: int) -> None:
        self.updates = updates
        if set(averages) != set(self.shadow):
            raise PlanError("resume: the checkpoint averages other tensors. Resume with the saved settings.")
        for name, shadow in self.shadow.items():
            shadow.copy_(torch.from_numpy(np.array(averages[name])))

    @torch.no_grad()
    def restart(self) -> None:
        """The average begins at the present weights."""
        self.updates = 0
        for name, parameter in self.weights.items():
            self.shadow[name].copy_(parameter)
