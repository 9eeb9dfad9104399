"""The plan's rules for memory: dense copies of quantized weights, checkpointing, batch size, offload."""

from backend_manager import Backend
from finetune.config import DEFAULTS, TrainConfig
from finetune.errors import PlanError
from finetune.estimate import budget
from finetune.plan.draft import Draft

CACHE_FRACTION_OF_MEMORY = 0.04  # auto keeps dense copies of a quantized base if they take no more than this


def resolve_memory(draft: Draft) -> None:
    """Every setting that trades memory for speed."""
    auto_cache = draft.values["cache_dequantized"] == "auto" and draft.values["train_type"] == "qlora"
    resolve_dequant_cache(draft, auto_cache)
    resolve_activation_offload(draft)
    resolve_flash_attention(draft)
    resolve_batch(draft, auto_cache)


def resolve_dequant_cache(draft: Draft, auto_cache: bool) -> None:
    """cache_dequantized: on if dense copies are small beside the memory.
    They save two dequantizations per layer and microbatch.
    """
    values, memory_budget = draft.values, draft.memory_budget()
    if values["cache_dequantized"] == "true" and values["train_type"] != "qlora":
        raise PlanError(
            f"--cache_dequantized true: --train_type {values['train_type']} has nothing quantized. Omit it."
        )
    if not auto_cache:
        if values["cache_dequantized"] == "auto":
            values["cache_dequantized"] = "false"
        return
    num_weights = draft.shape and draft.shape.num_weights
    memory_bytes = memory_budget and memory_budget.memory_bytes
    if draft.dims.shards > 1:
        draft.adjust("cache_dequantized", "false", "sharded weights are all-gathered packed")
    elif not (num_weights and memory_bytes):
        draft.adjust("cache_dequantized", "false", "dequantized weights would be as large as unquantized ones")
    else:
        dense = num_weights * (4 if "32" in values["precision"] or "autocast" in values["precision"] else 2)
        fits = dense <= CACHE_FRACTION_OF_MEMORY * memory_bytes
        reason = f"dense copies take {dense / 2**30:.1f} GiB of {memory_bytes / 2**30:.0f} GiB"
        draft.adjust("cache_dequantized", "true" if fits else "false", reason)


def resolve_activation_offload(draft: Draft) -> None:
    host_memory = draft.backend in (Backend.CPU, Backend.MPS) and not draft.assumes_accelerator
    if draft.values["use_activation_cpu_offload"] and host_memory:
        reason = f"activations on {draft.backend} already are in host memory"
        draft.adjust("use_activation_cpu_offload", False, reason)


def resolve_flash_attention(draft: Draft) -> None:
    if not draft.values["use_flash_attention"]:
        return
    if draft.capabilities.supports_flash_attention or draft.assumes_accelerator:
        draft.notices.append("flash attention: torch's own kernels, which it takes for bf16 and fp16")
        return
    default = f"no flash attention kernels on {draft.backend}"
    reason = draft.capabilities.reasons.get("flash_attention", default)
    draft.adjust("use_flash_attention", False, f"{reason}; attention runs per document through torch")


def resolve_batch(draft: Draft, auto_cache: bool) -> None:
    """Checkpointing and batch_size if they are auto, microbatch_tokens if it is unset: whatever fits."""
    values, shape, memory_budget = draft.values, draft.shape, draft.memory_budget()
    default_tokens = max(budget.DEFAULT_MICROBATCH_TOKENS, TrainConfig(**values).row_length)
    predicted = bool(memory_budget and shape and shape.known and shape.linears)
    if predicted:
        given = {name for name in ("microbatch_tokens",) if values[name] is not None}
        if auto_cache and values["cache_dequantized"] == "true":
            drop_dequant_cache(draft, memory_budget, default_tokens)
        chosen = budget.settle_memory(TrainConfig(**values), shape, memory_budget, given)
        for name, (value, reason) in chosen.items():
            draft.adjust(name, value, reason)
        warn_over_budget(draft, memory_budget)
    if shape and shape.outside:
        draft.notices.append(
            f"memory is not predicted: the formulas do not describe this model's layers ({shape.outside} in its "
            "config.json). If it runs out, lower --batch_size, or set --use_gradient_checkpointing true"
        )
    if not predicted and values["batch_size"] == "auto":
        draft.adjust("batch_size", DEFAULTS["batch_size"], "the model's sizes are not known yet")
    if values["use_gradient_checkpointing"] == "auto":
        if values["reentrant_checkpointing"]:
            draft.adjust("use_gradient_checkpointing", "true", "--reentrant_checkpointing asks for it")
        else:
            reason = "recomputation costs about a third of the speed; ask for it if memory runs out"
            draft.adjust("use_gradient_checkpointing", "false", reason)
    if values["microbatch_tokens"] is None:
        values["microbatch_tokens"] = default_tokens


def drop_dequant_cache(draft: Draft, memory_budget, default_tokens: int) -> None:
    """Gives up dense copies that auto would keep if the run, without recomputation, does not fit with them."""
    values = draft.values
    without_recomputation = dict(
        use_gradient_checkpointing="false",
        batch_size=DEFAULTS["batch_size"] if values["batch_size"] == "auto" else values["batch_size"],
        microbatch_tokens=values["microbatch_tokens"] or default_tokens,
    )
    needed = budget.predicted_bytes(TrainConfig(**values | without_recomputation), draft.shape, memory_budget)
    if needed > memory_budget.usable:
        draft.adjustments = [a for a in draft.adjustments if a.setting != "cache_dequantized"]
        values["cache_dequantized"] = "auto"
        fact = f"{budget.gib(needed)} predicted with dense copies do not fit in {budget.gib(memory_budget.usable)}"
        draft.adjust("cache_dequantized", "false", fact)


def warn_over_budget(draft: Draft, memory_budget) -> None:
    """A notice if the run is predicted not to fit; with full rows the prediction is an upper bound."""
    needed = budget.predicted_bytes(TrainConfig(**draft.values), draft.shape, memory_budget)
    if needed > memory_budget.usable and not draft.values["dry_run"]:
        draft.notices.append(
            f"memory: {budget.gib(needed)} predicted for full rows, {budget.gib(memory_budget.usable)} usable; "
            "--dry_run lists what would make it fit"
        )
