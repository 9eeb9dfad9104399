"""--frozen_products in the plan: fp8 on a card and a CPU, exact with its reason where something excludes it."""

from dataclasses import replace
from pathlib import Path

import pytest

from backend_manager import Backend
from finetune.estimate.budget import MemoryBudget
from finetune.estimate.memory import estimate
from finetune.estimate.model_cost import MicrobatchShape
from finetune.estimate.model_shape import ModelShape
from finetune.estimate.rates import documented
from finetune.estimate.remedies import time_line
from finetune.estimate.step_time import Machine
from finetune.parts.plan_base import SavedRun
from finetune.plan.facts import Facts
from finetune.plan.finalize import products_before
from finetune.plan.resolve import resolve_plan
from finetune.plan.resume import changed_settings
from tests.support import large
from tests.support.plans import NOW, capabilities


def plan_of(backend=Backend.CUDA, num_devices=1, **overrides):
    caps = capabilities(backend, supports_bfloat16=True, supports_flash_attention=backend is Backend.CUDA)
    facts = Facts(backend, caps, num_devices=num_devices)
    wanted = {"dataset": "x", "train_type": "lora", "precision": "bf16", "frozen_products": "fp8"}
    return resolve_plan(wanted | overrides, facts, NOW)


def reason_of(plan, setting="frozen_products"):
    return next((a.reason for a in plan.adjustments if a.setting == setting), "")


@pytest.mark.parametrize("backend", [Backend.CUDA, Backend.CPU])
def test_it_stays_and_nothing_is_compiled_beside_it(backend):
    assert plan_of(backend).precision.frozen_products == "fp8" and plan_of(backend).settings.compile == "false"
    assert "--frozen_products fp8" in reason_of(plan_of(backend, compile="true"), "compile")
    assert plan_of(backend, frozen_products="exact").precision.frozen_products == "exact"


def test_replicas_and_quantized_bases_have_it():
    assert plan_of(num_devices=2, dp_degree=2).precision.frozen_products == "fp8"
    assert plan_of(train_type="qlora").precision.frozen_products == "fp8"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"backend": Backend.MPS}, "of NVIDIA cards, not of mps"),
        ({"train_type": "full"}, "there are none"),
        ({"precision": "fp32"}, "use bf16"),
        ({"precision": "fp16"}, "use bf16"),
        ({"preference": "dpo"}, "compares with exact products"),
        ({"num_devices": 2}, "ranks share a microbatch, or its weights"),
        ({"num_devices": 2, "tp_degree": 2}, "ranks share a microbatch, or its weights"),
    ],
)
def test_what_excludes_it_is_named(overrides, said):
    plan = plan_of(**overrides)
    assert plan.settings.frozen_products == "exact" and said in reason_of(plan)


@pytest.mark.parametrize(
    ("asked", "found", "backend", "before"),
    [
        ("fp8", "fp8", "cuda", "fp8"),
        ("fp8", "exact", "cuda", "exact"),
        ("fp8", "fp8", "cpu", "fp8"),
        ("fp8", "exact", "mps", None),
        ("exact", "exact", "cuda", None),
        (None, "exact", "cuda", None),
    ],
)
def test_a_resumed_run_keeps_what_was_found_and_one_that_turns_to_fp8_proves_it(asked, found, backend, before):
    plan = plan_of()
    assert products_before(plan) is None
    requested = {} if asked is None else {"frozen_products": asked}
    saved = {"requested": requested, "settled": plan.to_json()["settled"] | {"frozen_products": found}}
    saved["settled"]["backend"] = backend
    assert products_before(replace(plan, resume_from=SavedRun(Path("x"), saved, None))) == before
    changed = changed_settings(plan, saved)
    assert ("frozen_products" in changed) == (asked != "fp8")  # what is found again is not told as a change


def test_a_dry_run_predicts_no_time_of_it():
    shape = ModelShape.from_config(large.LLAMA_1B).known
    said = {
        word: time_line(
            plan_of(frozen_products=word), shape, MemoryBudget(80 * 2**30, "cuda"), Machine(documented("h100"))
        )
        for word in ("exact", "fp8")
    }
    assert said["exact"].startswith("predicted ") and said["fp8"].startswith("time of a step: not predicted")


@pytest.mark.parametrize(("device", "each"), [("cuda", (1, 1, 0)), ("cpu", (9, 5, 4))])
def test_a_rounded_weight_and_its_rows_are_predicted(device, each):
    """One byte each, while they are multiplied; a CPU multiplies copies of four."""
    shape = ModelShape.from_config(large.LLAMA_1B)
    totals = {}
    for word in ("exact", "fp8"):
        plan = plan_of(frozen_products=word, use_gradient_checkpointing="true")
        totals[word] = sum(estimate(plan, shape, MicrobatchShape((8000,), 10), device)["items"].values())
    more = totals["fp8"] - totals["exact"]
    of_rows = each[1] * shape.intermediate_size + each[2] * shape.hidden_size
    assert more == each[0] * shape.known.largest_linear + 8000 * of_rows
