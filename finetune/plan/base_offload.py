"""The frozen base in the plan: where it is while adapters train, and where its packed form is kept for later starts."""

from pathlib import Path

from backend_manager import Backend
from finetune.backend.machine import system_memory
from finetune.errors import PlanError
from finetune.estimate.budget import UNIFIED, MemoryBudget, gib
from finetune.estimate.memory import layers_bytes, outer_file_bytes
from finetune.estimate.model_cost import ModelCost
from finetune.estimate.model_shape import KnownShape
from finetune.estimate.step_time import Machine
from finetune.parts.memory import OFFLOADS
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter, Trains
from finetune.plan.asked import Asked, Change, Notice, Ranks, Said
from finetune.plan.facts import Facts
from finetune.plan.memory import best_of, combinations
from finetune.system.files import cache_folder, check_writable

SAID_FROM_BYTES = 2**28  # of a packed base: a smaller one is kept without a word


def base_offload(asked: Asked, facts: Facts, ranks: Ranks, trains: Trains) -> Said:
    """The place of the frozen layers, as far as it follows from what trains and from the machine; `memory_of_base`
    settles what is left open. Raises PlanError for what cannot be.
    """
    word = asked.base_offload
    obstacle = _obstacle(facts, ranks, trains)
    if obstacle:
        fact, remedy = obstacle
        if word in OFFLOADS and asked.given("base_offload"):
            raise PlanError(f"--base_offload {word}: {fact}. {remedy}.")
        yield Change("base_offload", "none", fact if word in OFFLOADS else "")
        return
    if word not in OFFLOADS:
        return
    if word == "host" and _has_one_memory(asked, facts):
        yield Change("base_offload", "none", f"{facts.backend} and its host have one memory; disk takes less of it")
        return
    yield from _excluded(asked, word)


# Settings that an offloaded base excludes.
EXCLUDED = {
    "cache_dequantized": "keeps dense copies of the layers on the device",
    "compile": "traces layers whose weights it takes to stay",
}


def _is_asked_for(asked: Asked, name: str) -> bool:
    return getattr(asked, name) == "true" and asked.given(name)


def _excluded(asked: Asked, word: str) -> Said:
    """Changes that turn off what an offloaded base excludes. Raises PlanError for what the user asked for."""
    for name, why in EXCLUDED.items():
        if _is_asked_for(asked, name):
            raise PlanError(f"--base_offload {word}: --{name} true {why}. Omit one of them.")
        yield Change(name, "false")


def _has_one_memory(asked: Asked, facts: Facts) -> bool:
    if asked.assumes_accelerator:
        return not asked.assumes_cuda
    return str(facts.backend) in ("cpu", *UNIFIED)


def may_pass_through(facts: Facts, ranks: Ranks, trains: Trains) -> bool:
    """True if the layers of this run's base may be elsewhere than on its device."""
    return _obstacle(facts, ranks, trains) is None


def _divides_weights(dims: ParallelDims) -> bool:
    """True if a rank has less than the full model."""
    return dims.shards * dims.tp * dims.pp * dims.ep > 1


def _obstacle(facts: Facts, ranks: Ranks, trains: Trains) -> tuple[str, str] | None:
    """(the fact by which this run's base is on its device, a remedy); None if it may be elsewhere."""
    if facts.backend is Backend.MLX:
        return "the MLX engine keeps the base in memory", "Use --backend mps or cpu, or omit it"
    if not isinstance(trains, Adapter):
        remedy = (
            "Use --train_type lora or qlora; of full fine-tuning --dp_shards and --use_cpu_offload share the weights"
        )
        return "weights of the base train", remedy
    if trains.init.reads_base:
        fact = f"--init_lora_weights {trains.init.word} computes with the whole unquantized base"
        return fact, "Use another, or omit one of them"
    if _divides_weights(ranks.dims):
        return "ranks divide the weights among them", "Use --dp_degree for replicas that each read the base, or omit it"
    if ranks.distribution != "ptd":
        return f"{ranks.distribution} is accelerate's", "Use --parallel_backend ptd"
    return None


def memory_of_base(
    asked: Asked, facts: Facts, trial: Parts, room: MemoryBudget | None, machine: Machine | None
) -> Said:
    """base_offload auto: elsewhere than on the device if nothing fits there."""
    word = trial.settings.base_offload
    shape = facts.known_shape
    if word == "auto":
        word = "none"
        reason = ""
        if shape is not None and room is not None and not any(_is_asked_for(asked, name) for name in EXCLUDED):
            word, reason = _chosen(asked, facts, trial, shape, room, machine)
        yield Change("base_offload", word, reason)
        trial = trial.with_settings(base_offload=word)
        if word in OFFLOADS:
            yield from _excluded(asked, word)
    if word in OFFLOADS and shape is not None:
        size = layers_bytes(ModelCost(shape, trial))
        yield Notice(
            f"base_offload {word}: {gib(size)} of layers are read for every forward and again for its backward; more "
            "tokens per forward (--microbatch_tokens) make fewer of them"
        )


def _chosen(
    asked: Asked, facts: Facts, trial: Parts, shape: KnownShape, room: MemoryBudget, machine: Machine | None
) -> tuple[str, str]:
    """(place of the layers, reason if it is not the device)."""
    given = set() if trial.settings.microbatch_tokens is None else {"microbatch_tokens"}
    ways = combinations(trial, room, given, machine is not None)
    resident = best_of(trial, ways, shape, room, machine)
    if resident.needed <= room.usable:
        return "none", ""
    for word in OFFLOADS[1:] if _has_one_memory(asked, facts) else OFFLOADS:
        other = trial.with_settings(base_offload=word, cache_dequantized="false", compile="false")
        found = best_of(other, ways, shape, room, machine)
        if word == "host" and not asked.assumes_accelerator and not _host_holds(other, shape):
            continue
        if found.needed <= room.usable:
            return word, (
                f"{gib(resident.needed)} predicted with the base on the device, {gib(room.usable)} usable; "
                f"{gib(found.needed)} with its layers passing through two buffers"
            )
    return "none", ""


def _host_holds(plan: Parts, shape: KnownShape) -> bool:
    """True if the layers fit in what this host has free."""
    return layers_bytes(ModelCost(shape, plan)) < system_memory()[1]


def packed_cache(asked: Asked, facts: Facts, ranks: Ranks, quantizes: bool, trains: Trains, trial: Parts) -> Said:
    """packed_cache auto: kept where a process quantizes the whole base, with a notice of its size."""
    offloads = trial.memory.base_offload is not None
    if asked.packed_cache == "none" and offloads:
        raise PlanError(
            f"--packed_cache none: --base_offload {trial.memory.base_offload} reads the base from there. Omit it, or "
            "give a folder."
        )
    if asked.packed_cache == "none":
        return
    why = None
    if facts.backend is Backend.MLX:
        why = "MLX quantizes as it loads"
    elif not (quantizes or offloads):
        why = f"--train_type {asked.train_type} has nothing quantized"
    elif not isinstance(trains, Adapter):
        why = "weights of the base train"
    elif trains.init.reads_base:
        why = f"--init_lora_weights {trains.init.word} changes the base of each run"
    elif _divides_weights(ranks.dims):
        why = "each rank quantizes its own part"
    elif facts.prequantized and not offloads:
        why = "the model is stored quantized"
    if why:
        yield Change("packed_cache", "none", why if asked.given("packed_cache") else "")
        return
    if asked.packed_cache != "auto":
        check_writable(Path(asked.packed_cache).expanduser(), "--packed_cache")
    shape = facts.known_shape
    if shape is None:
        return
    cost = ModelCost(shape, trial)
    size = layers_bytes(cost) + outer_file_bytes(cost)
    if size < SAID_FROM_BYTES and not offloads:
        return
    where = str(cache_folder("packed")) if asked.packed_cache == "auto" else asked.packed_cache
    yield Notice(
        f"the packed base takes {gib(size)} of disk in {where}, and later starts read it from there "
        "(--packed_cache none: it is not kept)"
    )
