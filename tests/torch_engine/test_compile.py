"""Compiled decoder layers: one graph, the numbers of eager, no graph for each set of lengths."""

import numpy as np
import pytest
import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

from finetune.data.collate import microbatches
from finetune.distributed.env import RankEnv
from finetune.parts.parallel_dims import ParallelDims
from finetune.torch_engine import compile
from finetune.torch_engine.attention import per_document
from finetune.torch_engine.compile import cannot_pay, choose, compile_layers, stop_compiling
from finetune.torch_engine.device import set_onednn
from finetune.torch_engine.experts import grouped
from finetune.torch_engine.kernels import fuse
from finetune.torch_engine.lora import flat
from finetune.torch_engine.lora.layers import cast_once, multiplies_to_fp32
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from tests.support import cases, ranks, tiny, varlen_reference
from tests.support.cases import Case
from tests.support.engines import ROWS, assert_same, engine, gradients

CASES = {
    "full": Case("full"),
    "lora": Case("lora"),
    "dora": Case("lora", use_dora=True),
    "qlora": Case(method="nf4", double_quant=True),
    "qlora recomputed": Case(method="nf4", recomputed=True),
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def assert_equal_in_one_graph(built):
    """fullgraph raises at a break. Gradients through aot_eager, which runs the traced operations as they are."""
    built.model.train()
    parts = microbatches(ROWS, np.arange(8), built.layout, 8, 60, 0)
    wanted = gradients(built, parts)
    compile_layers(built.model, "aot_eager", fullgraph=True)
    assert_same(gradients(built, parts), wanted, 1e-6)
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    stop_compiling(built.model)
    assert not any("forward" in layer.__dict__ for layer in built.model.model.layers)


def test_a_lora_layer_with_unequal_documents_is_one_graph():
    assert_equal_in_one_graph(engine(model=tiny.build("llama", num_hidden_layers=1)))


@pytest.mark.parametrize("trial", [multiplies_to_fp32, grouped.works])
def test_what_is_tried_once_of_a_device_breaks_no_graph(trial, device):
    """It reads a number, which no graph holds; it is known before a layer is traced."""

    def tried(x):
        return x * 2 if trial(x.device, torch.bfloat16) else x

    torch.compile(tried, backend="aot_eager", fullgraph=True)(torch.ones(2, device=device))
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_layer_of_every_kind_is_one_graph_with_eagers_gradients(name):
    assert_equal_in_one_graph(cases.build(CASES[name], stages=4))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma3", "mistral", "qwen3", "gemma2"])
def test_windows_softcaps_and_other_norms_are_in_it(architecture):
    assert_equal_in_one_graph(cases.build(Case("lora"), architecture=architecture))


@pytest.mark.slow
def test_a_kernel_that_takes_bounds_and_casts_of_a_step_are_in_it():
    built = cases.build(Case("lora"))
    built.forward.attention = varlen_reference.attention(varlen_reference.operation)
    with torch.no_grad():  # the trial comes before anything is compiled, as in a run
        built.forward.nll(microbatches(ROWS, np.arange(8), built.layout, 8, 60, 0)[0])
    with cast_once(built.model, torch.float64):
        assert_equal_in_one_graph(built)


def steps_of_any_lengths(built, steps):
    random = np.random.default_rng(0)
    for step in range(steps):
        lengths = np.clip(random.lognormal(2.5, 0.7, random.integers(1, 7)), 2, 120).astype(int)
        data = tiny.dataset(lengths=tuple(lengths.tolist()), seed=step)
        built.train_step(microbatches(data, np.arange(len(lengths)), built.layout, 8, 10**6, 0), 1e-4)


def assert_one_graph(built, steps):
    """In `steps` steps of any lengths, with norms, SwiGLU and RoPE replaced and a kernel that takes bounds, as on a
    GPU: one graph of all layers, which is dynamo's one entry.
    """
    fuse.replace(built.model)
    built.forward.attention = varlen_reference.attention(varlen_reference.operation)
    with torch.no_grad():  # the trial comes before anything is compiled, as in a run
        built.forward.nll(microbatches(ROWS, np.arange(8), built.layout, 8, 60, 0)[0])
    assert all(found.kernel for found in built.forward.attention.found.values())
    compile_layers(built.model, "aot_eager", fullgraph=True)
    steps_of_any_lengths(built, steps)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert len(_debug_get_cache_entry_list(compile._forward.__code__)) == 1


@pytest.mark.slow
def test_twelve_layers_are_one_graph_in_fifty_steps_of_any_lengths(own_rope):
    assert_one_graph(cases.build(CASES["lora"], stages=12), 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layers_of_every_kind_are_one_graph_for_any_lengths(name, own_rope):
    assert_one_graph(cases.build(CASES[name], stages=4), 8)


@pytest.mark.slow
def test_layers_of_experts_in_groups_are_one_graph_for_any_lengths(own_rope, monkeypatch):
    monkeypatch.setattr(grouped, "works", lambda device, dtype: True)  # a CPU computes them too, slowly
    built = cases.build(Case(method="nf4", precision="bf16"), stages=4, architecture="qwen3_moe")
    assert_one_graph(built, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dora", "qlora", "qlora recomputed"])
def test_compiled_steps_are_eager_ones(name, own_rope):
    """Gradients of adapters are added in place in a step, and autograd's outside: a graph each."""
    losses = []
    weights = []
    outside = []
    for compiled in (False, True):
        built = cases.build(CASES[name])
        fuse.replace(built.model)
        flat.flatten(built.model)
        if compiled:
            compile_layers(built.model, "aot_eager", fullgraph=True)
        parts = microbatches(ROWS, np.arange(8), built.layout, 8, 70, 0)
        losses.append([built.train_step(parts, 1e-3).loss for _ in range(3)])
        outside.append(gradients(built, parts))
        losses[-1].append(built.train_step(parts, 1e-3).loss)
        weights.append({n: torch.as_tensor(v) for n, v in built.trainable_state().items()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert_same(outside[1], outside[0], 1e-5)
    assert_same(weights[1], weights[0], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "qlora recomputed"])
def test_layers_with_groups_of_documents_are_one_graph_for_any_lengths(name):
    built = cases.build(CASES[name])
    compile_layers(built.model, "aot_eager", fullgraph=True)
    steps_of_any_lengths(built, 50)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_groups_as_one_operation_have_the_gradients_of_groups():
    set_onednn(True)
    lengths = (7, 600, 30)
    q, k, v = (torch.randn(1, heads, sum(lengths), 8, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    documents = per_document.documents_of(torch.cat([torch.arange(n) for n in lengths]), "cpu")
    for window, softcap, sink in ((None, None, None), (20, None, None), (20, 30.0, None), (None, None, sinks)):
        inputs = (q, k, v) if sink is None else (q, k, v, sink)
        how = per_document.Scoring(0.3, 0.0, window, softcap, sink)
        outs = (
            torch.ops.finetune_attention.groups(q, k, v, sink, documents.number, 0.3, window, softcap),
            per_document.grouped_attention(q, k, v, documents, how),
        )
        assert torch.equal(*outs)
        for mine, right in zip(*(torch.autograd.grad(out.sin().sum(), inputs) for out in outs), strict=True):
            assert torch.equal(mine, right)


def test_compiling_is_chosen_if_it_saves_more_than_it_costs():
    assert choose(0.5, 0.4, 30.0, 1000)[0] == "true" and choose(0.5, 0.4, 30.0, 200)[0] == "false"
    assert choose(0.4, 0.5, 0.0, 1000)[0] == "false" and "200 of them" in choose(0.5, 0.4, 30.0, 200)[1]


def test_a_run_that_ends_before_compiling_pays_does_not_try_it():
    assert cannot_pay(0.03, 120) and "120 of them" in cannot_pay(0.03, 120)
    assert cannot_pay(0.03, 10_000) is None and cannot_pay(2.0, 100) is None
    built = engine(model=tiny.build("llama", num_hidden_layers=1))
    batch = microbatches(ROWS, np.arange(8), built.layout, 8, 10**6, 0)[0]
    counters.clear()
    assert built.compile_if_it_pays(batch, 1)[0] == "false" and not counters["stats"]


@pytest.mark.slow
def test_a_timed_pair_of_microbatches_decides_and_leaves_no_trace(monkeypatch):
    built = engine(model=tiny.build("llama", num_hidden_layers=1))
    batch = microbatches(ROWS, np.arange(8), built.layout, 8, 10**6, 0)[0]
    before, state = built.rng_state(), {n: v.copy() for n, v in built.trainable_state().items()}
    monkeypatch.setattr(compile, "COMPILING_S", 0.0)
    word, why = built.compile_if_it_pays(batch, 1)
    assert word == "false" and "would not pay in 1 of them" in why
    assert all(np.array_equal(v, built.trainable_state()[n]) for n, v in state.items())
    assert all(np.array_equal(v, built.rng_state()[n]) for n, v in before.items())
    assert not any("forward" in layer.__dict__ for layer in built.model.model.layers)
    assert built.compile_if_it_pays(batch, 10**9)[0] in ("true", "false")  # as this machine says


def losses_of_ranks(rank: int, size: int) -> list:
    """Losses and norms of two steps over FSDP2, eager and compiled, of recomputed layers."""
    found = []
    for compiled in (False, True):
        groups = ProcessGroups.of(RankEnv(rank, size, rank, size), ParallelDims(dp_shard=size), ranks.compute_device())
        built = cases.build(Case("lora", recomputed=True), groups)
        if compiled:
            compile_layers(built.model, "aot_eager")
        for step in range(2):
            result = built.train_step(cases.rank_batches(built, cases.rows_of_step(step)), 1e-3)
            found.append([result.loss, result.grad_norm])
    return found


@pytest.mark.slow
def test_sharded_layers_are_compiled_and_recompute_as_before(tmp_path):
    for eager_1, eager_2, compiled_1, compiled_2 in ranks.run(2, losses_of_ranks, tmp_path):
        assert compiled_1 == pytest.approx(eager_1, rel=1e-6) and compiled_2 == pytest.approx(eager_2, rel=1e-6)
