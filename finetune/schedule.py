"""Learning rate schedules as pure functions of the step, so that a resumed run needs no scheduler state."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A schedule. `kind`: one of config.SCHEDULES; `warmup_steps`: linear from 0, included in the total; `decay_ratio`,
    `decay_type`: of wsd, the fraction of all steps in which it decays and one of config.WSD_DECAYS.
    """

    kind: str
    lr: float
    total_steps: int
    warmup_steps: int
    min_ratio: float = 0.1
    decay_ratio: float = 0.1
    decay_type: str = "cosine"

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, from 1 to total_steps."""
        if step <= self.warmup_steps:
            return self.lr * step / (self.warmup_steps + 1)
        after = step - 1 - self.warmup_steps
        rest = max(1, self.total_steps - self.warmup_steps)
        if self.kind == "inverse_sqrt":
            timescale = self.warmup_steps or INVERSE_SQRT_TIMESCALE
            return self.lr * math.sqrt(timescale / (after + timescale))
        if self.kind == "wsd":
            decay = min(rest, math.ceil(self.decay_ratio * self.total_steps))
            done = max(0, after - (rest - decay)) / decay
            return self.lr * DECAYS[self.decay_type](min(1.0, done))
        return self.lr * SHAPES[self.kind](min(1.0, after / rest), self.min_ratio)


def warmup_steps(total_steps: int, steps: int | None, ratio: float) -> int:
    """Steps of the warmup: more than the run has, where more were asked for, as transformers' schedulers have it."""
    if steps is not None:
        return steps
    return math.ceil(ratio * total_steps)


def _cosine(done: float, low: float):
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))


INVERSE_SQRT_TIMESCALE = 10_000  # steps, without warmup: transformers' get_inverse_sqrt_schedule
# Of wsd (MiniCPM, Hu et al. 2024), as transformers' get_wsd_schedule has them: the completed fraction to a factor.
DECAYS = {
    "cosine": lambda done: _cosine(done, 0.0),
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - math.sqrt(done),  # Haegele et al. 2024
}
# Each maps the completed fraction of the schedule (0..1) to a factor of the peak.
SHAPES = {
    "constant": lambda done, low: 1.0,
    "linear": lambda done, low: 1 - done,
    "cosine": _cosine,
    "cosine_with_restarts": lambda done, low: _cosine(done * 2 % 1.0 if done < 1 else 1.0, low),  # two cycles
    "polynomial": lambda done, low: (1 - done) ** 2,
    "exponential": lambda done, low: 0.01**done,  # down to 1 %
}
