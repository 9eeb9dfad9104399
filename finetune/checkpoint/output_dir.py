"""A run's output_dir while it trains: its lock, whose files are in it, and what rank 0 writes beside checkpoints."""

import contextlib
import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

from finetune.checkpoint.lock import Lock
from finetune.checkpoint.saved_run import PLAN, STATE, plan_digest
from finetune.checkpoint.signed import is_as_signed, signed
from finetune.checkpoint.store import (
    LATEST,
    PRETRAINED,
    check_unowned,
    clean_leftovers,
    clear_run,
    holds_a_run,
    keep_aside,
    names_present,
    numbered,
    owned_files,
    replace_text,
    steps_folder,
    storage,
    subfolders,
)
from finetune.errors import OutputDirInUseError, PlanError, StorageError
from finetune.estimate.budget import GIB
from finetune.model_files.llama_pro import TRAINED
from finetune.model_files.published import remove_manifest
from finetune.model_files.tokenizer import FullTokenizer
from finetune.model_files.tokenizer_files import save_tokenizer
from finetune.parts.log_to import tracking
from finetune.parts.plan_base import PlanBase
from finetune.parts.train_state import TrainState
from finetune.parts.trains import AddedLayers
from finetune.plan.run_plan import RunPlan
from finetune.system.owned_files import kind_of
from finetune.system.untrusted import rust_errors

NUM_SAVED = 3  # weights and, with Adam, two moments per trainable parameter
ADAPTER = "adapter_model.safetensors"
FULL = "model.safetensors"
MOMENTS = "optimizer.safetensors"
BEST = "best"  # the folder of the weights with the least validation loss


def weights_file(plan: PlanBase) -> str:
    """File name of the trainable weights in a checkpoint."""
    return TRAINED if isinstance(plan.trains, AddedLayers) else ADAPTER if plan.has_adapter else FULL


def root_of(plan: PlanBase) -> Path:
    """The output_dir, which every resolved plan names."""
    return plan.output.folder


def with_own_folder(plan: RunPlan) -> RunPlan:
    """The plan with its default output_dir created, under a name of its own if runs start in the same second."""
    if plan.resume_from or plan.settings.dry_run or "output_dir" in plan.requested:
        return plan
    first = root_of(plan)
    with storage(first):
        first.parent.mkdir(exist_ok=True)
        for name in numbered(first):
            with contextlib.suppress(FileExistsError):
                name.mkdir()
                return replace(plan, settings=replace(plan.settings, output_dir=str(name)))
    raise AssertionError(f"{first}: every number is taken")


def clean_finished(root: Path) -> None:
    """Removes what a kill left half-written after a run had finished, its report for one; nothing if another process
    has the folder, or this one may not write there.
    """
    owned = owned_files(root)
    if any(owned.leftovers(subfolders(root))):
        with contextlib.suppress(OutputDirInUseError, StorageError, OSError):
            lock = Lock(root)
            try:
                clean_leftovers(root, owned)
            finally:
                lock.release()


class OutputDir:
    """Rank 0's files in the output_dir, while this process holds its lock. Raises PlanError, OutputDirInUseError."""

    def __init__(self, plan: PlanBase):
        self.root = root_of(plan)
        self.plan = plan
        self.lock = Lock(self.root)
        self.owned = owned_files(self.root)
        # The default folder was created for this run before its plan was printed.
        self.is_own_folder = self.lock.created_folder or "output_dir" not in plan.requested
        saved = plan.resume_from
        self.continues = saved is not None and saved.continues
        if holds_a_run(self.root) and not self.continues and not plan.output.overwrite:
            self.close()
            ways = "Use --resume auto to continue it, or --overwrite true to replace it"
            if saved:
                ways = "Give another folder; --resume auto continues the run that is there"
            raise PlanError(f"--output_dir {self.root}: holds another run. {ways}.")
        try:
            if self.continues:
                self.owned.check(names_present(self.root))
            else:
                check_unowned(self.root, self.owned)
        except PlanError:
            self.close()
            raise

    def begin(self, step: int, recipe: str | None) -> list[tuple[str, str]]:
        """Claims the folder for this run, after every check has passed; returns the checkpoints kept aside.
        `recipe`: of pretrain.py, whose file says where its checkpoints are.

        Removes leftovers of crashes and, with --overwrite, the previous run; keeps checkpoints newer than `step` aside.
        """
        clean_leftovers(self.root, self.owned)
        if not self.continues and self.plan.output.overwrite:
            clear_run(self.root, self.owned)
        if recipe:
            self.write_text(PRETRAINED, recipe)
        latest = str((steps_folder(self.root)[0] / LATEST).relative_to(self.root))
        ranks = self.plan.dims.world_size
        later = []  # what this run may write later
        if ranks > 1:  # a lone process has no watchdog
            later += [f"stacks/rank-{rank}.txt" for rank in range(ranks)]
        if isinstance(self.plan, RunPlan) and self.plan.objective.facts.needs_reference:
            later.append("reference_log_probs.json")
        later += ["samples.jsonl"] if self.plan.output.eval_samples else []
        followed = tracking(self.plan.logs.log_to)
        later += ["trackers.json"] if followed else []
        later += ["metrics.csv"] if "csv" in followed else []
        self.owned.claim(PLAN, STATE, "metrics.jsonl", latest, *later)
        (self.root / STATE).unlink(missing_ok=True)  # first: from now on the run is not complete
        remove_manifest(self.root)
        return keep_aside(self.root, step)

    def check_place(self) -> None:
        """Raises StorageError if the folder was moved or replaced since this process locked it."""
        if not self.lock.is_current():
            raise StorageError(f"{self.root}: was moved or replaced while the run went on, which cannot save there.")

    def close(self) -> None:
        """Releases the lock, and removes the folder if it is new and nothing was written to it."""
        if not holds_a_run(self.root):
            (self.root / ".lock").unlink(missing_ok=True)
            self.owned.remove_list_of_nothing()
            if self.is_own_folder:
                with contextlib.suppress(OSError):  # it holds someone else's files
                    self.root.rmdir()
        self.lock.release()

    def write_json(self, name: str, content: dict) -> None:
        self.write_text(name, json.dumps(content, indent=1) + "\n")

    def write_card(self, name: str, text: str) -> bool:
        """Writes a page about the result; False if someone else's is there, or one that was edited, which stays."""
        kind = kind_of(self.root / name)
        if kind and (kind != "a file" or name not in self.owned.names or not is_as_signed(self.root / name)):
            return False
        self.write_text(name, signed(text))
        return True

    def write_text(self, name: str, text: str) -> None:
        self.owned.claim(name)
        replace_text(self.root / name, text, self.owned.id)

    def save_plan(self, plan: PlanBase) -> None:
        content = plan.to_json()
        self.write_json(PLAN, content | {"sha256": plan_digest(content)})

    def write_probe(self) -> str:
        """The name of a new file, by which the other ranks tell whether they see this folder."""
        probe = self.root / self.owned.temporary(f"probe-{time.time_ns()}")
        replace_text(probe, "seen by all ranks?", self.owned.id)
        return probe.name

    def check_free_space(self, trainable: int) -> list[str]:
        """A notice if the file system cannot hold the run's checkpoints, before the first is written."""
        output = self.plan.output
        if not output.save_model:
            return []
        step_bytes = NUM_SAVED * 4 * trainable  # fp32, each
        needed = step_bytes * (output.keep_last + 1)  # one more is written before the oldest is deleted
        free = shutil.disk_usage(self.root).free
        if free >= needed:
            return []
        return [
            f"{self.root} has {free / GIB:.2f} GiB free; {output.keep_last} checkpoints and one being written take "
            f"about {needed / GIB:.2f} GiB. Free some space, or lower --keep_last."
        ]

    def save_tokenizer(self, tokenizer: FullTokenizer) -> None:
        """Writes the tokenizer's files, each atomically."""
        with storage(self.root), rust_errors(), self.owned.staged() as beside:
            if isinstance(self.plan, RunPlan):
                save_tokenizer(tokenizer, beside, self.plan.model.tokenizer_folder)
            else:
                tokenizer.save_pretrained(beside)

    def finish(self, state: TrainState) -> None:
        """Writes the final state, which makes the run complete."""
        clean_leftovers(self.root, self.owned)
        self.write_json(STATE, asdict(replace(state, output_dir=str(self.root))))
