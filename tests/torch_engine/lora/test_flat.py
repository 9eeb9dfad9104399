"""Adapters in one buffer: linears that share an input together, gradients in place; the numbers of autograd's own."""

import numpy as np
import pytest
import torch
from torch import nn

from finetune.data.collate import microbatches
from finetune.torch_engine.kernels import fuse
from finetune.torch_engine.lora import flat
from finetune.torch_engine.lora.layers import LoRALinear, layers
from tests.support import cases
from tests.support.cases import Case
from tests.support.engine_access import trainable_params
from tests.support.engines import ROWS, assert_same, engine, gradients


def in_place(built, parts):
    """Gradients of one step's loss as a step of the engine collects them."""
    targets = sum(b.num_targets for b in parts)
    with built._weights_cast_once():
        for batch in parts:
            (built.forward.nll(batch) / targets).backward()
    found = {n: p.grad.clone() for n, p in trainable_params(built).items() if p.grad is not None}
    built.parallel.drop_gradients()
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "mixtral", "phi3", "gpt2"])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_in_place_are_autograds(architecture, fused, own_rope):
    """Two microbatches; sums of products in another order."""
    built = engine(architecture)
    if fused:
        fuse.replace(built.model)
        flat.flatten(built.model)
    built.model.eval()  # GPT-2 has dropout of its own
    parts = microbatches(ROWS, np.arange(8), built.layout, 8, 70, 0)
    assert len(parts) > 1
    assert_same(in_place(built, parts), gradients(built, parts), 2e-6)


KINDS = {
    "nf4": Case(method="nf4"),
    "dora": Case("lora", use_dora=True),
    "recomputed": Case("lora", recomputed=True),
    "bf16": Case(method="nf4", precision="bf16"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_so_are_those_of_other_layers(kind):
    built = cases.build(KINDS[kind])
    built.model.train()
    parts = microbatches(ROWS, np.arange(8), built.layout, 8, 70, 0)
    # Sums in another order: 2.9e-6 of fp32, 2.2e-2 of bf16 on an AMD EPYC.
    assert_same(in_place(built, parts), gradients(built, parts), 3e-2 if kind == "bf16" else 4e-6)


def test_dropout_draws_what_it_draws_without():
    built = engine("llama", lora_dropout=0.3)
    built.model.train()
    parts = microbatches(ROWS, np.arange(8), built.layout, 8, 10**6, 0)
    found = []
    for collect in (in_place, gradients):
        torch.manual_seed(3)
        found.append(collect(built, parts))
    assert_same(*found)


def test_parameters_and_gradients_are_views_of_one_buffer():
    built = engine("llama")
    adapters = built.model.flat_adapters
    (place,) = {p.untyped_storage().data_ptr() for p in adapters.parameters}
    assert place == adapters.weights.untyped_storage().data_ptr()
    built.model.train()
    with built._weights_cast_once():
        built.forward.nll(microbatches(ROWS, np.arange(8), built.layout, 8, 10**6, 0)[0]).backward()
    (place,) = {p.grad.untyped_storage().data_ptr() for p in adapters.parameters}
    assert place == adapters.gradients.untyped_storage().data_ptr()


class Block(nn.Module):
    def __init__(self, same: bool):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = LoRALinear(nn.Linear(8, 6).requires_grad_(False), 2, 4, 0.0, False, False)
            nn.init.normal_(layer.lora_A)
            nn.init.normal_(layer.lora_B)
            setattr(self, name, layer)
        self.same = same

    def forward(self, x):
        other = x if self.same else x.cos()
        return self.q_proj(x).sin() + self.k_proj(other) * self.v_proj(other)


@pytest.mark.parametrize("same", [True, False])
def test_linears_that_get_other_inputs_compute_their_own(same):
    block, x = Block(same), torch.randn(3, 8)
    block(x).sum().backward()
    wanted = {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
    block.zero_grad()
    flat.flatten(block)
    for _ in range(2):
        with flat.in_step(block, None):
            block(x).sum().backward()
        assert_same({n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}, wanted, 1e-5)
        block.zero_grad()
    assert all((layer.flat.shares is not None) == same for layer in layers(block).values())
    shared = block.q_proj.flat.shares
    assert shared is None or (shared.x is None and not shared.left)


def test_an_adapter_that_no_microbatch_reached_has_no_gradient():
    block = nn.ModuleDict({"used": Block(True), "unused": Block(True)})
    flat.flatten(block)
    with flat.in_step(block, None):
        block["used"](torch.randn(3, 8)).sum().backward()
    assert all((p.grad is None) == n.startswith("unused") for n, p in block.named_parameters() if p.requires_grad)


def test_a_layer_whose_weight_is_read_has_both_gradients():
    block, x = Block(True), torch.randn(3, 8)

    def loss():
        return block(x).sum() + (x @ block.k_proj.weight.t()).sin().sum()

    loss().backward()
    wanted = {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
    block.zero_grad()
    flat.flatten(block)
    with flat.in_step(block, None):
        loss().backward()
    assert_same({n: p.grad for n, p in block.named_parameters() if p.grad is not None}, wanted, 1e-5)
