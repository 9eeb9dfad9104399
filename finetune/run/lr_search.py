"""--lr search: short trial runs of the loaded model at several rates, each undone, before the run itself.

Successive halving (Jamieson and Talwalkar 2016) on the validation loss: all rates for a few steps, then the better ones
for more. A trial has the whole schedule in its few steps. Such short runs do best at higher rates than long ones do, by
plan.learning_rate.trial_factor, so each rate is tried at as much more. The run that follows is to the bit the one that
--lr with the chosen rate gives.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from finetune.checkpoint.store import steps_of
from finetune.data.run_data import Data
from finetune.engine import Batch, FineTuningEngine
from finetune.errors import NonFiniteError
from finetune.parts.plan_base import Adjustment, SavedRun
from finetune.parts.train_state import TrainState
from finetune.plan.learning_rate import MOST, rounded, trial_factor
from finetune.plan.run_plan import RunPlan
from finetune.system.process import StopSignal

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the rule's rate
KEPT = 2  # rates that are tried for longer
LEAST_STEPS = 4  # of a trial; in fewer the highest rate always leads
FORWARD = 1 / 3  # of a step's time per row: what the evaluation of a row costs
MOST_ROWS = 64  # of the validation rows, by which trials are compared


@dataclass(frozen=True)
class Rungs:
    """`steps` of each trial: of all rates, then of the KEPT best; 0: there is no second rung. `rows`: evaluated."""

    rates: tuple[float, ...]
    steps: tuple[int, int]
    rows: int

    @property
    def trials(self) -> int:
        return len(self.rates) + (KEPT if self.steps[1] else 0)


def with_searched_rate(
    plan: RunPlan, data: Data, engine: FineTuningEngine, say: Callable[[str], object], stop: StopSignal
) -> RunPlan:
    """The plan with the rate of the best trials, if it asks for a search that no earlier start of the run has done. One
    that a signal ends settles nothing.
    """
    if plan.requested.get("lr") != "search":
        return plan
    if plan.resume_from:
        found = searched_before(plan.resume_from)
        if found or plan.resume_from.step_folder or steps_of(plan.resume_from.output_dir):
            return replace(plan, adjustments=(*plan.adjustments, *found))
    assert data.validation is not None, "the plan refuses a search without validation rows"
    total = data.total_steps(plan)
    rungs = rungs_of(plan.steps.lr, total, plan.rows_per_step, data.validation.num_rows, plan.settings.search_budget)
    if rungs is None:
        fewest = math.ceil(3 * (LEAST_STEPS + 1) / plan.settings.search_budget)
        why = f"{total} steps are too few for a search by --search_budget; about {fewest} are enough. Not searched"
        say(f"lr: {plan.steps.lr:g} ({why})")
        return plan
    first, more = rungs.steps
    said = ""
    if more:
        said = f", then the best {KEPT} for {more}"
    say(f"lr search: {len(rungs.rates)} rates for {first} steps each{said}; {rungs.rows} validation rows compare them")
    evaluated = validation_part(data, plan, engine.pad_id, rungs.rows)
    rate = best_rate(plan, data, engine, rungs, evaluated, say, stop)
    if rate is None:
        say("lr search: ended by a signal, which leaves it to the resumed run")
        return plan
    reason = f"the least validation loss of {rungs.trials} trials"
    say(f"lr: {rate:g} ({reason})")
    return plan.changed({"lr": (rate, reason)})


def searched_before(run: SavedRun) -> list[Adjustment]:
    """The change of the rule's rate by an earlier start of the run; the rule's own is of the word search."""
    found = [Adjustment(**entry) for entry in run.saved_plan.get("adjustments", ())]
    return [entry for entry in found if entry.setting == "lr" and not isinstance(entry.requested, str)]


def rungs_of(rate: float, total: int, rows_per_step: int, validation_rows: int, budget: float) -> Rungs | None:
    """The trials that cost at most `budget` of the run's steps; None if they would be too short."""
    for factors, kept in ((FACTORS, KEPT), (FACTORS[1:-1], 0)):
        rates = tuple(dict.fromkeys(rounded(min(MOST, rate * factor)) for factor in factors))
        trials = len(rates) + kept
        rows = min(validation_rows, MOST_ROWS, max(16, round(total * budget * rows_per_step / 4 / trials / FORWARD)))
        left = total * budget - trials * rows * FORWARD / rows_per_step
        if not kept:
            first = int(left / len(rates))
        else:
            first = int(left / 2 / len(rates))
        if first >= LEAST_STEPS:
            return Rungs(rates, (first, int(left / 2 / kept) if kept else 0), rows)
    return None


def best_rate(
    plan: RunPlan,
    data: Data,
    engine: FineTuningEngine,
    rungs: Rungs,
    evaluated: list[Batch],
    say: Callable[[str], object],
    stop: StopSignal,
) -> float | None:
    """The rate with the least loss; None if a signal ended the trials."""
    rates = list(rungs.rates)
    losses: dict[float, float] = {}
    for steps in filter(None, rungs.steps):
        losses = {rate: trial(plan, data, engine, rate, steps, evaluated, stop) for rate in rates}
        if stop.requested():
            return None
        say("  " + ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items()) + f" after {steps} steps")
        rates = sorted(losses, key=lambda rate: losses[rate])[:KEPT]
    return min(losses, key=lambda rate: losses[rate])


def trial(
    plan: RunPlan,
    data: Data,
    engine: FineTuningEngine,
    rate: float,
    steps: int,
    evaluated: list[Batch],
    stop: StopSignal,
) -> float:
    """Validation loss after `steps` steps at this rate, which are undone; infinite if it diverged, or a signal ended
    them.
    """
    factor = trial_factor(steps, data.total_steps(plan), plan.steps.adam_beta2)
    state = TrainState(total_steps=steps)
    schedule = replace(plan.schedule(steps), lr=rate * factor)
    with engine.undone():
        try:
            while state.step < steps:
                if stop.requested():
                    return math.inf
                microbatches, _, cursor = data.step(plan, state, engine)
                result = engine.train_step(microbatches, schedule.lr_at(state.step + 1))
                state.advance(result, cursor)
            loss = engine.evaluate(evaluated).loss
        except NonFiniteError:
            loss = math.inf
    if math.isfinite(loss):
        return loss
    return math.inf


def validation_part(data: Data, plan: RunPlan, pad_id: int, rows: int) -> list[Batch]:
    """Microbatches of the first validation rows."""
    assert data.validation is not None, "the plan refuses a search without validation rows"
    return data.microbatches(data.validation, range(rows), slice(None), plan, pad_id, rows)
