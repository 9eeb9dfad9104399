"""Preferences on MLX: losses, metrics, reference and states are those of the torch engine on the same rows."""

import dataclasses

import numpy as np
import pytest

from finetune.data.mismatched import DataWithMismatches
from finetune.data.run_data import Data
from finetune.parts.objectives import OBJECTIVES
from finetune.parts.parts import Parts
from tests.support import cases, tiny
from tests.support.mlx_engines import mlx_engine, save, settings_of, torch_engine_of
from train import fine_tune

METHODS = ("dpo", "orpo", "simpo", "kto")
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "affine 4": {"train_type": "qlora", "quantization_backend": "mlx", "n_bits": 4, "group_size": 32},
}
# fp32 sums in another order, through a loss that divides log-probabilities of 40 tokens; measured: 2e-6.
LOSS = 1e-5
ROWS_PER_STEP = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


def batches_of(settings, step: int, tokens: int = 90) -> list:
    facts = OBJECTIVES[settings.preference]
    rows_of, dataset = (DataWithMismatches, cases.LABELLED) if facts.labels else (Data, cases.PAIRS)
    plan = Parts(dataclasses.replace(settings, batch_layout="padded", microbatch_tokens=tokens))
    rows = np.arange(step * ROWS_PER_STEP, (step + 1) * ROWS_PER_STEP) % dataset.num_rows
    return rows_of(None, set(), dataset, None, [], None, None).microbatches(dataset, rows, slice(None), plan, 0, 8)


def steps_of(engine, settings, steps: range, tokens: int = 90) -> list:
    return [engine.train_step(batches_of(settings, step, tokens), 1e-3) for step in steps]


def assert_alike(mine: list, theirs: list) -> None:
    for ours, other in zip(mine, theirs, strict=True):
        assert (ours.num_rows, ours.num_targets) == (other.num_rows, other.num_targets)
        assert ours.loss == pytest.approx(other.loss, rel=LOSS)
        assert ours.metrics == pytest.approx(other.metrics, rel=1e-3, abs=1e-4)  # rewards: differences of sums of ~200


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [k if k == "lora" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_twenty_steps_have_the_losses_and_metrics_of_torch(folder, method, kind):
    changes = KINDS[kind] | dict(preference=method, preference_beta=0.3)
    settings = settings_of(**changes)
    mlx, torch = mlx_engine(folder, **changes), torch_engine_of(folder, **changes)
    mine, theirs = (steps_of(engine, settings, range(20)) for engine in (mlx, torch))
    assert len(batches_of(settings, 0)) > 1
    assert_alike(mine, theirs)
    evaluated = [engine.evaluate(batches_of(settings, 3)) for engine in (mlx, torch)]
    assert_alike(evaluated[:1], evaluated[1:])
    norms = [[result.grad_norm for result in found] for found in (mine, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("method", [m if m == "orpo" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_microbatches_and_a_compiled_step_are_one_batch(folder, method, tmp_path):
    config = tmp_path / "mlx.json"
    config.write_text('{"compile": "true", "length_multiple": 16}')
    changes = dict(preference=method, preference_beta=0.3)
    settings = settings_of(**changes)
    several = steps_of(mlx_engine(folder, **changes), settings, range(3))
    assert_alike(steps_of(mlx_engine(folder, **changes), settings, range(3), tokens=4096), several)
    compiled = mlx_engine(folder, **changes, mlx_config=str(config))
    assert_alike(steps_of(compiled, settings, range(3)), several)


@pytest.mark.parametrize("method", ("dpo", "kto"))
def test_the_reference_is_the_base_without_adapters(folder, method):
    changes = dict(preference=method, preference_beta=0.3)
    settings = settings_of(**changes)
    mlx, torch = mlx_engine(folder, **changes), torch_engine_of(folder, **changes)
    before = mlx.log_probs_before_training(batches_of(settings, 0))
    steps_of(mlx, settings, range(2))
    assert mlx.log_probs_before_training(batches_of(settings, 0)) == before
    assert before == pytest.approx(torch.log_probs_before_training(batches_of(settings, 0)), rel=1e-5)


@pytest.mark.parametrize("method", [m if m == "kto" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_a_run_moves_to_torch_and_back(folder, method):
    changes = dict(preference=method, preference_beta=0.3)
    settings = settings_of(**changes)
    alone = mlx_engine(folder, **changes)
    expected = steps_of(alone, settings, range(6))
    engine, found = mlx_engine(folder, **changes), steps_of(first := mlx_engine(folder, **changes), settings, range(2))
    for build, steps in ((torch_engine_of, range(2, 4)), (mlx_engine, range(4, 6))):
        engine = build(folder, **changes)
        state = first.trainable_state(), *first.optimizer_state()
        engine.load_state(*state, engine.rng_state())
        assert all(np.array_equal(value, engine.trainable_state()[name]) for name, value in state[0].items())
        found += steps_of(engine, settings, steps)
        first = engine
    assert_alike(found, expected)


def test_a_run_on_pairs_has_the_events_of_torch(tmp_path):
    folder = save(tmp_path / "model", vocab_size=512)
    tiny.train_tokenizer(folder, chat_template=tiny.CHATML)
    rows = tmp_path / "pairs.jsonl"
    rows.write_text(
        "".join(f'{{"prompt": "{i} plus {i}? ", "chosen": "{2 * i}", "rejected": "no {i}"}}\n' for i in range(12))
    )
    how = dict(model_name=str(folder), dataset=str(rows), preference="dpo", precision="fp32", context_length=64)
    how |= dict(max_steps=4, batch_size=4, validation_split=0.25, lr=1e-3, eval_every=2)
    losses = {}
    for backend in ("mlx", "cpu"):
        found = fine_tune(**how, backend=backend, output_dir=str(tmp_path / backend))
        assert found.step == 4
        lines = (tmp_path / backend / "metrics.jsonl").read_text().splitlines()
        losses[backend] = [line for line in lines if '"rewards/accuracies"' in line or '"loss"' in line]
    assert losses["mlx"] and len(losses["mlx"]) == len(losses["cpu"])
