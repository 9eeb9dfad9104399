"""Every optimizer and LoRA+."""

import numpy as np
import pytest

from finetune.config import OPTIMIZERS
from tests.support.engine_access import trainable_params
from tests.support.engines import batches, engine


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_every_optimizer_learns_and_restores_its_saved_state_bitwise(optimizer, train_type, device):
    lr = {"sgd": 0.5, "adadelta": 3.0 if train_type == "full" else 30.0}.get(optimizer, 5e-3)
    first = engine(train_type=train_type, optimizer=optimizer, device=device)
    losses = [first.train_step(batches(), lr).nll for _ in range(6)]
    assert losses[-1] < losses[0]
    second = engine(train_type=train_type, optimizer=optimizer, device=device)
    tensors, values = first.optimizer_state()
    second.load_state(first.trainable_state(), tensors, values, first.rng_state())
    for _ in range(2):
        assert first.train_step(batches(), lr).nll == second.train_step(batches(), lr).nll
    for name, array in first.trainable_state().items():
        np.testing.assert_array_equal(array, second.trainable_state()[name])


def test_loraplus_moves_b_faster(device):
    plain, plus = engine(optimizer="sgd", device=device), engine(optimizer="sgd", loraplus_lr_ratio=16.0, device=device)
    start = {n: p.detach().clone() for n, p in trainable_params(plain).items()}
    for built in (plain, plus):
        built.train_step(batches(), 1e-3)
    for name, before in start.items():
        moved = [(trainable_params(e)[name] - before).norm().item() for e in (plain, plus)]
        assert moved[1] == pytest.approx(moved[0] * (16 if name.endswith("lora_B") else 1), rel=1e-3)
