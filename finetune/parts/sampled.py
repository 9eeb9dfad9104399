"""Answers that a step samples before it learns: to every prompt for its rewards, or to some rows for a teacher."""

from dataclasses import dataclass
from typing import Any

from finetune.parts.fields import Settings


@dataclass(frozen=True)
class SampledPlan:
    """`group`: answers to each prompt, of at most `most` tokens; `fraction`: of a step's rows that are answered.
    `copies_prompts`: each answer has its prompt's keys and values beside its own, as mlx-lm's caches hold them.
    """

    group: int
    most: int
    temperature: float
    top_p: float
    fraction: float = 1.0
    copies_prompts: bool = False

    @classmethod
    def of(cls, settings: Settings) -> "SampledPlan | None":
        """None for a run that learns from its rows alone."""
        s = settings
        copies = s.backend == "mlx"
        if s.reward:
            return cls(s.num_generations, s.max_completion_length, s.temperature, s.top_p, copies_prompts=copies)
        if s.teacher and s.on_policy_fraction:
            return cls(1, s.max_completion_length, s.temperature, s.top_p, s.on_policy_fraction, copies)
        return None


def sampled_of(plan: Any) -> SampledPlan:
    """The answers of a plan that samples some. `plan`: a Parts."""
    assert plan.sampled is not None, "the plan samples answers"
    return plan.sampled
