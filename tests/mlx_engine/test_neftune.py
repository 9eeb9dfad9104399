"""NEFTune on MLX: torch's numbers on a CPU, on the same tokens."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import torch

from finetune.data.collate import microbatches
from finetune.mlx_engine.neftune import uniform
from tests.mlx_engine.test_runs import flags_of
from tests.support import tiny
from tests.support.cells import slow
from tests.support.mlx_engines import is_torch_s_moves_and_resumes, mlx_engine, save, torch_engine_of
from train import fine_tune

ROWS = tiny.dataset()
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_those_of_torch_s_generator(dtype):
    number = 2**40 + 12345
    limit = 0.0371
    generator = torch.Generator().manual_seed(number)
    theirs = torch.empty(30, 8, dtype=getattr(torch, dtype)).uniform_(-limit, limit, generator=generator).float()
    drawn = np.frombuffer(np.random.RandomState(number % 2**32).bytes(4 * 240), "<u4").reshape(30, 8)
    ours = np.array(mx.array(uniform(drawn, limit)).astype(DTYPES[dtype]).astype(mx.float32))
    assert np.array_equal(ours, theirs.numpy())


def stepped(engine, count: int, tokens: int = 64) -> list[float]:
    found = []
    for n in range(count):
        rows = [(3 * n + i) % len(ROWS) for i in range(4)]
        batches = [replace(batch, step=n + 1) for batch in microbatches(ROWS, rows, "padded", 4, tokens, 0)]
        found.append(engine.train_step(batches, 2e-3).nll)
    return found


@pytest.mark.parametrize("architecture", ["llama", *slow("gemma2", "granite", "qwen2")])
def test_losses_are_torch_s(tmp_path, architecture):
    """Gemma multiplies its embeddings before noise is added, Granite after."""
    more = dict(sliding_window=64) if architecture == "gemma2" else {}  # mlx-lm's has none
    folder = save(tmp_path, architecture, **more)
    changes = dict(neftune_noise_alpha=20.0)
    mine, theirs = mlx_engine(folder, **changes), torch_engine_of(folder, **changes)
    count = 4 if architecture == "llama" else 20
    found = stepped(mine, count)
    assert found == pytest.approx(stepped(theirs, count), rel=1e-5)
    assert found != pytest.approx(stepped(mlx_engine(folder), count), rel=1e-3)
    batch = microbatches(ROWS, range(4), "padded", 4, 10**6, 0)
    assert mine.evaluate(batch).nll == pytest.approx(theirs.evaluate(batch).nll, rel=1e-5)


def test_padding_and_a_compiled_step_change_nothing(tmp_path):
    folder = save(tmp_path / "model")
    config = tmp_path / "mlx.json"
    config.write_text('{"length_multiple": 16}')
    how = dict(neftune_noise_alpha=20.0, use_gradient_checkpointing="true")
    padded = stepped(mlx_engine(folder, **how, mlx_config=str(config)), 3)
    assert padded == pytest.approx(stepped(mlx_engine(folder, neftune_noise_alpha=20.0), 3, 10**6), rel=1e-6)


@pytest.mark.slow
def test_a_run_is_torch_s_moves_and_resumes_bitwise(tiny_model, rows_file, tmp_path):
    more = dict(neftune_noise_alpha=15.0, max_steps=20, save_every=5, keep_last=9, num_epochs=9)
    for backend in ("mlx", "cpu"):
        fine_tune(**flags_of(tiny_model, rows_file, tmp_path / backend, **more, backend=backend))
    is_torch_s_moves_and_resumes(tmp_path)
