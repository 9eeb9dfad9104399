"""Rewards on MLX: answers, losses, metrics, files and runs are those of the torch engine from the same seed."""

import json
from itertools import product

import numpy as np
import pytest
import torch

from finetune.arrays import Named, Per
from finetune.data.collate import microbatches
from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts
from finetune.errors import OutOfMemoryError
from finetune.generation import Sampling
from finetune.mlx_engine import sampling
from finetune.parts.objectives import OBJECTIVES, reward_losses
from finetune.rewards import rollouts
from tests.support.cells import but_slow, slow
from tests.support.mlx_engines import mlx_engine, save, torch_engine_of
from tests.support.rows import jsonl
from tests.support.runs import WHOLE_STATE, copy_up_to, losses, read_events, same_files, steps
from tests.support.small_runs import model_in
from train import fine_tune

PROMPTS = [[7 * i % 120 + 3 for i in range(n)] for n in (3, 11, 6)]
SEEDS = [[(1, row, answer) for answer in range(3)] for row in range(len(PROMPTS))]
MOST = [12, 5, 9]
ENDS = set(range(1, 120, 8))
# Of Gemma 2 and 3 each prompt's answers are sampled apart: mlx-lm has no mask for padding there.
ARCHITECTURES = {
    "llama": {},
    "gemma2": dict(sliding_window=64),
    "gemma3": dict(num_hidden_layers=6),
    "stablelm": {},
    "qwen3": {},
    "cohere": {},
}
APART = ("gemma2", "gemma3")
# The loss of a step is a difference of advantages, near zero: as rounding, of log-probabilities of about 5.
NEAR_ZERO = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


def engines(folder, **changes) -> list:
    """An engine of each framework with the same adapters, which are not zero."""
    found = [mlx_engine(folder, **changes), torch_engine_of(folder, **changes)]
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(0, 0.1, a.shape).astype(np.float32) for n, a in found[0].trainable_state().items()}
    for engine in found:
        engine.load_trainable(weights)
    return found


@pytest.mark.parametrize("how", [Sampling(1.0), *slow(Sampling(0.7, 0, 0.8), Sampling(0.0))])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", *slow(*list(ARCHITECTURES)[2:])])
def test_answers_are_torch_s(architecture, how, tmp_path):
    folder = save(tmp_path, architecture, **ARCHITECTURES[architecture])
    both = engines(folder, reward="exact", temperature=how.temperature or 1.0)
    assert both[0]._answers_together == (architecture not in APART)
    mine, theirs = ([each for of in e.sample(PROMPTS, SEEDS, MOST, ENDS, how) for each in of] for e in both)
    assert [(one.ids, one.ended) for one in mine] == [(one.ids, one.ended) for one in theirs]
    assert len({len(one.ids) for one in mine}) > 1
    assert how.temperature == 0 or any(one.ended for one in mine)
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-5)
    assert both[0].sample([], [], [], ENDS, how) == []


def test_rows_that_have_ended_leave_where_they_are_many_or_have_no_position_left():
    """Another position than the model has is none that it could look up."""
    policy = sampling.Policy(None, 0, 16, True)
    active = np.array([True] * 9 + [False])
    assert not sampling._leave(policy, active, np.full(10, 15))
    assert sampling._leave(policy, active, np.r_[np.full(9, 9), 16])
    assert sampling._leave(policy, np.array([True, False]), np.array([3, 3]))
    assert not sampling._leave(policy, np.ones(4, bool), np.full(4, 16))


def test_sampling_without_room_says_what_to_lower(folder):
    engine = mlx_engine(folder, reward="exact", num_generations=3)
    with pytest.raises(
        OutOfMemoryError, match="while it sampled 9 answers. Lower --batch_size .*, --num_generations 3"
    ):
        engine.sample(PROMPTS, SEEDS, [10**13] * 3, ENDS, Sampling(1.0))


def test_sampling_leaves_the_run_s_random_numbers_as_they_are(folder):
    engine = mlx_engine(folder, reward="exact", lora_dropout=0.1)
    before = engine.rng_state()
    engine.sample(PROMPTS, SEEDS, MOST, ENDS, Sampling(1.0))
    with engine.drawing_apart(3):
        drawn = np.random.random(), torch.rand(1).item()
    with engine.drawing_apart(3):
        assert drawn == (np.random.random(), torch.rand(1).item())
    assert all(np.array_equal(engine.rng_state()[name], array) for name, array in before.items())


# ---- the loss


def batches_of(step: int) -> list:
    """Microbatches of six answers in padded rows, with advantages, weights, and log-probabilities to compare with."""
    rng = np.random.default_rng(step)
    parts = []
    for length in (9, 21, 14, 6, 30, 17):
        ids = rng.integers(3, 120, length)
        parts.append((ids, np.arange(length) >= length // 3))
    counts = [int(is_target.sum()) for _, is_target in parts]
    tokens = sum(len(ids) for ids, _ in parts)
    arrays = {
        rollouts.ADVANTAGE: Named(rng.normal(size=6).astype(np.float32), Per.DOCUMENT),
        rollouts.WEIGHT: Named((1 / np.array(counts)).astype(np.float32), Per.DOCUMENT),
        rollouts.SAMPLED_LOG_PROB: Named(-4.9 + 0.3 * rng.normal(size=tokens), Per.TARGET),
        rollouts.REFERENCE_LOG_PROB: Named(-4.9 + 0.3 * rng.normal(size=tokens), Per.TARGET),
    }
    sources = tuple(map(str, range(6)))
    dataset = TokenizedDataset(**joined_parts(parts), sources=sources, counts={}, arrays=arrays)
    return microbatches(dataset, range(6), "padded", 6, 60, 0)


@pytest.mark.parametrize(
    ("objective", "count"), but_slow(product(reward_losses(), (5, 20)), [("grpo", 5), ("gspo", 5), ("rloo", 5)])
)
def test_steps_have_the_losses_and_metrics_of_torch(folder, objective, count):
    changes = dict(reward="exact", reward_loss=objective, temperature=0.8, **OBJECTIVES[objective].defaults)
    if "kl_beta" in OBJECTIVES[objective].arguments:
        changes["kl_beta"] = 0.1
    clip = 0.02 if objective == "gspo" else 0.4  # so that some are clipped and some are not
    changes |= dict(clip_low=clip, clip_high=clip)
    found = []
    for engine in (mlx_engine(folder, **changes), torch_engine_of(folder, **changes)):
        results = [engine.train_step(batches_of(step), 1e-3) for step in range(count)]
        found.append([(r.loss, r.grad_norm, r.num_rows, r.metrics) for r in results])
    assert len(batches_of(0)) > 1
    for mine, theirs in zip(*found, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-5, abs=1e-5)
        assert mine[1] == pytest.approx(theirs[1], rel=2e-5)
        assert mine[2] == theirs[2] == 6
        assert mine[3] == pytest.approx(theirs[3], rel=1e-4)
    assert 0 < np.mean([metrics["clip_ratio"] for *_, metrics in found[0]]) < 1


@pytest.mark.parametrize("compiled", ["false", *slow("true")])
def test_positions_that_fill_the_shape_count_nothing(folder, tmp_path, compiled):
    """A step in shapes of multiples is the plain one, compiled too."""
    config = tmp_path / "mlx.json"
    config.write_text(json.dumps({"compile": compiled, "length_multiple": 16}))
    changes = dict(reward="exact", reward_loss="gspo", clip_low=0.4, clip_high=0.4, kl_beta=0.1)
    plain, filled = mlx_engine(folder, **changes), mlx_engine(folder, **changes, mlx_config=str(config))
    for step in range(3):
        batches = batches_of(step)
        one, other = (engine.train_step(batches, 1e-3) for engine in (plain, filled))
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=NEAR_ZERO)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-4)


STATES = {
    "lora": dict(kl_beta=0.1),
    "dora": dict(use_dora=True, lora_dropout=0.0),
    "full": dict(train_type="full"),
    "qlora": dict(train_type="qlora", quantization_backend="mlx", group_size=32),
}


@pytest.mark.parametrize(
    "kind", [name if name == "lora" else pytest.param(name, marks=pytest.mark.slow) for name in STATES]
)
@pytest.mark.parametrize("first", ["mlx", "torch"])
def test_state_that_moves_is_the_same_to_the_bit(folder, first, kind):
    """Weights and moments of two steps, read by the other engine and by a third of the first kind."""
    changes = dict(reward="exact", **STATES[kind])
    builds = [mlx_engine, torch_engine_of]
    one, other = builds if first == "mlx" else builds[::-1]
    engine = one(folder, **changes)
    for step in range(2):
        engine.train_step(batches_of(step), 1e-3)
    state = engine.trainable_state(), *engine.optimizer_state()
    assert any(array.any() for array in state[1].values())
    for build in (other, one):
        moved = build(folder, **changes)
        moved.load_state(*state, moved.rng_state())
        again = moved.trainable_state(), *moved.optimizer_state()
        for before, after in zip(state[:2], again[:2], strict=True):
            assert before.keys() == after.keys() and all(np.array_equal(after[n], a) for n, a in before.items())
        assert again[2] == state[2]
        state = again


def test_the_reference_is_the_base_without_adapters(folder):
    changes = dict(reward="exact", temperature=0.8)
    batches = batches_of(0)
    mlx, torch_s = engines(folder, **changes)
    found = {off: mlx.target_log_probs(batches, before_training=off) for off in (True, False)}
    assert found[True] == mlx_engine(folder, **changes).target_log_probs(batches, before_training=False)
    for off, of_documents in found.items():
        for mine, theirs in zip(of_documents, torch_s.target_log_probs(batches, before_training=off), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)
    apart = [a - b for one, two in zip(*found.values(), strict=True) for a, b in zip(one, two, strict=True)]
    assert np.abs(apart).max() > 1e-2


# ---- runs

REWARD = "def length(prompts, answers, rows):\n    return [-abs(len(answer) - 6) / 6 for answer in answers]\n"
KINDS = {
    "updates": dict(reward_loss="dapo", updates_per_rollout=3, kl_beta=0.05),
    "grpo": dict(),
    "gspo": dict(reward_loss="gspo", refill=True, temperature=0.9, top_p=0.95),
    "rloo": dict(reward_loss="rloo", updates_per_rollout=2, train_type="full", lr=1e-3),
    "qlora": dict(reward_loss="dr_grpo", train_type="qlora", quantization_backend="mlx", group_size=32, kl_beta=0.02),
    "dora": dict(use_dora=True, lora_dropout=0.0, kl_beta=0.02),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("rewarded")
    (root / "mine.py").write_text(REWARD)
    return dict(
        model_name=str(model_in(root / "model", 1, 2)),
        dataset=str(jsonl(root / "rows.jsonl", [{"prompt": f"What is {i} plus {i}? ", "id": i} for i in range(12)])),
        reward=f"{root / 'mine.py'}:length",
        precision="fp32",
        train_type="lora",
        context_length=64,
        batch_size=3,
        num_generations=4,
        max_completion_length=8,
        mask_truncated=False,
        lr=5e-3,
        log_to="stdout",
        async_save="false",
        keep_last=99,
    )


def rewards(folder) -> list:
    return [(event["reward"], event["answers"]) for event in read_events(folder, "step")]


def assert_same(folder, other) -> None:
    """Answers and rewards are the same, losses and norms to rounding."""
    assert rewards(folder) == rewards(other)
    assert losses(folder) == pytest.approx(losses(other), rel=1e-5, abs=NEAR_ZERO)
    norms = [[event["grad_norm"] for event in read_events(f, "step")] for f in (folder, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5, abs=NEAR_ZERO)


@pytest.mark.parametrize(("kind", "count"), but_slow([(k, 20) for k in KINDS] + [("updates", 6)], [("updates", 6)]))
def test_a_run_by_rewards_is_torch_s_moves_and_resumes(flags, tmp_path, kind, count):
    """A run that moves does so between two steps of a rollout, where one is used more than once."""
    for backend in ("mlx", "cpu"):
        how = dict(backend=backend, max_steps=count, save_every=2, output_dir=str(tmp_path / backend))
        assert fine_tune(**flags | KINDS[kind] | how).step == count
    assert_same(tmp_path / "mlx", tmp_path / "cpu")
    middle = count // 4 * 2
    again = copy_up_to(tmp_path / "mlx", middle, tmp_path / "again")
    assert fine_tune(resume="auto", output_dir=str(again)).step == count
    assert steps(again) == steps(tmp_path / "mlx") and rewards(again) == rewards(tmp_path / "mlx")
    state = list(WHOLE_STATE) if KINDS[kind].get("train_type") != "full" else ["optimizer.safetensors"]
    same_files(*(f / "checkpoints" / f"step-{count}" for f in (again, tmp_path / "mlx")), state)
    source = tmp_path / "cpu"
    for backend, step in (("mlx", middle), ("cpu", middle + 2)):
        source = copy_up_to(source, step, tmp_path / f"moved-to-{backend}")
        assert fine_tune(resume=str(source), backend=backend).step == count
        assert_same(source, tmp_path / "cpu")


@pytest.mark.parametrize("backends", [("cpu", "mlx"), ("mlx", "cpu")])
def test_a_rollout_in_use_moves_to_the_bit(flags, tmp_path, backends):
    """Log-probabilities of sampling and of the reference stay as they were; the number of its uses alone changes."""
    one, other = backends
    how = dict(KINDS["updates"], max_steps=2, save_every=1)
    assert fine_tune(**flags | how, backend=one, output_dir=str(tmp_path / "one")).step == 2
    moved = copy_up_to(tmp_path / "one", 1, tmp_path / "moved")
    assert fine_tune(resume=str(moved), backend=other).step == 2
    kept = [
        json.loads((folder / "checkpoints" / f"step-{step}" / "train_state.json").read_text())["stream"]
        for folder, step in ((tmp_path / "one", 1), (moved, 2))
    ]
    assert [rollout.pop("used") for rollout in kept] == [1, 2]
    assert kept[0] == kept[1] and len(kept[0]["answers"]) == 12
