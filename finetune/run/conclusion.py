"""Steps after a finished run: its score on the dense base too, its model card, and the Hub."""

import argparse
from dataclasses import asdict

from finetune import open_checkpoint
from finetune.checkpoint.writer import CheckpointWriter
from finetune.data.run_data import Data
from finetune.errors import PlanError
from finetune.model_files.hub_upload import upload
from finetune.parts.train_state import TrainState
from finetune.plan.run_plan import RunPlan
from finetune.run import evaluation, model_card, page
from finetune.run.metrics import Metrics
from finetune.system.process import StopSignal
from finetune.system.program import started_as

ENGINE_BYTES = 1.2  # of the dense weights: what answering takes beside them


def conclude(
    plan: RunPlan, data: Data, state: TrainState, log: Metrics, writer: CheckpointWriter, stop: StopSignal
) -> None:
    """Ends a finished run on rank 0: scores, card, the final state."""
    if writer.files is None:
        return
    if plan.output.save_model:
        if plan.quantization and data.score_examples:
            with log.phase("scoring the dense base"):
                log.summary.dense = dense_scores(plan, data, log, stop)
            state.scores = {**(state.scores or {}), "dense": log.summary.dense}
        facts = model_card.facts_of(writer.root, asdict(state))
        kind = "model" if plan.all_weights else "adapter"
        if not writer.files.write_card(model_card.README, model_card.card(facts, writer.root.resolve().name, kind)):
            log.say(
                f"note: {writer.root / model_card.README} is not as a run wrote it and stays: no model card is written"
            )
    writer.finish(state)


def write_page(log: Metrics, writer: CheckpointWriter) -> None:
    """Writes report.html of a run that has ended in whatever way, on rank 0."""
    if writer.files is None:
        return
    try:
        content = page.page_of([writer.root])
    except PlanError as error:  # of a log that was edited: the run itself is fine
        log.say(f"note: no report is written: {error}")
        return
    if log.curve:
        log.curve.show_page(content)
    if not writer.files.write_card(page.PAGE, content):
        log.say(f"note: {writer.root / page.PAGE} is not as a run wrote it and stays: no report is written")


def dense_scores(plan: RunPlan, data: Data, log: Metrics, stop: StopSignal) -> dict | str:
    """Scores of the published adapter on its dense base, beside the loaded model; why there are none, if so."""
    score = f"{started_as('score.py')} --checkpoint {plan.output.output_dir}"
    later = f"{score} --n_bits 16 --dataset {plan.data.score_dataset}"
    reason = _obstacle(plan, log)
    if reason:
        return f"{reason}. To have it: {later}"
    how = argparse.Namespace(
        checkpoint=str(plan.output.output_dir), device=plan.backend, precision="auto", n_bits=16, quiet=True
    )
    engine, _, _, _ = open_checkpoint.open_engine(how)
    found: dict = {}
    if data.validation is not None and not plan.objective.facts.is_preference:  # whose loss needs a reference too
        same = plan.changed({"batch_layout": (engine.layout, "this engine is opened with it")})
        batches = data.evaluation_batches(same, engine.pad_id)
        found = data.evaluation_values({name: engine.evaluate(part) for name, part in batches.items()})
    loss = evaluation.Evaluation(found).loss
    scored = evaluation.scores(engine, data, plan.data, loss, stop.requested)
    for line in scored.lines:
        log.say(line)
    if stop.requested():
        return f"a signal came before it was known. To have it: {later}"
    return found | scored.values


def _obstacle(plan: RunPlan, log: Metrics) -> str:
    if plan.dims.world_size > 1:
        return "not scored, as ranks share the model"
    shape = None
    if plan.shape:
        shape = plan.shape.known
    budget = plan.memory_budget
    if shape is None or budget is None:
        return "not scored, as its size is not known"
    needed = ENGINE_BYTES * shape.num_weights * plan.precision.weight_bytes
    held = (log.summary.peak or {"total": 0})["total"]
    if needed > budget.usable - held:
        gib = (n / 2**30 for n in (needed, max(0, budget.usable - held)))
        return "not scored, as it takes {:.1f} GiB and {:.1f} are left beside this model".format(*gib)
    return ""


def uploaded(plan: RunPlan) -> str:
    """Uploads a finished run's folder; the line that says so. Raises PlanError."""
    repo_id = str(plan.output.push_to_hub)
    return upload(plan.output.folder, repo_id, f"{plan.settings.train_type} of {plan.settings.model_name}")
