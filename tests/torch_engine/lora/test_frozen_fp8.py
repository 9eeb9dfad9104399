"""Runs whose frozen products are in fp8: proved on the loaded model, near the exact run, exact where nothing trains."""

import numpy as np
import pytest
import torch

from finetune.parts.trains import Adapter
from finetune.torch_engine.lora import frozen_fp8
from finetune.torch_engine.lora.layers import layers
from tests.support import architectures, tiny
from tests.support.build import load_model, torch_engine
from tests.support.engines import CPU
from tests.support.planned import settings_of

LENGTHS = (40, 37, 12, 30, 44, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    tiny.build().save_pretrained(found)
    return found


def build(folder, train_type="lora", **more):
    settings = settings_of(train_type, precision="bf16", lora_rank=4, **{"frozen_products": "fp8"} | more)
    engine = torch_engine(load_model(folder, settings, CPU, say=lambda line: None), settings, CPU)
    engine.verify("auto")
    return engine


def batches(engine, count=1, tokens=4096):
    rows = tiny.dataset(LENGTHS)
    layout = engine.forward.layout
    word = "padding_free" if layout.padding_free else "padded"
    found = architectures.microbatches(rows, range(len(LENGTHS)), word, len(LENGTHS), tokens, 0)
    return [found for _ in range(count)]


def trained(engine, steps=8, **more):
    return [engine.train_step(parts, 3e-3).loss for parts in batches(engine, steps, **more)]


@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_a_run_in_fp8_is_near_the_exact_one_and_evaluates_exactly(folder, train_type):
    exact = build(folder, train_type, frozen_products="exact")
    rounded = build(folder, train_type)
    word, why = rounded.prove_fp8(batches(rounded)[0][0], before=None)
    assert word == "fp8" and "of their norm" in why
    assert rounded.evaluate(batches(rounded)[0]).nll == exact.evaluate(batches(exact)[0]).nll
    wanted = np.array(trained(exact))
    found = np.array(trained(rounded))
    assert found == pytest.approx(wanted, rel=0.02) and (found != wanted).all()
    assert wanted[-1] < 0.97 * wanted[0]
    switch = frozen_fp8.switch_of(rounded.model)
    before = rounded.evaluate(batches(rounded)[0]).nll
    switch.on = False
    assert rounded.evaluate(batches(rounded)[0]).nll == before


def test_adapters_in_one_buffer_and_beside_each_other_learn_the_same(folder):
    """Without the buffer each linear rounds its own copy of a shared input; accumulated, each row is rounded alone."""
    alone = build(folder)
    alone.model.flat_adapters.running = False
    for layer in layers(alone.model).values():
        layer.flat = None
    alone.model.flat_adapters = None
    together = build(folder)
    assert trained(together) == pytest.approx(trained(alone), rel=2e-3)
    accumulated = build(folder)
    assert trained(accumulated, tokens=64) == pytest.approx(trained(build(folder)), rel=2e-3)


@pytest.mark.parametrize("more", [{"use_gradient_checkpointing": "true"}, {"reentrant_checkpointing": True}])
def test_recomputed_layers_round_as_before(folder, more):
    recomputed = build(folder, **{"use_gradient_checkpointing": "true"} | more)
    assert trained(recomputed) == trained(build(folder))


def test_dora_and_dropout_train_in_fp8(folder):
    exact = build(folder, use_dora=True, lora_dropout=0.1, frozen_products="exact")
    rounded = build(folder, use_dora=True, lora_dropout=0.1)
    assert trained(rounded) == pytest.approx(trained(exact), rel=0.03)


def test_a_model_that_rounding_changes_is_refused(folder):
    """Outputs that are differences of large parts: each product is within its bound, their difference is not."""
    engine = build(folder)
    with torch.no_grad():
        for name, layer in layers(engine.model).items():
            if name.endswith(("o_proj", "down_proj")):
                layer.base.weight[:, 1::2] = -layer.base.weight[:, ::2]
                layer.base.weight += 30 * layer.base.weight.abs().mean() * torch.randn(layer.in_features).sign()
    word, why = engine.prove_fp8(batches(engine)[0][0], before=None)
    assert word == "exact" and "more than 5% or 33%" in why, (word, why)
    exact = [engine.train_step(parts, 3e-3).loss for parts in batches(engine, 2)]
    assert not frozen_fp8.switch_of(engine.model).on and np.isfinite(exact).all()


def test_sizes_that_fp8_lacks_are_named(tmp_path):
    tiny.build(hidden_size=72, intermediate_size=136, num_attention_heads=6, num_key_value_heads=6).save_pretrained(
        tmp_path
    )
    engine = build(tmp_path)
    assert isinstance(engine.plan.trains, Adapter)
    assert engine.prove_fp8(batches(engine)[0][0], before=None) == (
        "exact",
        "no linear with an adapter has sizes in multiples of 16",
    )


@pytest.mark.parametrize("before", ["fp8", "exact"])
def test_a_run_that_goes_on_stays_as_it_was_found(folder, before):
    engine = build(folder)
    assert engine.prove_fp8(batches(engine)[0][0], before=before) == (before, "as the run began")
    assert frozen_fp8.switch_of(engine.model).on == (before == "fp8")


def test_a_head_alone_has_no_frozen_product(tmp_path):
    """Its loss multiplies by it as it is: nothing differs."""
    tiny.build(vocab_size=256).save_pretrained(tmp_path)
    engine = build(tmp_path, lora_target_modules="lm_head")
    word, why = engine.prove_fp8(batches(engine)[0][0], before=None)
    assert word == "exact" and "loss and gradients are the same" in why


def test_a_trial_leaves_no_trace(folder):
    tried = build(folder)
    tried.prove_fp8(batches(tried)[0][0], before=None)
    assert trained(tried) == trained(build(folder))
