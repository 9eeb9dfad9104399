"""Optimizers on MLX arrays, numerically torch's: the same bias correction, eps and weight decay, the same state names.

{name: array} in, new {name: array} out; nothing is changed in place, so a step that is not finite can be dropped.
"""

from collections.abc import Iterable, Iterator

import mlx.core as mx
from mlx.optimizers import Lion

from finetune.errors import CheckpointDamagedError
from finetune.mlx_engine import eight_bit
from finetune.parts.engine_limits import MLX_UPDATED_BYTES
from finetune.parts.optimizers import OPTIMIZERS
from finetune.parts.rows import implementation
from finetune.parts.steps import StepsPlan


def groups_by_size(grads: dict[str, mx.array], most: int) -> Iterator[list[str]]:
    """The names in order, as many together as take at most so many bytes; a larger one alone."""
    group: list[str] = []
    size = 0
    for name, grad in grads.items():
        if group and size + grad.nbytes > most:
            yield group
            group = []
            size = 0
        group.append(name)
        size += grad.nbytes
    if group:
        yield group


class Optimizer:
    """`moments`: {'<name>.<moment>': array}, `counts`: {'<name>.step': steps applied}; both empty before the first."""

    def __init__(self, steps: StepsPlan, lr_ratio: float = 1.0):
        facts = OPTIMIZERS[steps.optimizer]
        assert facts.mlx, steps.optimizer
        self.update = implementation(facts.mlx)
        self.kinds = sorted(facts.moments or ())
        self.eight_bit = facts.eight_bit
        self.has_count = facts.count is not None
        self.wd = steps.wd
        self.ratio = lr_ratio
        self.adam = steps.adam_beta1, steps.adam_beta2, steps.adam_epsilon
        self.moments: dict[str, mx.array] = {}
        self.counts: dict[str, int] = {}

    def step(self, params: dict, grads: dict, lr: mx.array) -> tuple[dict, dict]:
        """(new weights, new moments) of one step at the learning rate `lr`, an array."""
        weights: dict[str, mx.array] = {}
        moments: dict[str, mx.array] = {}
        for name, weight in params.items():
            is_b = name.endswith(("lora_B", "lora_B.weight"))
            if is_b and weight.ndim >= 2:
                rate = lr * self.ratio
            else:
                rate = lr
            decay = 0.0
            if weight.ndim >= 2:
                decay = self.wd
            start = self._start(weight)
            state = {k: self.moments.get(f"{name}.{k}", array) for k, array in start.items()}
            count = self.counts.get(f"{name}.step", 0) + 1
            weights[name], state = self.update(weight, grads[name], state, rate, decay, count, self.adam)
            moments |= {f"{name}.{k}": v for k, v in state.items()}
        return weights, moments

    def _start(self, weight: mx.array) -> dict[str, mx.array]:
        """The state of a weight before its first step."""
        if self.eight_bit:
            return eight_bit.start(weight)
        return {k: mx.zeros_like(weight) for k in self.kinds}

    def applied(self, names: Iterable[str], moments: dict) -> None:
        """Records a step that was applied to these weights."""
        self.moments = self.moments | moments
        if self.has_count:
            self.counts = self.counts | {f"{name}.step": self.counts.get(f"{name}.step", 0) + 1 for name in names}

    def load(self, moments: dict, counts: dict) -> None:
        if any(not isinstance(n, int | float) for n in counts.values()):
            raise CheckpointDamagedError("train_state.json: engine.counts are not numbers")
        self.moments = moments
        self.counts = dict(counts)


def _adam(
    weight: mx.array,
    grad: mx.array,
    state: dict[str, mx.array],
    lr: mx.array,
    decay: float,
    count: int,
    adam: tuple[float, float, float],
    decoupled: bool,
):
    beta1, beta2, epsilon = adam
    if decoupled:
        weight = weight * (1 - lr * decay)
    elif decay:
        grad = grad + decay * weight
    m = beta1 * state["exp_avg"] + (1 - beta1) * grad
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * mx.square(grad)
    denominator = mx.sqrt(v) / (1 - beta2**count) ** 0.5 + epsilon
    return weight - (lr / (1 - beta1**count)) * m / denominator, {"exp_avg": m, "exp_avg_sq": v}


def adamw_8bit(
    weight: mx.array,
    grad: mx.array,
    state: dict[str, mx.array],
    lr: mx.array,
    decay: float,
    count: int,
    adam: tuple[float, float, float],
):
    """bitsandbytes' AdamW: moments in 8 bits, or in 32 of small weights. A large one is updated in slices of whole
    blocks, one after the other: its moments in 32 bits and what finds their codes take eleven times its bytes.
    """
    size = MLX_UPDATED_BYTES // 4
    if weight.size <= size:
        return _adamw_8bit(weight, grad, state, lr, decay, count, adam)
    weights = []
    states = []
    for start in range(0, weight.size, size):
        part = slice(start, start + size)
        of_slice = eight_bit.sliced(state, start, size)
        grad_S = grad.reshape(-1)[part]
        found, of_slice = _adamw_8bit(weight.reshape(-1)[part], grad_S, of_slice, lr, decay, count, adam)
        mx.eval(found, of_slice)
        weights.append(found)
        states.append(of_slice)
    return mx.concatenate(weights).reshape(weight.shape), eight_bit.joined(states, weight.shape)


def _adamw_8bit(
    weight: mx.array,
    grad: mx.array,
    state: dict[str, mx.array],
    lr: mx.array,
    decay: float,
    count: int,
    adam: tuple[float, float, float],
):
    first, second = eight_bit.moments_of(state, weight.shape)
    moments = {"exp_avg": first, "exp_avg_sq": second}
    weight, moments = _adam(weight, grad, moments, lr, decay, count, adam, decoupled=True)
    return weight, eight_bit.stored(moments["exp_avg"], moments["exp_avg_sq"], state)


def adamw(
    weight: mx.array,
    grad: mx.array,
    state: dict[str, mx.array],
    lr: mx.array,
    decay: float,
    count: int,
    adam: tuple[float, float, float],
):
    return _adam(weight, grad, state, lr, decay, count, adam, decoupled=True)


def adam(
    weight: mx.array,
    grad: mx.array,
    state: dict[str, mx.array],
    lr: mx.array,
    decay: float,
    count: int,
    adam: tuple[float, float, float],
):
    return _adam(weight, grad, state, lr, decay, count, adam, decoupled=False)


def sgd(
    weight: mx.array,
    grad: mx.array,
    state: dict[str, mx.array],
    lr: mx.array,
    decay: float,
    count: int,
    adam: tuple[float, float, float],
):
    """Momentum 0.9; its buffer starts as the first gradient, which is 0.9 * 0 + grad."""
    buffer = 0.9 * state["momentum_buffer"] + grad + decay * weight
    return weight - lr * buffer, {"momentum_buffer": buffer}


def adadelta(
    weight: mx.array,
    grad: mx.array,
    state: dict[str, mx.array],
    lr: mx.array,
    decay: float,
    count: int,
    adam: tuple[float, float, float],
):
    grad = grad + decay * weight
    square = 0.9 * state["square_avg"] + 0.1 * mx.square(grad)
    change = mx.sqrt(state["acc_delta"] + 1e-6) / mx.sqrt(square + 1e-6) * grad
    delta = 0.9 * state["acc_delta"] + 0.1 * mx.square(change)
    return weight - lr * change, {"square_avg": square, "acc_delta": delta}


def lion(
    weight: mx.array,
    grad: mx.array,
    state: dict[str, mx.array],
    lr: mx.array,
    decay: float,
    count: int,
    adam: tuple[float, float, float],
):
    """mlx's own Lion, of one weight."""
    optimizer = Lion(0.0, betas=list(adam[:2]), weight_decay=decay)
    optimizer.state["learning_rate"] = lr
    held = {"m": state["exp_avg"]}
    weight = optimizer.apply_single(grad, weight, held)
    return weight, {"exp_avg": held["m"]}
