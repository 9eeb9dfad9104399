"""Linears of one input as one product: found in forwards, equal to each alone, and alone again where inputs differ."""

import numpy as np
import pytest
import torch

from finetune.data.collate import microbatches
from finetune.torch_engine.lora.layers import layers
from finetune.torch_engine.lora.shared_input import SharedInput, forget_waiting, joined_by
from tests.support import cases
from tests.support.cases import Case
from tests.support.engines import ROWS, assert_same, engine, gradients

CASES = {
    "lora": Case("lora"),
    "dora": Case("lora", use_dora=True),
    "nf4": Case(method="nf4", double_quant=True),
    "nf4 recomputed": Case(method="nf4", recomputed=True),
}


def parts_of(built):
    return microbatches(ROWS, np.arange(8), built.layout, 8, 60, 0)


def alone(built):
    for layer in layers(built.model).values():
        layer.shared = None


def companies(built) -> dict[str, int]:
    """{name of a linear in the first layer: number of linears that share its input}."""
    found = {}
    for name, layer in layers(built.model).items():
        if ".layers.0." in name:
            found[name.rpartition(".")[2]] = len(layer.shared.members) if layer.shared else 1
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_q_k_and_v_are_one_product_and_gate_and_up_another(architecture):
    shares = dict(q_proj=3, k_proj=3, v_proj=3, o_proj=1, gate_proj=2, up_proj=2, down_proj=1)
    assert companies(engine(architecture)) == shares


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # the second with biases
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_each_linear_alone(name, architecture):
    """Sums of gradients have another order: equal to rounding."""
    built = cases.build(CASES[name], architecture=architecture)
    built.model.train()
    found = gradients(built, parts_of(built))
    losses = [built.forward.nll(batch).item() for batch in parts_of(built)]
    alone(built)
    assert_same(found, gradients(built, parts_of(built)), 2e-6)
    assert losses == pytest.approx([built.forward.nll(batch).item() for batch in parts_of(built)], rel=1e-6)


def test_linears_with_dropout_or_another_scaling_stay_alone():
    assert set(companies(engine(lora_dropout=0.1)).values()) == {1}
    built = engine()
    alone(built)
    for name, layer in layers(built.model).items():
        if name.endswith("q_proj"):
            layer.scaling = 0.5
    with joined_by(built.model), torch.no_grad():
        built.forward.nll(parts_of(built)[0])
    assert companies(built)["q_proj"] == companies(built)["k_proj"] == 1 and companies(built)["up_proj"] == 2


def test_an_input_that_a_hook_changes_is_computed_alone():
    built = engine()
    attention = built.model.model.layers[0].self_attn
    x = torch.randn(1, 5, built.model.config.hidden_size)
    wanted = [attention.q_proj(x), attention.v_proj(x), attention.k_proj(2 * x)]
    hook = attention.k_proj.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    found = [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)]
    hook.remove()
    for mine, right in zip(found, (wanted[0], wanted[2], wanted[1]), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_nothing_waits_after_a_forward_or_after_an_error_in_one():
    built = engine()
    built.forward.nll(parts_of(built)[0])
    shared = [layer.shared for layer in layers(built.model).values() if layer.shared]
    assert shared and all(isinstance(each, SharedInput) and not each.waiting for each in shared)
    attention = built.model.model.layers[0].self_attn
    attention.q_proj(torch.randn(1, 5, built.model.config.hidden_size))
    assert attention.k_proj.shared.waiting
    forget_waiting(built.model)
    assert not attention.k_proj.shared.waiting and attention.k_proj.shared.input is None
