"""Resume: which settings may differ from the saved run's, and what a resumed run inherits from it."""

from dataclasses import replace

from finetune.errors import PlanError
from finetune.plan.run_plan import RunPlan, format_value

# ---- resume: what may differ

MAY_CHANGE = {
    "max_steps",
    "num_epochs",
    "save_every",
    "keep_last",
    "save_model",
    "eval_every",
    "validation_dataset",
    "score_dataset",
    "score_samples",
    "score_max_new_tokens",
    "log_to",
    "log_every_n_steps",
    "verbose",
    "project_name",
    "name",
    "group",
    "entity",
    "output_dir",
    "backend",
    "world_size",
    "dp_degree",
    "dp_shards",
    "tp_degree",
    "cp_degree",
    "pp_degree",
    "parallel_backend",
    "quantization_backend",
    "microbatch_tokens",
    "low_memory",
    "profile",
    "profiling_output",
    "with_stack",
    "with_shapes",
    "export_trace",
    "export_memory_timeline",
    "profile_memory",
    "wait_steps",
    "profiler_warmup_steps",
    "active_steps",
    "repeat",
    "profiling_frequency",
    "rank_timeout",
    "master_addr",
    "master_port",
    "loading_workers",
    "cache_dequantized",
    "use_activation_cpu_offload",
    "sharding_strategy",
    "no_sync",
    "use_cpu_offload",
    "pp_schedule",
}


def merge_saved(given: dict, saved: dict) -> dict:
    """The overrides of a resumed run: the saved run's, under what is given now."""
    return {**saved["requested"], **given}


def inherited_from_checkpoint(saved: dict, backend: str, given=()) -> dict:
    """What a resumed run takes from the saved one instead of deciding anew: rows a step, and on the same backend the rest.

    `given`: the overrides of now; who sets rows now is held to them.
    """
    rows = {"rows_per_step": saved_rows(saved["settled"])}
    by_hand = saved["requested"].get("batch_size") != "auto" and "gradient_accumulation_steps" in given
    if "batch_size" in given or by_hand:
        rows = {}
    if saved["settled"].get("backend") != backend:
        return rows
    names = (
        "precision",
        "quantization_backend",
        "use_gradient_checkpointing",
        "cache_dequantized",
        "microbatch_tokens",
    )
    return rows | {name: saved["settled"][name] for name in names if name in saved["settled"]}


def check_resumed(plan: RunPlan, saved: dict) -> RunPlan:
    """The plan with a notice for each setting that differs from the saved run's. PlanError names each that must not."""
    new, old = plan.to_json()["settled"], saved["settled"]
    derived = ("backend_type", "engine", "output_dir")
    changed = {k: (old[k], new[k]) for k in new if k in old and old[k] != new[k] and k not in derived}
    if plan.settings.batch_layout == "auto":  # settled on the loaded model, as it was in the saved run
        changed.pop("batch_layout", None)
    rows = ("batch_size", "gradient_accumulation_steps")
    old_rows, new_rows = saved_rows(old), plan.rows_per_step
    if old_rows != new_rows:
        ranks = f" x {plan.data_ranks} data ranks" if plan.data_ranks > 1 else ""
        raise PlanError(
            f"--batch_size x --gradient_accumulation_steps{ranks}: {old_rows} -> {new_rows} rows a step. Keep {old_rows}."
        )
    if any(k in changed for k in rows):
        changed = {k: v for k, v in changed.items() if k not in rows}
    may = MAY_CHANGE | ({"quant_type", "group_size", "double_quant"} if "quantization_backend" in changed else set())
    refused = [f"--{k}: {format_value(a)} -> {format_value(b)}" for k, (a, b) in changed.items() if k not in may]
    if refused:
        raise PlanError(
            "; ".join(refused) + ". A resumed run keeps these. Leave them out, or start in another --output_dir."
        )
    lines = [f"{k}: {format_value(a)} -> {format_value(b)} since the saved run" for k, (a, b) in changed.items()]
    if "quantization_backend" in changed:
        lines.append("the base is quantized anew from its own weights, so the loss may step a little")
    return replace(plan, notices=plan.notices + tuple(lines))


def saved_rows(settled: dict) -> int:
    """Rows a step of a saved run."""
    ranks = settled.get("dp_degree", 1) * max(1, settled.get("dp_shards", 1))
    return settled["batch_size"] * settled["gradient_accumulation_steps"] * ranks


def same_length(plan: RunPlan, saved: dict) -> bool:
    """Whether the plan asks for as many steps as the saved run did."""
    return all(getattr(plan.settings, k) == saved["settled"][k] for k in ("max_steps", "num_epochs"))
