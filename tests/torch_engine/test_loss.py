"""The chunked loss against cross-entropy and the model's own logits."""

import pytest
import torch

from finetune.data.collate import microbatches
from finetune.torch_engine import loss
from finetune.torch_engine.lora.layers import adapter_parameters
from tests.support import architectures, tiny
from tests.support.adapters import KINDS, adapted
from tests.support.build import torch_engine
from tests.support.devices import tolerance
from tests.support.engine_access import chunked_head
from tests.support.engines import ROWS, batches, engine
from tests.support.launches import Launches


def test_a_layers_loss_with_softcap_scale_and_bias_is_cross_entropy(device):
    torch.manual_seed(0)
    hidden, labels = torch.randn(300, 16).to(device).requires_grad_(), torch.randint(0, 50, (300,)).to(device)
    linear = torch.nn.Linear(16, 50).to(device)
    for scale, softcap in ((1.0, None), (0.25, None), (1.0, 2.0), (3.0, 1.5)):
        head = loss.Head(linear, scale, softcap)
        mine = head.nll(hidden, labels)
        theirs = torch.nn.functional.cross_entropy(head.logits(hidden), labels, reduction="sum")
        assert mine.item() == pytest.approx(theirs.item(), rel=tolerance(device))
        wanted = (hidden, linear.weight, linear.bias)
        for a, b in zip(torch.autograd.grad(mine, wanted), torch.autograd.grad(theirs, wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # sums of 300 rows in another order


def test_chunks_give_the_sum_and_each_position_with_the_gradients_of_cross_entropy(device):
    torch.manual_seed(0)
    hidden, labels = torch.randn(700, 8).to(device).requires_grad_(), torch.randint(0, 50_000, (700,)).to(device)
    linear = torch.nn.Linear(8, 50_000).to(device)
    head = loss.Head(linear, 1.0, None)
    weights = torch.linspace(-1, 2, 700).to(device)
    theirs = -torch.nn.functional.cross_entropy(head.logits(hidden), labels, reduction="none")
    inputs = (hidden, linear.weight, linear.bias)
    for mine, wanted in (
        (head.nll(hidden, labels), -theirs.sum()),
        ((head.log_probs(hidden, labels) * weights).sum(), (theirs * weights).sum()),
    ):
        assert mine.item() == pytest.approx(wanted.item(), rel=tolerance(device, 1e-6))
        expected = torch.autograd.grad(wanted, inputs, retain_graph=True)
        for a, b in zip(torch.autograd.grad(mine, inputs), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # sums of 700 rows in another order


def test_loss_and_gradient_beside_a_high_logit_have_no_bias():
    """As a trained model's: the one column that is likely, whose softmax on a CPU divides by too small a sum."""
    torch.manual_seed(0)
    logits, labels = 2 * torch.randn(64, 49_152), torch.randint(0, 49_152, (64,))
    logits[torch.arange(64), labels] = 12 + 4 * torch.rand(64)
    linear = torch.nn.Linear(64, 49_152, bias=False)
    linear.weight = torch.nn.Parameter(logits.t().contiguous(), requires_grad=False)
    hidden = torch.eye(64, requires_grad=True)
    mine = loss.Head(linear, 1.0, None).nll(hidden, labels)
    mine.backward()
    exact_hidden = torch.eye(64, dtype=torch.float64, requires_grad=True)
    exact = torch.nn.functional.cross_entropy(exact_hidden @ logits.double(), labels, reduction="sum")
    exact.backward()
    assert abs(mine.item() - exact.item()) / 64 <= 2e-7  # fp32's roundings in 64 rows; 2e-6 by softmax's sum
    off = (hidden.grad - exact_hidden.grad).diagonal() / exact_hidden.grad.diagonal()
    assert off.mean().abs() <= 2e-6  # 3e-5 by softmax's sum; the label's p - 1 rounds


@pytest.mark.parametrize("name", ["recurrent_gemma", "xlstm"])
def test_a_soft_cap_of_another_name_is_in_the_chunked_head(name):
    assert chunked_head(engine(model=architectures.build(name))) is not None


@pytest.mark.parametrize("architecture", ["gemma2", "granite", "cohere"])
def test_soft_caps_and_scales_of_the_config_are_in_the_chunked_head(architecture, device):
    assert chunked_head(engine(architecture, device=device)) is not None


def test_a_head_that_does_more_than_its_config_says_is_left_to_the_model(monkeypatch, device):
    model = tiny.build()
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x) * 1.5
    built = engine(model=model, device=device)
    assert chunked_head(built) is None and built.layout == "padding_free"
    result = built.evaluate(batches())
    nll, count = result.nll, result.num_targets
    assert (
        nll == pytest.approx(built.evaluate(batches("padding_free", 1)).nll, rel=tolerance(device))
        and count == ROWS.counts["targets"]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere"])
def test_an_adapted_heads_loss_in_chunks_is_the_models_own_with_its_gradients(architecture, kind, device):
    model, settings = adapted(
        architecture,
        "lm_head,q_proj",
        **KINDS[kind],
        lr=1e-3,
        model=tiny.build(architecture, tie_word_embeddings=False),
        device=device,
    )
    built = torch_engine(model, settings, device)
    built.verify("auto")
    assert (chunked_head(built) is None) == (kind == "dora") and built.layout == "padding_free"
    one = microbatches(tiny.dataset(), [2], "padding_free", 1, 10**6, pad_id=0)[0]
    labels = torch.from_numpy(one.labels_BS.copy()).to(device)
    mine = built.forward.nll(one)
    logits = model(input_ids=torch.from_numpy(one.input_ids_BS).to(device)).logits
    theirs = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")  # -100: no target
    assert mine.item() == pytest.approx(theirs.item(), rel=tolerance(device, 1e-5))
    wanted = list(adapter_parameters(model).values())
    for one, other in zip(torch.autograd.grad(mine, wanted), torch.autograd.grad(theirs, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # sums over a document in another order


def test_evaluation_makes_no_gradient_of_the_head(device):
    built = engine(train_type="full", device=device)
    seen = []
    linear = chunked_head(built).linear
    hook = linear.weight.register_hook(seen.append)
    built.evaluate(batches())
    hook.remove()
    assert not seen and linear.weight.grad is None


def test_a_gpu_reads_the_heads_weight_a_few_times_per_microbatch():
    """In chunks of 128 rows, a CPU cache's size, 16 times forward and 16 times backward for 2,048 targets."""
    linear = torch.nn.Linear(64, 128_256, bias=False, device="meta", dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.empty(2048, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with Launches() as launches:
        loss.Head(linear, 1.0, None).nll(hidden, torch.empty(2048, dtype=torch.int64, device="meta")).backward()
    assert launches.counts["aten::mm"] == 2 * 4
