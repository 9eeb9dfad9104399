"""examples/reference_step.py, plain PyTorch, and the engine take the same ten steps."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from examples import reference_step
from finetune.data.run_data import Data
from finetune.torch_engine.lora.layers import layers
from tests.support import cases, tiny
from tests.support.build import torch_engine

STEPS = 10
EPSILON = 1e-5  # of Adam, so that gradients which are rounding do not become steps of full length
KINDS = {"lora": "lora", "dora": "dora", "packed": "lora", "dpo": "lora dpo"}
PARTS = {"A": "lora_A", "B": "lora_B", "magnitude": "lora_magnitude_vector"}


def rows_of_step(dataset, step: int) -> list[int]:
    return [(step * 4 + i) % dataset.num_rows for i in range(4)]


def engines_steps(built, method: str) -> list[list[float]]:
    """[loss, norm] of each step of the engine."""
    dataset = cases.PAIRS if method == "dpo" else cases.DATA
    data = Data(None, set(), dataset, None, [], None, None)
    plan = built.plan.with_settings(batch_layout=built.layout, microbatch_tokens=60)
    found = []
    for step in range(STEPS):
        batches = data.microbatches(dataset, rows_of_step(dataset, step), slice(None), plan, 0, 4)
        result = built.train_step(batches, 1e-3)
        found.append([result.loss, result.grad_norm])
    return found


def plain_steps(model, trained: list, method: str, max_norm: float) -> list[list[float]]:
    """The same of the plain code."""
    dataset = cases.PAIRS if method == "dpo" else cases.DATA
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=EPSILON, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        each = dataset.documents_per_row
        numbers = [row * each + k for row in rows_of_step(dataset, step) for k in range(each)]
        documents = []
        for ids, is_target in map(dataset.document, numbers):
            documents.append((torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(is_target.copy())))
        loss = reference_step.LOSSES[method](model, documents)
        found.append(list(reference_step.train_step(loss, optimizer, max_norm)))
    return found


@pytest.mark.parametrize("method", KINDS)
def test_ten_steps_of_plain_pytorch_are_the_engines(method):
    case = cases.CASES[KINDS[method]]
    settings = replace(cases.build(case).plan.settings, adam_epsilon=EPSILON)
    model = tiny.build("llama", intermediate_size=128)
    model.requires_grad_(False)
    cases.add_frozen_base_and_adapters(model, case, settings, cases.CPU)
    built = torch_engine(model, settings)
    built.verify("auto")
    kind = reference_step.DoRALinear if method == "dora" else reference_step.LoRALinear
    plain = tiny.build("llama", intermediate_size=128)
    trained = reference_step.add_adapters(plain, partial(kind, rank=settings.lora_rank, alpha=settings.lora_alpha))
    adapted = dict(layers(built.model))
    assert {n for n, m in plain.named_modules() if isinstance(m, reference_step.LoRALinear)} == set(adapted)
    with torch.no_grad():
        for name, layer in adapted.items():
            of_plain = plain.get_submodule(name)
            for plain_name, own_name in PARTS.items():
                if hasattr(of_plain, plain_name):
                    getattr(of_plain, plain_name).copy_(getattr(layer, own_name))
    wanted = plain_steps(plain, trained, method, settings.grad_norm)
    found = engines_steps(built, method)
    # fp32, other orders of the same sums: of ten documents' targets, and of Adam's steps from them.
    np.testing.assert_allclose([loss for loss, _ in found], [loss for loss, _ in wanted], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([norm for _, norm in found], [norm for _, norm in wanted], rtol=1e-4)
    for name, layer in adapted.items():
        of_plain = plain.get_submodule(name)
        torch.testing.assert_close(layer.lora_A, of_plain.A, rtol=0, atol=1e-6)
        torch.testing.assert_close(layer.lora_B, of_plain.B, rtol=0, atol=1e-6)


def test_the_example_prints_losses_that_fall(tiny_model, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reference_step.py", str(tiny_model)])
    reference_step.main()
    losses = [float(line.split()[4]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == STEPS and losses[-1] < losses[0]
