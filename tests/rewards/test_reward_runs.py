"""Runs that learn from rewards on the tiny model: a reward that answers can reach rises, on one rank as on two, and a
run that was cut off goes on to the bit.
"""

import os
import random
import signal
import time
from functools import cache
from itertools import product

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import ranks
from tests.support.cells import but_slow
from tests.support.commands import PYTHON, command, finish, finish_start
from tests.support.rows import json_lines
from tests.support.runs import WHOLE_STATE, assert_same_run, copy_up_to, count_steps, read_events, same_files, steps
from tests.support.templates import R1
from train import fine_tune

REWARD = """
def length(prompts, answers, rows):
    return [-abs(len(answer) - 6) / 6 for answer in answers]


def letters(prompts, answers, rows):
    return [sum(letter.isalpha() for letter in answer) / (1 + len(answer)) for answer in answers]


def vowels(prompts, answers, rows):
    return [sum(answer.count(v) for v in "aeiou") / (1 + len(answer)) for answer in answers]
"""
WORDS = ("--num_generations 4 --max_completion_length 12 --batch_size 4 --save_every 2 --keep_last 99 --lr 5e-3",)
ENDED = "note: the log of the resumed run has no end: it was killed, or code that it called ended its process"
KINDS = {
    "grpo": "--reward_loss grpo",
    "updates": "--reward_loss dapo --updates_per_rollout 3 --kl_beta 0.05",
    "gspo": "--reward_loss gspo --refill true --temperature 0.9 --top_p 0.95",
}


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "mine.py"
    file.write_text(REWARD)
    return file


@pytest.fixture(scope="session")
def flags_of(base, reward_prompts, reward_file):
    def of(kind="grpo", **values):
        own = base | {"dataset": reward_prompts, "num_epochs": 1, "reward": f"{reward_file}:length"} | values
        return own, (*WORDS, KINDS[kind])

    return of


@pytest.fixture(scope="session")
def whole(flags_of, tmp_path_factory):
    """The folder of a kind's undisturbed run, by its word."""

    @cache
    def of(kind):
        folder = tmp_path_factory.mktemp("whole") / "out"
        own, words = flags_of(kind)
        code, _, err = finish(command(own, *words, output_dir=folder))
        assert code == 0, err
        return folder

    return of


@pytest.mark.slow
def test_a_reward_that_can_be_reached_rises(flags_of, reward_file, tmp_path):
    own, words = flags_of(num_epochs=10, mask_truncated=False, reward=f"{reward_file}:letters", train_type="full")
    own.pop("lora_rank")
    code, out, err = finish(command(own, *words, output_dir=tmp_path / "out"))
    assert code == 0, err
    rewards = [event["reward"] for event in read_events(tmp_path / "out", "step")]
    assert len(rewards) == 60
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.2
    assert "reward" in out


@pytest.mark.parametrize(("kind", "step"), but_slow(product(KINDS, (2, 4)), [("updates", 2)]))
def test_a_run_that_was_cut_off_goes_on_to_the_bit(kind, step, whole, flags_of, tmp_path):
    own, words = flags_of(kind)
    folder = copy_up_to(whole(kind), step, tmp_path / "out")
    code, _, err = finish(command(own, *words, output_dir=folder, resume="auto"))
    assert code == 0, err
    assert steps(folder) == steps(whole(kind))
    assert [e["reward"] for e in read_events(folder, "step")] == [e["reward"] for e in read_events(whole(kind), "step")]
    last = sorted(p.name for p in (folder / "checkpoints").iterdir())[-1]
    same_files(folder / "checkpoints" / last, whole(kind) / "checkpoints" / last, WHOLE_STATE)


@pytest.mark.parametrize(("kind", "strategy"), but_slow(product(KINDS, ("ddp", "full_shard")), []))
def test_two_ranks_sample_and_learn_as_one(kind, strategy, whole, flags_of, tmp_path):
    own, words = flags_of(kind, world_size=2, sharding_strategy=strategy)
    words = tuple(text.replace("--batch_size 4", "--batch_size 2") for text in words)
    code, _, err = finish_start(command(own, *words, output_dir=tmp_path / "out"))
    assert code == 0, err
    assert_same_run(tmp_path / "out", whole(kind))
    mine, theirs = ([e["reward"] for e in read_events(f, "step")] for f in (tmp_path / "out", whole(kind)))
    assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_bit(flags_of, tmp_path):
    """A step takes a few tenths of a second, most of it sampling: kills fall there, in training and in saving."""
    own, words = flags_of("updates", num_epochs=4, resume="auto")
    words = (words[0].replace("--save_every 2", "--save_every 1"), *words[1:])
    assert finish(command(own, *words, output_dir=tmp_path / "whole")).returncode == 0
    rng = random.Random(54)
    out = tmp_path / "out"
    kills = 0
    while kills < 20:
        process = ranks.Fork("script", command(own, *words, output_dir=out)[len(PYTHON) :], {}, tmp_path / "said")
        seen = count_steps(out) + rng.randint(0, 2)
        while process.poll() is None and count_steps(out) < seen:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.15) + (rng.random() if not seen else 0))
        assert process.poll() is None, "the run ended before it was killed often enough"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        kills += 1
    assert finish(command(own, *words, output_dir=out)).returncode == 0
    assert steps(out) == steps(tmp_path / "whole")
    rewards = [[e["reward"] for e in read_events(folder, "step")] for folder in (out, tmp_path / "whole")]
    assert rewards[0] == rewards[1]
    last = f"step-{len(rewards[0])}"
    same_files(out / "checkpoints" / last, tmp_path / "whole" / "checkpoints" / last, WHOLE_STATE)


@pytest.mark.slow
def test_the_sampler_is_compared_once(whole):
    events = read_events(whole("updates"), "step")
    assert ["sampler_difference" in event for event in events] == [True] + [False] * (len(events) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "exit_code"), [("kill(os.getpid(), 9)", -9), ("execv('/bin/true', ['true'])", 0)])
def test_a_function_that_ends_the_process_loses_no_step_and_the_next_start_says_so(flags_of, tmp_path, how, exit_code):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\ncalls = []\ndef f(prompts, answers, rows):\n    calls.append(1)\n"
        f"    len(calls) < 4 or os.{how}\n    return [len(a) for a in answers]\n"
    )
    own, words = flags_of(reward=f"{file}:f", save_every=1)
    code, said, _ = finish(command(own, *words, "--save_every 1 --async_save false", output_dir=tmp_path / "out"))
    assert code == exit_code and ENDED not in said
    assert [event["step"] for event in read_events(tmp_path / "out", "step")] == [1, 2, 3]
    assert (tmp_path / "out" / "checkpoints" / "step-3").is_dir()
    _, said, _ = finish(
        command(own, *words, "--save_every 1 --async_save false", output_dir=tmp_path / "out", resume="auto")
    )
    assert ENDED in said


def test_a_resumed_run_says_that_the_code_of_a_reward_has_changed(flags_of, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(prompts, answers, rows):\n    return [float(len(a)) for a in answers]\n")
    own, words = flags_of(reward=f"{file}:f", save_every=1)
    out = tmp_path / "out"
    told = "the file of a --reward has changed"
    for steps_in_all, changes in ((1, ""), (2, ""), (3, "# corrected\n")):
        file.write_text(file.read_text() + changes)
        more = dict(max_steps=steps_in_all, output_dir=out)
        if steps_in_all > 1:
            more |= dict(resume="auto")
        code, said, err = finish(command(own, *words, **more))
        assert code == 0, err
        assert (told in said) == bool(changes)


def test_a_resumed_run_says_that_columns_which_a_reward_reads_have_changed(base, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def f(prompts, answers, rows):\n    return [float(row['factor']) for row in rows]\n")
    rows = tmp_path / "rows.jsonl"
    own = base | dict(reward=f"{file}:f", num_generations=2, max_completion_length=4, save_every=1, resume="auto")
    own |= dict(dataset=str(rows), output_dir=str(tmp_path / "out"))
    for steps_in_all, factor in ((1, 1), (2, 1), (3, -1)):
        rows.write_bytes(json_lines(*({"prompt": f"{i} + {i} = ", "factor": factor} for i in range(8))))
        fine_tune(**own, max_steps=steps_in_all)
        assert ("columns that a --reward reads have changed since" in capsys.readouterr().out) == (factor < 0)


@pytest.mark.slow
def test_packed_answers_are_learned_from_as_padded_ones(whole, flags_of, tmp_path):
    own, words = flags_of(batch_layout="padded")
    code, _, err = finish(command(own, *words, output_dir=tmp_path / "out"))
    assert code == 0, err
    assert_same_run(tmp_path / "out", whole("grpo"))


@pytest.mark.slow
def test_several_rewards_are_added_with_their_weights(flags_of, reward_file, tmp_path):
    own, words = flags_of(reward=f"{reward_file}:length:0.5,{reward_file}:vowels:2")
    code, _, err = finish(command(own, *words, output_dir=tmp_path / "out", max_steps=2))
    assert code == 0, err
    for event in read_events(tmp_path / "out", "step"):
        both = 0.5 * event["rewards/length"] + 2 * event["rewards/vowels"]
        assert event["reward"] == pytest.approx(both, rel=1e-6)


def test_rows_that_have_the_answer_are_rewarded_by_a_metric(base, tmp_path):
    words = "--reward exact,contains:0.5 --num_generations 4 --max_completion_length 8 --max_steps 2 --batch_size 2"
    code, _, err = finish(command(base, words, output_dir=tmp_path / "out"))
    assert code == 0, err
    assert {"rewards/exact", "rewards/contains"} <= read_events(tmp_path / "out", "step")[-1].keys()
    assert load_file(tmp_path / "out" / "adapter_model.safetensors")


ASKED = """
def asked(prompts, answers, rows):
    assert all(prompt.endswith("assistant\\n<think>\\n") for prompt in prompts), prompts
    return [float(len(answer)) for answer in answers]
"""


def test_a_model_that_thinks_is_asked_to_where_rows_have_answers_alone(base, tmp_path):
    """Rows for rewards name what is expected of an answer, not how it is come by."""
    template = tmp_path / "r1.jinja"
    template.write_text(R1)
    reward = tmp_path / "asked.py"
    reward.write_text(ASKED)
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(json_lines({"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}))
    words = "--num_generations 2 --max_completion_length 8 --max_steps 1 --batch_size 1"
    own = base | {"dataset": rows, "chat_template": template, "reward": f"{reward}:asked,contains"}
    code, _, err = finish(command(own, words, output_dir=tmp_path / "out"))
    assert code == 0, err
    assert "is left out" not in err
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == R1
