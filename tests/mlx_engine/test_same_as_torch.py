"""Both engines take the same steps: identical model, data and seed."""

import math

import numpy as np
import pytest
import torch

from finetune.data.collate import microbatches
from finetune.data.sampler import step_rows
from finetune.generation import Sampling
from finetune.parts.train_state import Cursor
from tests.support import tiny
from tests.support.mlx_engines import mlx_engine, save, torch_engine_of

ROWS = tiny.dataset(lengths=(5, 17, 30, 9, 40, 3, 22, 11, 28, 14, 7, 33))
# fp32 sums in another order: 2e-7 here. At a rate of 1e-2 this model's loss is chaotic: rounding grows.
LOSS = 1e-4
LR = 2e-3
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "full": {"train_type": "full"},
    "affine 4": {"train_type": "qlora", "quantization_backend": "mlx", "n_bits": 4, "group_size": 32},
    "affine 8": {"train_type": "qlora", "quantization_backend": "mlx", "n_bits": 8, "group_size": 32},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


def run(engine, steps: range, lr=LR, rows=4, tokens=64) -> list:
    """StepResults with a linear warmup from outside, in the order that the sampler gives."""
    results, cursor = [], Cursor()
    for step in range(steps.stop):
        chosen, cursor = step_rows(len(ROWS), rows, 1, cursor)
        if step in steps:
            batches = microbatches(ROWS, chosen, "padded", rows, tokens, 0)
            results.append(engine.train_step(batches, lr * min(1, (step + 1) / 5)))
    return results


def off(mine: list, theirs: list) -> float:
    """The largest relative difference in loss."""
    return max(abs(a.nll / b.nll - 1) for a, b in zip(mine, theirs, strict=True))


SLOW = KINDS.keys() - {"lora"}  # moved runs in test_runs.py and every width in test_step.py run by default


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in KINDS])
def test_fifty_steps_of_mlx_have_the_losses_of_torch(folder, kind):
    changes = {"wd": 0.1, "grad_norm": 0.5} | KINDS[kind]
    mlx, torch = mlx_engine(folder, **changes), torch_engine_of(folder, **changes)
    assert mlx.trainable_state().keys() == torch.trainable_state().keys()
    mine, theirs = run(mlx, range(50)), run(torch, range(50))
    assert off(mine, theirs) < LOSS
    assert theirs[-1].nll / theirs[-1].num_targets < theirs[0].nll / theirs[0].num_targets
    # The norm of the gradient before clipping: fp32 products of other kernels.
    assert max(abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(mine, theirs, strict=True)) < 1e-2


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.5), (3, 0.5), (0, 0.0)])
def test_sampling_keeps_the_same_tokens(top_k, top_p):
    """At the boundary too: the last row's shares are 1/2, 1/4, 1/8, ..., exact in binary."""
    import mlx.core as mx

    from finetune.mlx_engine.generate import restrict
    from finetune.torch_engine.generation import sampling

    halves = -torch.arange(1.0, 17.0) * math.log(2)
    logits = torch.cat([torch.randn(20, 16, generator=torch.Generator().manual_seed(0)), halves[None]])
    how = Sampling(1.0, top_k, top_p)
    mine = np.isfinite(np.array(restrict(mx.array(logits.numpy()), how)))
    assert (mine == torch.isfinite(sampling.restrict(logits, how)).numpy()).all()
