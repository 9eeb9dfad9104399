"""Optimizers on MLX arrays, numerically torch's: the same bias correction, eps and weight decay, the same state names.

{name: array} in, new {name: array} out; nothing is changed in place, so a step that is not finite can be dropped.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

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
            update = Update(weight, grads[name], state=state, lr=rate, decay=decay, count=count, adam=self.adam)
            weights[name], state = self.update(update)
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


@dataclass(frozen=True)
class Update:
    """A weight and what a step changes it by: gradient and moments, the learning rate, the weight decay, the number of
    the step, and Adam's betas and epsilon.
    """

    weight: mx.array
    grad: mx.array
    state: dict[str, mx.array]
    lr: mx.array
    decay: float
    count: int
    adam: tuple[float, float, float]


Updated = tuple[mx.array, dict[str, mx.array]]  # a new weight, its new moments


def adamw(update: Update) -> Updated:
    return adam(replace(update, weight=update.weight * (1 - update.lr * update.decay), decay=0.0))


def adam(update: Update) -> Updated:
    beta1, beta2, epsilon = update.adam
    grad = update.grad
    if update.decay:
        grad = grad + update.decay * update.weight
    m = beta1 * update.state["exp_avg"] + (1 - beta1) * grad
    v = beta2 * update.state["exp_avg_sq"] + (1 - beta2) * mx.square(grad)
    denominator = mx.sqrt(v) / (1 - beta2**update.count) ** 0.5 + epsilon
    return update.weight - (update.lr / (1 - beta1**update.count)) * m / denominator, {"exp_avg": m, "exp_avg_sq": v}


def adamw_8bit(update: Update) -> Updated:
    """bitsandbytes' AdamW: moments in 8 bits, or in 32 of small weights. A large one is updated in slices of whole
    blocks, one after the other: its moments in 32 bits and what finds their codes take eleven times its bytes.
    """
    size = MLX_UPDATED_BYTES // 4
    shape = update.weight.shape
    if update.weight.size <= size:
        return _adamw_8bit(update)
    weights = []
    states = []
    for start in range(0, update.weight.size, size):
        part = slice(start, start + size)
        of_slice = replace(
            update,
            weight=update.weight.reshape(-1)[part],
            grad=update.grad.reshape(-1)[part],
            state=eight_bit.sliced(update.state, start, size),
        )
        found, state = _adamw_8bit(of_slice)
        mx.eval(found, state)
        weights.append(found)
        states.append(state)
    return mx.concatenate(weights).reshape(shape), eight_bit.joined(states, shape)


def _adamw_8bit(update: Update) -> Updated:
    first, second = eight_bit.moments_of(update.state, update.weight.shape)
    weight, moments = adamw(replace(update, state={"exp_avg": first, "exp_avg_sq": second}))
    return weight, eight_bit.stored(moments["exp_avg"], moments["exp_avg_sq"], update.state)


def sgd(update: Update) -> Updated:
    """Momentum 0.9; its buffer starts as the first gradient, which is 0.9 * 0 + grad."""
    buffer = 0.9 * update.state["momentum_buffer"] + update.grad + update.decay * update.weight
    return update.weight - update.lr * buffer, {"momentum_buffer": buffer}


def adadelta(update: Update) -> Updated:
    grad = update.grad + update.decay * update.weight
    square = 0.9 * update.state["square_avg"] + 0.1 * mx.square(grad)
    change = mx.sqrt(update.state["acc_delta"] + 1e-6) / mx.sqrt(square + 1e-6) * grad
    delta = 0.9 * update.state["acc_delta"] + 0.1 * mx.square(change)
    return update.weight - update.lr * change, {"square_avg": square, "acc_delta": delta}


def lion(update: Update) -> Updated:
    """mlx's own Lion, of one weight."""
    optimizer = Lion(0.0, betas=list(update.adam[:2]), weight_decay=update.decay)
    optimizer.state["learning_rate"] = update.lr
    held = {"m": update.state["exp_avg"]}
    weight = optimizer.apply_single(update.grad, update.weight, held)
    return weight, {"exp_avg": held["m"]}
