"""Plans of a machine given as data."""

import dataclasses
from datetime import datetime

import quantization_wrapper
from backend_manager import CAPABILITIES, Backend
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan

NOW = datetime(2026, 1, 2, 3, 4, 5)
PASSED = {f"{name}/{bits}": {"error": None} for name, bits in quantization_wrapper.pairs()}


def capabilities(backend=Backend.CPU, **changes):
    """A machine's probed facts as data: the plan reads nothing else of it."""
    probed = dict(
        probed=True, quantizers=PASSED, bfloat16_speed=0.3, reasons={"bf16": "bf16 products have 0.30 x the speed"}
    )
    return dataclasses.replace(CAPABILITIES[backend], **{**probed, **changes})


def plan_of(backend=Backend.CPU, shape=None, caps=None, **overrides):
    return resolve_plan(overrides, Facts(backend, caps or capabilities(backend), shape), NOW)


def adjustment(plan, setting):
    return next(a for a in plan.adjustments if a.setting == setting)
