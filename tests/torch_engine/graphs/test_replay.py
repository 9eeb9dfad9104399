"""Microbatches in buckets and their replays: eager's losses and weights, one memory, nothing read by the host."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from finetune.data.collate import microbatches
from finetune.engine import Batch
from finetune.errors import OutOfMemoryError, PlanError
from finetune.objectives import NextToken
from finetune.parts.objectives import OBJECTIVES
from finetune.parts.rows import implementation
from finetune.torch_engine.experts import grouped
from finetune.torch_engine.graphs import replay
from finetune.torch_engine.graphs.buckets import LEAST, Bucket, fixed_arrays, rounded
from finetune.torch_engine.graphs.losses import LOSSES
from finetune.torch_engine.graphs.replay import Graphs
from finetune.torch_engine.kernels import fuse
from finetune.torch_engine.lora import flat
from tests.support import cases, tiny, varlen_reference
from tests.support.cases import Case
from tests.support.dry_capture import DryCapture, storage_of

CASES = {
    "lora": Case("lora"),
    "nf4": Case(method="nf4", double_quant=True),
    "dora": Case("lora", use_dora=True),
    "full": Case("full"),
    "dpo": Case("lora", preference="dpo"),
}


def build(case: Case, **more):
    """An engine as on a GPU: adapters in one buffer, kernels that take bounds."""
    built = cases.build(case, **more)
    built.forward.attention = varlen_reference.attention(varlen_reference.by_bounds)
    return built


def captured(built):
    trained = [p for p in built.parallel.local_params.values() if p is not None]
    built.graphs = Graphs(built.forward, built.objective, trained, DryCapture())
    return built


def steps_of(built, count, tokens=50):
    """Microbatches of `count` steps of log-normal lengths; rows of pairs where the engine learns them."""
    each = 1 + built.plan.objective.facts.pairs
    for step in range(count):
        random = np.random.default_rng(step)
        rows = random.integers(1, 6)
        lengths = np.clip(random.lognormal(2.5, 0.7, rows * each), 2, 40).astype(int)
        data = replace(tiny.dataset(lengths=tuple(lengths.tolist()), seed=step), documents_per_row=each)
        yield microbatches(data, np.arange(rows), built.layout, 8, tokens, 0)


def losses_of(built, count, tokens=50):
    return [[r.loss, r.grad_norm] for r in (built.train_step(parts, 1e-4) for parts in steps_of(built, count, tokens))]


def assert_replays_are_eager(case, count, **more):
    eager = build(case, **more)
    replayed = captured(build(case, **more))
    assert np.array(losses_of(replayed, count)) == pytest.approx(np.array(losses_of(eager, count)), rel=1e-6)
    assert replayed.graphs.capture.replays >= count // 2
    mine, wanted = ({n: torch.as_tensor(v) for n, v in each.trainable_state().items()} for each in (replayed, eager))
    for name in wanted:
        assert (mine[name] - wanted[name]).abs().max() <= 1e-6, name  # of weights of some 0.1 to 1, after AdamW


@pytest.mark.parametrize("name", ["lora", "dpo", "full"])
def test_losses_and_weights_of_replays_are_eagers(name):
    assert_replays_are_eager(CASES[name], 6)


def test_answers_between_steps_get_the_graphs_memory_and_change_no_number():
    losses = []
    for built in (build(CASES["lora"]), captured(build(CASES["lora"]))):
        losses.append(losses_of(built, 3))
        built.generate([[5, 6, 7]], 4, {2})
        assert built.graphs is None or not (built.graphs.held or built.graphs.capture.recorders)
        losses[-1] += losses_of(built, 3)
    assert np.array(losses[1]) == pytest.approx(np.array(losses[0]), rel=1e-6)


def test_labels_are_smoothed_in_replays():
    eager, replayed = build(CASES["lora"]), captured(build(CASES["lora"]))
    for built in (eager, replayed):
        built.forward.label_smoothing = 0.1
    assert np.array(losses_of(replayed, 2)) == pytest.approx(np.array(losses_of(eager, 2)), rel=1e-6)


def test_adapters_that_are_not_in_one_buffer_are_cast_where_they_are_used():
    """What is cast for a step is a copy, which is elsewhere in the next one."""
    built = cases.build(CASES["lora"])
    built.forward.model.flat_adapters = None
    built.device = torch.device("meta")  # for which adapters are cast once a step
    layer = built.model.model.layers[0].self_attn.q_proj
    with built._weights_cast_once():
        assert layer.casts == {} and layer.cast_dtype == torch.float32
    captured(built)
    with built._weights_cast_once():
        assert layer.casts is None


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_of_every_kind_after_twenty_steps(name):
    assert_replays_are_eager(CASES[name], 20)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma3", "qwen3", "gemma2"])
def test_of_windows_softcaps_and_other_norms(architecture):
    case = Case("lora")
    if architecture == "gemma2":  # softcaps, which kernels that take bounds lack
        built = captured(build(case, architecture=architecture))
        with pytest.raises(ValueError, match="no kernel of attention"):
            losses_of(built, 1)
        return
    assert_replays_are_eager(case, 8, architecture=architecture)


@pytest.mark.slow
def test_of_experts_in_groups(monkeypatch):
    monkeypatch.setattr(grouped, "works", lambda device, dtype: True)  # a CPU computes them too, slowly
    case = Case(method="nf4", precision="bf16")
    eager, replayed = build(case, architecture="qwen3_moe"), captured(build(case, architecture="qwen3_moe"))
    # 16-bit products of more rows are summed in another order.
    assert np.array(losses_of(replayed, 8)) == pytest.approx(np.array(losses_of(eager, 8)), rel=2e-2)
    assert replayed.graphs.capture.replays


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "nf4", "full", "dpo"])
def test_in_fifty_steps_everything_stays_where_it_is(name):
    """What a graph reads and writes is of the model, of its gradients, or of its bucket: none has moved."""
    built = captured(build(CASES[name]))
    fuse.replace(built.model)
    losses_of(built, 50, tokens=150)
    graphs = built.graphs
    known = [*built.model.parameters(), *built.model.buffers(), *graphs.gradients.values()]
    known += [x for held in graphs.held.values() for x in (held.buffers.integers, held.buffers.numbers)]
    if graphs.flat is not None:
        known += [graphs.flat.weights, graphs.flat.gradients, graphs.flat.anchor]
    known += [x for m in built.model.modules() for x in vars(m).values() if torch.is_tensor(x)]
    storages = {storage_of(x) for x in known}
    recorders = graphs.capture.recorders
    assert len(recorders) > 3 and graphs.capture.replays > 40
    for recorder in recorders:
        for address, tensor in recorder.outside.items():
            assert storage_of(tensor) == address
        left = [x for address, x in recorder.outside.items() if address not in storages]
        assert not left, [(x.shape, x.dtype) for x in left]


def test_a_number_that_the_host_reads_is_not_captured():
    """The trial says so, and the run goes on without graphs."""
    built = build(CASES["lora"])
    parts = next(steps_of(built, 1))
    layer = built.model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda module, args: args[0].sum().item() and None)
    used, why = built.capture_if_it_pays(parts[0], True, 1000, DryCapture)
    assert used == "false" and "capturing fails here" in why and built.graphs is None
    built.train_step(parts, 1e-3)


def test_a_size_that_cannot_be_captured_in_a_run_ends_it_in_a_line():
    """The largest size was tried before the run; what another one does differently is met in the middle of it."""
    built = captured(build(CASES["lora"]))
    (parts,) = steps_of(built, 1)
    built.train_step(parts, 1e-3)
    built.model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: args[0].sum().item() and None)
    with pytest.raises(PlanError, match="--cuda_graphs: .* cannot be captured .*start again with --cuda_graphs false"):
        built.train_step(parts, 1e-3)


def test_a_replay_that_differs_is_refused():
    """A value of the batch that is a number of the host would be that of the captured batch for ever."""
    built = build(CASES["lora"])
    embedded = built.model.model.embed_tokens
    embedded.register_forward_hook(lambda module, args, out: out * float(args[0].numpy()[0, 0]))
    used, why = built.capture_if_it_pays(next(steps_of(built, 1))[0], True, 1000, DryCapture)
    assert used == "false" and "a replayed microbatch is off by" in why and built.graphs is None


@pytest.mark.parametrize("name", ["full", "lora", "dpo"])
def test_a_trial_leaves_no_trace(name):
    built = build(CASES[name])
    parts = next(steps_of(built, 1))
    before, state = built.rng_state(), {n: v.copy() for n, v in built.trainable_state().items()}
    used, why = built.capture_if_it_pays(parts[0], True, 1000, DryCapture)
    assert used == "true" and "s replayed, measured" in why
    assert all(np.array_equal(v, built.trainable_state()[n]) for n, v in state.items())
    assert all(np.array_equal(v, built.rng_state()[n]) for n, v in before.items())
    assert all(p.grad is None for p in built.model.parameters())
    other = captured(build(CASES[name]))
    assert built.train_step(parts, 1e-3) == other.train_step(parts, 1e-3)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"padding_free": False}, "padded rows"),
        ({"passes_bounds": True}, "bounds of documents on the host"),
        ({"chunked_head": False}, "its own logits"),
    ],
)
def test_what_a_loaded_model_excludes_is_said(what, said):
    built = build(CASES["lora"])
    parts = next(steps_of(built, 1))
    built.forward.use(replace(built.forward.layout, **what))
    used, why = built.capture_if_it_pays(parts[0], True, 1000, DryCapture)
    assert used == "false" and said in why


def test_it_is_left_out_where_it_would_not_pay_or_memory_ends():
    built = build(CASES["lora"])
    parts = next(steps_of(built, 1))
    used, why = built.capture_if_it_pays(parts[0], False, 1, DryCapture)
    assert used == "false" and "would not pay in 1 of them" in why

    class Full(DryCapture):
        def captured(self, work):
            raise torch.OutOfMemoryError("CUDA out of memory")

    used, why = built.capture_if_it_pays(parts[0], False, 10**9, Full)
    assert used == "false" and why.startswith("no memory for a graph's activations")
    with pytest.raises(OutOfMemoryError):
        built.capture_if_it_pays(parts[0], True, 10**9, Full)


def test_a_loss_that_is_not_the_objective_s_is_refused(monkeypatch):
    """A bucket's loss is compared with the loss without one."""
    built = build(CASES["lora"])
    right = LOSSES[NextToken]
    monkeypatch.setitem(LOSSES, NextToken, replace(right, loss=lambda *given: (right.loss(*given)[0] * 1.1, None)))
    used, why = built.capture_if_it_pays(next(steps_of(built, 1))[0], True, 1000, DryCapture)
    assert used == "false" and "a microbatch in a bucket is off" in why


def test_memory_that_replays_compute_in_is_counted():
    built = captured(build(CASES["lora"]))
    losses_of(built, 4)
    assert built.counter.idle == built.graphs.idle_bytes == 1000 * len(built.graphs.capture.recorders) > 0


def test_buckets_beyond_the_most_run_as_they_are_and_give_the_same(monkeypatch):
    """A resumed run meets them in another order: its numbers are the same bits."""
    many = captured(build(CASES["lora"]))
    wanted = losses_of(many, 6)
    monkeypatch.setattr(replay, "MOST", 1)
    few = captured(build(CASES["lora"]))
    assert losses_of(few, 6) == wanted and len(few.graphs.held) == 1 < len(many.graphs.held)


def test_a_parameter_that_no_microbatch_reaches_has_no_gradient():
    """It is not decayed, as in eager."""
    built = captured(build(CASES["full"]))
    unused = torch.nn.Parameter(torch.ones(3))
    built.graphs.gradients[unused] = torch.zeros(3)
    (batch, *_) = next(steps_of(built, 1))
    for _ in range(3):
        built.graphs.begin()
        built.graphs.learn(batch, 1.0, contextlib.nullcontext())
        built.graphs.end()
        assert unused.grad is None and built.model.lm_head.weight.grad is not None


def batch_of(lengths):
    data = tiny.dataset(lengths=lengths)
    return microbatches(data, np.arange(len(lengths)), "padding_free", len(lengths), 10**6, 0)[0]


@pytest.mark.parametrize("lengths", [(5, 9, 3), (70,), (2, 2), (33, 120, 7, 40)])
def test_a_bucket_holds_the_batch_and_filling_alone(lengths):
    batch = batch_of(lengths)
    bucket = Bucket.of(batch)
    ids, positions, at, labels, counts, bounds = fixed_arrays(batch, bucket, 0)
    real = sum(lengths)
    assert len(ids) == len(positions) == bucket.tokens >= real and len(at) == len(labels) == bucket.targets
    assert bucket.tokens - real < max(LEAST, real / 2) and positions.max() < max(lengths)
    assert np.array_equal(ids[:real], batch.input_ids_BS[0]) and not ids[real:].any()
    assert np.array_equal(np.flatnonzero(positions == 0), np.unique(bounds)[:-1])
    assert bounds[0] == 0 and bounds[-1] == bucket.tokens and len(bounds) == bucket.documents + 1
    assert np.diff(bounds).max() <= bucket.longest
    assert np.array_equal(labels[labels >= 0], batch.labels_BS[batch.labels_BS >= 0])
    assert counts.sum() == (labels >= 0).sum() and at.max() < bucket.tokens


def test_sizes_of_buckets_are_few_and_near():
    sizes = {n: rounded(n) for n in range(1, 16_385)}
    assert all(0 <= size - n < max(LEAST, n / (2 if n < 2048 else 4 if n < 8192 else 8)) for n, size in sizes.items())
    assert len({size for n, size in sizes.items() if n <= 2048}) <= 10 and len(set(sizes.values())) <= 28


def test_the_plan_and_the_engine_know_the_same_objectives():
    captured_ones = [facts for facts in OBJECTIVES.values() if facts.captured]
    assert {implementation(facts.implementation) for facts in captured_ones} == set(LOSSES)


def test_an_empty_microbatch_of_a_rank_without_rows_adds_nothing():
    built = captured(build(CASES["lora"]))
    built.graphs.begin()
    empty: Batch = built.forward.empty_batch()
    with flat.in_step(built.model, None):
        for _ in range(3):
            learned = built.graphs.learn(empty, 1.0, contextlib.nullcontext())
    assert learned.loss == 0 and not built.graphs.flat.gradients.any()
