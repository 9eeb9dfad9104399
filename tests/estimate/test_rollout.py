"""Sampled answers as a plan predicts them before data are read."""

import json
import re

import pytest

from finetune.data.lengths import data_sample
from finetune.estimate.rollout import planned
from tests.support.commands import command, finish
from tests.support.planned import plan_of_kind
from tests.support.plans import plan_of

REWARDED = dict(reward="exact", num_generations=4, max_completion_length=16, context_length=64)


@pytest.mark.parametrize(("batch_size", "prompts"), [(3, 6), ("auto", 1)])
def test_prompts_of_a_step_are_counted_once_the_batch_is_settled_and_before_as_one(batch_size, prompts):
    plan = plan_of_kind("lora", **REWARDED, batch_size=batch_size, gradient_accumulation_steps=2)
    assert planned(plan).prompts == (48,) * prompts


def test_a_dry_run_of_rewards_is_predicted_from_the_prompts_without_their_answers(tiny_model, tmp_path):
    file = tmp_path / "rows.jsonl"
    own = dict(model_name=tiny_model, dataset=file, reward="exact", context_length=200, num_generations=2)
    found = []
    for words in (1, 40):
        rows = [{"prompt": f"Count to {i}. ", "completion": "one two three " * words} for i in range(40)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sample = data_sample(plan_of(dataset=str(file), reward="exact").data, tiny_model, False)
        code, out, err = finish(command(own, "--dry_run --assume_memory 8GiB", output_dir=tmp_path / "out"))
        assert code == 0, err
        assert min(sample.lengths) > max(sample.prompts)
        found.append((sample.prompts, re.search(r"predicted .* with prompts of (\d+) tokens", out)[1]))
    assert found[0] == found[1]
    assert found[0][1] == f"{sum(sample.prompts) / 40:.0f}"
