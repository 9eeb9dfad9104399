"""Preference losses and the log-probabilities under them, against fp64 references and the model's own logits; steps."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from finetune.arrays import Named, Per
from finetune.config import TrainConfig
from finetune.data.mismatched import DataWithMismatches
from finetune.data.run_data import Data
from finetune.data.tokens.tokenize import labels_of
from finetune.objectives import Totals
from finetune.parts import engine_limits
from finetune.parts.parts import Parts
from finetune.parts.precision import Precision
from finetune.preference import OfLabels, OfPairs
from finetune.torch_engine import loss, preference
from finetune.torch_engine.device import DTYPES
from finetune.torch_engine.lora.adapters import adapters_off
from finetune.torch_engine.lora.layers import LoRALinear, layers
from finetune.torch_engine.passes import Passes
from tests.support import tiny
from tests.support.build import torch_engine
from tests.support.cells import each_alone
from tests.support.engine_access import optimizer, trainable_params
from tests.support.engines import CPU, ROWS, assert_same, batches, engine

# fp64 has 16 digits; what is left are sums over a few hundred numbers in another order.
EXACT = dict(rtol=1e-10, atol=1e-10)
LENGTHS = (70, 1, 130, 99)


def random_log_probs(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [(-5 * torch.rand(n, generator=generator, dtype=torch.float64)).requires_grad_() for n in sizes]


def assert_equal_with_gradients(mine, theirs, inputs):
    torch.testing.assert_close(mine, theirs, **EXACT)
    wanted = (torch.autograd.grad(found.sum(), inputs, retain_graph=True) for found in (mine, theirs))
    for a, b in zip(*wanted, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


# ------ losses


def test_dpo_is_the_papers_formula_in_fp64_with_its_gradients():
    chosen, rejected, ref_chosen, ref_rejected = random_log_probs(6, 6, 6, 6)
    found = preference.dpo(chosen, rejected, ref_chosen.detach(), ref_rejected.detach(), beta=0.3)
    chosen_ratio = torch.exp(chosen) / torch.exp(ref_chosen.detach())
    rejected_ratio = torch.exp(rejected) / torch.exp(ref_rejected.detach())
    preferred = 1 / (1 + (rejected_ratio / chosen_ratio) ** 0.3)
    assert_equal_with_gradients(found.loss_P, -torch.log(preferred), (chosen, rejected))
    metrics = OfPairs().sums_of(found.observed())
    assert metrics["rewards/chosen"] == pytest.approx(0.3 * chosen_ratio.log().sum().item())
    assert metrics["rewards/accuracies"] == (chosen_ratio > rejected_ratio).sum().item()
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])


def test_orpo_is_the_papers_formula_in_fp64_with_its_gradients():
    chosen, rejected = random_log_probs(6, 6)
    lengths = torch.tensor([1, 2, 3, 9, 20, 400]), torch.tensor([5, 1, 2, 400, 1, 7])
    found = preference.orpo(chosen, rejected, *lengths, beta=0.3)
    p, q = (torch.exp(total) ** (1 / n.double()) for total, n in zip((chosen, rejected), lengths, strict=True))
    ratio = (p / (1 - p)) / (q / (1 - q))
    assert_equal_with_gradients(found.loss_P, 0.3 * torch.log(1 + 1 / ratio), (chosen, rejected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orpo_is_finite_for_answers_that_are_certain_or_impossible(dtype):
    chosen = torch.tensor([0.0, 0.0, -1e-9, -1e6, -0.6931472], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([0.0, -1e6, -1e6, 0.0, -1e-3], dtype=dtype, requires_grad=True)
    found = preference.orpo(chosen, rejected, 1, 1, beta=0.1)
    grads = torch.autograd.grad(found.loss_P.sum(), (chosen, rejected))
    assert found.loss_P.isfinite().all() and all(grad.isfinite().all() for grad in grads)


def test_simpo_is_the_papers_formula_in_fp64_with_its_gradients():
    chosen, rejected = random_log_probs(6, 6)
    lengths = torch.tensor([1, 2, 3, 9, 20, 400]), torch.tensor([5, 1, 2, 400, 1, 7])
    found = preference.simpo(chosen, rejected, *lengths, beta=2.0, gamma=0.7)
    margin = 2.0 * chosen / lengths[0] - 2.0 * rejected / lengths[1] - 0.7
    assert_equal_with_gradients(found.loss_P, torch.log(1 + torch.exp(-margin)), (chosen, rejected))


def test_kto_is_the_papers_formula_in_fp64_with_its_gradients():
    log_probs, ref = random_log_probs(6, 6)
    ref = ref.detach()
    desirable = torch.tensor([True, False, False, True, True, False])
    for mismatched in (log_probs.flip(0), ref - 1):  # the reference point is not negative
        total = (mismatched - ref).sum().item()
        point = max(0.0, total / 6)
        found = preference.kto(log_probs, ref, desirable, point, 0.3, 1.5, 0.5)
        good = 1.5 * (1 - 1 / (1 + torch.exp(-0.3 * (log_probs - ref - point))))
        bad = 0.5 * (1 - 1 / (1 + torch.exp(-0.3 * (point - log_probs + ref))))
        assert_equal_with_gradients(found.loss_D, torch.where(desirable, good, bad), (log_probs,))
        right = (log_probs - ref > point) == desirable
        assert OfLabels().sums_of(found.observed())["rewards/accuracies"] == right.sum().item()


# ------ log-probabilities through the chunked head


@pytest.mark.parametrize("learning", ["hidden states", "the head", "an adapter of the head"])
@pytest.mark.parametrize("scale, softcap", [(1.0, None), (0.25, 1.5)])
def test_a_dpo_loss_through_the_chunked_head_is_the_full_logits_one_in_fp64(learning, scale, softcap, monkeypatch):
    monkeypatch.setattr(engine_limits, "LOGITS_CHUNK_BYTES", 0)  # 128 rows at a time: chunks end inside documents
    torch.manual_seed(0)
    hidden = torch.randn(sum(LENGTHS), 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (len(hidden),))
    linear, adapter = torch.nn.Linear(16, 50).double(), None
    linear.requires_grad_(learning == "the head")
    wanted = [hidden, *linear.parameters()] if learning == "the head" else [hidden]
    if learning == "an adapter of the head":
        adapter = LoRALinear(linear, 4, 8, 0.0, False, False).double()
        for parameter in (adapter.lora_A, adapter.lora_B):
            torch.nn.init.normal_(parameter, std=0.3)
        wanted += [adapter.lora_A, adapter.lora_B]
    head = loss.Head(linear, scale, softcap, adapter)
    full = torch.log_softmax(head.logits(hidden), -1).gather(1, labels[:, None]).squeeze(1)
    mine = head.log_probs(hidden, labels)
    torch.testing.assert_close(mine, full, **EXACT)

    def dpo(log_probs):
        one, two, three, four = torch.stack([part.sum() for part in log_probs.split(LENGTHS)])
        refs = torch.tensor([-200.0, -400.0], dtype=torch.float64), torch.tensor([-3.0, -300.0], dtype=torch.float64)
        return preference.dpo(torch.stack([one, three]), torch.stack([two, four]), *refs, beta=0.02).loss_P.sum()

    for a, b in zip(torch.autograd.grad(dpo(mine), wanted), torch.autograd.grad(dpo(full), wanted), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_no_more_logits_exist_at_a_time_than_a_chunk_of_them(monkeypatch):
    monkeypatch.setattr(engine_limits, "LOGITS_CHUNK_BYTES", 0)
    linear = torch.nn.Linear(16, 500)
    hidden, labels, saved = torch.randn(700, 16, requires_grad=True), torch.randint(0, 500, (700,)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        for learns in (False, True):
            linear.requires_grad_(learns)
            loss.Head(linear, 1.0, None).log_probs(hidden, labels).sum().backward()
    assert max(saved) == 700 * 16


@pytest.mark.parametrize("layout", ["padding_free", "padded"])
@pytest.mark.parametrize("train_type", ["full", "lora", "qlora"])
def test_log_probabilities_of_documents_are_those_of_each_alone_with_their_gradients(train_type, layout, device):
    built = engine(train_type=train_type, layout=layout, device=device)
    (batch,) = batches(layout)
    weights = torch.linspace(-1, 2, len(batch.rows)).to(device)
    found = built.forward.document_log_probs(batch)
    (weights * found).sum().backward()
    mine = {n: p.grad.clone() for n, p in trainable_params(built).items()}
    optimizer(built).zero_grad()
    alone = [batches(layout, rows=[row])[0] for row in batch.rows]
    for weight, total, one in zip(weights, found, alone, strict=True):
        nll = built.forward.nll(one)  # of one document
        assert total.item() == pytest.approx(-nll.item(), rel=1e-5)  # fp32: another batch is another order of sums
        (-weight * nll).backward()
    assert_same(mine, {n: p.grad for n, p in trainable_params(built).items()}, 1e-5)


def test_log_probabilities_row_by_row_are_those_of_the_padded_batch(device):
    built = engine(layout="padded", device=device)
    (batch,) = batches("padded")
    with torch.no_grad():
        wanted, nll = built.forward.document_log_probs(batch), built.forward.nll(batch)
        built.forward.layout = replace(built.forward.layout, padded_inputs="rows")
        torch.testing.assert_close(built.forward.document_log_probs(batch), wanted, rtol=1e-5, atol=1e-5)  # fp32
        torch.testing.assert_close(built.forward.nll(batch), nll, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_a_weight_that_model_code_reads_is_the_bases_with_adapters_off(train_type, device):
    model = engine(train_type=train_type, device=device).model
    layer = next(iter(layers(model).values()))
    with adapters_off(model):
        assert torch.equal(layer.weight, layer.base.weight)
    assert not torch.equal(layer.weight, layer.base.weight)


@pytest.mark.parametrize("precision", ["bf16", "bf16_autocast"])
def test_log_probabilities_of_low_precisions_are_fp32_and_near_the_nll(precision, device):
    model = tiny.build().to(DTYPES[Precision.of(TrainConfig(precision=precision)).weights])
    built = engine(model=model, device=device)
    built = torch_engine(built.model, replace(built.plan.settings, precision=precision), device)
    built.verify("auto")
    (batch,) = batches()
    found = built.forward.document_log_probs(batch)
    found.sum().backward()
    assert found.dtype == torch.float32
    assert -found.sum().item() == pytest.approx(built.forward.nll(batch).item(), rel=1e-4)


# ------ steps


PAIRS = replace(ROWS, documents_per_row=2)  # 4 pairs
LABELLED = replace(ROWS, arrays=labels_of([1, 0, 0, 1, 1, 1, 0, 1]))
METHODS = ("dpo", "orpo", "simpo", "kto")
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


def reference_of(batch) -> Named:
    return Named(-np.arange(3.0, 3.0 + len(batch.rows)), Per.DOCUMENT, is_data=False)


def trainer_of(method, train_type="lora", layout="auto", device=CPU, **changes):
    built = engine(train_type=train_type, device=device, **changes)
    settings = replace(built.plan.settings, preference=method, preference_beta=0.3, undesirable_weight=0.5)
    built = torch_engine(built.model, settings, device)
    built.verify(layout)
    return built


def step_batches(method, layout="padding_free", batch_size=8, tokens=10**6, rows=None, mine=slice(None)):  # noqa: B008
    dataset = LABELLED if method == "kto" else PAIRS
    plan = Parts(TrainConfig(preference=method, batch_layout=layout, microbatch_tokens=tokens))
    rows = range(dataset.num_rows) if rows is None else rows
    kind = DataWithMismatches if plan.data.mismatches else Data
    data = kind(None, set(), dataset, None, [], None, None)
    return data.microbatches(dataset, rows, mine, plan, 0, batch_size)


@EVERY_METHOD
def test_an_empty_microbatch_adds_nothing(method, device):
    """What a rank with fewer microbatches than another takes part with."""
    built = trainer_of(method, device=device)
    found, statistics = built.objective.prepare(Passes(built.parallel, nullcontext), [built.forward.empty_batch()])
    totals = Totals((1, 1), statistics)
    for batch in found:
        loss_of_batch, observed = built.objective.loss(built.forward, batch, totals)
        assert loss_of_batch.item() == 0 and set(built.objective.sums_of(observed).values()) <= {0.0}
    assert [built.objective.count(batch)[0] for batch in found] == [0]


def trained(built, batches, steps=2):
    results = [built.train_step(batches, 1e-2) for _ in range(steps)]
    return results[-1], {name: torch.from_numpy(value.copy()) for name, value in built.trainable_state().items()}


@pytest.mark.parametrize("layout", ["padding_free", "padded"])
def test_the_documents_of_a_pair_are_in_one_microbatch_however_small_it_is(layout):
    for batch_size, tokens in ((8, 10**6), (3, 60), (1, 1)):
        parts = step_batches("dpo", layout, batch_size, tokens)
        assert sorted(row for part in parts for row in part.rows) == list(range(8))
        for part in parts:
            chosen, rejected = preference.pair_indices(part, CPU)
            assert [part.rows[i] + 1 for i in chosen] == [part.rows[i] for i in rejected]
            assert part.input_ids_BS.size <= tokens or len(part.rows) == 2


@pytest.mark.parametrize(
    ("train_type", "layout"),
    [
        ("lora", "padding_free"),
        pytest.param("qlora", "padded", marks=pytest.mark.slow),
        pytest.param("qlora", "padding_free", marks=pytest.mark.slow),
        pytest.param("lora", "padded", marks=pytest.mark.slow),
    ],
)
@EVERY_METHOD
def test_accumulated_rows_train_as_one_batch_of_them(method, train_type, layout, device):
    whole, wanted = trained(trainer_of(method, train_type, layout, device=device), step_batches(method, layout))
    for batch_size, tokens in ((1, 10**6), (3, 60)):
        built = trainer_of(method, train_type, layout, device=device)
        found, weights = trained(built, step_batches(method, layout, batch_size, tokens))
        assert found.num_rows == whole.num_rows == (8 if method == "kto" else 4)
        assert found.num_targets == whole.num_targets > 8
        assert found.nll == pytest.approx(whole.nll, rel=1e-5)  # fp32: sums in another order
        assert found.metrics == pytest.approx(whole.metrics, rel=1e-4, abs=1e-5)
        assert found.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
        scored, again = (built.evaluate(step_batches(method, layout, size)) for size in (8, 1))
        assert again.nll == pytest.approx(scored.nll) and again.num_rows == whole.num_rows
        assert scored.nll < whole.nll and scored.metrics.keys() == whole.metrics.keys()
        # Adam divides by the gradient's size, which magnifies rounding of small ones: 2 steps of 1e-2 each.
        assert max((weights[name] - wanted[name]).abs().max() for name in wanted) < 1e-3


@pytest.mark.parametrize(
    ("train_type", "changes"), each_alone(["lora", "qlora"], [{}, {"use_dora": True}, {"lora_dropout": 0.5}]), ids=str
)
def test_the_reference_is_the_base_that_a_second_model_holds(train_type, changes, device):
    built, (batch,) = trainer_of("dpo", train_type, **changes, device=device), step_batches("dpo")
    second = trainer_of("dpo", train_type, **changes, device=device)
    for layer in layers(second.model).values():  # B is zero and magnitudes are those of the base
        second.model.set_submodule(next(n for n, m in second.model.named_modules() if m is layer), layer.base)
    second.model.eval()
    trained(built, [batch], 1)
    built.model.train()
    with torch.no_grad():
        wanted = second.forward.document_log_probs(batch)
        with adapters_off(built.model):
            assert torch.equal(built.forward.document_log_probs(batch), wanted)
        assert built.model.training and not torch.equal(built.forward.document_log_probs(batch), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_reference_of_every_architecture_is_its_model_without_adapters(architecture):
    built, plain = engine(architecture), engine(architecture, train_type="full")
    (batch,) = batches(built.layout)
    plain.model.eval()
    with torch.no_grad():
        wanted = plain.forward.document_log_probs(batch)
        found = Passes(built.parallel, nullcontext).log_probs_before_training([batch])[0].float()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # fp32
        assert not torch.allclose(built.forward.document_log_probs(batch), wanted, atol=1e-3)


@EVERY_METHOD
def test_a_resumed_run_of_preferences_is_bitwise_the_uninterrupted_one(method, device):
    first = trainer_of(method, lora_dropout=0.2, device=device)
    first.train_step(step_batches(method), 1e-2)
    state = copy.deepcopy((first.trainable_state(), *first.optimizer_state(), first.rng_state()))
    wanted, weights = trained(first, step_batches(method))
    second = trainer_of(method, lora_dropout=0.2, device=device)
    second.load_state(*state)
    found, same = trained(second, step_batches(method))
    assert found == wanted and all(torch.equal(same[name], weights[name]) for name in weights)
