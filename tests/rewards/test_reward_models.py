"""--reward may name a reward model: its scores are those of transformers' own class, and the run is as any other."""

import numpy as np
import pytest
import torch
import transformers

from finetune.checkpoint.store import newest_checkpoint
from finetune.errors import PlanError
from finetune.run.reward_models import found_of, models_of
from tests.run.test_classify import opened
from tests.support.commands import command, finish
from tests.support.processor import need_cpu_matmul
from tests.support.rows import jsonl
from tests.support.runs import WHOLE_STATE, copy_up_to, losses, read_events, same_files
from tests.support.small_runs import head_flags, model_in
from train import fine_tune, make_plan

PAIRS = [{"prompt": f"What is {i}? ", "chosen": f"It is {i}.", "rejected": f"No idea {i}"} for i in range(14)]
CHATS = [{"messages": [{"role": "user", "content": f"What is {i}?"}]} for i in range(12)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Flags of a run that is rewarded by a trained reward model."""
    root = tmp_path_factory.mktemp("rewarded")
    of_judge = head_flags(root, "reward_model", PAIRS, num_held_out=5)
    judge = fine_tune(**of_judge | dict(max_steps=6, output_dir=str(root / "judge")))
    prompts = [{"prompt": row["prompt"], "id": i} for i, row in enumerate(PAIRS)]
    own = {name: of_judge[name] for name in ("backend", "context_length", "precision", "log_to", "lora_rank", "lr")}
    return own | dict(
        model_name=str(model_in(root / "policy", 3, 2)),
        dataset=str(jsonl(root / "prompts.jsonl", prompts)),
        train_type="lora",
        reward=judge.output_dir,
        num_generations=3,
        max_completion_length=6,
        mask_truncated=False,
        batch_size=4,
        max_steps=3,
        seed=5,
    )


def test_answers_that_it_reads_in_part_are_said_once(flags, tmp_path, capsys):
    rows = [{"prompt": "What is it? " * 30, "id": i} for i in range(8)]
    how = dict(dataset=str(jsonl(tmp_path / "long.jsonl", rows)), context_length=256, max_steps=2)
    fine_tune(**flags | how | dict(output_dir=str(tmp_path / "o")))
    said = [line for line in capsys.readouterr().out.splitlines() if "answers after their prompts are over" in line]
    assert len(said) == 1 and f"--context_length {flags['context_length']}" in said[0]


@pytest.mark.parametrize("word", ["blas", "onednn"])
def test_a_reward_model_is_opened_by_the_library_that_the_run_multiplies_by(flags, tmp_path, word):
    need_cpu_matmul(word)
    plan = make_plan(flags | dict(output_dir=str(tmp_path / "o"), cpu_matmul=word))
    (source,) = models_of(plan)
    assert found_of(source, plan).base.plan.precision.onednn == plan.precision.onednn == (word == "onednn")


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "o"
    fine_tune(**flags | dict(save_every=1, output_dir=str(folder)))
    return folder


def test_scores_are_those_of_transformers_own_class(flags, whole):
    model = opened(flags["reward"], num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(flags["reward"])
    model.config.pad_token_id = tokenizer.pad_token_id
    assert tokenizer.pad_token_id == tokenizer.eos_token_id  # with which rows end, and which is not read
    found = [answer for step in read_events(whole, "step") for answer in step["answers"]]
    assert len(found) == 6
    for answer in found:
        ids = tokenizer(answer["prompt"] + answer["answer"] + tokenizer.eos_token, return_tensors="pt").input_ids
        with torch.no_grad():
            assert answer["reward"] == pytest.approx(float(model(input_ids=ids).logits[0, 0]), abs=1e-5)
            assert answer["reward"] == pytest.approx(float(model(input_ids=ids[:, :-1]).logits[0, 0]), abs=1e-5)


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(flags, whole, tmp_path):
    stopped = copy_up_to(whole, 2, tmp_path / "stopped")
    fine_tune(**flags | dict(save_every=1, output_dir=str(stopped), resume="auto"))
    assert losses(stopped) == losses(whole)
    last = [newest_checkpoint(folder)[0].folder for folder in (stopped, whole)]
    same_files(*last, WHOLE_STATE)


def test_a_run_on_mlx_is_rewarded_as_one_on_torch(flags, whole, tmp_path):
    """The reward model is opened in torch."""
    fine_tune(**flags | dict(backend="mlx", output_dir=str(tmp_path / "mlx")))
    mine, theirs = ([(e["reward"], e["loss"]) for e in read_events(f, "step")] for f in (tmp_path / "mlx", whole))
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_two_ranks_are_one(flags, tmp_path):
    """Rank 0 alone opens the model."""
    one = flags | dict(output_dir=str(tmp_path / "one"))
    two = flags | dict(output_dir=str(tmp_path / "two"), batch_size=2, world_size=2, sharding_strategy="ddp")
    for some in (one, two):
        done = finish(command(some))
        assert done.returncode == 0, done.stderr
    rewards = [[step["reward"] for step in read_events(tmp_path / name, "step")] for name in ("one", "two")]
    np.testing.assert_allclose(*rewards, atol=1e-5)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)


def test_chats_are_scored_beside_a_metric_and_the_plan_has_the_model_s_memory(flags, tmp_path, capsys):
    rows = [row | {"answer": str(i)} for i, row in enumerate(CHATS)]
    reward = [f"{flags['reward']}:0.5", "contains"]
    changes = dict(dataset=str(jsonl(tmp_path / "chats.jsonl", rows)), reward=reward, output_dir=str(tmp_path / "o"))
    fine_tune(**flags | changes | dict(max_steps=1))
    assert f"--reward {flags['reward']}: a reward model, " in capsys.readouterr().out
    (step,) = read_events(tmp_path / "o", "step")
    assert step["reward"] == pytest.approx(0.5 * step["rewards/judge"] + step["rewards/contains"], abs=1e-6)
    assert np.isfinite(step["rewards/judge"])


@pytest.mark.parametrize(
    "reward, fact",
    [
        ("/nowhere/at/all", "--reward /nowhere/at/all: there is no such folder. Give a checkpoint of --task reward_m"),
        ("{policy}", "--reward .*: has no head. Give a checkpoint of --task reward_model"),
        ("nothing", "--reward nothing: is no reward. Use .* or the folder of a reward model"),
    ],
)
def test_what_is_no_reward_model_is_refused_in_a_line(flags, tmp_path, reward, fact):
    reward = reward.format(policy=flags["model_name"])
    for dry_run in (True, False):
        with pytest.raises(PlanError, match=fact):
            fine_tune(**flags | dict(reward=reward, dry_run=dry_run, output_dir=str(tmp_path / "o")))


def test_a_reward_model_is_no_teacher(flags, tmp_path):
    """It taught what its head for tokens was before, without a word."""
    own = {name: flags[name] for name in ("model_name", "train_type", "backend", "precision", "log_to")}
    own["dataset"] = str(jsonl(tmp_path / "rows.jsonl", [{"prompt": "a? ", "completion": "b"}] * 4))
    for dry_run in (True, False):
        with pytest.raises(PlanError, match="--teacher .*: was trained with --task reward_model, and finds no next"):
            fine_tune(**own | dict(teacher=flags["reward"], dry_run=dry_run, output_dir=str(tmp_path / "o")))
