"""The loss beside a teacher: in chunks, with its gradients written out, it is torch's own of both distributions."""

import pytest
import torch
import torch.nn.functional as F

from finetune.torch_engine import loss
from finetune.torch_engine.divergence import Teacher, top_log_probs

T, H, V = 37, 16, 50
BETAS = (0.0, 1.0, 0.5, 0.1)


def made(seed: int = 0, sharp: float = 3.0):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    hidden = (drawn(T, H)).requires_grad_()
    head = torch.nn.Linear(H, V, bias=True)
    head.load_state_dict({"weight": drawn(V, H), "bias": drawn(V)})
    return hidden, head, torch.randint(V, (T,), generator=generator), sharp * drawn(T, V)


def full_divergence(logits_TV: torch.Tensor, teacher_TV: torch.Tensor, beta: float) -> torch.Tensor:
    """The sum over the vocabulary, with torch's kl_div, as its authors write it."""
    student, teacher = F.log_softmax(logits_TV, -1), F.log_softmax(teacher_TV, -1)

    def kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return F.kl_div(to, of, reduction="none", log_target=True).sum(-1)

    if beta == 0.0:
        return kl(teacher, student)
    if beta == 1.0:
        return kl(student, teacher)
    mixture = torch.logaddexp(student + torch.tensor(1 - beta).log(), teacher + torch.tensor(beta).log())
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def head_of(linear, scale: float = 1.0, softcap: float | None = None) -> loss.Head:
    return loss.Head(linear, scale, softcap)


def kept(teacher_TV: torch.Tensor, count: int, alpha: float, beta: float) -> Teacher:
    return Teacher(*top_log_probs(teacher_TV, count), alpha, 1 - alpha, beta)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("scale, softcap", [(1.0, None), (0.7, 5.0)])
def test_with_the_whole_vocabulary_it_is_the_loss_of_both_models_at_once(beta, scale, softcap, monkeypatch):
    monkeypatch.setattr(loss, "CACHED_LOGITS", 3 * V)  # rows at a time
    hidden, linear, labels, teacher_TV = made()
    head = head_of(linear, scale, softcap)
    ours, log_probs_T = head.distilled(hidden, labels, kept(teacher_TV, V, 0.7, beta))
    found = torch.autograd.grad(3 * ours, [hidden, linear.weight, linear.bias])
    logits = head.logits(hidden) + 0 * linear.bias
    nll = F.cross_entropy(logits, labels, reduction="sum")
    theirs = 0.7 * full_divergence(logits, teacher_TV, beta).sum() + 0.3 * nll
    wanted = torch.autograd.grad(3 * theirs, [hidden, linear.weight, linear.bias])
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    assert float(-log_probs_T.sum()) == pytest.approx(float(nll), rel=1e-6)
    for ours_grad, theirs_grad in zip(found, wanted, strict=True):
        # fp32 sums in another order, of terms of both signs
        torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-5, atol=6e-6 * float(theirs_grad.abs().max()))


@pytest.mark.parametrize("beta", BETAS)
def test_with_a_part_of_it_it_is_torch_s_own_of_the_parts(beta, monkeypatch):
    monkeypatch.setattr(loss, "CACHED_LOGITS", 3 * V)
    hidden, linear, labels, teacher_TV = made(1)
    teacher = kept(teacher_TV, 7, 1.0, beta)
    ours, _ = head_of(linear).distilled(hidden, labels, teacher)
    found = torch.autograd.grad(ours, [hidden, linear.weight])
    theirs = teacher.of_logits(linear(hidden)).sum()
    wanted = torch.autograd.grad(theirs, [hidden, linear.weight])
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    for ours_grad, theirs_grad in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-5, atol=2e-6 * float(theirs_grad.abs().max()))


@pytest.mark.parametrize("count", [3, 10, 30])
def test_what_a_part_lacks_is_the_divergence_within_the_rest(count):
    hidden, linear, _, teacher_TV = made(2)
    logits = linear(hidden)
    for beta in (0.0, 1.0):
        teacher = kept(teacher_TV, count, 1.0, beta)
        p, q = F.log_softmax(logits, -1), F.log_softmax(teacher_TV, -1)
        within_p, within_q = (each.scatter(1, teacher.tokens_TK, float("-inf")) for each in (p, q))
        masses = [each.logsumexp(-1, keepdim=True) for each in (within_p, within_q)]
        rest_p, rest_q = (each - mass for each, mass in zip((within_p, within_q), masses, strict=True))
        first, second = (rest_q, rest_p) if beta == 0.0 else (rest_p, rest_q)
        inside = (first.exp() * (first - second).nan_to_num()).sum(-1)
        mass = masses[1 if beta == 0.0 else 0].exp().squeeze(1)
        parts = teacher.of_logits(logits)
        torch.testing.assert_close(
            full_divergence(logits, teacher_TV, beta), parts + mass * inside, rtol=1e-5, atol=1e-5
        )
        assert (parts <= full_divergence(logits, teacher_TV, beta) + 1e-5).all()


def test_tokens_of_another_numbering_are_taken_by_their_places():
    _, _, _, teacher_TV = made(3)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(4))[:40]
    tokens, log_probs = top_log_probs(teacher_TV, 5, order)
    q = F.log_softmax(teacher_TV, -1)
    torch.testing.assert_close(q.gather(1, order[tokens]), log_probs[:, :5])
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(T))
    assert torch.equal(q.index_select(1, order).amax(-1), log_probs[:, 0])


@pytest.mark.parametrize("beta", BETAS)
def test_rows_of_either_head_that_are_no_tokens_have_no_part_where_all_tokens_are_kept(beta, monkeypatch):
    monkeypatch.setattr(loss, "CACHED_LOGITS", 3 * V)
    hidden, linear, labels, teacher_TV = made(6)
    labels = labels % 44
    order = torch.randperm(V - 3, generator=torch.Generator().manual_seed(4))[:44]
    teacher = Teacher(*top_log_probs(teacher_TV, 10**6, order), 0.7, 0.3, beta)
    assert not teacher.has_rest
    ours, _ = head_of(linear).distilled(hidden, labels, teacher)
    found = torch.autograd.grad(ours, [hidden, linear.weight])
    logits = linear(hidden)
    apart = full_divergence(logits[:, :44], teacher_TV.index_select(1, order), beta).sum()
    theirs = 0.7 * apart + 0.3 * F.cross_entropy(logits, labels, reduction="sum")
    wanted = torch.autograd.grad(theirs, [hidden, linear.weight])
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    assert float(teacher.of_logits(linear(hidden)).sum()) == pytest.approx(float(apart), rel=1e-6)
    for ours_grad, theirs_grad in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-5, atol=6e-6 * float(theirs_grad.abs().max()))


def test_probabilities_of_zero_leave_loss_and_gradients_finite():
    hidden, linear, labels, teacher_TV = made(5, sharp=60.0)
    for beta in BETAS:
        for count in (4, V):
            ours, _ = head_of(linear).distilled(hidden * 30, labels, kept(teacher_TV, count, 0.5, beta))
            (gradient,) = torch.autograd.grad(ours, [hidden])
            assert torch.isfinite(ours) and torch.isfinite(gradient).all()
