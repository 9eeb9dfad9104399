"""A base that a run makes for itself: a model folder in its output_dir, written before the run takes it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from finetune.checkpoint.lock import Lock
from finetune.checkpoint.output_dir import root_of
from finetune.checkpoint.store import holds_a_run, storage
from finetune.errors import PlanError
from finetune.model_files import rope_scaling
from finetune.model_files.files import find_model, with_new_tokens
from finetune.plan.run_plan import RunPlan
from finetune.system.files import new_folder


def on_own_base(plan: RunPlan, name: str, write: Callable[[Path], None], what: str) -> RunPlan:
    """The plan on the base that `write` puts into the folder of this name. `what`: what it is, for the plan's reasons.
    Raises PlanError.
    """
    root = root_of(plan)
    if holds_a_run(root) and not plan.settings.overwrite:
        return plan  # refused with its line when the run takes the folder
    folder = root / name
    lock = Lock(root)
    try:
        write(folder)
    finally:
        lock.release()
    files = with_new_tokens(find_model(str(folder)), plan.settings.new_tokens)
    changes = {"model_name": (str(folder), what), "revision": (None, "a local folder")}
    return replace(plan.changed(changes), files=files)


def with_scaled_base(plan: RunPlan, say: Callable[[str], None]) -> RunPlan:
    """The plan on the base of --rope_scaling, see model_files/rope_scaling.py. Raises PlanError."""
    files = plan.files
    assert files is not None, "make_plan found the base"

    def write(folder: Path) -> None:
        if not folder.exists():
            with storage(folder), new_folder(folder) as made:
                rope_scaling.write_scaled(files, made)
        elif not rope_scaling.is_scaled(files, folder):
            raise PlanError(
                f"--rope_scaling: {folder} holds something other than this base, scaled. Remove it, or give another "
                "--output_dir."
            )
        say(f"base for longer rows: {folder}")

    return on_own_base(plan, rope_scaling.FOLDER, write, "the base with its RoPE scaled")
