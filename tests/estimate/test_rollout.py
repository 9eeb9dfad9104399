"""Sampled answers as a plan predicts them before data are read."""

import pytest

from finetune.estimate.rollout import planned
from tests.support.planned import plan_of_kind

REWARDED = dict(reward="exact", num_generations=4, max_completion_length=16, context_length=64)


@pytest.mark.parametrize(("batch_size", "prompts"), [(3, 6), ("auto", 1)])
def test_prompts_of_a_step_are_counted_once_the_batch_is_settled_and_before_as_one(batch_size, prompts):
    plan = plan_of_kind("lora", **REWARDED, batch_size=batch_size, gradient_accumulation_steps=2)
    assert planned(plan).prompts == (48,) * prompts
