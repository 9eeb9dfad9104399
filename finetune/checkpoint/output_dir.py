"""A run's output_dir: its lock, the content of its checkpoints, and finding and resuming a saved run."""

import contextlib
import json
import os
import re
import shutil
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

from finetune import cli, safetensors_io
from finetune.checkpoint.store import (
    WRITING,
    Lock,
    VerifiedCheckpoint,
    begin_checkpoint,
    clean_leftovers,
    clear_run,
    commit_checkpoint,
    drop_newer,
    holds_a_run,
    newest_checkpoint,
    newest_run,
    replace_tensors,
    replace_text,
    save_checkpoint,
    storage,
    verify_checkpoint,
    write_parts,
)
from finetune.config import FIELDS, RESIDUAL_INITS
from finetune.distributed.launcher import ERRORS_BY_CODE
from finetune.errors import CheckpointDamagedError, NonFiniteError, PlanError, StorageError
from finetune.estimate.model_shape import ModelShape
from finetune.model_files.files import local_path
from finetune.model_files.llama_pro import TRAINED
from finetune.plan.resume import same_length
from finetune.plan.run_plan import RunPlan, SavedRun, TrainState

ADAPTER, FULL, MOMENTS = "adapter_model.safetensors", "model.safetensors", "optimizer.safetensors"


def find_saved_run(resume: str | None, output_dir: str | None) -> SavedRun | None:
    """The run that --resume names; None to start from scratch (unset, or auto and nothing saved). Raises PlanError."""
    if resume is None:
        return None
    step_folder = None
    if resume == "auto":
        root = Path(output_dir) if output_dir else newest_run(Path("outputs"))
        if root is None or not (root / "run_plan.json").is_file():
            return None
    else:
        root = local_path(resume, f"--resume {resume}")
        if not root.exists():
            raise PlanError(f"--resume {resume}: no such folder. Give an output_dir or one of its checkpoints/step-N.")
        if not root.is_dir():
            raise PlanError(f"--resume {resume}: is a file. Give an output_dir or one of its checkpoints/step-N.")
        whole = root.resolve()
        if re.fullmatch(r"step-\d+", whole.name) and whole.parent.name == "checkpoints":
            root, step_folder = whole.parent.parent, whole
    file = root / "run_plan.json"
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"--resume {resume}: {root} has no run_plan.json. Give the output_dir of a run.") from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointDamagedError(f"{file}: cannot be read ({error})") from None
    return SavedRun(root, _checked_plan(saved, file), step_folder)


def _checked_plan(saved, file: Path) -> dict:
    """A saved plan with its requested and settled values converted to the flags' types. Raises PlanError."""
    again = "Restore the file as the run wrote it, or start in another --output_dir."
    if not isinstance(saved, dict):
        raise PlanError(f"{file}: contains {type(saved).__name__}, must contain an object. {again}")
    for key in ("requested", "settled"):
        if not isinstance(saved.get(key), dict):
            fact = f"is {type(saved[key]).__name__}, must be an object" if key in saved else "is missing"
            raise PlanError(f"{file}: '{key}' {fact}. {again}")
    settled = {
        k: cli.parse_value(k, v, f"{file}: settled {k}") if k in FIELDS else v for k, v in saved["settled"].items()
    }
    for key in ("batch_size", "gradient_accumulation_steps", "max_steps", "num_epochs"):
        if settled.get(key) is None:
            raise PlanError(f"{file}: 'settled' has no {key}. {again}")
    return saved | {"requested": cli.parse_config(saved["requested"], str(file)), "settled": settled}


def finished_run(plan: RunPlan) -> TrainState | None:
    """The final state of the run to be resumed, if it has nothing left to do."""
    saved = plan.resume_from
    done = finished_state(saved.output_dir) if saved and not saved.step_folder else None
    complete = done and done.step == done.total_steps and same_length(plan, saved.saved_plan)
    return done if complete else None


def finished_state(root: Path) -> TrainState | None:
    """State of a run that finished, else None."""
    try:
        values = json.loads((root / "train_state.json").read_text())
    except (OSError, ValueError):
        return None
    state = _state(values)
    return state if state.status == "finished" else None


def _state(values: dict) -> TrainState:
    return TrainState(**{f.name: values[f.name] for f in fields(TrainState) if f.name in values})


def weights_file(plan: RunPlan) -> str:
    """File name of the trainable weights in a checkpoint."""
    return TRAINED if plan.settings.llama_pro_path else ADAPTER if plan.has_adapter else FULL


def open_output_dir(plan: RunPlan, rank: int) -> "OutputDir":
    """The plan's output_dir: locked by rank 0, read by the others. Raises PlanError, OutputDirInUseError."""
    return NonMasterOutputDir(plan) if rank else OutputDir(plan)


class OutputDir:
    """The output_dir while this process holds its lock, as a context.

    `identity` ties checkpoints to base model, tokenizer and data; `configs`: {file: JSON} beside the weights, so that
    others can load them; both set by `describe`. `in_parts`: sharded checkpoints, to which each rank writes its own
    files; set by check_shared_filesystem.
    """

    in_parts = False

    def __init__(self, plan: RunPlan):
        self.root, self.plan = Path(plan.settings.output_dir), plan
        self.lock = Lock(self.root)
        self.weights_file = weights_file(plan)
        self.run_id = plan.digest()[:16]
        if not holds_a_run(self.root) and (self.root / "config.json").exists():
            self.close()
            raise PlanError(
                f"--output_dir {self.root}: holds a model that was not written by this tool. Give another folder."
            )
        if holds_a_run(self.root) and not plan.resume_from and not plan.settings.overwrite:
            self.close()
            raise PlanError(
                f"--output_dir {self.root}: holds another run. Use --resume auto to continue it, or --overwrite true "
                "to replace it."
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def describe(self, engine, plan: RunPlan, data) -> None:
        """Sets what every checkpoint and the published weights carry beside their tensors."""
        self.configs = engine.describe_weights(plan.files.name, plan.files.digest)
        vocab_size = ModelShape.from_config(plan.files.config).vocab_size
        self.identity = {"vocab_size": vocab_size, "base model": plan.files.digest, "dataset": data.train.digest()}

    def restore_or_begin(self, engine, plan: RunPlan, data, say) -> tuple[TrainState, int | None, Path | None]:
        """(state, offset in metrics.jsonl, folder of the checkpoint it resumes from or None).

        Then the folder is this run's.

        `say` is called with each line to print. PlanError if the checkpoint belongs to other data. Collective.
        """
        total_steps = data.total_steps(plan)
        state, offset, folder = TrainState(total_steps=total_steps, output_dir=plan.settings.output_dir), None, None
        saved = self._checkpoint_of_all_ranks(engine, plan.resume_from, say) if plan.resume_from else None
        if saved:
            state, offset = self.restore(engine, saved)
            folder = saved.folder
            say(f"resumed from {folder} at step {state.step} of {total_steps}")
            if engine.reseeded:
                say("  saved with a different world size or degrees: dropout RNG re-seeded per rank")
            if state.total_steps != total_steps:
                say(f"  total steps: {state.total_steps} -> {total_steps}; the schedule is that of the new total")
            if state.step > total_steps:
                raise PlanError(
                    f"--max_steps {plan.settings.max_steps}: {folder} is already at step {state.step}. Use a larger "
                    "one."
                )
            state.total_steps, state.status = total_steps, "running"
        dropped = self.begin(state.step if plan.resume_from else None)
        if dropped:
            say(f"  dropped {', '.join(dropped)}: this run continues from step {state.step}")
        for line in self.check_shared_filesystem(engine):
            say(f"  note: {line}")
        self.save_plan(plan)
        self.save_tokenizer(data.tokenizer)
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

    def begin(self, resumed_step: int | None) -> list[str]:
        """Claims the folder for this run, after every check has passed; returns the names of deleted checkpoints.

        Removes leftovers of crashes, the previous run with --overwrite, and checkpoints newer than `resumed_step`
        (None: a new run).
        """
        clean_leftovers(self.root)
        if resumed_step is None and self.plan.settings.overwrite:
            clear_run(self.root)
        (self.root / "train_state.json").unlink(missing_ok=True)  # first: from now on the run is not complete
        return [] if resumed_step is None else drop_newer(self.root, resumed_step)

    def close(self) -> None:
        """Releases the lock, and removes the folder if nothing was written to it."""
        if not holds_a_run(self.root):
            (self.root / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds someone else's files
                self.root.rmdir()
        self.lock.release()

    def write_json(self, name: str, content: dict) -> None:
        replace_text(self.root / name, json.dumps(content, indent=1) + "\n")

    def save_plan(self, plan: RunPlan) -> None:
        self.plan = plan
        self.write_json("run_plan.json", plan.to_json())

    def save_step(self, engine, state: TrainState, metrics_offset: int) -> Path:
        """Commits checkpoints/step-N: weights, optimizer state, RNG state, data position and plan. Collective."""
        tensors, written, beside = {"rng.safetensors": engine.rng_state()}, {}, None
        if self.in_parts:
            beside, written = self._write_parts(engine, state.step)
            values = engine.optimizer_values()
        else:
            moments, values = engine.optimizer_state()
            tensors = {self.weights_file: engine.trainable_state(), MOMENTS: moments, **tensors}
        texts = {name: json.dumps(content, indent=1) for name, content in self.configs.items()}
        texts["run_plan.json"] = json.dumps(self.plan.to_json(), indent=1)
        texts["train_state.json"] = json.dumps(
            {**asdict(state), "engine": values, "metrics_bytes": metrics_offset, "identity": self.identity}, indent=1
        )
        keep_last = self.plan.settings.keep_last
        if not self.in_parts:
            return save_checkpoint(self.root, state.step, tensors, texts, keep_last, self.run_id)
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
        sign = self._write_probe_file(engine)
        blind = [rank for rank, sees in enumerate(engine.all_gather_object(sign.is_file())) if not sees]
        self._remove_probe_file(sign)
        self.in_parts = not blind
        if not blind:
            return []
        return [
            f"rank {blind[0]} does not see --output_dir {self.root}: checkpoints are gathered to rank 0, one "
            "tensor at a time, "
            "and held there in full. Use a file system that all hosts share."
        ]

    def _write_probe_file(self, engine) -> Path:
        sign = self.root / f"{WRITING}{os.getpid()}-{time.time_ns()}"
        replace_text(sign, "seen by all ranks?")
        return self.root / engine.broadcast_object(sign.name)

    def _remove_probe_file(self, sign: Path) -> None:
        sign.unlink(missing_ok=True)

    def _write_parts(self, engine, step: int) -> tuple[Path, dict]:
        """Writes all ranks' shards; (folder of the uncommitted checkpoint, {file: size and digest}). Collective.

        A failure on one rank is raised on all, and the folder is removed.
        """
        beside, failed = None, None
        try:
            beside = self._begin_step(step)
        except (StorageError, PlanError) as error:
            failed = [error.exit_code, str(error)]
        name, failed = engine.broadcast_object([beside and beside.name, failed])
        written = {}
        if failed is None:
            beside = self.root / "checkpoints" / name
            try:
                weights, moments = engine.state_shards()
                written = write_parts(beside, engine.rank, {self.weights_file: weights, MOMENTS: moments})
            except (StorageError, NonFiniteError, PlanError) as error:
                failed = [error.exit_code, str(error)]
        by_rank = engine.all_gather_object([written, failed])
        for rank, (_, failed) in enumerate(by_rank):
            if failed:
                self._drop_step(beside)
                code, text = failed
                raise ERRORS_BY_CODE[code](text if rank == 0 else f"rank {rank}: {text}")
        return beside, {file: entry for files, _ in by_rank for file, entry in files.items()}

    def _begin_step(self, step: int) -> Path:
        return begin_checkpoint(self.root, step)

    def _drop_step(self, beside: Path | None) -> None:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)

    def find_checkpoint(self, step_folder: Path | None) -> tuple[VerifiedCheckpoint | None, list[str]]:
        """(checkpoint to resume from or None, notices about skipped ones).

        CheckpointDamagedError if none of them verifies.
        """
        if step_folder is not None:
            return verify_checkpoint(step_folder), []
        saved, skipped = newest_checkpoint(self.root)
        if saved is None and skipped:
            raise CheckpointDamagedError(f"{self.root}: no checkpoint verifies. {skipped[0]}")
        return saved, [f"skipped a damaged checkpoint: {line}" for line in skipped]

    def initial_adapter(self) -> dict | None:
        """Adapter of the checkpoint to resume from if its initialization changed the base weights; else None."""
        if (
            not self.plan.resume_from
            or self.plan.settings.init_lora_weights not in RESIDUAL_INITS
            or not self.plan.has_adapter
        ):
            return None
        saved, _ = self.find_checkpoint(self.plan.resume_from.step_folder)
        return saved.tensors(self.weights_file) if saved else None

    def restore(self, engine, saved: VerifiedCheckpoint) -> tuple[TrainState, int]:
        """Loads a checkpoint into the engine; (its state, offset in metrics.jsonl).

        PlanError if base or data differ.
        """
        content = saved.json("train_state.json")
        for what, value in content["identity"].items():
            if self.identity.get(what) != value:
                raise PlanError(
                    f"--resume: the {what} differs from the one that checkpoint {saved.folder} was made with. "
                    f"Give the {what} of that run, or a new --output_dir."
                )
        read = saved.tensors if self.plan.has_adapter else saved.slices
        engine.load_state(
            read(self.weights_file), saved.slices(MOMENTS), content["engine"], saved.tensors("rng.safetensors")
        )
        return _state(content), content["metrics_bytes"]

    def publish(self, engine, folder: Path | None = None) -> None:
        """Writes the current weights to the output_dir (or `folder`), each file atomically."""
        folder = folder or self.root
        with storage(folder):
            folder.mkdir(exist_ok=True)
        if self.plan.has_adapter:
            replace_tensors(folder / self.weights_file, engine.trainable_state())
        else:
            with storage(folder):
                engine.write_model(folder)
        for name, content in self.configs.items():
            replace_text(folder / name, json.dumps(content, indent=2) + "\n")

    def save_tokenizer(self, tokenizer) -> None:
        tokenizer.save_pretrained(self.root)

    def finish(self, state: TrainState) -> None:
        self.write_json("train_state.json", asdict(replace(state, output_dir=str(self.root))))


class NonMasterOutputDir(OutputDir):
    """The output_dir on ranks other than 0: read to resume from a checkpoint, never written to.

    Gathers are collective, so saving and publishing call the engine on these ranks as on rank 0.
    """

    def __init__(self, plan: RunPlan):
        self.root, self.plan = Path(plan.settings.output_dir), plan
        self.weights_file = weights_file(plan)

    def begin(self, resumed_step: int | None) -> list[str]:
        return []

    def close(self) -> None:
        pass

    def write_json(self, name: str, content: dict) -> None:
        pass

    def _write_probe_file(self, engine) -> Path:
        return self.root / engine.broadcast_object(None)

    def _remove_probe_file(self, sign: Path) -> None:
        pass

    def _begin_step(self, step: int) -> None:
        return None

    def _drop_step(self, beside) -> None:
        pass

    def save_step(self, engine, state, metrics_offset) -> Path:
        engine.rng_state()
        if self.in_parts:
            self._write_parts(engine, state.step)
            engine.optimizer_values()
        else:
            engine.optimizer_state(), engine.trainable_state()
        return self.root / "checkpoints" / f"step-{state.step}"

    def publish(self, engine, folder: Path | None = None) -> None:
        if self.plan.has_adapter:
            engine.trainable_state()
        else:
            engine.write_model(folder or self.root)

    def save_tokenizer(self, tokenizer) -> None:
        pass
