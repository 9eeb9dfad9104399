"""What the time of a step is predicted for: this machine as it was probed, or devices that are assumed."""

from collections.abc import Mapping

from backend_manager import Backend, BackendCapabilities, BackendManager, cpu_facts
from finetune.estimate.budget import MemoryBudget, parse_size
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
from finetune.estimate.step_time import Machine, StepTime, seconds_per_step
from finetune.plan.draft import Draft
from finetune.plan.run_plan import RunPlan


def machine_of(draft: Draft) -> Machine | None:
    """Of a draft; None where nothing was probed or assumed."""
    values, device = draft.values, draft.values["assume_device"]
    if draft.assumes_accelerator and not device:
        device = device_of_memory(parse_size(values["assume_memory"]))
    if draft.assumes_accelerator:
        rates: Rates | None = documented(device)
    else:
        rates = rates_here(draft.backend, draft.capabilities, draft.local_world_size, draft.facts.environment)
    if rates is None:
        return None
    sample = draft.data_sample()
    mean = sum(sample.lengths) / len(sample.lengths) if sample and sample.lengths else None
    links: Links | None = None
    if draft.dims.world_size > 1:
        per_host = draft.local_world_size
        if values["assume_world_size"]:
            per_host = min(RANKS_PER_HOST, draft.dims.world_size)
        interconnect = values["assume_interconnect"]
        if draft.backend is Backend.CPU and not draft.assumes_accelerator:
            links = gloo_links(rates.contention, interconnect)
        else:
            links = links_of(interconnect, device or "a100", per_host)
    return Machine(rates, links, mean)


def rates_here(
    backend: Backend, caps: BackendCapabilities, local_ranks: int, environment: Mapping[str, str]
) -> Rates | None:
    """Rates of one of the `local_ranks` ranks of this machine, as probed."""
    if not (caps.product_rates and caps.memory_rate and caps.operator_seconds):
        return None
    if backend is not Backend.CPU:
        return of_accelerator(caps.product_rates, caps.memory_rate, caps.operator_seconds)
    given, cpu = environment.get("OMP_NUM_THREADS", ""), cpu_facts()
    threads = int(given) if given.isdigit() and int(given) else max(1, cpu["cores"] // local_ranks)
    one = caps.product_rates, caps.memory_rate, caps.operator_seconds
    return of_cpu(*one, threads, local_ranks, cpu["cores"], cpu["physical_cores"])


def predicted_time(
    plan: RunPlan, shape: KnownShape | None, row_lengths, local_ranks: int, environment: Mapping[str, str]
) -> StepTime | None:
    """Of the average step of a run whose data are read. `row_lengths`: tokens of each row.

    None if the rates of this machine are not known, or no formula describes the model.
    """
    caps = BackendManager(plan.backend, False).documented_or_cached()
    rates = rates_here(Backend(plan.backend), caps, local_ranks, environment)
    if rates is None or shape is None or shape.tracer is not None or not len(row_lengths):
        return None
    links = gloo_links(rates.contention) if plan.backend == "cpu" else links_of(None, "a100", local_ranks)
    machine = Machine(rates, links if plan.dims.world_size > 1 else None, float(row_lengths.mean()))
    return seconds_per_step(plan, shape, MemoryBudget.of_run(plan), machine)
