"""Overrides and facts in, one frozen plan out, with a reason for every difference. No framework is imported here.

`resolve_plan` runs before anything is loaded; plan.finalize runs once after loading. Nothing changes after that.
"""

from datetime import datetime
from pathlib import Path

from finetune.config import TrainConfig
from finetune.estimate.traced import Failed
from finetune.plan.degrees import with_degrees
from finetune.plan.facts import Facts
from finetune.plan.machine import room_of
from finetune.plan.run_plan import RunPlan
from finetune.plan.settle import Fold


def resolve_plan(requested: dict, facts: Facts, now: datetime | None = None) -> RunPlan:
    """Resolves what the user asked for against what the machine can do and the model's config. Raises PlanError.
    `now` names the default output_dir.
    """
    fold = Fold(requested)
    try:
        plan, layouts = with_degrees(fold, fold.settle(facts))
    except Failed as failed:  # from here on nothing is predicted, and it is said why
        assert facts.shape and facts.shape.tracer
        facts.shape.tracer.give_up(failed)
        plan, layouts = with_degrees(fold, fold.settle(facts))
    asked = plan.asked
    if asked.output_dir is None:
        started = now or datetime.now()
        asked = asked.changed(output_dir=f"outputs/{started:%Y%m%d-%H%M%S}-{Path(asked.model_name).name}")
    return RunPlan(
        settings=TrainConfig(**vars(asked.settings)),
        requested=asked.requested,
        adjustments=plan.adjustments,
        notices=plan.notices,
        backend=str(facts.backend),
        engine=facts.capabilities.engine,
        dims=plan.ranks.dims,
        distribution=plan.ranks.distribution,
        shape=facts.shape,
        memory_budget=room_of(asked, facts, plan.ranks),
        machine=fold.machine(plan),
        layouts=layouts,
    )
