"""Resume: which settings may differ from the saved run's, and what a resumed run inherits from it."""

from dataclasses import replace
from pathlib import Path

from finetune.config import FIELDS, settings_asked
from finetune.errors import PlanError
from finetune.parts.degrees import DEGREES
from finetune.parts.plan_base import PlanBase, SavedRun, format_value
from finetune.plan.run_plan import RunPlan

# Settled values that a run resumed on the same backend inherits instead of resolving them again.
INHERITED = (
    "precision",
    "quantization_backend",
    "use_gradient_checkpointing",
    "cache_dequantized",
    "cpu_matmul",
    "microbatch_tokens",
    "compile",
    "cuda_graphs",
    "frozen_products",
)
# Settled values that it inherits on any backend.
KEPT = (
    *("train_type", "num_epochs", "lr", "lora_rank", "validation_split", "early_stopping", "load_best", "eval_every"),
    *("adam_beta2", "warmup_ratio", "context_length", "precompute_ref_log_probs", "rope_factor"),
)
# What --adapter settled, which a resumed run does not read again.
OF_ADAPTER = (
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
    "use_dora",
    "use_rslora",
    "modules_to_save",
    "new_tokens",
    "train_vision",
)
# What a run did that was saved before it had the setting.
BEFORE_IT_WAS_A_SETTING = {
    **{"overlong": "keep_end", "text_unit": "line", "special_tokens_in_text": "keep"},
    **{"early_stopping": 0, "load_best": "false", "adam_beta2": 0.999, "vision_lr_ratio": 1.0},
}
DERIVED = ("backend_type", "engine", "output_dir")
# What the device and the loaded model decide: finalize.
ON_LOADED_MODEL = ("batch_layout", "attention", "compile", "cuda_graphs", "frozen_products")
ROWS = ("batch_size", "gradient_accumulation_steps")
LENGTH = ("max_steps", "num_epochs")


def merge_saved(overrides: dict, saved: dict) -> dict:
    """The overrides of a resumed run: those given now over the saved run's."""
    return {**saved["requested"], **overrides}


def resumed_overrides(overrides: dict, saved: SavedRun, launched: bool) -> dict:
    """The overrides of a run resumed from `saved`. Raises PlanError.

    Degrees are not taken from the saved run if any is given now, or if a launcher decided the world size.
    """
    folder = overrides.get("output_dir")
    if folder and Path(folder).resolve() != saved.output_dir.resolve():
        raise PlanError(f"--output_dir {folder}: a resumed run continues in {saved.output_dir}. Omit it.")
    merged = merge_saved(overrides, saved.saved_plan) | {"output_dir": str(saved.output_dir)}
    for name in ("class_names", "hard_negatives"):  # which the rows settled
        if saved.saved_plan["settled"].get(name) not in (None, "auto"):
            merged.setdefault(name, saved.saved_plan["settled"][name])
    degrees = ("world_size", "sharding_strategy", *DEGREES)
    if launched or any(name in overrides for name in degrees):
        merged = {k: v for k, v in merged.items() if k not in degrees or k in overrides}
    return merged


def without_repeated_rows(overrides: dict, saved: SavedRun, launcher: str | None) -> dict:
    """The overrides of a resumed run, under torchrun without those that split its rows as the saved run was asked to:
    it repeats the command on the ranks that it has then, and the rows of a step stay.
    """
    asked = saved.saved_plan["requested"]
    if launcher != "torchrun":
        return overrides
    return {name: value for name, value in overrides.items() if name not in ROWS or value != asked.get(name)}


def inherited_from_checkpoint(saved: dict, backend: str, overrides: dict | None = None) -> dict:
    """Settings that a resumed run inherits from the saved plan: warmup, context length, rows per step, precision and,
    on the same backend, INHERITED.
    `overrides`: given now; rows per step are not inherited if these set them.
    """
    given = settings_asked(overrides or {})
    rows: dict = {"rows_per_step": saved_rows_per_step(saved["settled"])}
    batch_is_set = "batch_size" in settings_asked(merge_saved(overrides or {}, saved))
    if batch_is_set and any(name in given for name in ROWS):
        rows = {}
    rows |= {name: saved["settled"][name] for name in KEPT if name in saved["settled"]}
    if saved["settled"].get("adapter"):
        rows |= {name: saved["settled"][name] for name in OF_ADAPTER if name in saved["settled"]}
    rows |= {name: value for name, value in BEFORE_IT_WAS_A_SETTING.items() if name not in saved["settled"]}
    if saved["settled"].get("backend") != backend:
        portable = {"precision"}
        if saved["settled"].get("quantization_backend") == "mlx":  # every engine has this one
            portable.add("quantization_backend")
        return rows | {name: saved["settled"][name] for name in portable if name in saved["settled"]}
    # of runs saved before this setting existed
    before = {}
    if backend == "cpu":
        before = {"cpu_matmul": "blas"}
    settled = before | saved["settled"]
    if any(name in given and given[name] != settled.get(name) for name in LENGTH):  # of a longer run compiling may pay
        settled.pop("compile", None)
    return rows | {name: settled[name] for name in INHERITED if name in settled}


def check_resumed(plan: RunPlan, saved: dict) -> RunPlan:
    """The plan with a notice per setting that differs from the saved run's. PlanError lists those that may not."""
    old_rows = saved_rows_per_step(saved["settled"])
    new_rows = plan.rows_per_step
    if old_rows != new_rows:
        ranks = ""
        if plan.data_ranks > 1:
            ranks = f" x {plan.data_ranks} data ranks"
        raise PlanError(
            f"--batch_size x --gradient_accumulation_steps{ranks}: {old_rows} -> {new_rows} rows per step. "
            f"Keep {old_rows}."
        )
    changed = changed_settings(plan, saved)
    resumable = {name for name, field in FIELDS.items() if field.metadata["resumable"]}
    if "quantization_backend" in changed:
        resumable |= {"quant_type", "group_size", "double_quant"}
    moved = "backend" in changed
    if moved and "precision" not in settings_asked(plan.requested):
        resumable.add("precision")  # another device may lack the saved one
    refused = [f"--{k}: {format_value(a)} -> {format_value(b)}" for k, (a, b) in changed.items() if k not in resumable]
    if refused:
        raise PlanError(
            "; ".join(refused) + ". A resumed run keeps these. Omit them, or start in another --output_dir."
        )
    lines = [f"{k}: {format_value(a)} -> {format_value(b)} since the saved run" for k, (a, b) in changed.items()]
    if "quantization_backend" in changed:
        lines.append("the base is quantized again from its own weights, so the loss may change slightly")
    if moved:
        lines += what_moves(plan, saved)
    notices: tuple[str, ...] = ()
    if plan.resume_from:
        notices = plan.resume_from.notices
    return replace(plan, notices=(*plan.notices, *notices, *lines))


def what_moves(plan: RunPlan, saved: dict) -> list[str]:
    """Lines on what a run takes with it to another backend, and what it cannot."""
    s = plan.settings
    old = saved["settled"]
    lines = [
        f"moved from {old['backend']} to {plan.backend}: step, data order, schedule, weights and the moments of "
        f"{s.optimizer} continue; {plan.rows_per_step} rows per step as batch_size {s.batch_size} x accumulation "
        f"{s.gradient_accumulation_steps} x data ranks {plan.data_ranks}"
    ]
    if s.lora_dropout and old.get("engine") != plan.engine:
        lines.append("dropout cannot continue: the engines draw other random numbers, so new ones start here")
    return lines


def changed_settings(plan: RunPlan, saved: dict) -> dict[str, tuple]:
    """{setting: (saved, new)} of all that differ, other than how rows per step are split."""
    new = plan.to_json()["settled"]
    old = saved["settled"]
    left_out = {*DERIVED, *ROWS, *(k for k in ON_LOADED_MODEL if new[k] in ("auto", saved["requested"].get(k)))}
    return {k: (old[k], new[k]) for k in new if k in old and old[k] != new[k] and k not in left_out}


def saved_rows_per_step(settled: dict) -> int:
    """Rows per step of a saved run."""
    data_ranks = settled.get("dp_degree", 1) * max(1, settled.get("dp_shards", 1))
    return settled["batch_size"] * settled["gradient_accumulation_steps"] * data_ranks


def same_length(plan: PlanBase, saved: dict) -> bool:
    """True if the plan asks for as many steps as the saved run did."""
    return all(getattr(plan.settings, k) == saved["settled"][k] for k in LENGTH)
