"""Memory in the plan: dense copies of quantized weights, checkpointing, tokens per forward, offload."""

from dataclasses import dataclass

from backend_manager import Backend
from finetune.errors import PlanError
from finetune.estimate import budget
from finetune.estimate.budget import UNIFIED, MemoryBudget, gib
from finetune.estimate.model_cost import shards_ends
from finetune.estimate.model_shape import KnownShape
from finetune.estimate.step_time import Machine, StepTime, seconds_per_step, seconds_said
from finetune.parts.attention import REQUIRED
from finetune.parts.degrees import DEGREES
from finetune.parts.objectives import GENERATE
from finetune.parts.parts import Parts
from finetune.parts.precision import Precision
from finetune.plan.asked import Asked, Change, Notice, Ranks, Said
from finetune.plan.facts import Facts

CACHE_FRACTION_OF_MEMORY = 0.04  # auto keeps dense copies of a quantized base if they take no more than this


def may_offload(asked: Asked, facts: Facts, ranks: Ranks) -> bool:
    """True if the plan may keep weights in host memory where nothing else fits."""
    accelerated = facts.backend is Backend.CUDA or asked.assumes_cuda
    open_to_it = asked.is_open("use_cpu_offload") and ranks.distribution == "ptd"
    return accelerated and ranks.dims.shards > 1 and open_to_it


def may_shard_vocabulary(facts: Facts, trial: Parts, shape: KnownShape) -> bool:
    """True if the plan may keep each rank's rows of embedding and head ungathered where nothing else fits."""
    is_open = trial.settings.vocab_parallel == "auto" and trial.dims.shards > 1
    return is_open and facts.backend is not Backend.MPS and shards_ends(trial, shape)


def recompute_on_apple_gpus(asked: Asked, facts: Facts, ranks: Ranks, quantizes: bool) -> Said:
    """Recomputation, which sharded weights that are not quantized need on MPS."""
    sharded = facts.backend is Backend.MPS and ranks.dims.shards > 1
    if sharded and not quantizes and asked.use_gradient_checkpointing == "auto":
        reason = (
            "MPS cannot resize storages: gathered weights that autograd has saved leave memory only where layers are "
            "recomputed"
        )
        yield Change("use_gradient_checkpointing", "true", reason)


def activation_offload(asked: Asked, facts: Facts) -> Said:
    """Offload of activations, which are in host memory already on some devices."""
    host_memory = facts.backend in (Backend.CPU, Backend.MPS) and not asked.assumes_accelerator
    if asked.use_activation_cpu_offload and host_memory:
        reason = f"activations on {facts.backend} already are in host memory"
        yield Change("use_activation_cpu_offload", False, reason)


def attention(asked: Asked, facts: Facts, precision: Precision) -> Said:
    """Refuses kernels that this device or precision lacks; which one each layer gets is tried on the loaded model."""
    available = facts.capabilities.supports_flash_attention or asked.assumes_cuda
    default = f"no flash attention kernels on {facts.backend}"
    reason = facts.capabilities.reasons.get("flash_attention", default)
    if asked.attention in REQUIRED:
        if not available:
            raise PlanError(f"--attention {asked.attention}: {reason}. Use auto, groups or sdpa.")
        if precision.word == "fp32":
            raise PlanError(
                f"--attention {asked.attention}: its kernels compute in 16 bits only. Use --precision bf16, or auto."
            )
    if not asked.use_flash_attention:
        return
    if available:
        yield Notice(f"use_flash_attention: --attention {asked.attention} says which kernels; they take bf16 and fp16")
        return
    yield Change("use_flash_attention", False, f"{reason}; attention runs per document through torch")


def compiling(asked: Asked, facts: Facts, ranks: Ranks, trial: Parts) -> Said:
    """--compile, where nothing is compiled; what is left open is timed on the loaded model."""
    if asked.compile == "false":
        return
    degrees = {name: getattr(ranks.dims, row.axis) for name, row in DEGREES.items() if row.in_forward}
    split = [f"--{name} {degree}" for name, degree in degrees.items() if degree > 1]
    is_open = asked.requested.get("compile", "auto") == "auto"  # a resumed run may have inherited what was decided
    why = None
    if "DISABLE_COMPILE" in facts.environment:
        why = "DISABLE_COMPILE is set"
    elif facts.backend is Backend.MPS:
        why = "torch.compile is not used on MPS"
    elif split:
        why = f"layers of {split[0]} communicate within their forward"
    elif facts.environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        why = "DeepSpeed gathers weights within a layer's forward"
    elif trial.precision.in_fp8 and (facts.backend is Backend.CUDA or not is_open):
        why = "--frozen_products fp8 rounds by kernels that are not compiled with a layer"
    if why:
        yield Change("compile", "false", why)
    elif is_open and (facts.backend is not Backend.CUDA or ranks.dims.world_size > 1):
        yield Change("compile", "false")


def vocabulary(asked: Asked, facts: Facts, trial: Parts) -> Said:
    """vocab_parallel: false where it cannot be chosen. PlanError for true beside adapters on embedding or head."""
    shape = facts.known_shape
    if asked.vocab_parallel == "true" and shape is not None and not shards_ends(trial, shape):
        raise PlanError(
            f"--vocab_parallel true: embedding or head gets an adapter (--lora_target_modules "
            f"{asked.lora_target_modules}), which is gathered with its layer. Use false."
        )
    whole = bool(asked.teacher) or asked.task != GENERATE or not (shape and may_shard_vocabulary(facts, trial, shape))
    if asked.vocab_parallel == "auto" and whole:
        yield Change("vocab_parallel", "false")


def dense_copies(
    asked: Asked,
    facts: Facts,
    ranks: Ranks,
    precision: Precision,
    quantizes: bool,
    trial: Parts,
    room: MemoryBudget | None,
) -> Said:
    """cache_dequantized auto: on if dense copies are small beside the memory, and the run fits with them.
    They save two dequantizations per layer and microbatch.
    """
    word = asked.cache_dequantized
    if word == "true" and not quantizes:
        raise PlanError(f"--cache_dequantized true: --train_type {asked.train_type} has nothing quantized. Omit it.")
    left_open = asked.requested.get("cache_dequantized", "auto") == "auto"
    by_one_process = word == "true" and left_open and ranks.dims.shards > 1  # a saved run that sharded nothing
    if word != "auto" and not by_one_process:
        return
    num_weights = facts.shape and facts.shape.num_weights
    if not quantizes:
        yield Change("cache_dequantized", "false")
    elif ranks.dims.shards > 1:
        yield Change("cache_dequantized", "false", "sharded weights are all-gathered packed")
    elif not (num_weights and room):
        yield Change("cache_dequantized", "false", "dequantized weights would be as large as unquantized ones")
    else:
        kept, reason = _dense_copies_fit(num_weights * precision.weight_bytes, facts.known_shape, trial, room)
        yield Change("cache_dequantized", "true" if kept else "false", reason)


def _dense_copies_fit(num_bytes: int, shape: KnownShape | None, trial: Parts, room: MemoryBudget) -> tuple[bool, str]:
    """(True if auto keeps dense copies of so many bytes, reason); the run is predicted without recomputation."""
    small = num_bytes <= CACHE_FRACTION_OF_MEMORY * room.memory_bytes
    size = f"dense copies take {num_bytes / 2**30:.1f} GiB of {room.memory_bytes / 2**30:.0f} GiB"
    if not small or shape is None:
        return small, size
    with_copies = trial.with_settings(
        cache_dequantized="true",
        use_gradient_checkpointing="false",
        microbatch_tokens=trial.settings.microbatch_tokens or default_tokens(trial),
    )
    needed = budget.predicted_bytes(with_copies, shape, room)
    if needed > room.usable:
        return False, f"{gib(needed)} predicted with dense copies do not fit in {gib(room.usable)}"
    return True, size


def default_tokens(plan: Parts) -> int:
    """Tokens of a forward where nothing decides."""
    return max(budget.DEFAULT_MICROBATCH_TOKENS, plan.data.row_length)


def memory(asked: Asked, facts: Facts, trial: Parts, room: MemoryBudget | None, machine: Machine | None) -> Said:
    """Checkpointing if it is auto, microbatch_tokens if it is unset, offload and resharding: whatever fits."""
    shape = facts.known_shape
    if room and shape:
        given = {name for name in ("use_cpu_offload", "sharding_strategy") if not asked.is_open(name)}
        if asked.microbatch_tokens is not None:
            given.add("microbatch_tokens")
        for name, (value, reason) in settle_memory(trial, shape, room, given, machine).items():
            yield Change(name, value, reason)
            trial = trial.with_settings(**{name: value})
        yield from warn_over_budget(trial, shape, room)
    yield from unpredicted(facts, room)
    if trial.settings.use_gradient_checkpointing == "auto":
        if asked.reentrant_checkpointing:
            yield Change("use_gradient_checkpointing", "true", "--reentrant_checkpointing asks for it")
        else:
            reason = "recomputation costs about a third of the speed; ask for it if memory runs out"
            yield Change("use_gradient_checkpointing", "false", reason)
    if trial.settings.vocab_parallel == "auto":
        yield Change("vocab_parallel", "false")
    if trial.settings.microbatch_tokens is None:
        yield Change("microbatch_tokens", default_tokens(trial))


def unpredicted(facts: Facts, room: MemoryBudget | None) -> Said:
    """Notices of models whose memory no formula describes."""
    model = facts.shape
    if model is None:
        return
    why = "its config.json lacks sizes of its layers"
    if model.unlike:
        why = f"{model.unlike} in its config.json"
    if (model.outside or model.tracer) and not model.known:
        failed = ""
        if model.tracer and model.tracer.error:
            failed = f": {model.tracer.error}"
        yield Notice(
            f"memory is not predicted: no formula describes this model's layers ({why}), and they cannot be "
            f"traced{failed}. If it runs out, lower --batch_size, or set --use_gradient_checkpointing true"
        )
    elif model.tracer and room:
        yield Notice(
            f"memory: no formula describes this model's layers ({why}); their activations were traced, and the "
            "result is kept for the next start"
        )


def warn_over_budget(plan: Parts, shape: KnownShape, room: MemoryBudget) -> Said:
    """A notice if the run is predicted not to fit; with full rows the prediction is an upper bound."""
    if plan.settings.dry_run:
        return
    needed = budget.predicted_bytes(plan, shape, room)
    if needed > room.usable:
        yield Notice(
            f"memory: {gib(needed)} predicted for full rows, {gib(room.usable)} usable; --dry_run lists what would "
            "make it fit"
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
        return self.plan.rows_per_step

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
        before = getattr(plan.settings, name)
        value = getattr(used.plan.settings, name)
        if before != value and (before, value) != ("auto", "false"):
            other = used.plan.with_settings(**{name: before})
            chosen[name] = (value, _instead(used, other, shape, memory_budget, machine))
    return chosen


def combinations(plan: Parts, memory_budget: MemoryBudget, given: set, timed: bool) -> list[dict]:
    """The settings of every combination of what is open in the plan, what changes least first."""
    settings = plan.settings
    words = [plan.settings.use_gradient_checkpointing]
    if words == ["auto"]:
        if settings.reentrant_checkpointing:
            words = ["true"]
        else:
            words = ["false", "true"]
    default = settings.microbatch_tokens or default_tokens(plan)
    tokens = [default]
    if "microbatch_tokens" not in given:
        in_batch = plan.steps.batch_size * plan.data.row_length
        fewer = default // 2
        larger = default
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
        if memory_budget.ranks > 1:
            vocabularies = ["false", "true"]
        else:
            vocabularies = ["false"]
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
    """The plan with the fastest predicted settings that fit; without known rates, the first that fit; if none fit,
    those that need the least memory. `ways`: from `combinations`.

    A way that only saves more memory than one that fits is not tried: it is no faster.
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
    """True if `way` is `other` plus recomputation, offload or both."""
    return all(way[n] >= other[n] if n in SAVERS else way[n] == other[n] for n in way)


def _checkpointing(used: Parts, shape: KnownShape, memory_budget: MemoryBudget) -> tuple[str, str]:
    without = used.with_settings(use_gradient_checkpointing="false")
    word = used.settings.use_gradient_checkpointing
    plain = budget.predicted_bytes(without, shape, memory_budget)
    with_it = used.with_settings(use_gradient_checkpointing="true")
    recomputed = budget.predicted_bytes(with_it, shape, memory_budget)
    usable = memory_budget.usable
    if word == "false":
        fits = "fits" if plain <= usable else "does not fit"
        return word, f"{gib(plain)} predicted without it {fits} in {gib(usable)}; {gib(recomputed)} with it"
    if plain <= usable:
        return word, f"with {used.steps.microbatch_tokens} tokens per forward it is predicted the fastest that fits"
    fact = f"{gib(recomputed)} with it {'fits' if recomputed <= usable else 'does not fit either'}"
    return word, f"{gib(plain)} predicted without it does not fit in {gib(usable)}; {fact}"


def _tokens_reason(
    used: Tried, default: int, shape: KnownShape, memory_budget: MemoryBudget, machine: Machine | None
) -> str:
    other = used.plan.with_settings(microbatch_tokens=default)
    whole = budget.predicted_bytes(other, shape, memory_budget)
    if whole > memory_budget.usable or used.time is None or machine is None:
        taken = f"would take {gib(whole)} of {gib(memory_budget.usable)}, these take {gib(used.needed)}"
        return f"{default} tokens per forward {taken}"
    return _instead(used, other, shape, memory_budget, machine)


def _instead(used: Tried, other: Parts, shape: KnownShape, memory_budget: MemoryBudget, machine: Machine | None) -> str:
    """Reason to prefer `used` to `other`."""
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
