"""The engine of tiny models: steps, precisions, memory, state."""

import copy
import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from finetune.config import TrainConfig
from finetune.data.collate import microbatches
from finetune.errors import NonFiniteError, OutOfMemoryError
from finetune.parts.precision import Precision
from finetune.quantizers.linear import can_pack
from finetune.torch_engine.device import DTYPES, free_bytes
from finetune.torch_engine.generation import generate
from finetune.torch_engine.generation.generate import dense_bytes, dense_weights
from finetune.torch_engine.lora.layers import adapters_in_fp32, layers
from tests.support import tiny
from tests.support.build import torch_engine
from tests.support.cells import each_alone, slow
from tests.support.commands import ROOT
from tests.support.engine_access import loss_scale, optimizer, set_loss_scale, trainable_params
from tests.support.engines import CPU, assert_same, batches, engine, gradients
from tests.support.planned import engine_of, settings_of


@pytest.mark.parametrize("layout", ["padding_free", "padded"])
@pytest.mark.parametrize("train_type", ["full", "lora", "qlora"])
def test_accumulated_gradients_are_those_of_one_batch_for_any_split_by_tokens(train_type, layout, device):
    built = engine(train_type=train_type, layout=layout, device=device)
    whole = gradients(built, batches(layout))
    for batch_size, tokens in ((1, 10**6), (2, 10**6), (8, 60), (8, 1)):
        assert_same(gradients(built, batches(layout, batch_size, tokens)), whole)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("train_type", ["full", "lora", "qlora"])
def test_checkpointing_changes_no_gradient(train_type, reentrant, device):
    plain = engine(train_type=train_type, device=device)
    recomputing = engine(
        train_type=train_type, use_gradient_checkpointing="true", reentrant_checkpointing=reentrant, device=device
    )
    plain.model.train(), recomputing.model.train()
    saved = {}
    for built in (plain, recomputing):
        count = 0

        def pack(tensor):
            nonlocal count
            count += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            built.forward.nll(batches()[0])
        saved[built] = count
    assert saved[recomputing] < 0.5 * saved[plain]
    assert_same(gradients(recomputing, batches()), gradients(plain, batches()), 1e-6)


def test_dropout_resumes_identically_only_with_the_rng_state(device):
    first = engine(lora_dropout=0.2, device=device)
    first.train_step(batches(), 1e-2)
    state = copy.deepcopy((first.trainable_state(), *first.optimizer_state(), first.rng_state()))
    wanted = first.train_step(batches(), 1e-2).nll
    for keep, same in ((True, True), (False, False)):
        second = engine(lora_dropout=0.2, device=device)
        rng = state[3] if keep else second.rng_state()
        second.load_state(*state[:3], rng)
        assert (second.train_step(batches(), 1e-2).nll == wanted) is same


LOW = ("bf16", "bf16_autocast", "bf16_buffers_autocast", "fp16", "fp16_autocast")


@pytest.mark.parametrize(("precision", "train_type"), each_alone(LOW, ["lora", "qlora"]))
def test_every_precision_trains_with_fp32_adapters_near_the_fp32_loss(precision, train_type, device):
    exact = engine(train_type=train_type, device=device)
    model = tiny.build()
    model.to(DTYPES[Precision.of(TrainConfig(precision=precision)).weights])
    built = engine(train_type=train_type, model=model, device=device)
    built = torch_engine(built.model, dataclasses.replace(built.plan.settings, precision=precision), device)
    built.verify("auto")
    assert built.layout == "padding_free"
    assert all(p.dtype == torch.float32 for p in trainable_params(built).values())
    frozen = {p.dtype for p in built.model.parameters() if not p.requires_grad and p.is_floating_point()}
    assert frozen == {DTYPES[Precision.of(TrainConfig(precision=precision)).weights]}
    one, two = (e.train_step(batches(), 1e-2) for e in (exact, built))
    # bf16 keeps 8 bits of a number, fp16 11: a mean over some 70 targets is within 1 % of the exact one.
    assert two.nll == pytest.approx(one.nll, rel=1e-2) and not two.skipped
    assert all(p.grad is None for p in trainable_params(built).values())
    assert built.train_step(batches(), 1e-2).nll < two.nll


def test_fp16_lowers_its_scale_on_overflow_and_leaves_the_weights(device):
    model = tiny.build().to(torch.float16)
    built = engine(model=model, device=device)
    built = torch_engine(built.model, dataclasses.replace(built.plan.settings, precision="fp16"), device)
    built.verify("auto")
    set_loss_scale(built, 2.0**40)
    before = built.trainable_state()
    result = built.train_step(batches(), 1e-2)
    assert result.skipped and loss_scale(built) == 2.0**39
    for name, array in before.items():
        np.testing.assert_array_equal(array, built.trainable_state()[name])


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(device):
    built = engine(device=device)
    with torch.no_grad():
        next(iter(trainable_params(built).values())).fill_(float("nan"))
    before = built.trainable_state()
    with pytest.raises(NonFiniteError, match="loss is nan"):
        built.train_step(batches(), 1e-2)
    for name, array in before.items():
        np.testing.assert_array_equal(array, built.trainable_state()[name])


@pytest.mark.promise("MSG_07")
def test_running_out_of_memory_names_what_to_lower():
    built = engine()
    built.model.model.register_forward_pre_hook(
        lambda *ignored: torch.empty(2**50) and None
    )  # 4 PiB: torch cannot allocate it
    s = built.plan.settings
    values = f"--microbatch_tokens {s.microbatch_tokens}, --batch_size {s.batch_size} or --context_length "
    switches = r"--use_gradient_checkpointing \(now \w+\) or --low_memory \(now False\)"
    with pytest.raises(OutOfMemoryError, match=f"{values}{s.context_length}, or turn on {switches}"):
        built.train_step(batches(), 1e-2)


def test_clipping_scales_the_full_gradient_and_reports_its_norm_before(device):
    free, clipped = engine(apply_gradient_clipping=False, device=device), engine(grad_norm=1e-3, device=device)
    one, two = free.train_step(batches(), 1e-2), clipped.train_step(batches(), 1e-2)
    assert one.grad_norm == two.grad_norm > 1e-3


@pytest.mark.promise("CLI_03")
@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_frozen_weights_are_the_same_bits_after_training(train_type, device):
    built = engine(train_type=train_type, device=device)
    before = tiny.base_tensors_digest(built.model)
    for _ in range(3):
        built.train_step(batches(), 1e-1)
    built.generate([[3, 4, 5]], 4, {127})
    assert tiny.base_tensors_digest(built.model) == before


def test_dense_weights_are_kept_only_inside(device):
    built = engine(train_type="qlora", device=device)
    layer = next(iter(layers(built.model).values()))
    x = torch.randn(3, layer.in_features).to(device)
    apart = layer(x)
    with dense_weights(built.model):
        assert layer.merged is not None
        torch.testing.assert_close(layer(x), apart, rtol=1e-5, atol=1e-6)
    assert layer.merged is None and layer.base.cached is None
    built.model.to(torch.bfloat16)  # 16 bits would round the adapter away
    with dense_weights(built.model):
        assert layer.merged is None and layer.base.cached is not None
    assert layer.base.cached is None


needs_bf16_of_onednn = pytest.mark.skipif(
    not can_pack(torch.zeros(1, dtype=torch.bfloat16)), reason="needs a processor on which oneDNN multiplies bf16"
)


@needs_bf16_of_onednn
@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_on_a_cpu_in_16_bits_they_are_in_onednns_order_with_the_same_products(train_type):
    built = engine(train_type=train_type)
    built.model.to(torch.bfloat16)
    layer = next(iter(layers(built.model).values()))
    x = torch.randn(3, layer.in_features).bfloat16()
    with torch.no_grad():
        apart = layer(x)
        with dense_weights(built.model):
            found = layer.packed if train_type == "lora" else layer.base.cached
            assert found.is_mkldnn and torch.equal(layer(x), apart)
            layer.off = True
            of_base = layer(x)
        assert layer.packed is None and torch.equal(layer(x), of_base)


@needs_bf16_of_onednn
def test_a_second_copy_is_made_of_so_many_weights_only(monkeypatch):
    built = engine(train_type="lora")
    built.model.to(torch.bfloat16)
    held = dense_bytes(layers(built.model).values(), torch.bfloat16)
    for most, is_packed in ((held, True), (held - 1, False)):
        monkeypatch.setattr(generate, "MOST_PACKED_BYTES", most)
        with dense_weights(built.model):
            assert (next(iter(layers(built.model).values())).packed is not None) == is_packed


def test_an_adapters_part_in_fp32_is_rounded_once(device):
    built = engine(train_type="lora", device=device)
    layer = next(iter(layers(built.model).values()))
    torch.nn.init.normal_(layer.lora_B)
    layer.base.to(torch.bfloat16)
    x = torch.randn(70, layer.in_features, device=device).bfloat16()
    exact = x.double() @ (layer.base.weight.double() + layer.scaling * (layer.lora_B @ layer.lora_A).double()).t()
    with torch.no_grad():
        rounded = layer(x).double()
        with adapters_in_fp32(built.model):
            found = layer(x)
        assert torch.equal(layer(x).double(), rounded)
    errors = [(each.double() - exact).square().mean().sqrt().item() for each in (found, rounded)]
    assert errors[0] < 0.9 * errors[1]


def test_dense_weights_that_do_not_fit_are_made_layer_by_layer(device):
    """A 70B's would take 128 GiB before the first step."""
    built = engine(train_type="qlora", device=device)
    layer = next(iter(layers(built.model).values()))
    held = dense_bytes(layers(built.model).values(), torch.float32)
    for free, is_dense in ((2 * held, True), (held, False)):
        with dense_weights(built.model, free):
            assert (layer.merged is not None) == is_dense and layer.base.cached is None
    assert free_bytes(CPU) is None


def test_a_tried_step_leaves_no_trace(tmp_path):
    """Weights, moments and random state are as before, and so are losses of later steps, dropout included."""
    losses = []
    for tried in (False, True):
        engine, layout = engine_of("llama", settings_of("lora", lora_dropout=0.2), tmp_path)
        rows = tiny.dataset()
        if tried:
            before = {n: p.clone() for n, p in trainable_params(engine).items()}
            state = engine.rng_state()["host"].copy()
            engine.try_step(microbatches(rows, range(8), layout, 8, 4096, 0)[0], several=True)
            assert all(torch.equal(p, before[n]) for n, p in trainable_params(engine).items())
            assert not optimizer(engine).state and (engine.rng_state()["host"] == state).all()
            assert all(p.grad is None for p in trainable_params(engine).values())
        steps = [microbatches(rows, range(i, i + 4), layout, 4, 4096, 0) for i in (0, 4, 2)]
        losses.append([engine.train_step(b, 1e-3).nll for b in steps])
    assert losses[0] == losses[1]


@pytest.mark.promise("ENV_06")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", *slow("MKL_NUM_THREADS")])
def test_threads_of_the_environment_are_respected(name):
    code = (
        "import torch; from finetune.torch_engine.device import set_num_threads\n"
        "set_num_threads(); print(torch.get_num_threads())"
    )
    others = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    env = {**others, name: "1"}
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env, text=True).strip() == "1"
