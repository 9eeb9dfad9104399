"""Finds the run that --resume names: its folder, the plan it continues by, and whether it has finished.

The plan is that of the newest checkpoint, under its digest. The output_dir's own run_plan.json is newer if a resumed
run was stopped before its first save; what the user asked for is taken from there if it is as this tool wrote it.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar, get_args, get_type_hints

from finetune.checkpoint.lock import check_not_in_use
from finetune.checkpoint.store import newest_run, steps_of, verified_json
from finetune.config import FIELDS, NAMES
from finetune.errors import CheckpointDamagedError, PlanError
from finetune.flag_values import nearest, parse_value, shown
from finetune.model_files.files import local_path
from finetune.model_files.manifest import MANIFEST, read_manifest
from finetune.model_files.published import is_as_published, is_checkpoint
from finetune.parts.train_state import TrainState
from finetune.plan.resume import changed_settings, same_length
from finetune.plan.run_plan import RunPlan, SavedRun
from finetune.system.json_files import NUMBER, OPTIONAL_NUMBER, JsonFileError, read_json

PLAN = "run_plan.json"
STATE = "train_state.json"
# Files that every checkpoint has beside its weights and moments.
REQUIRED = (PLAN, STATE, "rng.safetensors")
PLAN_SCHEMA = {"requested": {str: object}, "settled": {str: object}, "began_from?": str}
# Fields of TrainState that earlier versions did not save.
LATER = ("output_dir", "before", "scores", "exit_code", "eval_pending", "worse_evals", "dataset_tokens", "stream")
STATE_SCHEMA = {
    name + "?" * (name in LATER): get_args(kind) or (kind,) for name, kind in get_type_hints(TrainState).items()
}
# What the train_state.json of a checkpoint holds beside that.
CHECKPOINT_STATE_SCHEMA = STATE_SCHEMA | {
    "engine": {"counts": {str: NUMBER}, "scale": OPTIONAL_NUMBER, "clean_steps": int, "degrees?": [int]},
    "metrics_bytes": int,
    "identity": {str: (str, int)},
}
OF_RESULT = ("save_model", "load_best")  # settings that say what a run at its last step publishes
# Rows that a run is evaluated on, and how their answers are scored.
EVALUATED = ("validation_dataset", "score_dataset")
SCORED_BY = ("score_metric", "score_pattern", "score_max_new_tokens")
AGAIN = "Restore the file as the run wrote it, or start in another --output_dir."
NO_CHECKPOINT = "has no checkpoint to resume from. Give another folder; --resume auto starts a new run here."


def find_saved_run(resume: str | None, output_dir: str | None) -> SavedRun | None:
    """The run that --resume names; None to start from scratch (unset, or auto and nothing saved).
    Raises PlanError, CheckpointDamagedError, OutputDirInUseError.
    """
    if resume is None:
        return None
    if resume == "auto":
        if not output_dir:
            root = newest_run(Path("outputs"))
        else:
            root = Path(output_dir)
        if root is None or not (os.path.isfile(root / PLAN) or steps_of(root)):
            return None
        return _unless_in_use(root, lambda: _of_output_dir(root, "--resume auto"))
    return _named(resume, output_dir)


Found = TypeVar("Found")


def _unless_in_use(root: Path, find: Callable[[], Found]) -> Found:
    """find(). What looks damaged may be what its owner is writing: then the owner is named, or it is read once more."""
    try:
        return find()
    except CheckpointDamagedError:
        check_not_in_use(root)
        return find()


def _named(resume: str, output_dir: str | None) -> SavedRun:
    """The run that `--resume PATH` names."""
    said = f"--resume {resume}"
    root = local_path(resume, said)
    if not root.exists():
        raise PlanError(f"{said}: no such folder. Give an output_dir or one of its checkpoints/step-N.")
    if not root.is_dir():
        raise PlanError(f"{said}: is a file. Give an output_dir or one of its checkpoints/step-N.")
    full = root.resolve()
    of_run = full.parent.parent
    is_copied = bool(output_dir and Path(output_dir).resolve() != of_run) and not (of_run / PLAN).is_file()
    if full.parent.name == "checkpoints" and full.name[:5] == "step-" and full.name[5:].isdigit() and not is_copied:
        root = of_run
        return _unless_in_use(root, lambda: _of_checkpoint(root, full))
    if is_checkpoint(root):
        if not output_dir:
            raise PlanError(f"{said}: is a checkpoint outside of a run's folder. Give the --output_dir to continue in.")
        return _of_checkpoint(Path(output_dir), full)
    saved = _unless_in_use(root, lambda: _of_output_dir(root, said))
    if not steps_of(root) and finished_state(root) is None and not saved.begun:
        raise PlanError(f"{said}: {NO_CHECKPOINT}")
    return saved


def _of_checkpoint(root: Path, step_folder: Path) -> SavedRun:
    """The run of one checkpoint, which continues in `root`: the output_dir it belongs to, or another."""
    found = SavedRun(root, _plan_of_checkpoint(step_folder), step_folder)
    if found.is_outside:
        return found
    return _with_newer_requests(found)


def _of_output_dir(root: Path, said: str) -> SavedRun:
    """The run in an output_dir, by the newest of its checkpoints that has a plan under its digest."""
    plan = newest_plan(root, steps_of(root), _plan_of_checkpoint)
    if plan is not None:
        return _with_newer_requests(SavedRun(root, plan, None))
    try:
        content = read_json(root / PLAN, PLAN_SCHEMA)
    except FileNotFoundError:
        raise PlanError(f"{said}: {root} has no {PLAN}. Give the output_dir of a run.") from None
    except JsonFileError as error:
        raise PlanError(f"{error}. {AGAIN}") from None
    own = checked_plan(content, root / PLAN)
    if "began_from" not in own or finished_state(root) is not None:
        return SavedRun(root, own, None)
    first = Path(own["began_from"])
    if not first.is_dir():
        raise PlanError(
            f"{said}: {root} was begun from {first}, which is gone, and has no checkpoint of its own. Put it back, or "
            "begin in another --output_dir."
        )
    return SavedRun(root, _plan_of_checkpoint(first) | {"requested": own["requested"]}, first, begun=True)


def newest_plan(root: Path, step_folders: list[Path], read: Callable[[Path], dict]) -> dict | None:
    """read(folder) of the first of these that verifies; None if there are none. Raises CheckpointDamagedError."""
    damaged = None
    for folder in step_folders:
        try:
            return read(folder)
        except CheckpointDamagedError as error:
            damaged = damaged or error
    if damaged:
        raise CheckpointDamagedError(f"{root}: no checkpoint verifies. {damaged}")
    return None


def _plan_of_checkpoint(folder: Path) -> dict:
    """The plan in a checkpoint whose files are complete. Raises CheckpointDamagedError."""
    manifest = read_manifest(folder, REQUIRED)
    verified_json(folder, manifest, STATE, CHECKPOINT_STATE_SCHEMA)
    try:
        return checked_plan(verified_json(folder, manifest, PLAN, PLAN_SCHEMA), folder / PLAN)
    except PlanError as error:
        raise CheckpointDamagedError(str(error)) from None


def _with_newer_requests(saved: SavedRun) -> SavedRun:
    """`saved` with what was requested by the output_dir's own plan, if that is as it was written."""
    file = saved.output_dir / PLAN
    try:
        content = read_json(file, PLAN_SCHEMA)
    except FileNotFoundError:
        fact = f"{file} is missing"
    except JsonFileError as error:
        fact = str(error)
    else:
        if "sha256" in content and is_as_written(content):
            newer = saved.saved_plan | {"requested": checked_plan(content, file)["requested"]}
            return SavedRun(saved.output_dir, newer, saved.step_folder)
        fact = f"{file} is not as it was written"
    notice = f"{fact}: the plan of the checkpoint is used"
    return SavedRun(saved.output_dir, saved.saved_plan, saved.step_folder, (notice,))


def plan_digest(content: dict) -> str:
    """sha256 of a plan's JSON, which run_plan.json carries beside it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_as_written(plan: dict) -> bool:
    """True if an output_dir's plan has the sha256 beside it, or none, as a checkpoint's own, which its manifest has."""
    content = dict(plan)
    digest = content.pop("sha256", None)
    return digest is None or digest == plan_digest(content)


def parse_settled(saved: dict, file: Path) -> dict:
    """The settled values of a saved plan, converted to the flags' types. Raises PlanError."""
    return {k: parse_value(k, v, f"{file}: settled {k}") if k in FIELDS else v for k, v in saved["settled"].items()}


def checked_plan(saved: dict, file: Path) -> dict:
    """A saved plan with its requested and settled values converted to the flags' types. Raises PlanError."""
    settled = parse_settled(saved, file)
    for key in ("batch_size", "gradient_accumulation_steps", "max_steps", "num_epochs"):
        if settled.get(key) is None:
            raise PlanError(f"{file}: 'settled' has no {key}. {AGAIN}")
    return saved | {"requested": parse_requested(saved, file), "settled": settled}


def parse_requested(saved: dict, file: Path) -> dict:
    """{flag: value} of what the user of a saved plan set, converted to the flags' types. Raises PlanError."""
    found: dict = {}
    for key, value in saved["requested"].items():
        name = NAMES.get(str(key).replace("-", "_"))
        if name is None:
            raise PlanError(f"{file}: unknown key '{shown(key)}'.{nearest(key, NAMES)}")
        new = parse_value(name, value, f"{file}: {key}")
        if found.get(name, new) != new:
            raise PlanError(f"{file}: {key}: gives --{name} a second value. Give it once.")
        if new is not None:
            found[name] = new
    return found


def finished_run(plan: RunPlan) -> TrainState | None:
    """The final state of the run to be resumed, if it has nothing left to do: steps, or weights to publish again.
    Raises PlanError for a finished run that cannot do what else is asked.
    """
    saved = plan.resume_from
    if saved is None or saved.step_folder:
        return None
    done = finished_state(saved.output_dir)
    if done is None or not is_as_published(saved.output_dir):
        return None
    last = _plan_in(saved)
    different = changed_settings(plan, last)
    changed = [name for name in OF_RESULT if name in different]
    complete = done.step == done.total_steps and same_length(plan, saved.saved_plan) and not changed
    if complete and 0 < (last["settled"].get("early_stopping") or 0) <= done.worse_evals:
        complete = plan.ends_early(done)  # with another --early_stopping it goes on
    if complete:
        return replace(done, output_dir=str(saved.output_dir))  # which may have been moved
    if (saved.output_dir / MANIFEST).is_file() and not steps_of(saved.output_dir):
        asked = f"--{changed[0]}" if changed else "--resume"
        raise PlanError(
            f"{asked}: {saved.output_dir} is finished, and has no checkpoint left to go on from. Begin another run, or "
            "add --overwrite true without --resume to begin this one again."
        )
    return None


def unread_by_finished(plan: RunPlan) -> list[str]:
    """Lines on flags of a finished run that it would only be evaluated by."""
    assert plan.resume_from is not None, "it is finished"
    changed = changed_settings(plan, _plan_in(plan.resume_from))
    names = (*EVALUATED, "score_samples", *SCORED_BY)
    return [f"--{name} is not read by a finished run: score.py measures it" for name in names if name in changed]


def _plan_in(run: SavedRun) -> dict:
    """The plan in the run's folder, by which its result was published; without a readable one, its checkpoint's."""
    try:
        content = read_json(run.output_dir / PLAN, PLAN_SCHEMA)
    except (JsonFileError, FileNotFoundError):
        return run.saved_plan
    return content if is_as_written(content) else run.saved_plan


def finished_state(root: Path) -> TrainState | None:
    """State of a run that finished, else None."""
    try:
        values = read_json(root / STATE, STATE_SCHEMA)
    except (JsonFileError, FileNotFoundError):
        return None
    state = state_of(values)
    return state if state.status == "finished" else None


def state_of(values: dict) -> TrainState:
    """The TrainState in a train_state.json."""
    return TrainState(**{f.name: values[f.name] for f in fields(TrainState) if f.name in values})
