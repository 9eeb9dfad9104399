"""The plan after loading: what the data and the loaded model decide. It runs once; nothing changes after it."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from finetune.data.run_data import Data
from finetune.data.sampler import num_rows_of
from finetune.engine import FineTuningEngine
from finetune.errors import OutOfMemoryError
from finetune.estimate.step_time import average_microbatch
from finetune.plan.run_plan import RunPlan


def finalize(plan: RunPlan, data: Data, engine: FineTuningEngine, say: Callable[[str], object]) -> RunPlan:
    """The plan with the data's limits and the engine's checks; `say` is called with a line per change.

    batch_size auto is tried: one step on the run's largest microbatch, with half the rows if memory runs out.
    """
    changes = pipeline_microbatches(plan, data.train.row_lengths)
    checked = engine.verify(plan.data.layout, data.showing_images(engine.pad_id))
    plan = plan.changed(changes | checked)
    for setting, (used, reason) in (changes | checked).items():
        say(f"{setting}: {used} ({reason})")
    if plan.requested.get("batch_size") == "auto" and not plan.resume_from and plan.dims.world_size == 1:
        plan = probe_batch_size(plan, data, engine, say)
    if plan.precision.in_fp8:
        used, reason = engine.prove_fp8(data.largest_microbatch(plan, engine), products_before(plan))
        plan = plan.changed({"frozen_products": (used, reason)})
        say(f"frozen_products: {used} ({reason})")
    if plan.memory.compiles is None or plan.memory.graphs is not False:
        plan = timed(plan, data, engine, say)
    choice = reference_choice(plan, data)
    for setting, (used, reason) in choice.items():
        say(f"{setting}: {used} ({reason})")
    return plan.changed(choice)


def products_before(plan: RunPlan) -> str | None:
    """A resumed run's --frozen_products as it was found before, if fp8 was asked for and not turned down elsewhere."""
    if not plan.resume_from:
        return None
    asked = plan.resume_from.saved_plan["requested"].get("frozen_products")
    found = plan.resume_from.saved_plan["settled"]
    if asked != "fp8" or (found["frozen_products"] != "fp8" and found["backend"] != str(plan.backend)):
        return None
    return found["frozen_products"]


def timed(plan: RunPlan, data: Data, engine: FineTuningEngine, say: Callable[[str], object]) -> RunPlan:
    """Settles what timed runs of the largest microbatch decide: compiled layers, then graphs of what is left."""
    batch = data.largest_microbatch(plan, engine)
    _, each = average_microbatch(plan, float(data.train.row_lengths.mean()))
    microbatches = data.total_steps(plan) * each
    trials: dict[str, Callable[[], tuple[str, str]]] = {}
    if plan.memory.compiles is None:
        trials["compile"] = partial(engine.compile_if_it_pays, batch, microbatches)
    if plan.memory.graphs is not False:
        trials["cuda_graphs"] = partial(engine.capture_if_it_pays, batch, plan.memory.graphs is True, microbatches)
    for setting, trial in trials.items():
        used, reason = trial()
        plan = plan.changed({setting: (used, reason)})
        say(f"{setting}: {used} ({reason})")
    return plan


def reference_choice(plan: RunPlan, data: Data) -> dict:
    """Choice to compute the reference's log-probabilities once, if that takes fewer forward passes.

    Memory does not matter: the reference is the base with its adapters off, and a log-probability is one number.
    """
    s = plan.settings
    objective = plan.objective
    if not objective.facts.needs_reference or objective.precomputes_reference is not None:
        return {}
    steps = data.total_steps(plan)
    rows = data.train.num_rows
    if s.max_steps > 0:
        read = steps * plan.rows_per_step
    else:
        read = plan.steps.num_epochs * num_rows_of(data.train.order)
    once = rows
    what = "training rows"
    if data.validation:
        evaluations = 2 + ((steps - 1) // plan.output.eval_every if plan.output.eval_every else 0)
        read = read + evaluations * data.validation.num_rows
        once = rows + data.validation.num_rows
        what = "training and validation rows"
    fact = f"the run reads {read:,} {what}, and there are {once:,}"
    if read > once:
        return {"precompute_ref_log_probs": ("true", f"{fact}: once takes fewer forwards")}
    return {"precompute_ref_log_probs": ("false", f"{fact}: once would take no fewer forwards")}


def smaller_batch(plan: RunPlan, rows: int, why: str) -> dict:
    """The changes to a smaller batch_size and, if it was left open, to a forward that takes the full batch."""
    changes = {"batch_size": (rows, why)}
    if "microbatch_tokens" not in plan.requested:
        tokens = rows * plan.data.row_length
        changes["microbatch_tokens"] = (tokens, "one forward takes the full batch")
    return changes


def pipeline_microbatches(plan: RunPlan, lengths: np.ndarray) -> dict:
    """Choice of microbatch_tokens, if left open: small enough to give a pipeline two microbatches per stage."""
    s = plan.settings
    stages = plan.dims.pp
    if stages == 1 or "microbatch_tokens" in plan.requested:
        return {}
    per_batch = max(1, 2 * stages // s.gradient_accumulation_steps)
    tokens = math.ceil(plan.steps.batch_size * lengths.mean() / per_batch)
    if tokens >= s.microbatch_tokens:
        return {}
    return {"microbatch_tokens": (tokens, f"about {2 * stages} microbatches per step keep {stages} stages busy")}


def probe_batch_size(plan: RunPlan, data: Data, engine: FineTuningEngine, say: Callable[[str], object]) -> RunPlan:
    """One step on the run's largest microbatch, undone afterwards; half the rows each time memory runs out."""
    while True:
        steps = plan.steps
        try:
            batch = data.largest_microbatch(plan, engine)
            engine.try_step(batch, several=steps.accumulation > 1)
            return plan
        except OutOfMemoryError:
            if steps.batch_size == 1:
                raise
            why = f"memory ran out on a step of --batch_size {steps.batch_size}"
            changes = smaller_batch(plan, steps.batch_size // 2, why)
            plan = plan.changed(changes)
            say(f"batch_size: {plan.settings.batch_size} ({why})")
