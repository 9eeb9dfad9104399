"""The loop that every run shares, with evaluation and publishing around it: one turn is one optimizer step.

Every dependency is a parameter; there is no trainer object.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from finetune.adapters.continued import continued, read_saved
from finetune.adapters.patterns import scaling_of
from finetune.checkpoint.output_dir import BEST
from finetune.checkpoint.store import storage
from finetune.checkpoint.writer import CheckpointWriter
from finetune.engine import Engine, FineTuningEngine
from finetune.errors import DivergedError, NonFiniteError, PlanError, StorageError
from finetune.parts.plan_base import PlanBase
from finetune.parts.run_data import RunData
from finetune.parts.train_state import TrainState
from finetune.parts.trains import Adapter
from finetune.plan.run_plan import RunPlan
from finetune.run import conclusion, evaluation, report, samples
from finetune.run.metrics import Metrics
from finetune.system.process import StopSignal


def begin(
    engine: Engine,
    data: RunData,
    plan: PlanBase,
    log: Metrics,
    writer: CheckpointWriter,
    predicted: dict,
    start: Callable[[], None] = lambda: None,
) -> TrainState:
    """The state of a new run, or of the checkpoint it resumes from; opens the log at it. Collective.

    `predicted`: bytes, see report.memory_table. `start()`: called where no checkpoint was restored, which is so for a
    resumed run too if it was killed before its first.
    """
    with storage(writer.root):
        state, offset, resumed_from = writer.restore_or_begin(engine, plan, data, log.say)
    if resumed_from is None:
        start()
    if resumed_from and plan.quantizes_again:
        state.eval_pending = True  # what the other base does to the loss is measured at once
        state.forget_best()
    if plan.resume_from and plan.resume_from.is_outside:  # the bytes are those of another folder's log
        offset = None
    log.open(writer.root, state, offset, writer.run_id, other_rows=writer.other_rows)
    engine.call_before_exit(log.failed)
    if resumed_from:
        log.saved(state.step, resumed_from)
    log.start(data, predicted)
    if plan.output.run_page:
        log.at_end = lambda: conclusion.write_page(log, writer)
    return state


def start_from(engine: FineTuningEngine, plan: RunPlan, say: Callable[[str], object]) -> None:
    """Puts --adapter's weights, if one is continued, into a new run's adapter: its function at step 0. Collective."""
    if not plan.settings.adapter or plan.settings.adapter_merge:
        return
    trains = plan.trains
    saved = read_saved(str(plan.settings.adapter))
    assert isinstance(trains, Adapter), trains
    own = engine.trainable_state_of_all_ranks()
    scaling = scaling_of(trains.rank, trains.alpha, trains.rslora)
    engine.load_trainable(continued(saved, own, trains.rank, scaling))
    more = ""
    if trains.rank != saved.rank:
        more = f", padded from rank {saved.rank} to {trains.rank}"
    say(f"continues from the adapter in {saved.folder}{more}")


def run_steps(
    engine: Engine,
    data: RunData,
    plan: PlanBase,
    state: TrainState,
    log: Metrics,
    writer: CheckpointWriter,
    stop: StopSignal,
) -> None:
    """Evaluation, training, evaluation; publishes the weights unless a signal ended the run before.
    The caller writes the final state.
    """
    summary = log.summary

    def sample(already_answered: str | None) -> str | None:
        if not data.score_examples:
            return None
        with log.phase("samples"):
            return evaluation.sample_answer(engine, data, plan, already_answered, stop.requested)

    stop.sync(engine.all_reduce_max)
    if state.step == 0 and not stop.requested():
        evaluate(engine, data, plan, state, log, writer, stop)
        stop.sync(engine.all_reduce_max)
        if not stop.requested():
            summary.sample_before = sample(summary.scored_answer)
            summary.scored_answer = None
    train(engine, data, plan, state, log, writer, stop)
    # Weights of an earlier step may be the result, and are not replaced before that is known.
    later = plan.load_best and state.best_step not in (None, state.step)
    if not stop.requested():
        if plan.output.save_model and not later:
            with log.phase("saving"):
                writer.publish(engine, state.step)
        if not (plan.load_best and plan.ends_early(state)):  # an early end follows an evaluation of the same step
            evaluate(engine, data, plan, state, log, writer, stop)
    if not stop.requested() and load_best(engine, plan, state, log, writer):
        assert state.best_step is not None, "the best weights are of a step"
        writer.publish(engine, state.best_step)
        evaluate(engine, data, plan, state, log, writer, stop, of_step=state.best_step)
    elif not stop.requested() and plan.output.save_model and later:
        with log.phase("saving"):
            writer.publish(engine, state.step)
    if not stop.requested():
        summary.sample_after = sample(summary.scored_answer)
    state.status, state.exit_code = ("stopped", stop.exit_code) if stop.requested() else ("finished", 0)
    state.scores = {"before": summary.before, "after": summary.after}
    log.diagnose()


def train(
    engine: Engine,
    data: RunData,
    plan: PlanBase,
    state: TrainState,
    log: Metrics,
    writer: CheckpointWriter,
    stop: StopSignal,
) -> None:
    """Trains to the plan's last step or a signal. One turn is one optimizer step, on every backend."""
    schedule = plan.schedule(state.total_steps)
    traces: list = []
    unsaved = has_stepped = False
    if state.eval_pending and state.step < state.total_steps:  # that of the last step follows
        evaluate(engine, data, plan, state, log, writer, stop)
        end_early(plan, state, log, stop)
    with engine.profiler(traces) as profile_step, log.training(), saves_ended(engine, log, writer):
        while state.step < state.total_steps and not stop.requested():
            began = time.perf_counter()
            try:
                microbatches, rows, cursor = data.step(plan, state, engine)
            except PlanError:  # a bad row of a stream, which every rank reads: what was trained is kept
                if unsaved and plan.output.save_model:
                    save(engine, state, log, writer)
                raise
            lr = schedule.lr_at(state.step + 1)
            try:
                result = engine.train_step(microbatches, lr)
            except NonFiniteError as error:
                abandon_save(log, writer)
                sources = data.sources_of(rows)
                line = report.not_finite(error, state.step + 1, sources, writer.root, plan.lr_flag)
                raise NonFiniteError(line) from None
            stop.sync(engine.all_reduce_max)
            result = replace(result, metrics=result.metrics | data.metrics())
            data.count_step(state)
            state.advance(result, cursor)
            if plan.async_save and not has_stepped:
                engine.prepare_snapshot()
            unsaved = has_stepped = True
            profile_step()
            log.step(result, lr, time.perf_counter() - began, engine.memory())
            log.summary.base_reads = engine.base_reads
            end_save(engine, log, writer, wait=False)
            fact = None
            if plan.output.stop_on_divergence:  # by rank 0, which has read the losses before a resume from the log
                fact = engine.broadcast_object(log.watch.diverged())
            if fact:
                abandon_save(log, writer)
                raise DivergedError(report.diverged(fact, state.step, writer.root, plan.lr_flag))
            if plan.eval_due(state):
                evaluate(engine, data, plan, state, log, writer, stop)
                end_early(plan, state, log, stop)
            if plan.save_due(state, stop.requested()):
                is_last = state.step == state.total_steps
                goes_on = not is_last and not stop.requested()
                if is_last and not plan.ends_early(state):  # whoever goes on from here has it to take
                    state.eval_pending = data.validation is not None or bool(data.score_examples)
                save(engine, state, log, writer, beside_steps=goes_on and plan.async_save)
                unsaved = False
        if unsaved and stop.requested() and plan.output.save_model:  # by a signal since the step was looked at
            save(engine, state, log, writer)
    if traces:
        log.say(f"profile: {len(traces)} files in {traces[0].parent}")


def end_early(plan: PlanBase, state: TrainState, log: Metrics, stop: StopSignal) -> None:
    """Makes the present step the last, if the evaluation that was due here is the one that ends the run."""
    if plan.eval_due(state) and plan.ends_early(state) and not stop.requested():
        log.say(report.ended_early(state))
        state.total_steps = state.step


def save(engine: Engine, state: TrainState, log: Metrics, writer: CheckpointWriter, beside_steps: bool = False) -> None:
    """Saves a checkpoint, once the save before has ended. `beside_steps`: a thread writes it. Collective."""
    with log.phase("saving"):
        end_save(engine, log, writer, wait=True)
        if beside_steps:
            writer.begin_save(engine, state, log.offset())
        else:
            log.saved(state.step, writer.save_step(engine, state, log.offset()))


def end_save(engine: Engine, log: Metrics, writer: CheckpointWriter, wait: bool) -> None:
    """Logs the save that goes on beside steps, if all ranks have ended it; its failure ends the run. Collective."""
    saved = writer.end_save(engine, wait)
    if saved:
        log.saved(*saved)


def abandon_save(log: Metrics, writer: CheckpointWriter) -> None:
    """Waits for the save that goes on beside steps, for a run that another error ends."""
    saved = writer.abandon_save()
    if saved:
        log.saved(*saved)


@contextlib.contextmanager
def saves_ended(engine: Engine, log: Metrics, writer: CheckpointWriter):
    """Context of the steps: at its end no save goes on, however it ends."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed:
            with contextlib.suppress(StorageError):  # the first error is the one to say
                abandon_save(log, writer)
    with log.phase("saving"):
        end_save(engine, log, writer, wait=True)


def is_counted(plan: PlanBase, state: TrainState) -> bool:
    """True for an evaluation that --eval_every asks for: early stopping counts neither one at the end of a run, which
    may go on, nor the one that ended it, taken again.
    """
    every = plan.output.eval_every
    return bool(every) and state.step % every == 0 and not plan.ends_early(state)


def load_best(engine: Engine, plan: PlanBase, state: TrainState, log: Metrics, writer: CheckpointWriter) -> bool:
    """Loads the weights with the least validation loss, if asked for and not already the last; True if it did."""
    if not plan.load_best or state.best_step in (None, state.step):
        return False
    engine.load_trainable(writer.best_weights(engine))
    log.say(f"the weights of step {state.best_step} are published: the least validation loss, {state.best_loss:.4f}")
    return True


def evaluate(
    engine: Engine,
    data: RunData,
    plan: PlanBase,
    state: TrainState,
    log: Metrics,
    writer: CheckpointWriter,
    stop: StopSignal,
    of_step: int | None = None,
) -> None:
    """Evaluates at the present step if there are rows for it; keeps the best weights in best/. One that a signal ended
    before its samples were answered is not logged, and pending. `of_step`: the step of the weights, if they were put
    back.
    """
    if data.validation is None and not data.score_examples:
        return
    output = plan.output
    summary = log.summary
    with log.phase("scoring"):
        found = evaluation.evaluate(engine, data, plan, state.step, stop.requested)
        state.eval_pending = found is None
        if found is None:
            return
        prompts = []
        if output.eval_samples:
            prompts = data.sample_prompts(output.eval_samples)
        are_scored = bool(prompts) and prompts == data.score_examples[: len(prompts)]
        known: list[str | None] = [None] * len(prompts)
        if are_scored and found.answers:
            known = found.answers[: len(prompts)]
        wrong = []
        if state.step == state.total_steps:
            wrong = samples.more_wrong(found.wrong(), data.score_examples, prompts, most=output.eval_samples)
        asked = [*prompts, *(data.score_examples[row] for row in wrong)]
        known += [found.answers[row] for row in wrong]
        answers = samples.answers_to(engine, data, asked, known, output.score_max_new_tokens, stop.requested)
        if asked and not answers:  # all of it is taken again
            state.eval_pending = True
            return
        for line in found.lines:
            log.say(line)
        log.evaluation(found.values, found.right, num_scored=found.num_scored, of_step=of_step)
        if answers:
            lines = samples.lines_of(data, asked, answers, state.step, num_drawn=len(prompts), of_step=of_step)
            log.sampled(lines)
        if found.answers:
            summary.scored_answer = found.answers[0]
        else:
            summary.scored_answer = None
        if answers and are_scored and output.score_max_new_tokens <= samples.MOST_TOKENS:  # else a sample may be cut
            summary.scored_answer = answers[0].text
        if not state.step or data.validation is None or of_step is not None:
            pass
        elif state.best_loss is not None and not found.loss < state.best_loss:
            if is_counted(plan, state):
                state.worse_evals += 1
        else:
            state.best_loss = found.loss
            state.best_step = state.step
            state.worse_evals = 0
            if output.keeps_best:
                writer.publish(engine, state.step, writer.root / BEST)
    summary.evaluating_bytes = max(summary.evaluating_bytes, engine.reset_memory())
