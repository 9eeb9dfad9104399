"""--cuda_graphs in the plan: open on a card, false with its reason where something excludes it."""

import pytest

from backend_manager import Backend
from finetune.estimate.budget import full_microbatch
from finetune.estimate.memory import estimate
from finetune.estimate.model_cost import MicrobatchShape
from finetune.estimate.model_shape import ModelShape
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from tests.support import large
from tests.support.plans import NOW, capabilities


def plan_of(backend=Backend.CUDA, num_devices=1, **overrides):
    caps = capabilities(backend, supports_bfloat16=True, supports_flash_attention=backend is Backend.CUDA)
    facts = Facts(backend, caps, num_devices=num_devices)
    return resolve_plan({"dataset": "x", "train_type": "lora", **overrides}, facts, NOW)


def reason_of(plan):
    return next((a.reason for a in plan.adjustments if a.setting == "cuda_graphs"), "")


def test_on_a_card_it_is_left_open_and_a_word_stays():
    assert plan_of().memory.graphs is None and plan_of().settings.cuda_graphs == "auto"
    assert plan_of(cuda_graphs="true").memory.graphs is True and plan_of(cuda_graphs="false").memory.graphs is False
    assert plan_of(cuda_graphs="true", preference="dpo").memory.graphs is True


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"backend": Backend.CPU}, "of NVIDIA cards, not of cpu"),
        ({"num_devices": 2}, "ranks communicate within a microbatch"),
        ({"use_gradient_checkpointing": "true"}, "recomputed"),
        ({"use_activation_cpu_offload": True}, "offloaded"),
        ({"base_offload": "host"}, "offloaded base"),
        ({"preference": "orpo"}, "the loss orpo reads"),
        ({"neftune_noise_alpha": 5.0}, "--neftune_noise_alpha"),
        ({"lora_dropout": 0.1}, "dropout"),
        ({"batch_layout": "padded"}, "padded rows"),
        ({"precision": "fp32"}, "compute in 16 bits"),
        ({"attention": "groups"}, "groups of documents"),
    ],
)
def test_what_excludes_it_is_named_where_it_was_asked_for(overrides, said):
    asked = plan_of(cuda_graphs="true", **overrides)
    assert asked.memory.graphs is False and said in reason_of(asked)
    assert plan_of(**overrides).memory.graphs is False and not reason_of(plan_of(**overrides))


def test_on_an_assumed_card_it_is_planned_as_on_one():
    assumed = {"assume_memory": "24GB", "dry_run": True, "precision": "bf16", "cuda_graphs": "true"}
    assert plan_of(Backend.CPU, **assumed).memory.graphs is True


def test_replicas_may_have_graphs_where_they_are_asked_for():
    """Each rank would time them by itself."""
    assert plan_of(num_devices=2, dp_degree=2).memory.graphs is False
    assert plan_of(num_devices=2, dp_degree=2, cuda_graphs="true").memory.graphs is True


def test_gradients_stay_between_steps():
    """The prediction has them beside the activations, as between two microbatches."""
    wanted = {"batch_size": 1, "train_type": "full", "microbatch_tokens": 512}
    graphs = full_microbatch(plan_of(cuda_graphs="true", **wanted))
    assert graphs.several and not full_microbatch(plan_of(cuda_graphs="false", **wanted)).several


def test_activations_are_predicted_twice():
    """The first microbatch of a size runs beside what the graphs hold."""
    shape = ModelShape.from_config(large.LLAMA_1B)
    items = {}
    for word in ("true", "false"):
        plan = plan_of(cuda_graphs=word)
        items[word] = estimate(plan, shape, MicrobatchShape((1000,), 999), "cuda")["items"]
    assert items["true"]["graphs"] == items["true"]["activations"] > 0 and not items["false"].get("graphs")
