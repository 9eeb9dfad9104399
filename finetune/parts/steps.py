"""Rows, tokens and updates of a step, and the number of steps."""

from dataclasses import dataclass

from finetune.parts.fields import Settings, part_of
from finetune.parts.optimizers import OPTIMIZERS
from finetune.schedule import Schedule, warmup_steps


@dataclass(frozen=True)
class StepsPlan:
    """Rows, tokens and updates of a step, and their number. `clip`: of the global gradient norm; None: not clipped."""

    batch_size: int
    accumulation: int
    microbatch_tokens: int
    num_epochs: int
    max_steps: int
    optimizer: str
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    lr: float
    wd: float
    lr_scheduler: str
    warmup_steps: int | None
    warmup_ratio: float
    cosine_min_lr_ratio: float
    wsd_decay_ratio: float
    wsd_decay_type: str
    clip: float | None
    seed: int

    def schedule(self, total_steps: int) -> Schedule:
        warmup = warmup_steps(total_steps, self.warmup_steps, self.warmup_ratio)
        return Schedule(
            self.lr_scheduler,
            self.lr,
            total_steps,
            warmup,
            self.cosine_min_lr_ratio,
            self.wsd_decay_ratio,
            self.wsd_decay_type,
        )

    @property
    def length_flag(self) -> str:
        """The flag that sets the number of steps, as it is written."""
        if self.max_steps > 0:
            return f"--max_steps {self.max_steps}"
        return f"--num_epochs {self.num_epochs}"

    @property
    def moments_are_8_bit(self) -> bool:
        return OPTIMIZERS[self.optimizer].eight_bit

    @property
    def averages_weights(self) -> bool:
        """True if what is saved and evaluated is an average of the weights that train."""
        return OPTIMIZERS[self.optimizer].averages_weights

    @property
    def tells_matrices(self) -> bool:
        """True if the weights of linear layers have an optimizer of their own."""
        return OPTIMIZERS[self.optimizer].tells_matrices

    @classmethod
    def of(cls, settings: Settings) -> "StepsPlan":
        s = settings
        renamed = dict(
            accumulation=s.gradient_accumulation_steps, clip=s.grad_norm if s.apply_gradient_clipping else None
        )
        return part_of(cls, s, **renamed)
