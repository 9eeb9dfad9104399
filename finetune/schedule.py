"""Learning rate schedules as pure functions of the step, so that a resumed run needs no scheduler state."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A schedule. `kind`: one of settings.SCHEDULES; `warmup_steps`: linear from 0, included in the total."""

    kind: str
    lr: float
    total_steps: int
    warmup_steps: int
    min_ratio: float = 0.1

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, from 1 to total_steps."""
        if step <= self.warmup_steps:
            return self.lr * step / (self.warmup_steps + 1)
        done = (step - 1 - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.lr * SHAPES[self.kind](min(1.0, done), self.min_ratio)


def warmup_steps(total_steps: int, steps: int | None, ratio: float) -> int:
    return min(total_steps, steps if steps is not None else math.ceil(ratio * total_steps) if ratio else 0)


def _cosine(done, low):
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))


# Each maps the completed fraction of the schedule (0..1) to a factor of the peak.
SHAPES = {
    "constant": lambda done, low: 1.0,
    "linear": lambda done, low: 1 - done,
    "cosine": _cosine,
    "cosine_with_restarts": lambda done, low: _cosine(done * 2 % 1.0 if done < 1 else 1.0, low),  # two cycles
    "polynomial": lambda done, low: (1 - done) ** 2,
    "exponential": lambda done, low: 0.01**done,  # down to 1 %
}
