"""Log-probabilities of each answer under the model before training, computed once: kept in the output folder, verified
when resumed.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from finetune.adapters.continued import read_saved
from finetune.adapters.saved import adapter_digest
from finetune.arrays import Named, Per
from finetune.checkpoint.store import replace_text, steps_of, storage
from finetune.data.collate import microbatches
from finetune.data.run_data import Data
from finetune.data.tokens.tokenize import TokenizedDataset
from finetune.engine import FineTuningEngine
from finetune.errors import PlanError
from finetune.plan.run_plan import RunPlan
from finetune.system.json_files import NUMBER, JsonFileError, read_json
from finetune.system.process import StopSignal

FILE = "reference_log_probs.json"
SCHEMA = {"key": str, "sha256": str, "log_probs": {str: [NUMBER]}, "adapter?": (str, type(None))}
LARGEST = 1e30  # of a log-probability: no answer's comes near
# lines of progress
PARTS = 50
SAY_EVERY_S = 10.0
# Settings that decide the model before training; the base and the rows have digests.
DECIDING = ("precision", "quantization_backend", "n_bits", "group_size", "quant_type", "double_quant")


def check_reference(engine: FineTuningEngine, data: Data, plan: RunPlan, root: Path) -> None:
    """Raises PlanError if a resumed run's reference is lost: an adapter, trained further since. Called before anything
    is written. Collective.
    """
    if not plan.objective.precomputes_reference or not plan.objective.reference_is_adapter or plan.resume_from is None:
        return

    def fault() -> str | None:
        assert plan.resume_from is not None, "looked at above"
        goes_on = plan.resume_from.step_folder or steps_of(root)
        datasets = _datasets(data)
        if not goes_on or _read(root, _key(plan, datasets), datasets, None) is not None:
            return None
        if plan.resume_from.step_folder and not plan.resume_from.step_folder.is_relative_to(root.resolve()):
            return "is not here, but in the folder of the checkpoint's run. Resume it there"
        if _is_whole(root):
            return "is of other rows or settings. Give the --dataset and --validation_dataset of then"
        return "is missing or damaged. Restore it"

    found = engine.broadcast_object(fault() if engine.rank == 0 else None)
    if found:
        raise PlanError(
            f"--resume: {root / FILE} {found}, or start again: the reference, --adapter, has trained since."
        )


def with_reference(
    engine: FineTuningEngine,
    data: Data,
    plan: RunPlan,
    root: Path,
    run_id: str,
    say: Callable[[str], object],
    stop: StopSignal,
    step: int = 0,
):
    """The data with each document's log-probability under the reference, if the plan computes them once. Collective."""
    if not plan.objective.facts.needs_reference or not plan.objective.precomputes_reference:
        return data
    datasets = _datasets(data)
    key = _key(plan, datasets)
    adapter = None
    if engine.rank == 0 and plan.objective.reference_is_adapter and not step:  # a resumed run does not read it again
        adapter = adapter_digest(read_saved(str(plan.settings.adapter)).folder)
    found = engine.broadcast_object(_read(root, key, datasets, adapter) if engine.rank == 0 else None)
    if found is None:
        number = sum(len(dataset) for dataset in datasets.values())
        say(f"computing what the model before training gives {number:,} answers")
        found = {use: _computed(engine, dataset, plan, stop, say) for use, dataset in datasets.items()}
        if stop.requested():
            return data
        if engine.rank == 0 and plan.output.save_model:
            with storage(root):
                content = {"key": key, "sha256": _digest(found), "log_probs": found, "adapter": adapter}
                replace_text(root / FILE, json.dumps(content), run_id)
    else:
        say(f"what the model before training gives each answer: from {root / FILE}")
    known = {}
    for use, values in found.items():
        array = Named(np.array(values, np.float64), Per.DOCUMENT, is_data=False)
        known[use] = replace(datasets[use], arrays={**datasets[use].arrays, "reference": array})
    return replace(data, train=known["train"], validation=known.get("validation"))


def _datasets(data: Data) -> dict[str, TokenizedDataset]:
    return {"train": data.train} | ({"validation": data.validation} if data.validation else {})


def _is_whole(root: Path) -> bool:
    """True for a file as it was written, of whatever rows."""
    try:
        content = read_json(root / FILE, SCHEMA)
    except (FileNotFoundError, JsonFileError):
        return False
    return content["sha256"] == _digest(content["log_probs"])


def _computed(
    engine: FineTuningEngine, dataset: TokenizedDataset, plan: RunPlan, stop: StopSignal, say: Callable[[str], object]
) -> list[float]:
    """Log-probability of each document; nothing if a signal ended it. `say` is called with a line of progress now and
    then.
    """
    rows = dataset.num_rows
    found: dict[int, float] = {}
    batches = microbatches(dataset, range(rows), plan.data.layout, rows, plan.steps.microbatch_tokens, engine.pad_id)
    began = said = time.monotonic()
    for part in np.array_split(np.arange(len(batches)), min(len(batches), PARTS)):
        stop.sync(engine.all_reduce_max)  # of several ranks, all hear a signal at the same part
        found |= engine.log_probs_before_training([batches[i] for i in part], stop.requested)
        now = time.monotonic()
        done = len(found)
        if now - said > SAY_EVERY_S and done < len(dataset):
            said = now
            left = (now - began) * (len(dataset) / max(1, done) - 1)
            say(f"  {done:,} of {len(dataset):,} answers, {left:,.0f} s left")
    if len(found) == len(dataset):
        return [found[i] for i in range(len(dataset))]
    return []


def _read(root: Path, key: str, datasets: dict, adapter: str | None) -> dict | None:
    """The results of an earlier run for the same rows and model; None if they are not here, or damaged. `adapter`: the
    digest of the one that is the reference; None for one that trains already.
    """
    try:
        content = read_json(root / FILE, SCHEMA)
    except (FileNotFoundError, JsonFileError):
        return None
    whole = content["key"] == key and content["sha256"] == _digest(content["log_probs"])
    if adapter is not None:
        whole = whole and content.get("adapter") == adapter
    found = content["log_probs"]
    fits = {use: len(values) for use, values in found.items()} == {use: len(rows) for use, rows in datasets.items()}
    in_range = all(abs(value) < LARGEST for values in found.values() for value in values)
    return found if whole and fits and in_range else None


def _key(plan: RunPlan, datasets: dict) -> str:
    settings = asdict(plan.settings)
    start = []
    if plan.objective.reference_is_adapter:
        start = [plan.settings.adapter]
    what = [
        *start,
        plan.model.digest,
        [settings[name] for name in DECIDING],
        {u: d.digest() for u, d in datasets.items()},
    ]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _digest(log_probs: dict) -> str:
    return hashlib.sha256(json.dumps(log_probs, sort_keys=True).encode()).hexdigest()
