"""A run's output_dir while it trains: its lock, the content of its checkpoints, restoring and publishing."""

import contextlib
import hashlib
import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

from finetune import safetensors_io
from finetune.checkpoint.lock import Lock
from finetune.checkpoint.published import manifest_of, remove_manifest, verified
from finetune.checkpoint.saved_run import (
    CHECKPOINT_STATE_SCHEMA,
    NO_CHECKPOINT,
    PLAN,
    REQUIRED,
    STATE,
    plan_digest,
    state_of,
)
from finetune.checkpoint.store import (
    LATEST,
    MANIFEST,
    PRETRAINED,
    VerifiedCheckpoint,
    begin_checkpoint,
    check_unowned,
    clean_leftovers,
    clear_run,
    commit_checkpoint,
    folder_of_step,
    holds_a_run,
    keep_aside,
    names_present,
    newest_checkpoint,
    numbered,
    owned_files,
    replace_tensors,
    replace_text,
    save_checkpoint,
    steps_folder,
    storage,
    verify_checkpoint,
    write_parts,
)
from finetune.distributed.launcher import ERRORS_BY_CODE
from finetune.errors import CheckpointDamagedError, NonFiniteError, PlanError, StorageError
from finetune.estimate.budget import GIB
from finetune.estimate.model_shape import ModelShape
from finetune.model_files.files import GENERATION, ModelFiles
from finetune.model_files.llama_pro import TRAINED
from finetune.plan.log_to import tracking
from finetune.plan.parts import Adapter, AddedLayers
from finetune.plan.resume import same_length
from finetune.plan.run_plan import RunPlan, SavedRun, TrainState
from finetune.system.owned_files import kind_of
from finetune.system.untrusted import rust_errors

NUM_SAVED = 3  # weights and, with Adam, two moments per trainable parameter
ADAPTER, FULL, MOMENTS = "adapter_model.safetensors", "model.safetensors", "optimizer.safetensors"
BEST = "best"  # the folder of the weights with the least validation loss


def weights_file(plan: RunPlan) -> str:
    """File name of the trainable weights in a checkpoint."""
    return TRAINED if isinstance(plan.trains, AddedLayers) else ADAPTER if plan.has_adapter else FULL


def files_of(plan: RunPlan) -> ModelFiles:
    """The model's files on this host, which a plan has before it runs."""
    assert plan.files is not None
    return plan.files


def root_of(plan: RunPlan) -> Path:
    """The output_dir, which every resolved plan names."""
    assert plan.settings.output_dir is not None
    return Path(plan.settings.output_dir)


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


SIGNATURE = "<!-- sha256 of the page as it was written, which is replaced while it is so: {} -->\n"


def signed(text: str) -> str:
    """A page with the digest of its text in its last line."""
    return text + SIGNATURE.format(hashlib.sha256(text.encode()).hexdigest())


def is_as_signed(file: Path) -> bool:
    """Whether a page is as it was written, by its last line."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return signed(text.rpartition(SIGNATURE.partition("{}")[0])[0]) == text


class OutputDir:
    """Rank 0's files in the output_dir, while this process holds its lock. Raises PlanError, OutputDirInUseError."""

    def __init__(self, plan: RunPlan):
        self.root, self.plan = root_of(plan), plan
        self.lock = Lock(self.root)
        self.owned = owned_files(self.root)
        # The default folder was created for this run before its plan was printed.
        self.is_own_folder = self.lock.created_folder or "output_dir" not in plan.requested
        saved = plan.resume_from
        self.continues = saved is not None and not saved.is_outside
        if holds_a_run(self.root) and not self.continues and not plan.settings.overwrite:
            self.close()
            ways = "Use --resume auto to continue it, or --overwrite true to replace it"
            raise PlanError(f"--output_dir {self.root}: holds another run. {'Give another folder' if saved else ways}.")
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
        if not self.continues and self.plan.settings.overwrite:
            clear_run(self.root, self.owned)
        if recipe:
            self.write_text(PRETRAINED, recipe)
        latest = str((steps_folder(self.root)[0] / LATEST).relative_to(self.root))
        ranks, later = self.plan.dims.world_size, []  # what this run may write later; a lone process has no watchdog
        if ranks > 1:
            later += [f"stacks/rank-{rank}.txt" for rank in range(ranks)]
        if isinstance(self.plan, RunPlan) and self.plan.objective.facts.needs_reference:
            later.append("reference_log_probs.json")
        later += ["samples.jsonl"] if self.plan.settings.eval_samples else []
        followed = tracking(self.plan.settings.log_to)
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

    def save_plan(self, plan: RunPlan) -> None:
        content = plan.to_json()
        self.write_json(PLAN, content | {"sha256": plan_digest(content)})

    def write_probe(self) -> str:
        """The name of a new file, by which the other ranks tell whether they see this folder."""
        probe = self.root / self.owned.temporary(f"probe-{time.time_ns()}")
        replace_text(probe, "seen by all ranks?", self.owned.id)
        return probe.name

    def check_free_space(self, trainable: int) -> list[str]:
        """A notice if the file system cannot hold the run's checkpoints, before the first is written."""
        s = self.plan.settings
        if not s.save_model:
            return []
        step_bytes = NUM_SAVED * 4 * trainable  # fp32, each
        needed = step_bytes * (s.keep_last + 1)  # one more is written before the oldest is deleted
        free = shutil.disk_usage(self.root).free
        if free >= needed:
            return []
        return [
            f"{self.root} has {free / GIB:.2f} GiB free; {s.keep_last} checkpoints and one being written take about "
            f"{needed / GIB:.2f} GiB. Free some space, or lower --keep_last."
        ]

    def save_tokenizer(self, tokenizer) -> None:
        """Writes the tokenizer's files, each atomically."""
        with storage(self.root), rust_errors(), self.owned.staged() as beside:
            tokenizer.save_pretrained(beside)

    def finish(self, state: TrainState) -> None:
        """Writes the final state, which makes the run complete."""
        clean_leftovers(self.root, self.owned)
        self.write_json(STATE, asdict(replace(state, output_dir=str(self.root))))


class CheckpointWriter:
    """Saves, publishes and restores a run, as a context. Every rank calls every method; `files`: on rank 0 alone.

    `identity` ties checkpoints to base model, tokenizer and data; `configs`: {file: JSON} beside the weights, so that
    others can load them; both set by `describe`. `in_parts`: sharded checkpoints, to which each rank writes its own
    files; set by check_shared_filesystem. `recipe`: the settings of pretrain.py, set before restore_or_begin.
    """

    in_parts = False
    recipe: str | None = None

    def __init__(self, plan: RunPlan, rank: int):
        self.root, self.plan = root_of(plan), plan
        self.files = None if rank else OutputDir(plan)
        self.weights_file = weights_file(plan)
        self.run_id = self.files.owned.id if self.files else ""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.files:
            self.files.close()

    def describe(self, engine, plan: RunPlan, data) -> None:
        """Sets what every checkpoint and the published weights carry beside their tensors."""
        files = files_of(plan)
        self.configs = engine.describe_weights(files.name, files.digest)
        if "config.json" in self.configs and files.generation_config is not None:
            self.configs[GENERATION] = files.generation_config
        vocab_size = ModelShape.from_config(files.config).vocab_size
        self.identity = {"vocab_size": vocab_size, "base model": files.digest, "dataset": data.train.digest()}

    def restore_or_begin(self, engine, plan: RunPlan, data, say) -> tuple[TrainState, int | None, Path | None]:
        """(state, offset in metrics.jsonl, folder of the checkpoint it resumes from or None).

        Then the folder is this run's.

        `say` is called with each line to print. PlanError if the checkpoint belongs to other data. Collective.
        """
        total_steps = data.total_steps(plan)
        state, offset, folder = TrainState(total_steps=total_steps, output_dir=plan.settings.output_dir), None, None
        saved = self._checkpoint_of_all_ranks(engine, plan.resume_from, say) if plan.resume_from else None
        if saved and plan.resume_from:
            state, offset = self.restore(engine, saved)
            folder = saved.folder
            say(f"resumed from {folder} at step {state.step} of {total_steps}")
            if engine.reseeded:
                say("  saved by another engine, world size or degrees: dropout RNG re-seeded per rank")
            if plan.ends_early(state) and same_length(plan, plan.resume_from.saved_plan):
                total_steps = state.step  # it has ended, and only its result was not written yet
            if state.total_steps != total_steps:
                say(f"  total steps: {state.total_steps} -> {total_steps}; the schedule is that of the new total")
            if state.step > total_steps:
                raise PlanError(f"{plan.asked_length}: {folder} is already at step {state.step}. Use a larger one.")
            for line in data.resume(state):
                say(f"  note: {line}")
            state.total_steps, state.status = total_steps, "running"
        for old, new in self.files.begin(state.step, self.recipe) if self.files else []:
            say(f"  note: {old} is kept aside as checkpoints/{new}: this run continues from step {state.step}")
        for line in self.check_shared_filesystem(engine):
            say(f"  note: {line}")
        trainable, _ = engine.parameter_counts()
        for line in self.files.check_free_space(trainable) if self.files else []:
            say(f"  note: {line}")
        self.plan = plan
        if self.files:
            self.files.save_plan(plan)
            self.files.save_tokenizer(data.tokenizer)
        return state, offset, folder

    def _checkpoint_of_all_ranks(self, engine, resume_from: SavedRun, say) -> VerifiedCheckpoint | None:
        saved, skipped = self.find_checkpoint(resume_from.step_folder)
        for line in skipped:
            say(f"  {line}")
        steps = engine.all_gather_object(saved.step if saved else None)
        if len(set(steps)) > 1:
            raise PlanError(
                f"--resume: ranks find different checkpoints in {self.root} (steps {steps}). Give an --output_dir "
                "that all hosts share, or copy it to each."
            )
        return saved

    def save_step(self, engine, state: TrainState, metrics_offset: int) -> Path:
        """Commits checkpoints/step-N: weights, optimizer state, RNG state, data position and plan. Collective."""
        tensors = {"rng.safetensors": engine.rng_state()}
        if self.in_parts:
            beside, written = self._write_parts(engine, state.step)
            values = engine.optimizer_values()
        else:
            moments, values = engine.optimizer_state()
            tensors = {self.weights_file: engine.trainable_state(), MOMENTS: moments, **tensors}
        if not self.files:
            return folder_of_step(self.root, state.step)
        self.files.check_place()
        texts = {name: json.dumps(content, indent=1) for name, content in self.configs.items()}
        texts[PLAN] = json.dumps(self.plan.to_json(), indent=1)
        texts[STATE] = json.dumps(
            {**asdict(state), "engine": values, "metrics_bytes": metrics_offset, "identity": self.identity}, indent=1
        )
        keep_last = self.plan.settings.keep_last
        if not self.in_parts:
            return save_checkpoint(self.root, state.step, tensors, texts, keep_last, self.run_id)
        assert beside is not None
        with storage(beside):
            for file, arrays in tensors.items():
                written[file] = safetensors_io.write_file(beside / file, safetensors_io.shards_of_arrays(arrays))
            texts[safetensors_io.INDEX] = json.dumps(
                safetensors_io.index_of(beside, {f: e for f, e in written.items() if f not in tensors})
            )
        return commit_checkpoint(self.root, state.step, beside, written, texts, keep_last, self.run_id)

    def check_shared_filesystem(self, engine) -> list[str]:
        """Chooses sharded or gathered checkpoints, once the folder is claimed; returns notices to print. Collective.

        Sharded checkpoints need a shared file system: if a rank does not see the folder, tensors are gathered to
        rank 0.
        """
        if not engine.writes_shards:
            return []
        probe = self.root / engine.broadcast_object(self.files and self.files.write_probe())
        blind = [rank for rank, sees in enumerate(engine.all_gather_object(probe.is_file())) if not sees]
        if self.files:
            probe.unlink(missing_ok=True)
        self.in_parts = not blind
        if not blind:
            return []
        return [
            f"rank {blind[0]} does not see --output_dir {self.root}: checkpoints are gathered to rank 0, one tensor at "
            "a time, and held there in full. Use a file system that all hosts share."
        ]

    def _write_parts(self, engine, step: int) -> tuple[Path, dict]:
        """Writes all ranks' shards; (folder of the uncommitted checkpoint, {file: size and digest}). Collective.
        A failure on one rank is raised on all, and the folder is removed.
        """
        beside: Path | None = None
        failed = None
        try:
            if self.files:
                beside = begin_checkpoint(self.root, step, self.run_id)
        except (StorageError, PlanError) as error:
            failed = [error.exit_code, str(error)]
        name, failed = engine.broadcast_object([beside and beside.name, failed])
        written = {}
        if failed is None:
            beside = folder_of_step(self.root, step).with_name(name)
            try:
                weights, moments = engine.state_shards()
                written = write_parts(beside, engine.rank, {self.weights_file: weights, MOMENTS: moments})
            except (StorageError, NonFiniteError, PlanError) as error:
                failed = [error.exit_code, str(error)]
        by_rank = engine.all_gather_object([written, failed])
        for rank, (_, failed) in enumerate(by_rank):
            if failed:
                if self.files and beside:
                    shutil.rmtree(beside, ignore_errors=True)
                code, text = failed
                raise ERRORS_BY_CODE[code](text if rank == 0 else f"rank {rank}: {text}")
        assert beside is not None
        return beside, {file: entry for files, _ in by_rank for file, entry in files.items()}

    def find_checkpoint(self, step_folder: Path | None) -> tuple[VerifiedCheckpoint | None, list[str]]:
        """(checkpoint to resume from or None, notices about skipped ones).
        CheckpointDamagedError if none of them verifies.
        """
        if step_folder is not None:
            return verify_checkpoint(step_folder, REQUIRED), []
        saved, skipped = newest_checkpoint(self.root, REQUIRED)
        if saved is None and skipped:
            raise CheckpointDamagedError(f"{self.root}: no checkpoint verifies. {skipped[0]}")
        if saved is None and self.plan.settings.resume != "auto":
            raise PlanError(f"--resume {self.plan.settings.resume}: {NO_CHECKPOINT}")
        return saved, [f"skipped a damaged checkpoint: {line}" for line in skipped]

    def initial_adapter(self) -> dict | None:
        """Adapter of the checkpoint to resume from if its initialization changed the base weights; else None."""
        trains = self.plan.trains
        if not (self.plan.resume_from and isinstance(trains, Adapter) and trains.init.changes_base):
            return None
        saved, _ = self.find_checkpoint(self.plan.resume_from.step_folder)
        return saved.tensors(self.weights_file) if saved else None

    def restore(self, engine, saved: VerifiedCheckpoint) -> tuple[TrainState, int]:
        """Loads a checkpoint into the engine; (its state, offset in metrics.jsonl).
        PlanError if base or data differ.
        """
        content = saved.json(STATE, CHECKPOINT_STATE_SCHEMA)
        for what, value in content["identity"].items():
            same = self.identity.get(what) == value
            if not same and not (what == "base model" and files_of(self.plan).matches(str(value))):
                flag = {"base model": "model_name", "dataset": "dataset"}.get(what)
                name = f" {getattr(self.plan.settings, flag, '')}".rstrip() if flag else ""
                raise PlanError(
                    f"--resume: the {what}{name} differs from the one that checkpoint {saved.folder} was made with. "
                    f"Give the {what} of that run, or a new --output_dir."
                )
        read = saved.tensors if self.plan.has_adapter else saved.slices
        engine.load_state(
            read(self.weights_file), saved.slices(MOMENTS), content["engine"], saved.tensors("rng.safetensors")
        )
        return state_of(content), content["metrics_bytes"]

    def publish(self, engine, step: int, folder: Path | None = None) -> None:
        """Writes the current weights to the output_dir (or `folder`), each file atomically, and a manifest of them.
        Collective.
        """
        folder = folder or self.root
        adapter = engine.trainable_state() if self.plan.has_adapter else None
        if not self.files:
            if adapter is None:
                engine.write_model(folder)
            return
        subfolder = folder.relative_to(self.root)
        self.files.check_place()
        with storage(folder):
            folder.mkdir(exist_ok=True)
            with self.files.owned.staged(str(subfolder)) as beside:
                if adapter is None:
                    engine.write_model(beside)
                else:
                    replace_tensors(beside / self.weights_file, adapter)
                for name, content in self.configs.items():
                    replace_text(beside / name, json.dumps(content, indent=2) + "\n")
                remove_manifest(folder)
            self.files.write_text(str(subfolder / MANIFEST), manifest_of(folder, step, self.run_id))

    def best_weights(self) -> dict:
        """The adapter in best/, as `publish` wrote it. Raises CheckpointDamagedError."""
        best = self.root / BEST
        with verified(best, [best / self.weights_file]):
            return {
                name: tensor[...] for name, tensor in safetensors_io.CheckpointTensors(best, self.weights_file).items()
            }

    def finish(self, state: TrainState) -> None:
        """Writes the final state, which makes the run complete."""
        if self.files:
            self.files.finish(state)
