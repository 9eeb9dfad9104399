"""The recursive model against an independent fp64 reference of its equations, and that it never looks ahead."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from finetune.errors import PlanError
from recursive.config import ArchConfig
from recursive.recipe import CONFIGS, of_flat, read_arch
from recursive.torch_engine import model as recursive
from recursive.torch_engine.engine import check_causal
from recursive.torch_engine.generate import Decoder, generate
from recursive.torch_engine.model import RecursiveModel
from recursive.torch_engine.optim import AdamATan2, Average, SignSGD

V, S, B = 11, 6, 3
TINY = ArchConfig(hidden_size=16, num_heads=2, L_layers=2, expansion=2, forward_dtype="float64")
IDS = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(1))


def model_of(**changes) -> RecursiveModel:
    torch.manual_seed(0)
    arch = replace(TINY, **changes)
    return RecursiveModel(arch, V, S).to(recursive.DTYPES[arch.forward_dtype])


# ---- the reference: plain formulas over a dict of weights, in fp64; T and n as in the paper


def ref_rms(h):
    return h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-5)


def ref_swiglu(h, gate_up, down):
    gate, up = torch.split(h @ gate_up.T, down.shape[1], -1)
    return (gate / (1 + torch.exp(-gate)) * up) @ down.T


def ref_attention(h, qkv, out, arch):
    batch, length, _ = h.shape
    heads, size = arch.num_heads, arch.head_dim
    q, k, v = (h @ qkv.T).view(batch, length, 3, heads, size).permute(2, 0, 3, 1, 4)
    angle = torch.arange(length).double()[:, None] * arch.rope_theta ** (-2 * torch.arange(size // 2).double() / size)
    turn = torch.polar(torch.ones_like(angle), angle)
    if arch.pos_encodings == "rope":
        q, k = (ref_turned(t, turn) for t in (q, k))
    scores = q @ k.transpose(-1, -2) / math.sqrt(size)
    if arch.causal:
        scores = scores + torch.triu(torch.full((length, length), -torch.inf, dtype=h.dtype), 1)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, heads * size)
    return mixed @ out.T


def ref_turned(t, turn):
    half = t.shape[-1] // 2
    pairs = torch.complex(t[..., :half], t[..., half:]) * turn
    return torch.cat([pairs.real, pairs.imag], -1)


def ref_net(h, w, arch):
    for i in range(arch.L_layers):
        of = {name: w[f"layers.{i}.{name}.weight"] for name in ("gate_up", "down")}
        if arch.mlp_t:
            across = ref_swiglu(h.mT, w[f"layers.{i}.gate_up_t.weight"], w[f"layers.{i}.down_t.weight"])
            h = ref_rms(h.mT + across).mT
        else:
            h = ref_rms(h + ref_attention(h, w[f"layers.{i}.qkv.weight"], w[f"layers.{i}.out.weight"], arch))
        h = ref_rms(h + ref_swiglu(h, of["gate_up"], of["down"]))
    return h


def ref_deep_recursion(w, ids, y, z, arch):
    x = math.sqrt(arch.hidden_size) * w["embed.weight"][ids]
    for cycle in range(arch.H_cycles):
        if cycle == arch.H_cycles - 1:
            y, z = y.detach(), z.detach()
        for _ in range(arch.L_cycles):
            z = ref_net(z + y + x, w, arch)
        y = ref_net(y + z, w, arch)
    return y, z


def ref_starts(w):
    return (w[name].expand(B, S, -1) for name in ("y0_D", "z0_D"))


ARCHS = {
    "causal": {},
    "grid": {"causal": False},
    "mixing": {"causal": False, "mlp_t": True, "pos_encodings": "none"},
    "deep": {"H_cycles": 3, "L_cycles": 2},
}
EXACT = dict(rtol=0, atol=1e-10)  # both in fp64: sums of some hundred terms in another order


@pytest.mark.parametrize("changes", ARCHS.values(), ids=ARCHS)
def test_one_deep_recursion_and_its_gradient_are_the_papers_equations(changes):
    model = model_of(**changes)
    w = {n: t.detach().clone().requires_grad_(t.is_floating_point()) for n, t in model.state_dict().items()}
    y, z = model(IDS, *model.start(B, S))
    ref_y, ref_z = ref_deep_recursion(w, IDS, *ref_starts(w), model.arch)
    torch.testing.assert_close((y, z), (ref_y, ref_z), **EXACT)
    torch.nn.functional.cross_entropy(model.logits(y).flatten(0, 1), LABELS.flatten()).backward()
    probabilities = (ref_y @ w["head.weight"].T).softmax(-1).gather(-1, LABELS[..., None])
    (-probabilities.log()).mean().backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("q_head"):
            torch.testing.assert_close(parameter.grad, w[name].grad, **EXACT, msg=name)


def test_the_cycles_before_the_last_get_no_gradient():
    """The gradient of two cycles is that of the second alone, from where the first has ended."""
    model = model_of(H_cycles=2, L_cycles=2)
    (y, _), starts = model(IDS, *model.start(B, S)), model.start(B, S)
    y.sum().backward()
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.arch = replace(model.arch, H_cycles=1)
    with torch.no_grad():
        middle = model(IDS, *starts)
    middle = [t.requires_grad_() for t in middle]
    model(IDS, *middle)[0].sum().backward()
    last = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, whole, last)) and all(t.grad is not None for t in middle)


def test_the_one_step_gradient_is_that_of_the_last_two_applications():
    model = model_of(L_cycles=3, one_step_gradient=True)
    model(IDS, *model.start(B, S))[0].sum().backward()
    one_step = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    x, context = model.input_embedding(IDS), model.context(S)
    with torch.no_grad():
        y, z = model.start(B, S)
        for _ in range(2):
            z = model.apply_layers(z + y + x, context)
    z = model.apply_layers(z + y + x, context)
    model.apply_layers(y + z, context).sum().backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(expected) == len(one_step)
    for one, other in zip(one_step, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_stablemax_and_the_halting_loss_are_their_formulas():
    logits = torch.linspace(-4, 4, 5 * V, dtype=torch.float64).view(5, V).flip(1)
    labels = torch.tensor([0, 3, 10, 5, 1])
    s = torch.tensor([[a + 1 if a >= 0 else 1 / (1 - a) for a in row] for row in logits.tolist()], dtype=torch.float64)
    expected = -torch.log(s / s.sum(1, keepdim=True))[torch.arange(5), labels]
    found = recursive.token_losses(logits, labels, "stablemax_cross_entropy")
    torch.testing.assert_close(found, expected, **EXACT)
    fp32 = recursive.token_losses(logits.float(), labels, "stablemax_cross_entropy")
    torch.testing.assert_close(fp32.double(), expected, rtol=0, atol=1e-5)  # what MPS, without float64, computes
    q, right = torch.tensor([-5.0, 0.3, 2.0], dtype=torch.float64), torch.tensor([True, False, True])
    p = 1 / (1 + torch.exp(-q))
    expected = -0.5 * (p[0].log() + (1 - p[1]).log() + p[2].log())
    torch.testing.assert_close(recursive.halting_loss(q, right), expected, **EXACT)


def test_stablemax_has_finite_gradients_everywhere():
    logits = torch.tensor([[0.0, -1.0, 1.0, 1e4, -1e4]], requires_grad=True)
    recursive.token_losses(logits, torch.tensor([4]), "stablemax_cross_entropy").sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_adam_atan2_is_its_closed_form_over_five_steps():
    p = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    grads = [torch.sin(torch.arange(6, dtype=torch.float64) + k).view(2, 3) for k in range(5)]
    optimizer = AdamATan2([{"params": [p], "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.95))
    expected, m, v = p.detach().clone(), 0, 0
    for k, grad in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        expected *= 1 - 0.01 * 0.1
        expected -= 0.01 * torch.atan2(m / (1 - 0.9**k), torch.sqrt(v / (1 - 0.95**k)))
        p.grad = grad
        optimizer.step()
    torch.testing.assert_close(p.detach(), expected, **EXACT)


def test_the_average_is_its_closed_form_over_five_updates_and_swaps_in_and_out():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    average, expected = Average({"p": p}, rate=0.3), torch.zeros(3, dtype=torch.float64)
    for k in range(1, 6):
        with torch.no_grad():
            p.copy_(torch.arange(3.0) * k)
        average.update()
        rate = min(0.3, (1 + k) / (10 + k))
        expected = rate * expected + (1 - rate) * torch.arange(3, dtype=torch.float64) * k
    torch.testing.assert_close(average.shadow["p"], expected, **EXACT)
    raw = p.detach().clone()
    with average.applied():
        torch.testing.assert_close(p.detach(), expected, **EXACT)
    assert torch.equal(p.detach(), raw)


def test_signed_sgd_moves_the_rows_that_were_used():
    p = torch.nn.Parameter(torch.ones(3, 2))
    p.grad = torch.tensor([[0.5, -2.0], [0.0, 0.0], [1e-9, 0.0]])
    SignSGD([p], lr=0.1, weight_decay=0.5).step(1.0)
    torch.testing.assert_close(p.detach(), torch.tensor([[0.85, 1.05], [1.0, 1.0], [0.85, 0.95]]))


# ---- causality


def shipped_archs() -> list[str]:
    names = sorted(path.stem for path in (CONFIGS / "arch").glob("*.yaml"))
    return [name for name in names if of_flat(read_arch(name, "")).arch.causal]


@pytest.mark.parametrize("name", shipped_archs())
def test_no_config_that_is_causal_sees_later_tokens(name):
    """Bit for bit, for n, T and supervision steps of 1, 2 and 3, in its own dtype."""
    arch = replace(of_flat(read_arch(name, "")).arch, hidden_size=24, num_heads=2, expansion=2)
    torch.manual_seed(0)
    model, changed = RecursiveModel(arch, V, S), IDS.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % V
    for n, cycles, steps in itertools.product((1, 2, 3), repeat=3):
        model.arch = replace(arch, L_cycles=n, H_cycles=cycles, halt_max_steps=steps)
        found = []
        for ids in (IDS, changed):
            y, z = model.start(B, S)
            with torch.no_grad():
                for _ in range(steps):
                    y, z = model(ids, y, z)
            found.append(model.logits(y))
        assert torch.equal(found[0][:, :3], found[1][:, :3])
        assert not torch.equal(found[0][:, 3:], found[1][:, 3:])


def test_a_model_that_mixes_positions_fails_the_check_of_a_causal_one():
    model = model_of(causal=False, forward_dtype="float32")
    with pytest.raises(PlanError, match="depend on later tokens"):
        check_causal(model)


# ---- decoding


@pytest.mark.parametrize("positions", ["rope", "learned", "none"])
@pytest.mark.parametrize("steps", [1, 2])
def test_cached_logits_are_the_full_ones_for_prompts_of_unequal_length(steps, positions):
    model = model_of(L_cycles=2, H_cycles=2, halt_max_steps=steps, forward_dtype="float32", pos_encodings=positions)
    lengths, padding = (6, 4, 3), [0, 2, 3]
    full = []
    with torch.no_grad():
        for row, length in enumerate(lengths):
            y, z = model.start(1, length)
            for _ in range(steps):
                y, z = model(IDS[row : row + 1, :length], y, z)
            full.append(model.logits(y)[0])
    decoder = Decoder(model, padding)
    ids = torch.stack([torch.cat([torch.zeros(p, dtype=torch.int64), IDS[i, : 6 - p]]) for i, p in enumerate(padding)])
    cached = torch.cat([decoder.logits(part) for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:])], 1)
    applications = model.arch.applications * model.arch.L_layers * steps
    assert len(decoder.caches) == applications
    for row, pad in enumerate(padding):
        # fp32: attention over padded keys sums in another order; logits near 1 differ by up to 1.6e-5 on torch 2.11.
        torch.testing.assert_close(cached[row, pad:], full[row], rtol=0, atol=5e-5)


def test_generation_is_greedy_at_temperature_0_and_stops_at_the_stop_token():
    model = model_of(forward_dtype="float32")
    prompts = [IDS[0, :2].tolist(), IDS[1, :1].tolist()]
    first = generate(model, prompts, 4, set(), 0)
    again = [generate(model, [p], 4, set(), 0)[0] for p in prompts]
    assert first == again and len(first[0]) == 4
    stopped = generate(model, prompts, 4, {first[0][1]}, 0)
    assert stopped[0] == first[0][: first[0].index(first[0][1])]


def test_puzzle_embeddings_come_before_the_grid_and_are_trained_by_their_own_optimizer():
    arch = replace(TINY, causal=False, puzzle_emb_ndim=20, forward_dtype="float32")
    torch.manual_seed(0)
    model = RecursiveModel(arch, V, S, num_puzzles=4)
    y, z = model.start(B, S)
    y, z = model(IDS, y, z, torch.tensor([0, 1, 3]))
    assert arch.prefix_len == 2 and y.shape[1] == S + 2 and model.tokens_of(y).shape[1] == S
    model.logits(model.tokens_of(y)).square().sum().backward()
    used = model.puzzle_emb.weight.grad.ne(0).any(1)
    assert used.tolist() == [True, True, False, True]


@pytest.mark.promise("TR_16")
def test_the_parameters_are_those_that_the_plan_counts():
    from recursive.memory import parameters

    for changes in (*ARCHS.values(), {"pos_encodings": "learned"}):
        model = model_of(**changes)
        assert sum(parameters(model.arch, V, S).values()) == sum(p.numel() for p in model.parameters())
    sizes = {sum(p.numel() for p in model_of(plain=plain).parameters()) for plain in (False, True)}
    assert len(sizes) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"causal": False, "mlp_t": True, "pos_encodings": "none"}], ids=["causal", "mixing"]
)
def test_compiled_it_is_the_same_model(changes):
    """The compiler gets the formulas, eager the hand-written functions: one is the other, gradients too."""
    model = model_of(forward_dtype="float32", L_cycles=2, **changes)
    grads = []
    for network in (model.apply_layers, torch.compile(model.apply_layers)):
        model.network = network
        model.zero_grad()
        recursive.token_losses(
            model.logits(model(IDS, *model.start(B, S))[0]).flatten(0, 1), LABELS.flatten(), "softmax_cross_entropy"
        ).mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*grads, strict=True):
        # fp32 sums in another order.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
