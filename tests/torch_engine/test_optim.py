"""Every optimizer, its settings, and LoRA+."""

import numpy as np
import pytest
import torch

from finetune.config import OPTIMIZERS, TrainConfig
from finetune.errors import PlanError
from finetune.plan.parts import StepsPlan
from finetune.torch_engine import optim
from tests.support.engine_access import trainable_params
from tests.support.engines import batches, engine
from tests.support.plans import plan_of


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


BETAS = dict(adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_betas_and_epsilon_are_torch_s_in_both_engines(optimizer):
    """Five steps on the same gradients: bitwise as torch's own optimizer, and MLX as torch to fp32's rounding."""
    steps = StepsPlan.of(TrainConfig(optimizer=optimizer, lr=1e-2, wd=0.1, **BETAS))
    start = torch.linspace(-1, 1, 12).reshape(3, 4)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    built = optim.build({"w": ours}, steps, torch.device("cpu"))
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optimizer]
    reference = kind([theirs], lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-4)
    plain = optim.build({"w": torch.nn.Parameter(start.clone())}, StepsPlan.of(TrainConfig()), torch.device("cpu"))
    assert plain.param_groups[0]["betas"] == (0.9, 0.999) and plain.param_groups[0]["eps"] == 1e-8
    gradients = [torch.sin(start * (i + 1)) for i in range(5)]
    for gradient in gradients:
        for parameter, one in ((ours, built), (theirs, reference)):
            parameter.grad = gradient.clone()
            one.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)  # fused and foreach kernels round differently
    mx = pytest.importorskip("mlx.core")
    from finetune.mlx_engine.optim import Optimizer

    on_mlx, weights = Optimizer(steps), {"w": mx.array(start.numpy())}
    for gradient in gradients:
        weights, moments = on_mlx.step(weights, {"w": mx.array(gradient.numpy())}, mx.array(1e-2))
        on_mlx.applied(weights, moments)
    np.testing.assert_allclose(np.array(weights["w"]), theirs.detach().numpy(), rtol=0, atol=1e-6)


def test_betas_reach_a_run_and_are_refused_where_no_adam_is(device):
    plain, changed = engine(device=device), engine(device=device, **BETAS)
    for _ in range(2):
        losses = [one.train_step(batches(), 5e-3).nll for one in (plain, changed)]
    assert losses[0] != losses[1]
    with pytest.raises(PlanError, match="--adam_beta1 0.8: is of Adam"):
        plan_of(optimizer="sgd", adam_beta1=0.8)
