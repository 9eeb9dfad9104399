"""The checkpoints of a run, as every rank takes part in them: content, saves beside steps, restoring, publishing."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from finetune import safetensors_io
from finetune.adapters.continued import read_saved
from finetune.adapters.heads import FILE as HEAD
from finetune.adapters.saved import PEFT_FILE
from finetune.checkpoint.output_dir import BEST, MOMENTS, OutputDir, root_of, weights_file
from finetune.checkpoint.over_ranks import arrays_of_rank_0, newest_of_all_ranks, of_rank_0, shared_view, view_of
from finetune.checkpoint.saved_run import (
    CHECKPOINT_STATE_SCHEMA,
    EVALUATED,
    NO_CHECKPOINT,
    PLAN,
    REQUIRED,
    SCORED_BY,
    STATE,
    state_of,
)
from finetune.checkpoint.store import (
    VerifiedCheckpoint,
    begin_checkpoint,
    commit_checkpoint,
    folder_of_step,
    newest_checkpoint,
    replace_tensors,
    replace_text,
    save_checkpoint,
    steps_of,
    storage,
    verify_checkpoint,
    write_parts,
)
from finetune.distributed.launcher import ERRORS_BY_CODE
from finetune.engine import Engine
from finetune.errors import CheckpointDamagedError, NonFiniteError, PlanError, StorageError
from finetune.estimate.model_shape import ModelShape
from finetune.model_files.ends import generation_config
from finetune.model_files.files import GENERATION
from finetune.model_files.manifest import MANIFEST, read_manifest
from finetune.model_files.published import manifest_of, remove_manifest, verified
from finetune.parts.plan_base import PlanBase
from finetune.parts.reward import REWARDED
from finetune.parts.run_data import PROCESSOR, RunData
from finetune.parts.train_state import TrainState
from finetune.parts.trains import Adapter
from finetune.plan.resume import same_length
from finetune.plan.run_plan import RunPlan, SavedRun
from finetune.safetensors_io import TensorShard
from finetune.system.threads import in_background

RNG = "rng.safetensors"
REWARDS = "rewards"  # in `identity`: the digest of their files
JUDGED = "answers are judged by what is there now"
COMPARED = "what was measured before is of other rows"
OF_VALIDATION = ("loss", "rewards/")  # how the names of what is measured on validation rows begin
# In `identity`, what may be another when a run is resumed: (what has changed, what follows).
MAY_CHANGE = {
    REWARDS: ("the file of a --reward has", JUDGED),
    REWARDED: ("columns that a --reward reads have", JUDGED),
    **{name: (f"the rows of --{name} have", COMPARED) for name in EVALUATED},
}
FAILURES = (StorageError, NonFiniteError, PlanError)  # of a save


@dataclass(frozen=True)
class Content:
    """One rank's part of a checkpoint: on rank 0 `texts` and `arrays`, {file: {name: array}}; `shards`, {file:
    shards}, into the folder `beside`, if each rank writes its own.
    """

    step: int
    texts: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, dict] = field(default_factory=dict)
    shards: dict[str, list[TensorShard]] = field(default_factory=dict)
    beside: Path | None = None


class CheckpointWriter:
    """Saves, publishes and restores a run, as a context. Every rank calls every method; `files`: on rank 0 alone.

    `identity` ties checkpoints to base model, tokenizer and data; `configs`: {file: JSON} beside the weights, so that
    others can load them; both set by `describe`. `in_parts`: sharded checkpoints, to which each rank writes its own
    files; set by check_shared_filesystem. `recipe`: the settings of pretrain.py, set before restore_or_begin.
    `saving`: the step of a save that has begun, and the end of this rank's part in it. `other_rows`: this run
    evaluates other rows than the checkpoint's did.
    """

    other_rows = False
    in_parts = False
    recipe: str | None = None
    saving: tuple[int, Future] | None = None

    def __init__(self, plan: PlanBase, rank: int):
        self.root = root_of(plan)
        self.place = Path(os.path.abspath(self.root))  # for saves beside steps, whose callbacks may change directory
        self.plan = plan
        if rank:
            self.files = None
        else:
            self.files = OutputDir(plan)
        self.weights_file = weights_file(plan)
        if self.files:
            self.run_id = self.files.owned.id
        else:
            self.run_id = ""

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self.files:
            self.files.close()

    def describe(
        self,
        engine: Engine,
        plan: RunPlan,
        learned_ends: Collection[int],
        rows: dict[str, str],
        *,
        reads_messages: bool,
    ) -> None:
        """Sets what every checkpoint and the published weights carry beside their tensors. `rows`: see Data.digests;
        `reads_messages`: of a head, its rows are messages. Collective. PlanError if a rank reads another base, adapter
        or reward or other rows, as of a folder that each host has for itself.
        """
        files = plan.model
        self.configs = engine.describe_weights(files.name, files.digest)
        if HEAD in self.configs:
            self.configs[HEAD] |= {"messages": reads_messages, "whole": True}
        generation = generation_config(files.generation_config, files.config, set(learned_ends))
        if generation is not None and ("config.json" in self.configs or generation != files.generation_config):
            self.configs[GENERATION] = generation
        vocab_size = ModelShape.from_config(files.config).vocab_size
        self.identity = {"vocab_size": vocab_size, "base model": files.digest}
        self.identity |= {name: rows[name] for name in (PROCESSOR, "dataset", "teacher", *EVALUATED) if name in rows}
        if plan.data.reward is not None:
            self.identity[REWARDS] = plan.data.reward.digest()
            self.identity[REWARDED] = rows[REWARDED]
        named = {PROCESSOR: f"--model_name {files.name}, {PROCESSOR}"}
        read = {named.get(name, f"--{name}"): digest for name, digest in rows.items() if name != REWARDED}
        read[f"--model_name {files.name}"] = files.digest
        if plan.data.reward is not None:
            read["--reward"] = plan.data.reward.digest()
        if plan.settings.adapter and not plan.settings.adapter_merge and not plan.resume_from:
            folder = read_saved(str(plan.settings.adapter)).folder
            read[f"--adapter {plan.settings.adapter}"] = safetensors_io.digest_of(folder / PEFT_FILE)
        by_rank = engine.all_gather_object(read)
        for rank, found in enumerate(by_rank):
            other = next((flag for flag, digest in by_rank[0].items() if found.get(flag) != digest), None)
            if other is not None:
                raise PlanError(
                    f"{other}: rank {rank} reads other files than rank 0 (sha256 differs). Give all ranks the same, "
                    "by a path that leads to them on every host."
                )

    def restore_or_begin(
        self, engine: Engine, plan: PlanBase, data: RunData, say: Callable[[str], object]
    ) -> tuple[TrainState, int | None, Path | None]:
        """(state, offset in metrics.jsonl, folder of the checkpoint it resumes from or None).

        From here on the folder belongs to this run.

        `say` is called with each line to print. PlanError if the checkpoint belongs to other data. Collective.
        """
        total_steps = data.total_steps(plan)
        state = TrainState(total_steps=total_steps, output_dir=plan.output.output_dir)
        offset = None
        folder = None
        saved = None
        if plan.resume_from:
            saved = self._checkpoint_of_all_ranks(engine, plan.resume_from, say)
        if saved and plan.resume_from:
            state, offset = self.restore(engine, saved)
            folder = saved.folder
            say(f"resumed from {folder} at step {state.step} of {total_steps}")
            if plan.ends_early(state) and same_length(plan, plan.resume_from.saved_plan):
                total_steps = state.step  # it has ended, and its result was not written yet, or is asked to end here
                say(f"  ends here: {state.worse_evals} evaluations in a row without a better validation loss")
            changed = self._say_of_changes(saved, say)
            self.other_rows = bool(changed & {*EVALUATED})
            if "validation_dataset" in changed:
                state.before = None
            elif state.before and (self.other_rows or self._scores_otherwise(plan.resume_from)):
                state.before = {name: value for name, value in state.before.items() if name.startswith(OF_VALIDATION)}
            if "validation_dataset" in changed or not self._has_its_best(engine, state, say):
                state.forget_best()
            if engine.reseeded:
                say("  saved by another engine, world size or degrees: dropout RNG re-seeded per rank")
            if state.total_steps != total_steps:
                say(f"  total steps: {state.total_steps} -> {total_steps}; the schedule is that of the new total")
            if state.step > total_steps:
                raise PlanError(f"{plan.asked_length}: {folder} is already at step {state.step}. Use a larger one.")
            for line in data.resume(state):
                say(f"  note: {line}")
            state.total_steps = total_steps
            state.status = "running"
        for old, new in self.files.begin(state.step, self.recipe) if self.files else []:
            say(f"  note: {old} is kept aside as checkpoints/{new}: this run continues from step {state.step}")
        for line in self.check_shared_filesystem(engine):
            say(f"  note: {line}")
        trainable, _ = engine.parameter_counts()
        for line in self.files.check_free_space(trainable) if self.files else []:
            say(f"  note: {line}")
        self.plan = plan
        if self.files:
            self.files.save_tokenizer(data.tokenizer)  # before the plan, from which on a killed run can be resumed
            self.files.save_plan(plan)
        return state, offset, folder

    def _checkpoint_of_all_ranks(
        self, engine: Engine, resume_from: SavedRun, say: Callable[[str], object]
    ) -> VerifiedCheckpoint | None:
        named = resume_from.step_folder
        root = self.root
        if named is None or named.is_relative_to(root.resolve()):
            view = shared_view(engine, root, self.files.lock.text if self.files else None)
        else:
            view = view_of(named, engine.rank)
        found = newest_of_all_ranks(engine, steps_of(root) if named is None else [named], REQUIRED, view)
        saved, skipped = self._usable(named, *found)
        for line in skipped:
            say(f"  {line}")
        steps = engine.all_gather_object(saved.step if saved else None)
        if len(set(steps)) > 1:
            raise PlanError(
                f"--resume: ranks find different checkpoints in {self.root} (steps {steps}). Give an --output_dir "
                "that all hosts share, or copy it to each."
            )
        return saved

    # ---- saving

    def save_step(self, engine: Engine, state: TrainState, metrics_offset: int) -> Path:
        """Commits checkpoints/step-N: weights, optimizer state, RNG state, data position and plan. Collective.
        Raises StorageError, NonFiniteError, PlanError, on all ranks alike.
        """
        assert self.saving is None, "the save before has not ended"
        content = self._content(engine, state, metrics_offset)
        return self._agreed(engine, content.step, partial(self._write, engine, content))

    def begin_save(self, engine: Engine, state: TrainState, metrics_offset: int) -> None:
        """Begins what save_step does: copies the state, which a thread writes while steps go on. `end_save` says when
        it is committed, and comes before the next save. Collective.
        """
        assert self.saving is None, "the save before has not ended"
        with engine.snapshot():
            content = self._content(engine, state, metrics_offset)
        self.saving = content.step, in_background(self._write, engine, content)

    def end_save(self, engine: Engine, wait: bool) -> tuple[int, Path] | None:
        """(step, its folder) of the save that has begun, once all ranks have committed it; None before, unless `wait`,
        and if none has begun. Raises as save_step. Collective.
        """
        if self.saving is None:
            return None
        step, future = self.saving
        if future.done() and not isinstance(future.exception(), (*FAILURES, type(None))):
            future.result()  # the fault of one rank, for which the others would wait
        if not wait and engine.all_reduce_max(int(not future.done())):
            return None
        self.saving = None
        return step, self._agreed(engine, step, future.result)

    def abandon_save(self) -> tuple[int, Path] | None:
        """(step, its folder) of the save that has begun, if rank 0 has committed it; waits for this rank's part only.
        For a run that ends by another error, which is the one to say.
        """
        if self.saving is None:
            return None
        (step, future), self.saving = self.saving, None
        if future.exception():
            return None
        return (step, folder_of_step(self.root, step))

    def _content(self, engine: Engine, state: TrainState, metrics_offset: int) -> Content:
        """This rank's part of a checkpoint. Collective."""
        arrays = {RNG: engine.rng_state()}
        shards = {}
        beside = None
        if self.in_parts:
            assert engine.shard_writer is not None, "see check_shared_filesystem"
            beside = self._begin_parts(engine, state.step)
            weights, moment_shards = engine.shard_writer.state_shards()
            shards = {self.weights_file: weights, MOMENTS: moment_shards}
            values = engine.optimizer_values()
        else:
            moments, values = engine.optimizer_state()
            arrays = {self.weights_file: engine.trainable_state(), MOMENTS: moments, **arrays}
        if not self.files:
            return Content(state.step, shards=shards, beside=beside)
        texts = {name: json.dumps(content, indent=1) for name, content in self.configs.items()}
        texts[PLAN] = json.dumps(self.plan.to_json(), indent=1)
        texts[STATE] = json.dumps(
            {**asdict(state), "engine": values, "metrics_bytes": metrics_offset, "identity": self.identity}, indent=1
        )
        return Content(state.step, texts, arrays, shards, beside)

    def _begin_parts(self, engine: Engine, step: int) -> Path:
        """The new folder that all ranks write to. A failure on rank 0 is raised on all. Collective."""
        name = of_rank_0(engine, lambda: begin_checkpoint(self.place, step, self.run_id).name)
        return folder_of_step(self.place, step).with_name(name)

    def _write(self, engine: Engine, content: Content) -> None:
        """Writes and commits, while other threads may train. A rank's failure to write its shards is raised on all,
        and the folder is removed.
        """
        written = {}
        if content.beside:
            written = self._write_shards(engine, content)
        if not self.files:
            return
        self.files.check_place()
        keep_last = self.plan.output.keep_last
        step = content.step
        texts = content.texts
        if content.beside is None:
            save_checkpoint(self.place, step, content.arrays, texts, keep_last, self.run_id)
            return
        with storage(content.beside):
            of_ranks = dict(written)
            for file, arrays in content.arrays.items():
                shards = safetensors_io.shards_of_arrays(arrays)
                written[file] = safetensors_io.write_file(content.beside / file, shards)
            texts = texts | {safetensors_io.INDEX: json.dumps(safetensors_io.index_of(content.beside, of_ranks))}
        commit_checkpoint(self.place, step, content.beside, written, texts, keep_last, self.run_id)

    def _write_shards(self, engine: Engine, content: Content) -> dict:
        """Writes this rank's shards; {file: size and digest} of all ranks'. Collective, beside those of the steps."""
        written = {}
        failed = None
        assert content.beside is not None and engine.shard_writer is not None
        try:
            written = write_parts(content.beside, engine.rank, content.shards)
        except FAILURES as error:
            failed = [error.exit_code, str(error)]
        by_rank = engine.shard_writer.gather_beside_steps([written, failed])
        for rank, (_, failed) in enumerate(by_rank):
            if failed:
                if self.files:
                    shutil.rmtree(content.beside, ignore_errors=True)
                code, text = failed
                raise ERRORS_BY_CODE[code](text if rank == 0 else f"rank {rank}: {text}")
        return {file: entry for files, _ in by_rank for file, entry in files.items()}

    def _agreed(self, engine: Engine, step: int, write: Callable[[], object]) -> Path:
        """The folder of the checkpoint, after write() on every rank; the first rank's failure, on all. Collective."""
        own: Exception | None = None
        failed = None
        try:
            write()
        except FAILURES as error:
            own = error
            failed = [error.exit_code, str(error)]
        failures = [failed for failed in engine.all_gather_object(failed) if failed]
        if own and failed == failures[0]:
            raise own
        if failures:
            code, text = failures[0]
            raise ERRORS_BY_CODE[code](text)
        return folder_of_step(self.root, step)

    def check_shared_filesystem(self, engine: Engine) -> list[str]:
        """Chooses sharded or gathered checkpoints, once the folder is claimed; returns notices to print. Collective.

        Sharded checkpoints need a shared file system: if a rank does not see the folder, tensors are gathered to
        rank 0.
        """
        if engine.shard_writer is None:
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

    # ---- restoring

    def find_checkpoint(self, step_folder: Path | None) -> tuple[VerifiedCheckpoint | None, list[str]]:
        """(checkpoint to resume from or None, notices about skipped ones), every file of which this rank has hashed.
        CheckpointDamagedError if none of them verifies.
        """
        if step_folder is not None:
            return verify_checkpoint(step_folder, REQUIRED), []
        return self._usable(None, *newest_checkpoint(self.root, REQUIRED))

    def _usable(
        self, named: Path | None, saved: VerifiedCheckpoint | None, skipped: list[str]
    ) -> tuple[VerifiedCheckpoint | None, list[str]]:
        """The checkpoint found, with notices. CheckpointDamagedError if nothing verifies. `named`: the one that was
        asked for.
        """
        if saved is None and skipped:
            raise CheckpointDamagedError(skipped[0] if named else f"{self.root}: no checkpoint verifies. {skipped[0]}")
        if saved is None and self.plan.settings.resume != "auto":
            raise PlanError(f"--resume {self.plan.settings.resume}: {NO_CHECKPOINT}")
        return saved, [f"skipped a damaged checkpoint: {line}" for line in skipped]

    def initial_adapter(self) -> dict | None:
        """Adapter of the checkpoint to resume from if its initialization changed the base weights; else None."""
        trains = self.plan.trains
        if not (self.plan.resume_from and isinstance(trains, Adapter) and trains.init.changes_base):
            return None
        saved, _ = self.find_checkpoint(self.plan.resume_from.step_folder)
        if saved:
            return saved.tensors(self.weights_file)
        return None

    def restore(self, engine: Engine, saved: VerifiedCheckpoint) -> tuple[TrainState, int]:
        """Loads a checkpoint into the engine; (its state, offset in metrics.jsonl).
        PlanError if base or data differ.
        """
        content = saved.json(STATE, CHECKPOINT_STATE_SCHEMA)
        for what, value in content["identity"].items():
            same = self.identity.get(what) == value or what in MAY_CHANGE
            if not same and not (
                what == "base model" and isinstance(self.plan, RunPlan) and self.plan.model.matches(str(value))
            ):
                flag = {"base model": "model_name", "dataset": "dataset"}.get(what)
                name = ""
                if flag:
                    name = f" {getattr(self.plan.settings, flag, '')}".rstrip()
                split = getattr(self.plan.settings, "validation_split", None)
                otherwise = ""
                if what == "dataset":
                    otherwise = ", or an earlier version read its rows otherwise (CHANGELOG.md)"
                if split and what == "dataset":
                    otherwise += f", or held out other rows of it by --validation_split {split}"
                raise PlanError(
                    f"--resume: the {what}{name} differs from the one that checkpoint {saved.folder} was made with"
                    f"{otherwise}. Give the {what} of that run, or a new --output_dir."
                )
        read = saved.tensors if self.plan.has_adapter else saved.slices
        engine.load_state(read(self.weights_file), saved.slices(MOMENTS), content["engine"], saved.tensors(RNG))
        return state_of(content), content["metrics_bytes"]

    def _say_of_changes(self, saved: VerifiedCheckpoint, say: Callable[[str], object]) -> set[str]:
        """The names in MAY_CHANGE of what has changed, each said: that may be a correction."""
        before = saved.json(STATE, CHECKPOINT_STATE_SCHEMA)["identity"]
        found = [
            what
            for what in MAY_CHANGE
            if what in before and what in self.identity and before[what] != self.identity[what]
        ]
        for what in found:
            changed, so = MAY_CHANGE[what]
            say(f"  note: {changed} changed since: {so}")
        return set(found)

    def _scores_otherwise(self, saved: SavedRun) -> bool:
        """True if answers are scored in another way than in the saved run."""
        settled = self.plan.to_json()["settled"]
        return any(settled.get(name) != saved.saved_plan["settled"].get(name) for name in SCORED_BY)

    def _has_its_best(self, engine: Engine, state: TrainState, say: Callable[[str], object]) -> bool:
        """True if best/ has the weights of the state's best step, or none are kept there. Otherwise a run went on from
        here and found better ones, or somebody removed them. If those of this step are there, the checkpoint was saved
        before its evaluation, which is due. Collective.
        """
        if not self.plan.output.keeps_best:
            return True

        def step_of_best() -> int | None:
            with contextlib.suppress(CheckpointDamagedError):
                return read_manifest(self.root / BEST, (self.weights_file,))["step"]
            return None

        step = of_rank_0(engine, step_of_best)
        if step == state.best_step:
            return True
        if step == state.step:
            state.eval_pending = True
        elif state.best_step is not None:
            has = "no weights" if step is None else f"the weights of step {step}"
            say(f"  note: {BEST}/ has {has}, and not those of step {state.best_step}: the best is found anew from here")
        return False

    def publish(self, engine: Engine, step: int, folder: Path | None = None) -> None:
        """Writes the current weights to the output_dir (or `folder`), each file atomically, and a manifest of them.
        Collective.
        """
        folder = folder or self.root
        adapter = None
        if self.plan.has_adapter:
            adapter = engine.trainable_state()
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

    def best_weights(self, engine: Engine) -> dict:
        """The adapter in rank 0's best/, as `publish` wrote it. Raises CheckpointDamagedError. Collective."""
        best = self.root / BEST

        def read() -> dict:
            with verified(best, [best / self.weights_file]):
                tensors = safetensors_io.CheckpointTensors(best, self.weights_file)
                return {name: tensor[...] for name, tensor in tensors.items()}

        manifest = None
        with contextlib.suppress(OSError):
            manifest = (best / MANIFEST).read_text()
        if all(engine.all_gather_object(manifest == engine.broadcast_object(manifest))):
            return read()
        return arrays_of_rank_0(engine, read)

    def finish(self, state: TrainState) -> None:
        """Writes the final state, which makes the run complete."""
        if self.files:
            self.files.finish(state)
