"""The plan's rules for memory: dense copies of quantized weights, checkpointing, batch size, offload."""

from dataclasses import dataclass

from backend_manager import Backend, system_memory
from finetune.errors import PlanError
from finetune.estimate import budget
from finetune.estimate.budget import MemoryBudget, gib
from finetune.estimate.model_cost import shards_ends
from finetune.estimate.model_shape import KnownShape
from finetune.estimate.step_time import Machine, StepTime, seconds_per_step, seconds_said
from finetune.parts.parts import Parts
from finetune.plan.draft import Draft
from finetune.plan.machine import machine_of

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
    if draft.parts().attention.required:
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
    is_open = draft.requested.get("compile", "auto") == "auto"  # a resumed run may have inherited what was decided
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
    elif is_open and (draft.backend is not Backend.CUDA or dims.world_size > 1):
        values["compile"] = "false"


def resolve_async_save(draft: Draft) -> None:
    """async_save: on if what is saved fits in host memory a second time. The plan's other choices come first."""
    values, model, memory_budget = draft.values, draft.shape, draft.memory_budget()
    if values["async_save"] != "auto":
        return
    plan = draft.parts(async_save="true")
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
    default_tokens = max(budget.DEFAULT_MICROBATCH_TOKENS, draft.parts().data.row_length)
    resolve_vocabulary(draft, shape)
    if memory_budget and shape:
        given = {name for name in ("microbatch_tokens",) if values[name] is not None}
        given |= {name for name in ("use_cpu_offload", "sharding_strategy") if not draft.is_open(name)}
        if auto_cache and values["cache_dequantized"] == "true":
            drop_dequant_cache(draft, shape, memory_budget, default_tokens)
        chosen = settle_memory(draft.parts(), shape, memory_budget, given, machine_of(draft))
        for name, (value, reason) in chosen.items():
            draft.adjust(name, value, reason)
        warn_over_budget(draft, shape, memory_budget)
    if model and model.outside and not shape:
        why = f": {model.tracer.error}" if model.tracer and model.tracer.error else ""
        draft.notices.append(
            f"memory is not predicted: the formulas do not describe this model's layers ({model.outside} in its "
            f"config.json), and they cannot be traced{why}. If it runs out, lower --batch_size, or set "
            "--use_gradient_checkpointing true"
        )
    elif model and model.tracer and memory_budget:
        why = f"{model.outside} in its config.json" if model.outside else "its config.json lacks sizes of its layers"
        draft.notices.append(
            f"memory: no formula describes this model's layers ({why}); what they keep was traced, and is kept for the "
            "next start"
        )
    if values["use_gradient_checkpointing"] == "auto":
        if values["reentrant_checkpointing"]:
            draft.adjust("use_gradient_checkpointing", "true", "--reentrant_checkpointing asks for it")
        else:
            reason = "recomputation costs about a third of the speed; ask for it if memory runs out"
            draft.adjust("use_gradient_checkpointing", "false", reason)
    if values["vocab_parallel"] == "auto":
        values["vocab_parallel"] = "false"
    if values["microbatch_tokens"] is None:
        values["microbatch_tokens"] = default_tokens


def resolve_vocabulary(draft: Draft, shape: KnownShape | None) -> None:
    """vocab_parallel: false where it cannot be chosen. PlanError for true beside adapters on embedding or head."""
    values = draft.values
    possible = shape is not None and shards_ends(draft.parts(), shape)
    if values["vocab_parallel"] == "true" and shape is not None and not possible:
        raise PlanError(
            f"--vocab_parallel true: embedding or head gets an adapter (--lora_target_modules "
            f"{values['lora_target_modules']}), which is gathered with its layer. Use false."
        )
    if values["vocab_parallel"] == "auto" and not (shape and may_shard_vocabulary(draft, shape)):
        values["vocab_parallel"] = "false"


def may_shard_vocabulary(draft: Draft, shape: KnownShape) -> bool:
    """True if the plan may keep each rank's rows of embedding and head ungathered where nothing else fits."""
    is_open = draft.values["vocab_parallel"] == "auto" and draft.dims.shards > 1
    return is_open and draft.backend is not Backend.MPS and shards_ends(draft.parts(), shape)


def drop_dequant_cache(draft: Draft, shape: KnownShape, memory_budget: MemoryBudget, default_tokens: int) -> None:
    """Gives up dense copies that auto would keep if the run, without recomputation, does not fit with them."""
    values = draft.values
    tokens = values["microbatch_tokens"] or default_tokens
    without_recomputation = draft.parts(use_gradient_checkpointing="false", microbatch_tokens=tokens)
    needed = budget.predicted_bytes(without_recomputation, shape, memory_budget)
    if needed > memory_budget.usable:
        draft.adjustments = [a for a in draft.adjustments if a.setting != "cache_dequantized"]
        values["cache_dequantized"] = "auto"
        fact = f"{gib(needed)} predicted with dense copies do not fit in {gib(memory_budget.usable)}"
        draft.adjust("cache_dequantized", "false", fact)


def warn_over_budget(draft: Draft, shape: KnownShape, memory_budget: MemoryBudget) -> None:
    """A notice if the run is predicted not to fit; with full rows the prediction is an upper bound."""
    needed = budget.predicted_bytes(draft.parts(), shape, memory_budget)
    if needed > memory_budget.usable and not draft.values["dry_run"]:
        draft.notices.append(
            f"memory: {gib(needed)} predicted for full rows, {gib(memory_budget.usable)} usable; "
            "--dry_run lists what would make it fit"
        )


# ---- what fits, and which of it is fastest

MOST_TOKENS = 16384  # of a forward that auto chooses on an accelerator
WORTH = 0.98  # of the time of what is tried before it: what auto must save to depart from it


@dataclass(frozen=True)
class Tried:
    """A plan with some of its open settings settled, its bytes, and its predicted time; None without rates."""

    plan: Parts
    needed: int
    time: StepTime | None = None

    @property
    def rows(self) -> int:
        """Rows per step."""
        steps = self.plan.steps
        return steps.batch_size * steps.accumulation * self.plan.dims.data_ranks

    @property
    def seconds_per_row(self) -> float:
        assert self.time is not None
        return self.time.total / self.rows


def settle_memory(
    plan: Parts, shape: KnownShape, memory_budget: MemoryBudget, given: set, machine: Machine | None = None
) -> dict:
    """{setting: (value, reason)} for use_gradient_checkpointing auto and unset microbatch_tokens; beside them, where
    the machine's rates are known, for use_cpu_offload and sharding_strategy. `given`: names of those that the user set.

    With rates, the fastest predicted of all combinations that fit. Without: smaller microbatches cost less speed than
    recomputation, so they are tried first, down to one row.
    """
    ways = combinations(plan, memory_budget, given, machine is not None)
    used = best_of(plan, ways, shape, memory_budget, machine)
    chosen: dict[str, tuple] = {}
    if plan.settings.use_gradient_checkpointing == "auto" and len({w["use_gradient_checkpointing"] for w in ways}) > 1:
        chosen["use_gradient_checkpointing"] = _checkpointing(used.plan, shape, memory_budget)
    default = ways[0]["microbatch_tokens"]
    if used.plan.steps.microbatch_tokens != default:
        reason = _tokens_reason(used, default, shape, memory_budget, machine)
        chosen["microbatch_tokens"] = (used.plan.steps.microbatch_tokens, reason)
    for name in ("use_cpu_offload", "sharding_strategy", "vocab_parallel"):
        before, value = getattr(plan.settings, name), getattr(used.plan.settings, name)
        if before != value and (before, value) != ("auto", "false"):
            other = used.plan.with_settings(**{name: before})
            chosen[name] = (value, _instead(used, other, shape, memory_budget, machine))
    return chosen


def combinations(plan: Parts, memory_budget: MemoryBudget, given: set, timed: bool) -> list[dict]:
    """The settings of every combination of what is open in the plan, what changes least first."""
    settings, words = plan.settings, [plan.settings.use_gradient_checkpointing]
    if words == ["auto"]:
        words = ["true"] if settings.reentrant_checkpointing else ["false", "true"]
    default = settings.microbatch_tokens or max(budget.DEFAULT_MICROBATCH_TOKENS, plan.data.row_length)
    tokens = [default]
    if "microbatch_tokens" not in given:
        in_batch, fewer, larger = plan.steps.batch_size * plan.data.row_length, default // 2, default
        while fewer >= max(plan.data.row_length, 256):
            tokens += [fewer] if fewer < in_batch else []  # others hold the same rows
            fewer //= 2
        while timed and memory_budget.device != "cpu" and 2 * larger <= min(in_batch, MOST_TOKENS):
            larger *= 2
            tokens.append(larger)
    on_device = memory_budget.device not in ("cpu", *UNIFIED)
    sharded = timed and on_device and memory_budget.ranks > 1
    offloads = [settings.use_cpu_offload]
    if sharded and "use_cpu_offload" not in given and not settings.use_cpu_offload:
        offloads.append(True)
    strategies = [settings.sharding_strategy]
    if sharded and "sharding_strategy" not in given and settings.sharding_strategy is None:
        strategies.append("hybrid_shard_grad_op" if memory_budget.dims.dp_replicate > 1 else "shard_grad_op")
    vocabularies = [settings.vocab_parallel]
    if vocabularies == ["auto"]:
        vocabularies = ["false", "true"] if memory_budget.ranks > 1 else ["false"]
    return [
        dict(
            use_gradient_checkpointing=w,
            microbatch_tokens=t,
            use_cpu_offload=o,
            sharding_strategy=strategy,
            vocab_parallel=v,
        )
        for o in offloads
        for strategy in strategies
        for w in words
        for t in tokens
        for v in vocabularies
    ]


SAVERS = ("use_gradient_checkpointing", "use_cpu_offload")  # what takes time and saves memory, and does nothing else


def best_of(
    plan: Parts, ways: list[dict], shape: KnownShape, memory_budget: MemoryBudget, machine: Machine | None
) -> Tried:
    """The plan with the settings that are predicted the fastest of those with which it fits, or with the first that fit
    where no rates are known; with those that need least if none fit. `ways`: as `combinations` gives them.

    What only saves more memory than a way that fits is not tried: it is no faster.
    """
    found: Tried | None = None
    least: Tried | None = None
    fitting: list[dict] = []
    for way in ways:
        if any(_saves_more(way, other) for other in fitting):
            continue
        one = plan.with_settings(**way)
        needed = budget.predicted_bytes(one, shape, memory_budget)
        if needed > memory_budget.usable:
            if least is None or needed < least.needed:
                least = Tried(one, needed)
            continue
        if machine is None:
            return Tried(one, needed)
        fitting.append(way)
        tried = Tried(one, needed, seconds_per_step(one, shape, memory_budget, machine))
        if found is None or tried.seconds_per_row < WORTH * found.seconds_per_row:
            found = tried
    best = found or least
    assert best is not None, ways
    return best


def _saves_more(way: dict, other: dict) -> bool:
    """Whether a way is another one with recomputation, offload or both in addition."""
    return all(way[n] >= other[n] if n in SAVERS else way[n] == other[n] for n in way)


def _checkpointing(used: Parts, shape, memory_budget) -> tuple[str, str]:
    without = used.with_settings(use_gradient_checkpointing="false")
    word = used.settings.use_gradient_checkpointing
    plain = budget.predicted_bytes(without, shape, memory_budget)
    with_it = used.with_settings(use_gradient_checkpointing="true")
    recomputed, usable = budget.predicted_bytes(with_it, shape, memory_budget), memory_budget.usable
    if word == "false":
        fits = "fits" if plain <= usable else "does not fit"
        return word, f"{gib(plain)} predicted without it {fits} in {gib(usable)}; {gib(recomputed)} with it"
    if plain <= usable:
        return word, f"with {used.steps.microbatch_tokens} tokens per forward it is predicted the fastest that fits"
    fact = f"{gib(recomputed)} with it {'fits' if recomputed <= usable else 'does not fit either'}"
    return word, f"{gib(plain)} predicted without it does not fit in {gib(usable)}; {fact}"


def _tokens_reason(used: Tried, default: int, shape, memory_budget, machine: Machine | None) -> str:
    other = used.plan.with_settings(microbatch_tokens=default)
    whole = budget.predicted_bytes(other, shape, memory_budget)
    if whole > memory_budget.usable or used.time is None or machine is None:
        taken = f"would take {gib(whole)} of {gib(memory_budget.usable)}, these take {gib(used.needed)}"
        return f"{default} tokens per forward {taken}"
    return _instead(used, other, shape, memory_budget, machine)


def _instead(used: Tried, other: Parts, shape, memory_budget, machine: Machine | None) -> str:
    """Why `used` is taken and not `other`."""
    needed = budget.predicted_bytes(other, shape, memory_budget)
    if needed > memory_budget.usable:
        return (
            f"{gib(needed)} predicted without it does not fit in {gib(memory_budget.usable)}; "
            f"{gib(used.needed)} with it"
        )
    if machine is None or used.time is None:
        return "nothing else fits"
    slower = seconds_per_step(other, shape, memory_budget, machine).total
    return f"predicted {seconds_said(used.time.total)} per step, {seconds_said(slower)} otherwise"
