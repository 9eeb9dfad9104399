"""The plan of pretrain.py: a recipe against this machine, then against the data; a reason for every difference."""

import os
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from backend_manager import Backend, BackendManager
from finetune.checkpoint.saved_run import PLAN, PLAN_SCHEMA, STATE, finished_state, newest_plan
from finetune.checkpoint.store import (
    check_not_removed,
    holds_a_run,
    newest_run,
    numbered,
    steps_of,
    storage,
    verified_json,
)
from finetune.distributed.env import RankEnv
from finetune.errors import PlanError
from finetune.model_files.manifest import read_manifest
from finetune.parts.log_to import names_of
from finetune.parts.output import LogPlan, OutputPlan
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.plan_base import Adjustment, PlanBase, SavedRun
from finetune.parts.train_state import TrainState
from finetune.parts.trains import AllWeights
from finetune.plan.backend import choose_cpu_matmul
from finetune.schedule import Schedule
from finetune.system.files import check_writable
from recursive.config import PretrainConfig
from recursive.data.data import PretrainData
from recursive.recipe import defaults, flat, of_flat

NO_MPS_RANKS = "Distributed training is not supported on MPS"
COMPILE_COSTS = "compiling takes longer than it saves here"
# What a resumed run may change.
RESUMABLE = {
    *("epochs", "max_steps", "eval_interval", "min_eval_interval", "checkpoint_every_eval", "checkpoint_every"),
    *("eval_samples", "stop_on_divergence"),
    *(
        "async_save",
        "keep_last",
        "log_every_n_steps",
        "log_to",
        "project_name",
        "run_name",
        "device",
        "compile",
        "cpu_matmul",
    ),
    *("resume", "checkpoint_path", "overwrite", "dry_run", "load_checkpoint", "data_paths_test", "rank_timeout"),
}
ROOT = Path("checkpoints")
ORDER = (Backend.CUDA, Backend.MPS, Backend.CPU)


@dataclass(frozen=True)
class PretrainPlan(PlanBase):
    """A run as it is settled, as RunPlan is for train.py: the loop, the log and the output folder read both alike.
    `steps_per_epoch`: known once the data are read.
    """

    settings: PretrainConfig
    requested: dict
    adjustments: tuple[Adjustment, ...] = ()
    notices: tuple[str, ...] = ()
    backend: str = "cpu"
    dims: ParallelDims = ParallelDims()
    resume_from: SavedRun | None = None
    steps_per_epoch: int = 0
    engine = "torch"
    trains = AllWeights()
    has_adapter = False
    quantizes_again = False
    OUTPUT = "checkpoint_path"

    @property
    def output(self) -> OutputPlan:
        s = self.settings
        return OutputPlan(
            output_dir=s.checkpoint_path,
            save_model=True,
            save_every=s.checkpoint_every,
            async_save=s.async_save,
            keep_last=s.keep_last,
            eval_every=0,
            overwrite=s.overwrite,
            eval_samples=s.eval_samples,
            stop_on_divergence=s.stop_on_divergence,
        )

    @property
    def logs(self) -> LogPlan:
        s = self.settings
        return LogPlan(s.log_to, s.log_every_n_steps, project_name=s.project_name, name=s.run_name)

    @property
    def rows_per_step(self) -> int:
        return self.settings.global_batch_size * self.settings.gradient_accumulation_steps

    @property
    def asked_length(self) -> str:
        """The key that sets the number of steps, as it is written."""
        s = self.settings
        if s.max_steps:
            return f"max_steps={s.max_steps}"
        return f"epochs={s.epochs}"

    @property
    def lr_flag(self) -> str:
        """The learning rate, as it is written."""
        return f"lr={self.settings.lr}"

    def schedule(self, total_steps: int) -> Schedule:
        s = self.settings
        return Schedule("cosine", s.lr, total_steps, min(total_steps, s.lr_warmup_steps), s.lr_min_ratio)

    def eval_due(self, state: TrainState) -> bool:
        every = self.settings.eval_interval * self.steps_per_epoch
        late = state.step >= self.settings.min_eval_interval * self.steps_per_epoch
        return bool(every) and late and state.step % every == 0 and state.step < state.total_steps

    def save_due(self, state: TrainState, stopping: bool) -> bool:
        s = self.settings
        periodic = s.checkpoint_every and state.step % s.checkpoint_every == 0
        evaluated = s.checkpoint_every_eval and self.eval_due(state)
        return bool(periodic or evaluated or stopping or state.step == state.total_steps)

    @property
    def async_save(self) -> bool:
        return self.settings.takes_snapshots

    def flat_settings(self) -> dict:
        return flat(self.settings)

    @classmethod
    def settings_of(cls, values: dict) -> PretrainConfig:
        return of_flat({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def saved(self) -> tuple[dict, dict]:
        requested = {k: v for k, v in self.requested.items() if k != "dry_run"}
        return requested, self.flat_settings() | {"backend": self.backend}


# ---- from a recipe to a plan


def select_device(word: str) -> BackendManager:
    """CUDA, else MPS, else the CPU, unless `device` or FSDP_BACKEND names one. Raises PlanError."""
    named_by = f"device={word}"
    if word == "auto":
        named_by = f"FSDP_BACKEND={os.environ.get('FSDP_BACKEND')}"
        word = os.environ.get("FSDP_BACKEND") or "auto"
    try:
        if word != "auto":
            manager = BackendManager(word, verbose=False)
        else:
            found = BackendManager(None, verbose=False).available
            manager = BackendManager(next(b for b in ORDER if b in found), verbose=False)
    except ValueError as error:
        said = "MPS is not available. " if word == "mps" else ""
        raise PlanError(f"{named_by}: {said}{error}") from None
    if manager.backend is Backend.MLX:
        raise PlanError(f"{named_by}: the recursive model has no MLX engine. Use device=mps or device=cpu.")
    return manager


def resolve(recipe: dict, overrides: dict, manager: BackendManager, env: RankEnv | None) -> PretrainPlan:
    """The plan, but for what depends on the data. Raises PlanError."""
    backend = str(manager.backend)
    size = 1
    if env:
        size = env.size
    if backend == "mps" and size > 1:
        raise PlanError(NO_MPS_RANKS)
    requested = recipe | overrides
    saved = find_saved(requested.get("resume"), requested.get("checkpoint_path"))
    settings = of_flat(inherited(saved, overrides, backend) if saved else requested)
    dims = ParallelDims(dp_replicate=size)
    plan = PretrainPlan(settings, requested, backend=backend, dims=dims, resume_from=saved)
    check(settings, size)
    if not saved:  # a resumed run has taken its weights already
        check_load(settings)
    variable = os.environ.get("FSDP_BACKEND")
    if variable:
        why = f"FSDP_BACKEND={variable}"
    else:
        why = f"the first of {', '.join(map(str, ORDER))} that is available"
    changes = {"device": (backend, why), **model_changes(settings)}
    changes |= machine_changes(settings, manager, named=not saved or "cpu_matmul" in overrides)
    plan = plan.changed(changes)
    return replace(plan, notices=tuple(model_notices(plan.settings)))


def check(s: PretrainConfig, size: int) -> None:
    """Raises PlanError for keys that exclude each other."""
    names_of(s.log_to, "log_to=")
    arch = s.arch
    if arch.causal and arch.mlp_t:
        raise PlanError(
            "arch.mlp_t=true: mixes all positions, so that with arch.causal=true each token sees the answer it is to "
            "predict. Use arch.mlp_t=false, or arch.causal=false for puzzles."
        )
    if s.dataset_type == "chat" and not arch.causal:
        raise PlanError(
            "arch.causal=false: on conversations each token sees the answer it is to predict. Use arch.causal=true, or "
            "dataset_type=puzzle."
        )
    if arch.halting and arch.causal:
        raise PlanError(
            "arch.halting=true: asks whether a whole row is right, and a causal model's first position sees one token. "
            "Use arch.halting=false, or arch.causal=false for puzzles."
        )
    if arch.puzzle_emb_ndim and arch.causal:
        raise PlanError(
            f"arch.puzzle_emb_ndim={arch.puzzle_emb_ndim}: embeds the puzzle that a row belongs to, and text, which "
            "arch.causal=true is for, belongs to none. Use 0, or arch.causal=false for puzzles."
        )
    if not arch.no_ACT_continue:
        raise PlanError("arch.no_ACT_continue=false: the Q-continue loss of HRM is not supported. Use true.")
    if s.freeze_weights and not arch.puzzle_emb_ndim:
        raise PlanError("freeze_weights=true: leaves nothing to train without arch.puzzle_emb_ndim. Use false.")
    if s.global_batch_size % size:
        raise PlanError(f"global_batch_size={s.global_batch_size}: is not divisible by {size} ranks. Use {size}.")
    for name in ("evaluators", "eval_save_outputs"):
        if getattr(s, name):
            raise PlanError(
                f"{name}={list(getattr(s, name))}: is not supported; the loss and exact rows are measured. Use []."
            )
    if arch.num_heads > arch.hidden_size // 2:
        raise PlanError(
            f"arch.num_heads={arch.num_heads}: more than half of arch.hidden_size {arch.hidden_size}. Use fewer."
        )


def check_load(s: PretrainConfig) -> None:
    if s.load_checkpoint and not Path(s.load_checkpoint).exists():
        raise PlanError(f"load_checkpoint={s.load_checkpoint}: no such file or folder. Give a step_N.")


def model_changes(s: PretrainConfig) -> dict:
    arch = s.arch
    changes = {}
    fits = [n for n in range(arch.num_heads, 0, -1) if arch.hidden_size % n == 0 and arch.hidden_size // n % 2 == 0]
    if not arch.mlp_t and (not fits or fits[0] != arch.num_heads):
        if not fits:
            raise PlanError(f"arch.hidden_size={arch.hidden_size}: is odd. Use an even number.")
        reason = f"{arch.num_heads} heads do not divide hidden_size {arch.hidden_size} into an even head size"
        changes["arch.num_heads"] = (fits[0], reason)
    if arch.halting and arch.supervision_steps == 1:
        changes["arch.halting"] = (False, "one supervision step leaves nothing to halt")
    return changes


def machine_changes(s: PretrainConfig, manager: BackendManager, named: bool) -> dict:
    """`named`: cpu_matmul is the user's word of now, not a resumed run's."""
    backend = str(manager.backend)
    changes = {}
    if s.arch.forward_dtype == "bfloat16" and not manager.capabilities.supports_bfloat16:
        why = manager.capabilities.reasons.get("bf16", "not supported by this device")
        changes["arch.forward_dtype"] = ("float32", f"bfloat16: {why}")
    changes["cpu_matmul"] = matmul_change(s.cpu_matmul, manager, named)
    changes["compile"] = ("false", "never compiled on CPU unless compile=true: " + COMPILE_COSTS)
    if "DISABLE_COMPILE" in os.environ:
        changes["compile"] = ("false", "DISABLE_COMPILE is set")
    elif backend == "mps":
        changes["compile"] = ("false", "torch.compile is not used on MPS")
    elif s.compile == "true" or backend == "cuda":
        word = "true"
        if s.compile != "auto":
            word = s.compile
        changes["compile"] = (word, "compiled on CUDA unless compile=false")
    return changes


def matmul_change(word: str, manager: BackendManager, named: bool) -> tuple[str, str]:
    """(library of fp32 products, why)."""
    if manager.backend is not Backend.CPU:
        return "blas", f"it is for device=cpu, and this run is on {manager.backend}"
    used, why = choose_cpu_matmul(word, manager.capabilities)
    if word == "onednn" != used:
        if named:
            raise PlanError(f"cpu_matmul=onednn: {why}. Use auto or blas.")
        why = f"the saved run's is not available here: {why}"
    return used, why


def model_notices(s: PretrainConfig) -> list[str]:
    arch = s.arch
    notices = []
    if arch.plain:
        notices.append(f"arch.plain: {arch.L_layers} layers, each applied once")
    else:
        depth = arch.applications * arch.L_layers
        notices.append(
            f"recursion: T={arch.H_cycles} x (n={arch.L_cycles} + 1) applications of {arch.L_layers} layers = {depth} "
            f"layers per supervision step, {arch.applications_with_gradient * arch.L_layers} with gradient; "
            f"N_sup={arch.halt_max_steps}"
        )
    if s.ema:
        notices.append(f"EMA: rate (1 + t) / (10 + t) until it reaches {s.ema_rate}; evaluation and publishing use it")
    return notices


def with_recipe_notice(plan: PretrainPlan, name: str | None, recipe: dict) -> PretrainPlan:
    """The plan with a notice if it resumes a run and --config-name says something else."""
    if not plan.resume_from or not name:
        return plan
    kept = flat(plan.settings)
    asked = defaults() | {
        k: tuple(v) if isinstance(v, list) else v for k, v in plan.resume_from.saved_plan["requested"].items()
    }
    others = [k for k, v in recipe.items() if v not in (kept[k], asked.get(k))]
    if not others:
        return plan
    line = f"--config-name {name}: a resumed run keeps its own recipe; ignored: {', '.join(others)}"
    return replace(plan, notices=(*plan.notices, line))


def with_folder(plan: PretrainPlan) -> PretrainPlan:
    """The plan with its folder, checkpoints/<data>/<run_name or time>, if none is given; one that holds a run is
    refused.
    """
    s = plan.settings
    if plan.resume_from:
        return plan
    died = s.resume == "auto" and s.checkpoint_path and Path(s.checkpoint_path)
    if died and holds_a_run(died) and not steps_of(died):
        plan = replace(
            plan, notices=(*plan.notices, f"resume=auto: {died} ended before its first step_N: it begins again")
        )
        return replace(plan, settings=replace(s, overwrite=True))
    if s.checkpoint_path is None:
        data = "data"
        if s.data_paths:
            data = Path(s.data_paths[0]).name
        first = ROOT / data / (s.run_name or datetime.now().strftime("%Y%m%d-%H%M%S"))
        if s.dry_run:
            return replace(plan, settings=replace(s, checkpoint_path=str(first)))
        with storage(first):
            first.parent.mkdir(parents=True, exist_ok=True)
            taken = s.run_name and holds_a_run(first)
            if taken:
                folder = first
            else:
                folder = next(p for p in numbered(first) if not p.exists())
        s = replace(s, checkpoint_path=str(folder))
    else:
        folder = Path(s.checkpoint_path)
        check_writable(folder, "checkpoint_path")
    if s.overwrite and s.load_checkpoint:
        read = [(f"load_checkpoint={s.load_checkpoint}", Path(s.load_checkpoint))]
        check_not_removed(folder, read, "checkpoint_path", "overwrite=true")
    if holds_a_run(folder) and not s.overwrite:
        raise PlanError(
            f"checkpoint_path={s.checkpoint_path}: holds another run. Use resume=auto to continue it, or "
            "overwrite=true."
        )
    return replace(plan, settings=s)


def finalize(plan: PretrainPlan, data: PretrainData) -> PretrainPlan:
    """The plan against its data: steps, warm-up, rows that do not fill a step. Raises PlanError."""
    s = plan.settings
    rows = len(data.train)
    plan = replace(plan, steps_per_epoch=data.steps_per_epoch(plan))
    total = data.total_steps(plan)
    notices = [*data.notices]
    if rows < plan.rows_per_step:
        notices.append(
            f"{rows} rows are fewer than the {plan.rows_per_step} of a step ({s.global_batch_size} x accumulation "
            f"{s.gradient_accumulation_steps}): each step trains on all of them"
        )
    if s.arch.halting:
        notices.append(f"halting: {total} steps are those of rows that never halt; rows that do are replaced by more")
    if s.lr_warmup_steps > total // 2:
        shorter = total // 10
        reason = f"the run has {total} steps in all"
        plan = plan.changed({"lr_warmup_steps": (shorter, reason)})
    return replace(plan, notices=(*plan.notices, *notices))


# ---- resuming


def find_saved(resume: str | None, checkpoint_path: str | None) -> SavedRun | None:
    """The run that `resume` names: auto (the newest, or that in checkpoint_path), a run's folder or a step_N of it.
    Raises PlanError, CheckpointDamagedError.
    """
    if resume is None:
        return None
    step = None
    if resume == "auto":
        if checkpoint_path is None:
            newest = [newest_run(folder) for folder in ROOT.glob("*/")]
        else:
            newest = [Path(checkpoint_path)]
        runs = [run for run in newest if run and (run / PLAN).is_file()]
        if not runs:
            return None
        root = max(runs, key=lambda run: (run / PLAN).stat().st_mtime)
    else:
        root = Path(resume)
        if root.name.startswith("step_"):
            root, step = root.parent, root.resolve()
        if not root.is_dir() or (step and not step.is_dir()):
            raise PlanError(f"resume={resume}: no such folder. Give a run's folder or its step_N.")
    if step:
        folders = [step]
    else:
        folders = steps_of(root)
    if not folders:
        if resume == "auto":
            return None
        raise PlanError(f"resume={resume}: has no checkpoint to resume from. Omit resume to start.")

    def read(folder: Path) -> dict:
        return verified_json(folder, read_manifest(folder, (PLAN, STATE)), PLAN, PLAN_SCHEMA)

    saved_plan = newest_plan(root, folders, read)
    assert saved_plan is not None, folders
    return SavedRun(root, saved_plan, step)


def inherited(saved: SavedRun, overrides: dict, backend: str) -> dict:
    """The saved run's settings with what may change; anything else that differs is refused.

    `cpu_matmul` is inherited on the saved run's backend; a run saved before it was a setting computed with blas.
    """
    known = defaults()
    before = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.saved_plan["settled"].items() if k in known}
    missing = set(known) - set(before)
    before = known | {"cpu_matmul": "blas"} | before
    if saved.saved_plan["settled"].get("backend") != backend:
        before["cpu_matmul"] = "auto"
    of_length = [entry for entry in saved.saved_plan.get("adjustments", ()) if entry["setting"] == "lr_warmup_steps"]
    before |= {entry["setting"]: entry["requested"] for entry in of_length}  # this run's length may be another
    asked = saved.saved_plan["requested"]
    for key, value in overrides.items():
        if isinstance(value, tuple):
            written = list(value)
        else:
            written = value
        if value == saved.saved_plan["settled"].get(key):  # as it was used, whatever was asked for
            before[key] = value
        same = value == before[key] or (key in asked and asked[key] == written)
        if key not in RESUMABLE and key not in missing and not same:
            raise PlanError(
                f"{key}: {before[key]} -> {value}: cannot change in a resumed run. Omit it, or start another run."
            )
    keys = {k: v for k, v in overrides.items() if k in RESUMABLE}
    return before | {"overwrite": False} | keys | {"checkpoint_path": str(saved.output_dir)}


def finished(plan: PretrainPlan, total_steps: int) -> bool:
    """True if the run to be resumed has nothing left to do."""
    saved = plan.resume_from
    if not saved or saved.step_folder:
        return False
    done = finished_state(saved.output_dir)
    return done is not None and done.step == total_steps
