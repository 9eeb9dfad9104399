"""Every optimizer, its settings, and LoRA+."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from finetune.config import TrainConfig
from finetune.errors import PlanError
from finetune.estimate.memory import optimizer_bytes, step_bytes, trainable_weights, update_bytes
from finetune.estimate.model_cost import MicrobatchShape, ModelCost
from finetune.estimate.model_shape import shape_of_files
from finetune.model_files.files import find_model
from finetune.parts.optimizers import OPTIMIZERS
from finetune.parts.parts import Parts
from finetune.parts.steps import StepsPlan
from finetune.torch_engine import optim
from tests.support import meta_peaks, tiny
from tests.support.engine_access import optimizer as optimizer_of
from tests.support.engine_access import trainable_params
from tests.support.engines import batches, engine
from tests.support.plans import plan_of

ALSO_FULL = ("adamw", "adafactor", "schedule_free_adamw", "muon")
EVERY = [(kind, name) for name in OPTIMIZERS for kind in ("full", "lora") if (kind, name) != ("lora", "muon")]
FEW = [pytest.param(k, n, marks=() if k == "lora" or n in ALSO_FULL else pytest.mark.slow) for k, n in EVERY]


def needs(optimizer: str) -> None:
    """Skips without the package of an optimizer."""
    if optimizer == "schedule_free_adamw":
        pytest.importorskip("schedulefree")


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize(("train_type", "optimizer"), FEW)
def test_every_optimizer_learns_and_restores_its_saved_state_bitwise(optimizer, train_type, device):
    needs(optimizer)
    lr = {"sgd": 0.5, "adadelta": 3.0 if train_type == "full" else 30.0, "lion": 1e-3}.get(optimizer, 5e-3)
    first = engine(train_type=train_type, optimizer=optimizer, device=device)
    losses = [first.train_step(batches(), lr).nll for _ in range(6)]
    assert losses[-1] < losses[0]
    second = engine(train_type=train_type, optimizer=optimizer, device=device)
    tensors, values = first.optimizer_state()
    second.load_state(first.trainable_state(), tensors, values, first.rng_state())
    for _ in range(2):
        assert first.train_step(batches(), lr).nll == second.train_step(batches(), lr).nll
    for name, array in first.trainable_state().items():
        np.testing.assert_array_equal(array, second.trainable_state()[name])


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize(("train_type", "optimizer"), FEW)
def test_tried_and_undone_steps_of_every_optimizer_leave_nothing(optimizer, train_type, device):
    """--batch_size auto and --lr search make them before the first step."""
    needs(optimizer)
    losses = []
    for tried in (False, True):
        built = engine(train_type=train_type, optimizer=optimizer, device=device)
        if tried:
            built.try_step(batches()[0], several=True)
            with built.undone():
                built.train_step(batches(), 1e-2)
            built.try_step(batches()[0], several=False)
        losses.append([built.train_step(batches(), 1e-2).nll for _ in range(3)])
    assert losses[0] == losses[1]


def test_loraplus_moves_b_faster(device):
    plain, plus = engine(optimizer="sgd", device=device), engine(optimizer="sgd", loraplus_lr_ratio=16.0, device=device)
    start = {n: p.detach().clone() for n, p in trainable_params(plain).items()}
    for built in (plain, plus):
        built.train_step(batches(), 1e-3)
    for name, before in start.items():
        moved = [(trainable_params(e)[name] - before).norm().item() for e in (plain, plus)]
        assert moved[1] == pytest.approx(moved[0] * (16 if name.endswith("lora_B") else 1), rel=1e-3)


BETAS = dict(adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_betas_and_epsilon_are_torch_s_in_both_engines(optimizer):
    """Five steps on the same gradients: bitwise as torch's own optimizer, and MLX as torch to fp32's rounding."""
    steps = StepsPlan.of(TrainConfig(optimizer=optimizer, lr=1e-2, wd=0.1, **BETAS))
    start = torch.linspace(-1, 1, 12).reshape(3, 4)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    built = optim.build({"w": ours}, steps, torch.device("cpu"))
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optimizer]
    reference = kind([theirs], lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-4)
    plain = optim.build({"w": torch.nn.Parameter(start.clone())}, StepsPlan.of(TrainConfig()), torch.device("cpu"))
    assert plain.param_groups[0]["betas"] == (0.9, 0.999) and plain.param_groups[0]["eps"] == 1e-8
    gradients = [torch.sin(start * (i + 1)) for i in range(5)]
    for gradient in gradients:
        for parameter, one in ((ours, built), (theirs, reference)):
            parameter.grad = gradient.clone()
            one.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)  # fused and foreach kernels round differently
    mx = pytest.importorskip("mlx.core")
    from finetune.mlx_engine.optim import Optimizer

    on_mlx, weights = Optimizer(steps), {"w": mx.array(start.numpy())}
    for gradient in gradients:
        weights, moments = on_mlx.step(weights, {"w": mx.array(gradient.numpy())}, mx.array(1e-2))
        on_mlx.applied(weights, moments)
    np.testing.assert_allclose(np.array(weights["w"]), theirs.detach().numpy(), rtol=0, atol=1e-6)


def test_betas_reach_a_run_and_are_refused_where_no_adam_is(device):
    plain, changed = engine(device=device), engine(device=device, **BETAS)
    for _ in range(2):
        losses = [one.train_step(batches(), 5e-3).nll for one in (plain, changed)]
    assert losses[0] != losses[1]
    with pytest.raises(PlanError, match="--adam_beta1 0.8: applies to Adam only"):
        plan_of(optimizer="sgd", adam_beta1=0.8)


def library(optimizer: str, parameters: list):
    """The optimizer as its library's users make it."""
    if optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=1e-2, scale_parameter=False, relative_step=False, weight_decay=0.1)
    if optimizer == "schedule_free_adamw":
        made = pytest.importorskip("schedulefree").AdamWScheduleFree(parameters, lr=1e-2, weight_decay=0.1)
        made.train()
        return made
    if optimizer == "muon":
        return torch.optim.Muon(parameters, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return pytest.importorskip("lion_pytorch").Lion(parameters, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)


@pytest.mark.parametrize("optimizer", ["adafactor", "schedule_free_adamw", "muon", "lion"])
def test_each_optimizer_is_its_library_s(optimizer):
    """Six steps on the same gradients; Lion, which bitsandbytes computes, against lion-pytorch."""
    betas = {"adam_beta2": 0.99} if optimizer == "lion" else {}
    steps = StepsPlan.of(TrainConfig(optimizer=optimizer, lr=1e-2, wd=0.1, **betas))
    start = torch.linspace(-1, 1, 48).reshape(6, 8)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    reference = library(optimizer, [theirs])
    built = optim.build({"w": ours}, steps, torch.device("cpu"), matrices=frozenset(["w"]))
    for i in range(6):
        for parameter, one in ((ours, built), (theirs, reference)):
            parameter.grad = torch.sin(start * (i + 1))
            one.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    if optimizer == "schedule_free_adamw":
        y = ours.detach().clone()
        reference.eval()
        with optim.averaged(built):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
            assert (ours - y).abs().max() > 1e-4
        assert torch.equal(ours, y) and built.param_groups[0]["train_mode"]


def test_lion_on_mlx_is_lion_on_torch():
    mx = pytest.importorskip("mlx.core")
    from finetune.mlx_engine.optim import Optimizer

    steps = StepsPlan.of(TrainConfig(optimizer="lion", lr=1e-2, wd=0.1, adam_beta2=0.99))
    start = torch.linspace(-1, 1, 48).reshape(6, 8)
    ours, on_mlx, weights = torch.nn.Parameter(start.clone()), Optimizer(steps), {"w": mx.array(start.numpy())}
    built = optim.build({"w": ours}, steps, torch.device("cpu"))
    for i in range(6):
        ours.grad = torch.sin(start * (i + 1))
        weights, moments = on_mlx.step(weights, {"w": mx.array(ours.grad.numpy())}, mx.array(1e-2))
        on_mlx.applied(weights, moments)
        built.step()
    np.testing.assert_allclose(np.array(weights["w"]), ours.detach().numpy(), rtol=0, atol=1e-6)
    tensors, counts = optim.state(built, {"w": ours})
    np.testing.assert_allclose(np.array(moments["w.exp_avg"]), tensors["w.exp_avg"], rtol=0, atol=1e-6)
    assert counts == on_mlx.counts


OF_THEIR_OWN = ("adafactor", "lion", "schedule_free_adamw", "muon", "adamw_8bit")
COUNTED = [pytest.param(*pair, marks=[] if pair[1] in OF_THEIR_OWN else pytest.mark.slow) for pair in EVERY]


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize(("train_type", "optimizer"), COUNTED)
def test_predicted_bytes_of_the_optimizer_are_those_it_holds(optimizer, train_type, tmp_path):
    needs(optimizer)
    model = tiny.build("llama")
    model.save_pretrained(tmp_path)
    shape = shape_of_files(find_model(str(tmp_path)))
    built = engine(train_type=train_type, optimizer=optimizer, model=model)
    built.train_step(batches(), 1e-3)
    m = ModelCost(shape, Parts(TrainConfig(train_type=train_type, optimizer=optimizer, precision="fp32")))
    predicted = optimizer_bytes(m)
    # Without counts, and bitsandbytes' code books of 256 levels.
    states = [state.items() for state in optimizer_of(built).state.values()]
    names = ("step", "RMS", "qmap1", "qmap2")
    assert predicted == sum(t.nbytes for state in states for k, t in state if torch.is_tensor(t) and k not in names)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adadelta", "adafactor", "lion", "schedule_free_adamw"])
def test_the_predicted_peak_of_an_update_is_what_its_step_has(optimizer, tmp_path):
    needs(optimizer)
    model = tiny.build("llama", hidden_size=96, intermediate_size=256, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    built = engine(train_type="full", optimizer=optimizer, model=model)
    built.train_step(batches(), 1e-3)
    own = optimizer_of(built)
    held = [parameter for group in own.param_groups for parameter in group["params"]]
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    with meta_peaks.LiveBytes(torch.device("cpu")) as counted:
        counted.add(held + [t for p in held for t in (p.grad, *own.state[p].values()) if torch.is_tensor(t)])
        standing = counted.live
        if optimizer == "lion":  # whose kernel is an operator of its own: what it calls on a CPU
            _lion_on_cpu(held, own)
        else:
            own.step()
    plan = Parts(TrainConfig(train_type="full", optimizer=optimizer, precision="fp32"))
    m = ModelCost(shape_of_files(find_model(str(tmp_path))).known, plan)
    assert counted.peak - standing == pytest.approx(update_bytes(m), rel=0.03)
    assert update_bytes(replace(m, device="cuda")) == (0 if optimizer == "lion" else update_bytes(m))


def _lion_on_cpu(held: list, own) -> None:
    from bitsandbytes.backends.cpu.ops import _optimizer_update_32bit_cpu as update

    for p in held:
        of_norm, numbers = (None, 0.0, 0.0), (0.9, 0.99, 0.0, 0.0, 0.0, 0.01, 1, 1e-3, 1.0)
        update("lion", p.grad, p, own.state[p]["state1"], None, *of_norm, *numbers)


def test_the_predicted_peak_of_muon_s_update_is_what_its_step_has(tmp_path):
    """Matrices of one layer, larger than what else a step holds; within 3 %, for blocks of 512 bytes."""
    model = tiny.build("llama", hidden_size=96, intermediate_size=256, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    built = engine(train_type="full", optimizer="muon", model=model)
    built.train_step(batches(), 1e-3)
    muon = optimizer_of(built).parts[0]
    matrices = [parameter for group in muon.param_groups for parameter in group["params"]]
    for parameter in matrices:
        parameter.grad = torch.ones_like(parameter)
    with meta_peaks.LiveBytes(torch.device("cpu")) as counted:
        counted.add([t for p in matrices for t in (p, p.grad, muon.state[p]["momentum_buffer"])])
        standing = counted.live
        muon.step()
    plan = Parts(TrainConfig(train_type="full", optimizer="muon", precision="fp32"))
    m = ModelCost(shape_of_files(find_model(str(tmp_path))).known, plan)
    assert counted.peak - standing == pytest.approx(update_bytes(m), rel=0.03)
    several = MicrobatchShape((1,), 1, several=True)
    assert step_bytes(m, several, 0)["total"] >= 4 * trainable_weights(m) + update_bytes(m)


def test_the_plan_says_what_an_optimizer_changes_and_where_it_is_not():
    assert plan_of(optimizer="paged_adamw_8bit").steps.optimizer == "adamw_8bit"
    assert plan_of(optimizer="paged_adamw_32bit").steps.optimizer == "adamw"
    assert plan_of(optimizer="lion").steps.adam_beta2 == 0.99
    assert plan_of(optimizer="lion", adam_beta2=0.95).steps.adam_beta2 == 0.95
    assert plan_of(optimizer="schedule_free_adamw", dry_run=True).steps.lr_scheduler == "constant"
    for words, why in (
        (dict(optimizer="muon", train_type="lora"), "orthogonal"),
        (dict(optimizer="schedule_free_adamw", lr_scheduler="cosine"), "averages weights"),
        (dict(optimizer="adafactor", adam_beta1=0.8), "applies to Adam only"),
        (dict(optimizer="muon", train_type="full", world_size=2), "takes whole matrices"),
        (dict(optimizer="adafactor", world_size=2, tp_degree=2), "takes whole"),
        (dict(optimizer="schedule_free_adamw", train_type="full", world_size=2, dry_run=True), "averaged weights"),
    ):
        with pytest.raises(PlanError, match=why):
            plan_of(**words)
