"""The routers' load-balancing loss: transformers' on one forward, and the same however a step is split."""

import dataclasses

import pytest
import torch

from finetune.config import TrainConfig
from finetune.data.collate import microbatches
from finetune.errors import PlanError
from finetune.torch_engine.experts.load_balancing import routers_of
from tests.support import engine_access, tiny
from tests.support.adapters import adapted
from tests.support.build import torch_engine
from tests.support.commands import refused

COEFFICIENT = 0.3  # large enough to be seen beside the nll
DATA, ROWS = tiny.dataset(), tuple(range(6))
# Sums in another order, in fp32.
CLOSE = dict(rtol=1e-5, atol=1e-7)


def step(architecture: str, batch_size: int, layout: str = "padding_free", **changes):
    """(StepResult, {name: gradient}) of one step on ROWS in microbatches of `batch_size` rows."""
    train_type = changes.setdefault("train_type", "full")
    settings = dataclasses.replace(
        TrainConfig(),
        **dict(precision="fp32", lr=1e-3, router_aux_loss_coef=COEFFICIENT, apply_gradient_clipping=False) | changes,
    )
    model = tiny.build(architecture)
    if train_type == "lora":
        model, _ = adapted(model=model, lora_dropout=settings.lora_dropout)
    engine, gradients = torch_engine(model, settings), {}
    engine.verify(layout)
    engine.seed(1)

    def keep(*_):
        gradients.update({n: p.grad.clone() for n, p in engine_access.trainable_params(engine).items()})

    engine_access.optimizer(engine).register_step_pre_hook(keep)
    return engine.train_step(microbatches(DATA, ROWS, layout, batch_size, 10_000, 0), 1e-3), gradients


def reference(architecture: str):
    """(nll per target, aux loss, {name: gradient}) of transformers on the same rows, padded in one forward."""
    model = tiny.build(architecture).train()
    (batch,) = microbatches(DATA, ROWS, "padded", len(ROWS), 10_000, 0)
    mask = torch.from_numpy(batch.document_ids_BS >= 0).long()
    # transformers shifts labels itself.
    labels = torch.nn.functional.pad(torch.from_numpy(batch.labels_BS), (1, 0), value=-100)[:, :-1]
    given = dict(input_ids=torch.from_numpy(batch.input_ids_BS), attention_mask=mask, output_router_logits=True)
    out = model(**given)
    nll = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    (nll + COEFFICIENT * out.aux_loss).backward()
    return nll.item(), out.aux_loss.item(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_loss_and_gradients_are_transformers_in_one_forward_and_in_several(architecture):
    nll, aux, expected = reference(architecture)
    for batch_size, layout in ((6, "padding_free"), (2, "padding_free"), (6, "padded"), (1, "padded")):
        result, gradients = step(architecture, batch_size, layout)
        assert result.nll / result.num_targets == pytest.approx(nll, rel=1e-5)
        assert result.aux_loss == pytest.approx(aux, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], **CLOSE | {"atol": 1e-6}, msg=name)


def test_it_changes_the_routers_gradient_and_is_off_by_default():
    _, on = step("mixtral", 6)
    result, off = step("mixtral", 6, router_aux_loss_coef=0.0)
    router = "model.layers.1.mlp.gate.weight"
    assert result.aux_loss is None and (on[router] - off[router]).abs().max() > 1e-3


@pytest.mark.parametrize("changes", [dict(use_gradient_checkpointing="true"), dict(train_type="lora")])
def test_recomputed_or_with_adapters_it_does_not_depend_on_the_split(changes):
    one, whole = step("qwen3_moe", 6, **changes)
    several, split = step("qwen3_moe", 2, **changes)
    assert several.aux_loss == pytest.approx(one.aux_loss, rel=1e-6)
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], **CLOSE)


def test_the_forwards_that_count_leave_the_dropout_of_those_that_train():
    runs = [
        step("mixtral", 2, train_type="lora", lora_dropout=0.2, router_aux_loss_coef=weight) for weight in (0.0, 1e-9)
    ]
    assert runs[0][0].nll == runs[1][0].nll


def test_a_model_without_the_loss_is_refused():
    with pytest.raises(PlanError, match="transformers has no load-balancing loss for LlamaForCausalLM"):
        routers_of(tiny.build("llama"), "--router_aux_loss_coef 0.1")


def test_a_model_without_routers_is_refused_in_the_plan_of_a_run(flags):
    line = refused(flags, router_aux_loss_coef=0.1)
    assert line.startswith("--router_aux_loss_coef 0.1: weighs the load-balancing loss of routers, and")
