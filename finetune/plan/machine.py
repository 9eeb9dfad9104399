"""Machines that the time of a step is predicted for: this one as it was probed, or devices that are assumed."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from backend_manager import Backend, BackendCapabilities, BackendManager, cpu_facts
from finetune.backend.disk import disk_rate
from finetune.data.collate import share_prompts
from finetune.data.run_data import Data
from finetune.engine import Batch, FineTuningEngine
from finetune.estimate import memory
from finetune.estimate.budget import UNIFIED, MemoryBudget, metal_bytes, parse_size, predicted
from finetune.estimate.model_cost import MicrobatchShape
from finetune.estimate.model_shape import KnownShape
from finetune.estimate.rates import (
    RANKS_PER_HOST,
    Links,
    Rates,
    device_of_memory,
    documented,
    gloo_links,
    links_of,
    of_accelerator,
    of_cpu,
)
from finetune.estimate.rollout import rollout_of, with_judge
from finetune.estimate.step_time import Machine, StepTime, judged_time, rewarded_time, seconds_per_step
from finetune.estimate.traced import Failed, traceable_shape
from finetune.parts.parts import Parts
from finetune.parts.trains import AddedLayers
from finetune.plan.asked import Asked, Ranks, Sample
from finetune.plan.facts import Facts
from finetune.plan.run_plan import RunPlan
from finetune.rewards.own_answers import OwnAnswers
from finetune.rewards.rollouts import Rollouts


def machine_of(asked: Asked, facts: Facts, ranks: Ranks, sample: Sample) -> Machine | None:
    """The machine of a plan; None where nothing was probed or assumed."""
    device = asked.assume_device
    rates: Rates | None
    if asked.assumes_accelerator:
        device = device or device_of_memory(parse_size(asked.assume_memory))
        rates = documented(device)
    else:
        rates = rates_here(facts.backend, facts.capabilities, ranks.local, facts.environment)
        if rates is not None and asked.base_offload == "disk":
            rates = with_disk(rates, facts.weight_files)
    if rates is None:
        return None
    found = sample()
    mean = None
    if found and found.lengths:
        tokens = found.lengths
        if asked.reward:
            tokens = found.prompts
        mean = sum(tokens) / len(tokens)
    links: Links | None = None
    if ranks.dims.world_size > 1:
        per_host = ranks.local
        if asked.assume_world_size:
            per_host = min(RANKS_PER_HOST, ranks.dims.world_size)
        if asked.on_cpu:
            links = gloo_links(rates.contention, asked.assume_interconnect)
        else:
            links = links_of(asked.assume_interconnect, device or "a100", per_host)
    return Machine(rates, links, mean)


def room_of(asked: Asked, facts: Facts, ranks: Ranks) -> MemoryBudget | None:
    """Memory per rank that the plan may use: this machine's device, or --assume_memory's; None if unknown."""
    backend = str(facts.backend)
    memory_bytes = facts.capabilities.memory_bytes
    if asked.assume_memory:
        memory_bytes = parse_size(asked.assume_memory)
        if asked.assumes_cuda:
            backend = "cuda"
        elif asked.assumes_accelerator:
            backend = "mps"
    if not memory_bytes:
        return None
    if backend in UNIFIED and (asked.assume_memory or sys.platform == "darwin"):
        memory_bytes = metal_bytes(memory_bytes)
    if ranks.dims.world_size == 1:
        return MemoryBudget(max(0, memory_bytes - facts.beside), backend, asked.assume_world_size or 1)
    unified = facts.backend in (Backend.CPU, Backend.MPS, Backend.MLX) and not asked.assume_memory
    if unified:
        memory_bytes = memory_bytes // ranks.local
    return MemoryBudget(max(0, memory_bytes - facts.beside), backend, ranks.dims.shards, ranks.dims)


def rates_here(
    backend: Backend, caps: BackendCapabilities, local_ranks: int, environment: Mapping[str, str]
) -> Rates | None:
    """Rates of one of the `local_ranks` ranks of this machine, as probed."""
    if not (caps.product_rates and caps.memory_rate and caps.operator_seconds):
        return None
    if backend is not Backend.CPU:
        return of_accelerator(caps.product_rates, caps.memory_rate, caps.operator_seconds, caps.host_link_rate)
    given = environment.get("OMP_NUM_THREADS", "")
    cpu = cpu_facts()
    if given.isdigit() and int(given):
        threads = int(given)
    else:
        threads = max(1, cpu["cores"] // local_ranks)
    return of_cpu(
        caps.product_rates,
        caps.memory_rate,
        caps.operator_seconds,
        threads,
        local_ranks,
        cpu["cores"],
        cpu["physical_cores"],
    )


def with_disk(rates: Rates, weights: tuple[Path, ...]) -> Rates:
    """Rates with that of the disk of a base's files, where it can be timed: what is packed of them is read as fast."""
    return replace(rates, disk=disk_rate(weights) or rates.disk)


def predicted_time(
    plan: RunPlan,
    shape: KnownShape | None,
    data: Data,
    engine: FineTuningEngine,
    local_ranks: int,
    environment: Mapping[str, str],
    answer: float | None = None,
    answers: float | None = None,
) -> StepTime | None:
    """Predicted time of the average step of a run whose data are read. `answer`: mean tokens of a sampled answer,
    `answers`: how many a step learns from, over all ranks; None: all of full length.

    None if the rates of this machine are not known, no formula of time describes the layers, or they cannot be traced;
    nor are there rates of products in fp8.
    """
    caps = BackendManager(plan.backend, False).documented_or_cached()
    rates = rates_here(Backend(plan.backend), caps, local_ranks, environment)
    is_known = rates is not None and shape is not None and shape.is_timed and len(data.train) > 0
    if rates is None or shape is None or not is_known or plan.precision.in_fp8:
        return None
    if plan.memory.base_offload == "disk":
        rates = with_disk(rates, plan.model.weight_files)
    if plan.backend == "cpu":
        links = gloo_links(rates.contention)
    else:
        links = links_of(None, "a100", local_ranks)
    row_tokens = float(data.train.lengths.mean())
    if data.train.documents_per_row == 2:
        row_tokens *= computed_part(data.largest_microbatch(plan, engine), engine)
    machine = Machine(rates, links if plan.dims.world_size > 1 else None, row_tokens)
    rollouts = list(data.rollouts(plan))
    try:
        if not rollouts:
            return seconds_per_step(plan, shape, division_of(plan), machine)
        mean = max(1, round(sum(map(sum, rollouts)) / sum(map(len, rollouts))))
        rollout = rollout_of(plan, [mean] * max(map(len, rollouts)))
        learned = float(len(rollout.prompts))
        if isinstance(data, OwnAnswers):
            if answer is not None:
                rollout = replace(rollout, answer=max(1, round(answer)))
            return judged_time(plan, shape, division_of(plan), rollout, machine, data.judge.cost)
        if answer is not None and answers is not None:
            rollout = replace(rollout, answer=max(1, round(answer)))
            learned = answers / rollout.group / plan.dims.data_ranks
        return rewarded_time(plan, shape, division_of(plan), rollout, learned, machine)
    except Failed:
        return None
    finally:
        if shape.tracer is not None and answer is not None:  # at the end of the run
            shape.tracer.close()


def accumulates(plan: Parts, batch: Batch) -> bool:
    """True if a rank has more documents in a step than its largest microbatch."""
    return plan.rows_per_step * plan.data.documents_per_step_row > len(batch.rows) * plan.dims.data_ranks


def computed_part(batch: Batch, engine: FineTuningEngine) -> float:
    """The fraction of a microbatch's tokens that the engine computes: prompts of several answers once."""
    if not engine.shares_prompts:
        return 1.0
    return share_prompts(batch).input_ids_BS.size / batch.input_ids_BS.size


def division_of(plan: RunPlan) -> MemoryBudget:
    """Division of a plan's model over ranks, for predicted bytes and seconds without a limit."""
    return MemoryBudget(0, plan.backend, plan.dims.shards, plan.dims)


def shape_of_run(plan: RunPlan) -> KnownShape | None:
    """The shape of the run's model, read from its headers; None where it is not predicted. The plan has said if layers
    are traced.
    """
    added = plan.trains.folder if isinstance(plan.trains, AddedLayers) else None
    return traceable_shape(plan.model, added, said=True).known


def predicted_for_batch(
    plan: RunPlan, shape: KnownShape | None, data: Data, engine: FineTuningEngine, loads_own_shards: bool
) -> dict:
    """{"total", "items"} in bytes for the run's largest microbatch and rollout; `loading` is an item beside the total.

    Zeros if the model's shape is not known. `loads_own_shards`: each rank reads only its part of the weights.
    """
    if shape is None:
        return {"total": 0, "items": {}}
    batch = data.largest_microbatch(plan, engine)
    sampled = max(data.rollouts(plan), key=lambda lengths: len(lengths) * max(lengths, default=0), default=None)
    rollout = None
    if sampled:
        rollout = rollout_of(plan, sampled)
    several = accumulates(plan, batch)
    shares = False
    if engine.shares_prompts:
        shared = share_prompts(batch)
        shares = plan.data.reward is not None or shared is not batch
        batch = shared
    lengths = tuple(np.bincount(batch.document_ids_BS[batch.document_ids_BS >= 0]).tolist())
    microbatch = MicrobatchShape(lengths, batch.num_targets, plan.data.layout, several, shares)
    try:
        found = predicted(plan, shape, division_of(plan), microbatch, rollout)
    except Failed:
        return {"total": 0, "items": {}}
    finally:
        if shape.tracer is not None:
            shape.tracer.close()
    if isinstance(data, OwnAnswers):
        found = with_judge(found, data.judge.standing, data.judge.reading)
    if isinstance(data, Rollouts) and data.rewards.standing:
        found = with_judge(found, data.rewards.standing, data.rewards.reading)
    if plan.engine == "mlx":  # MLX's allocator does not tell them apart
        found["items"]["workspace"] = found["items"].get("workspace", 0) + found["items"].pop("activations", 0)
    if loads_own_shards:
        found["items"]["loading"] = memory.loading_bytes(plan, shape, plan.dims.shards, plan.dims)
    else:
        found["items"]["loading"] = memory.loading_bytes(plan, shape)
    if plan.engine == "mlx":  # whose peak is of arrays alone
        found["items"]["loading"] -= memory.LOADING_BYTES
    return found
