"""Label smoothing and NEFTune: transformers' own formulas, in training only, however rows are laid out and shared."""

from dataclasses import replace

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.trainer_pt_utils import LabelSmoother

from finetune.engine import IGNORE_INDEX
from finetune.errors import PlanError
from finetune.torch_engine import loss, neftune
from tests.support.engine_access import chunked_head
from tests.support.engines import assert_same, batches, engine, gradients
from tests.support.plans import plan_of

SMOOTHING, ALPHA = 0.2, 5.0


def of_step(parts, step=3):
    return [replace(batch, step=step) for batch in parts]


def smoothed(logits_TV, labels_T, smoothing=SMOOTHING):
    """transformers' loss, summed over targets."""
    return LabelSmoother(smoothing, IGNORE_INDEX)({"logits": logits_TV[None]}, labels_T[None]) * len(labels_T)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (3.0, 1.5)])
def test_the_chunked_loss_is_transformers_label_smoother_with_its_gradients(scale, softcap):
    torch.manual_seed(0)
    hidden, labels = torch.randn(300, 16, requires_grad=True), torch.randint(0, 50, (300,))
    linear = torch.nn.Linear(16, 50)
    head = loss.Head(linear, scale, softcap)
    mine, theirs = head.nll(hidden, labels, smoothing=SMOOTHING), smoothed(head.logits(hidden), labels)
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-6)
    of_model = loss.nll_of_logits(head.logits(hidden), labels, SMOOTHING)
    assert of_model.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert mine.item() != pytest.approx(head.nll(hidden, labels).item(), rel=1e-4)
    wanted = hidden, linear.weight, linear.bias
    for a, b in zip(torch.autograd.grad(mine, wanted), torch.autograd.grad(theirs, wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # sums of 300 rows in another order


@pytest.mark.parametrize("layout", ["padding_free", "padded"])
def test_a_step_is_smoothed_and_an_evaluation_is_not(layout):
    built, plain = engine(layout=layout, label_smoothing=SMOOTHING), engine(layout=layout)
    assert chunked_head(built) is not None
    (batch,) = parts = batches(layout)
    at = torch.from_numpy(batch.labels_BS.reshape(-1)) != IGNORE_INDEX
    labels = torch.from_numpy(batch.labels_BS.reshape(-1))[at]
    theirs = smoothed(built.forward.logits(batch)[at], labels)
    assert built.evaluate(parts).nll == plain.evaluate(parts).nll
    assert built.train_step(parts, 1e-3).nll == pytest.approx(theirs.item(), rel=1e-6)
    assert built.evaluate(parts).nll != plain.evaluate(parts).nll  # another gradient was taken


def test_mlx_has_the_same_smoothed_loss_and_gradients():
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as nn
    import numpy as np

    from finetune.mlx_engine.head import Head

    torch.manual_seed(0)
    hidden, labels = torch.randn(40, 16, requires_grad=True), torch.randint(0, 50, (40,))
    linear, layer = torch.nn.Linear(16, 50, bias=False), nn.Linear(16, 50, bias=False)
    layer.weight = mx.array(linear.weight.detach().numpy())
    mine, theirs = Head(layer, 1.0, None), loss.Head(linear, 1.0, None).nll(hidden, labels, smoothing=SMOOTHING)
    (gradient,) = torch.autograd.grad(theirs, hidden)

    def nll(x, learning=True):
        return mine.nll(x, mx.array(labels.numpy()), None, False, learning, SMOOTHING)

    x = mx.array(hidden.detach().numpy())
    assert nll(x).item() == pytest.approx(theirs.item(), rel=1e-6)
    np.testing.assert_allclose(np.array(mx.grad(nll)(x)), gradient.numpy(), atol=1e-6)


def test_noise_of_one_row_is_transformers_neftune():
    """The hook of transformers, with torch seeded as the row's own generator is."""
    built, plain = engine(neftune_noise_alpha=ALPHA), engine()
    (batch,) = of_step(batches(rows=[2]))
    built.model.train()
    nll = built.forward.nll(batch)
    embeddings = plain.model.get_input_embeddings()
    embeddings.neftune_noise_alpha = ALPHA
    plain.model.train()
    without = plain.forward.nll(batch)
    embeddings.register_forward_hook(neftune_post_forward_hook)
    torch.manual_seed(neftune.number_of(seed=42, step=3, row=2))
    theirs = plain.forward.nll(batch)
    assert nll.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert nll.item() != pytest.approx(without.item(), rel=1e-4)


def test_noise_does_not_depend_on_how_rows_are_cut_and_packed():
    built = {word: engine(layout=word, neftune_noise_alpha=ALPHA) for word in ("padding_free", "padded")}
    for one in built.values():
        one.model.train()
    flat = gradients(built["padding_free"], of_step(batches("padding_free")))
    padded = gradients(built["padded"], of_step(batches("padded")))
    alone = gradients(built["padded"], of_step(batches("padded", batch_size=1)))
    # 1e-5: the sum over a document's tokens is taken in another order in each layout.
    assert_same(flat, alone, 1e-5)
    assert_same(padded, alone, 1e-5)
    later = gradients(built["padded"], of_step(batches("padded"), 4))
    assert any((later[name] - padded[name]).abs().max() > 1e-3 * padded[name].abs().max() for name in later)


def test_evaluation_answers_and_checks_have_no_noise():
    built, plain = engine(neftune_noise_alpha=ALPHA), engine()
    assert built.evaluate(of_step(batches())).nll == plain.evaluate(batches()).nll
    prompts = [[3, 4, 5], [6, 7]]
    assert built.generate(prompts, 5, {2}) == plain.generate(prompts, 5, {2})
    built.model.train()
    torch.testing.assert_close(built.forward.logits(batches()[0]), plain.forward.logits(batches()[0]), rtol=0, atol=0)
    one, other = (e.train_step(of_step(batches()), 1e-3).nll for e in (built, plain))
    assert one != other


def test_the_plan_says_what_is_smoothed_and_refuses_what_has_another_loss():
    plan = plan_of(label_smoothing=0.1)
    assert any("label_smoothing 0.1" in line and "validation loss is not" in line for line in plan.notices)
    for flag, why in (("label_smoothing", "smooths the next token's loss"), ("neftune_noise_alpha", "log-prob")):
        with pytest.raises(PlanError, match=f"--{flag} 0.1: .*{why}"):
            plan_of(**{flag: 0.1}, preference="dpo", dataset="x")
    with pytest.raises(PlanError, match="--label_smoothing 1.0: must be below 1"):
        plan_of(label_smoothing=1.0)
