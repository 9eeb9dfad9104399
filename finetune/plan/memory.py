"""The plan's rules for memory: dense copies of quantized weights, checkpointing, batch size, offload."""

from backend_manager import Backend, system_memory
from finetune.config import TrainConfig
from finetune.errors import PlanError
from finetune.estimate import budget
from finetune.estimate.budget import MemoryBudget, gib
from finetune.estimate.model_shape import KnownShape
from finetune.plan.draft import Draft
from finetune.plan.parts import Parts

HOST_FRACTION = 0.5  # of the host's memory: the most that copies of what is saved take there, beside a device
UNIFIED = ("mps", "mlx")  # devices that share the host's memory
CACHE_FRACTION_OF_MEMORY = 0.04  # auto keeps dense copies of a quantized base if they take no more than this


def resolve_memory(draft: Draft) -> None:
    """Every setting that trades memory for speed."""
    auto_cache = draft.values["cache_dequantized"] == "auto" and draft.values["train_type"] == "qlora"
    resolve_dequant_cache(draft, auto_cache)
    resolve_activation_offload(draft)
    resolve_attention(draft)
    resolve_compile(draft)
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


def resolve_attention(draft: Draft) -> None:
    """Refuses kernels that this device or precision lacks; which one each layer gets is tried on the loaded model."""
    values, available = draft.values, draft.capabilities.supports_flash_attention or draft.assumes_accelerator
    word, default = values["attention"], f"no flash attention kernels on {draft.backend}"
    reason = draft.capabilities.reasons.get("flash_attention", default)
    if Parts(TrainConfig(**values)).attention.required:
        if not available:
            raise PlanError(f"--attention {word}: {reason}. Use auto, groups or sdpa.")
        if values["precision"] == "fp32":
            raise PlanError(f"--attention {word}: its kernels compute in 16 bits only. Use --precision bf16, or auto.")
    if not values["use_flash_attention"]:
        return
    if available:
        draft.notices.append(f"use_flash_attention: --attention {word} says which kernels; they take bf16 and fp16")
        return
    draft.adjust("use_flash_attention", False, f"{reason}; attention runs per document through torch")


def resolve_compile(draft: Draft) -> None:
    """Where nothing is compiled; what is left open is timed on the loaded model."""
    values, dims = draft.values, draft.dims
    if values["compile"] == "false":
        return
    split = [name for name in ("tp", "cp", "pp", "ep") if getattr(dims, name) > 1]
    why = None
    if "DISABLE_COMPILE" in draft.facts.environment:
        why = "DISABLE_COMPILE is set"
    elif draft.backend is Backend.MPS:
        why = "torch.compile is not used on MPS"
    elif split:
        why = f"layers of --{split[0]}_degree {getattr(dims, split[0])} communicate within their forward"
    elif draft.facts.environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        why = "DeepSpeed gathers weights within a layer's forward"
    if why:
        draft.adjust("compile", "false", why)
    elif values["compile"] == "auto" and (draft.backend is not Backend.CUDA or dims.world_size > 1):
        values["compile"] = "false"


def resolve_async_save(draft: Draft) -> None:
    """async_save: on if what is saved fits in host memory a second time. The plan's other choices come first."""
    values, model, memory_budget = draft.values, draft.shape, draft.memory_budget()
    if values["async_save"] != "auto":
        return
    plan = Parts(TrainConfig(**values | {"async_save": "true"}))
    if not plan.output.takes_snapshots:  # what is saved at the end delays no step
        values["async_save"] = "false"
        return
    shape = model.known if model else None
    if not (shape and memory_budget):
        draft.adjust("async_save", "false", "it is not predicted how much memory a copy of what is saved takes")
        return
    copy, usable = budget.snapshot_bytes(plan, shape, memory_budget), memory_budget.usable
    found = budget.predicted(plan, shape, memory_budget, budget.full_microbatch(plan))
    if memory_budget.device == "cpu":
        needed = found["total"]
    elif memory_budget.device in UNIFIED:
        needed = found["total"] + copy
    else:
        needed, usable = found["host"] * draft.local_world_size, int(HOST_FRACTION * system_memory()[0])
    fact = f"a copy of what is saved takes {gib(copy)} of host memory"
    if needed <= usable or draft.assumes_accelerator:
        draft.adjust("async_save", "true", f"{fact}, which fits")
    else:
        draft.adjust("async_save", "false", f"{fact}, and {gib(needed)} do not fit in {gib(usable)}")


def resolve_batch(draft: Draft, auto_cache: bool) -> None:
    """Checkpointing if it is auto, microbatch_tokens if it is unset: whatever fits."""
    values, model, memory_budget = draft.values, draft.shape, draft.memory_budget()
    shape = model.known if model else None
    default_tokens = max(budget.DEFAULT_MICROBATCH_TOKENS, Parts(TrainConfig(**values)).data.row_length)
    if memory_budget and shape:
        given = {name for name in ("microbatch_tokens",) if values[name] is not None}
        if auto_cache and values["cache_dequantized"] == "true":
            drop_dequant_cache(draft, shape, memory_budget, default_tokens)
        chosen = settle_memory(Parts(TrainConfig(**values)), shape, memory_budget, given)
        for name, (value, reason) in chosen.items():
            draft.adjust(name, value, reason)
        warn_over_budget(draft, shape, memory_budget)
    if model and model.outside:
        draft.notices.append(
            f"memory is not predicted: the formulas do not describe this model's layers ({model.outside} in its "
            "config.json). If it runs out, lower --batch_size, or set --use_gradient_checkpointing true"
        )
    if values["use_gradient_checkpointing"] == "auto":
        if values["reentrant_checkpointing"]:
            draft.adjust("use_gradient_checkpointing", "true", "--reentrant_checkpointing asks for it")
        else:
            reason = "recomputation costs about a third of the speed; ask for it if memory runs out"
            draft.adjust("use_gradient_checkpointing", "false", reason)
    if values["microbatch_tokens"] is None:
        values["microbatch_tokens"] = default_tokens


def drop_dequant_cache(draft: Draft, shape: KnownShape, memory_budget: MemoryBudget, default_tokens: int) -> None:
    """Gives up dense copies that auto would keep if the run, without recomputation, does not fit with them."""
    values = draft.values
    without_recomputation = dict(
        use_gradient_checkpointing="false", microbatch_tokens=values["microbatch_tokens"] or default_tokens
    )
    needed = budget.predicted_bytes(Parts(TrainConfig(**values | without_recomputation)), shape, memory_budget)
    if needed > memory_budget.usable:
        draft.adjustments = [a for a in draft.adjustments if a.setting != "cache_dequantized"]
        values["cache_dequantized"] = "auto"
        fact = f"{gib(needed)} predicted with dense copies do not fit in {gib(memory_budget.usable)}"
        draft.adjust("cache_dequantized", "false", fact)


def warn_over_budget(draft: Draft, shape: KnownShape, memory_budget: MemoryBudget) -> None:
    """A notice if the run is predicted not to fit; with full rows the prediction is an upper bound."""
    needed = budget.predicted_bytes(Parts(TrainConfig(**draft.values)), shape, memory_budget)
    if needed > memory_budget.usable and not draft.values["dry_run"]:
        draft.notices.append(
            f"memory: {gib(needed)} predicted for full rows, {gib(memory_budget.usable)} usable; "
            "--dry_run lists what would make it fit"
        )


# ---- what fits


def settle_memory(plan: Parts, shape: KnownShape, memory_budget: MemoryBudget, given: set) -> dict:
    """{setting: (value, reason)} for use_gradient_checkpointing auto and unset microbatch_tokens.

    Smaller microbatches cost less speed than activation checkpointing, so they are tried first, down to one row.
    """
    settings, chosen = plan.settings, {}
    words = [settings.use_gradient_checkpointing]
    if words == ["auto"]:
        words = ["true"] if settings.reentrant_checkpointing else ["false", "true"]
    default = settings.microbatch_tokens or max(budget.DEFAULT_MICROBATCH_TOKENS, plan.data.row_length)
    plain = plan.with_settings(use_gradient_checkpointing=words[0], microbatch_tokens=default)
    tokens, usable = [default], memory_budget.usable
    while "microbatch_tokens" not in given and tokens[-1] // 2 >= max(plan.data.row_length, 256):
        tokens.append(tokens[-1] // 2)
    tried = [plain.with_settings(use_gradient_checkpointing=w, microbatch_tokens=t) for w in words for t in tokens]
    used = next((t for t in tried if budget.fits(t, shape, memory_budget)), tried[-1])
    without = used.with_settings(use_gradient_checkpointing="false")
    if len(words) > 1:
        chosen["use_gradient_checkpointing"] = _checkpointing(used, without, shape, memory_budget)
    if used.steps.microbatch_tokens != default:
        whole = budget.predicted_bytes(used.with_settings(microbatch_tokens=default), shape, memory_budget)
        chosen["microbatch_tokens"] = (
            used.steps.microbatch_tokens,
            f"{default} tokens per forward would take {gib(whole)} of {gib(usable)}, these take "
            f"{gib(budget.predicted_bytes(used, shape, memory_budget))}",
        )
    return chosen


def _checkpointing(used, without, shape, memory_budget) -> tuple[str, str]:
    word = used.settings.use_gradient_checkpointing
    plain = budget.predicted_bytes(without, shape, memory_budget)
    with_it = used.with_settings(use_gradient_checkpointing="true")
    recomputed, usable = budget.predicted_bytes(with_it, shape, memory_budget), memory_budget.usable
    if word == "false":
        return word, f"{gib(plain)} predicted without it fits in {gib(usable)}; {gib(recomputed)} with it"
    fact = f"{gib(recomputed)} with it {'fits' if recomputed <= usable else 'does not fit either'}"
    return word, f"{gib(plain)} predicted without it does not fit in {gib(usable)}; {fact}"
