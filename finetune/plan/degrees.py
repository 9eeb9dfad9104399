"""--parallel: the degrees that are not given, by predicted time among the layouts that fit."""

from dataclasses import replace
from functools import partial

from backend_manager import Backend
from finetune.config import DEFAULTS
from finetune.distributed.parallel_dims import ParallelDims, check_expert_parallelism, check_model
from finetune.errors import PlanError
from finetune.estimate.budget import MemoryBudget, gib
from finetune.estimate.model_cost import shards_ends
from finetune.estimate.model_shape import KnownShape
from finetune.estimate.step_time import Machine, seconds_said
from finetune.parts.parts import Parts
from finetune.plan.amount import rows_per_batch, training_rows
from finetune.plan.data import wanted_length
from finetune.plan.draft import Draft
from finetune.plan.memory import WORTH, Tried, best_of, combinations
from finetune.plan.plan_base import Adjustment

DEGREES = ("dp_degree", "dp_shards", "tp_degree", "cp_degree", "pp_degree", "ep_degree")
LONG_ROW = 8192  # tokens from which splitting a row over ranks is tried
MOST_STAGES, MOST_SLICES = 16, 8
SHOWN = 3
# What is chosen again for each layout, and the words by which it is open.
MEMORY_SETTINGS = {
    "use_gradient_checkpointing": "auto",
    "microbatch_tokens": None,
    "use_cpu_offload": False,
    "sharding_strategy": None,
    "vocab_parallel": "auto",
}


def is_open(draft: Draft) -> bool:
    """True if the plan may choose the degrees of this run."""
    values = draft.values
    word = values["parallel"]
    asked = word == "fastest" or (word == "auto" and bool(values["assume_world_size"]))
    given = any(draft.given(name) for name in (*DEGREES, "sharding_strategy"))
    settled = draft.distribution != "ptd" or draft.backend is Backend.MPS or draft.is_resumed
    return asked and draft.dims.world_size > 1 and not (given or settled)


def choices(draft: Draft, plan: Parts, shape: KnownShape, machine: Machine) -> tuple[list[Tried], list[Tried]]:
    """(layouts that fit, the fastest run first; those that do not, the smallest first). `plan`: the settled one.

    A number of passes fixes the rows of a run, so that a row's time counts; --max_steps fixes the steps.
    """
    memory_budget, given = draft.memory_budget(), {n for n in MEMORY_SETTINGS if not draft.is_open(n)}
    assert memory_budget is not None
    words = {name: draft.requested.get(name, value) for name, value in MEMORY_SETTINGS.items()}
    if words["vocab_parallel"] == "auto" and not shards_ends(plan, shape):
        words["vocab_parallel"] = "false"
    found: list[Tried] = []
    timed: list[Tried] = []
    for length in lengths(draft):
        open_plan = plan.with_settings(**words, context_length=length)
        found = [
            best_of(one, combinations(one, room, given, timed=True), shape, room, machine)
            for one, room in candidates(open_plan, shape, memory_budget, draft, machine.ranks_per_host)
        ]
        timed = [t for t in found if t.time]
        if timed:
            break
    fitting = sorted(timed, key=partial(cost, draft))
    nearly = [t for t in timed if WORTH * cost(draft, t) <= cost(draft, fitting[0])]
    fitting = nearly[:1] + [t for t in fitting if t is not nearly[0]]  # of equals, what shards more
    return fitting, sorted((t for t in found if not t.time), key=lambda t: t.needed)


def lengths(draft: Draft) -> list[int]:
    """Context lengths at which layouts are compared, the longest first: what memory allows depends on the layout."""
    settled = draft.values["context_length"]
    length = wanted_length(draft)[0] if draft.is_open("context_length") else settled
    found = []
    while length > settled:
        found.append(length)
        length //= 2
    return [*found, settled]


def cost(draft: Draft, tried: Tried) -> float:
    """Seconds by which layouts are compared: of a row, or of a step where its rows may differ."""
    assert tried.time
    by_step = draft.values["max_steps"] > 0 and draft.is_open("batch_size")
    return tried.time.total if by_step else tried.seconds_per_row


def candidates(plan: Parts, shape: KnownShape, room: MemoryBudget, draft: Draft, per_host: int):
    """(plan, memory budget) of every layout of the world size that the model allows and whose base could fit, with the
    rows per rank that the plan would take there.
    """
    rows = training_rows(draft) if draft.is_open("batch_size") else None
    for dims in layouts(draft.dims.world_size, shape, plan.data.context_length, per_host):
        batch = plan.steps.batch_size if rows is None else rows_per_batch(draft, rows, dims.data_ranks)[0]
        one = replace(plan.with_settings(**flags(dims), batch_size=batch), dims=dims)
        yield one, replace(room, ranks=dims.shards, dims=dims)


def flags(dims: ParallelDims) -> dict[str, int]:
    """The settings that give these degrees."""
    found = dict(dp_degree=dims.dp_replicate, dp_shards=dims.dp_shard, tp_degree=dims.tp)
    return found | dict(cp_degree=dims.cp, pp_degree=dims.pp, ep_degree=dims.ep)


def say(draft: Draft, chosen: Tried, fitting: list[Tried]) -> None:
    """Adjustments of the degrees that were chosen."""
    assert chosen.time
    reason = f"predicted {seconds_said(chosen.time.total)} per step, the fastest of {len(fitting)} layouts that fit"
    shards = next((t for t in fitting if t.plan.dims.dp_shard == t.plan.dims.world_size and t.plan.dims.ep == 1), None)
    if shards and shards.time:
        reason += f"; {seconds_said(shards.time.total)} if all ranks shard"
    for name, value in flags(chosen.plan.dims).items():
        if value != DEFAULTS[name]:
            draft.adjustments.append(Adjustment(name, DEFAULTS[name], value, reason))
            reason = "of the same layout"


def layouts(world_size: int, shape: KnownShape, context_length: int, per_host: int) -> list[ParallelDims]:
    """Degrees whose product is the world size and that divide the model; FSDP over all of them first."""
    found = []
    for tp in powers(min(per_host, MOST_SLICES)):
        for pp in powers(MOST_STAGES):
            for cp in powers(world_size) if context_length >= LONG_ROW else [1]:
                if world_size % (tp * pp * cp) or context_length // cp < LONG_ROW // 2 and cp > 1:
                    continue
                rest = world_size // (tp * pp * cp)
                for shards in sorted({rest, *(s for s in powers(rest) if rest % s == 0)}, reverse=True):
                    dims = ParallelDims(rest // shards, shards, cp, tp, pp)
                    found.append(dims)
                    if shape.num_experts and tp == 1:
                        found += [replace(dims, ep=ep) for ep in powers(shards)[1:]]
    return [dims for dims in found if is_possible(dims, shape)]


def is_possible(dims: ParallelDims, shape: KnownShape) -> bool:
    try:
        check_model(dims, shape)
        check_expert_parallelism(dims)
    except PlanError:
        return False
    return True


def powers(most: int) -> list[int]:
    """Powers of two up to `most`."""
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


# ---- what is said of it


def lines_of(fitting: list[Tried], others: list[Tried], room: MemoryBudget) -> list[str]:
    """The first layouts with their bytes and seconds, and how many lost, and to what."""
    if not fitting:
        least = others[0]
        return [f"none of {len(others)} layouts fits: the smallest, {named(least)}, takes {gib(least.needed)} per rank"]
    shown = fitting[:SHOWN]
    times = [f"{seconds_said(t.time.total)} per step" for t in shown if t.time]
    if len({t.rows for t in shown}) > 1:
        times = [f"{said} of {t.rows} rows" for said, t in zip(times, shown, strict=True)]
    rows = [(str(t.plan.dims), knobs(t.plan), gib(t.needed), said) for t, said in zip(shown, times, strict=True)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [f"layouts of {fitting[0].plan.dims.world_size} ranks, the fastest predicted first:"]
    for row, one in zip(rows, shown, strict=True):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        lines.append(f"  {text}{_slower(one, fitting[0])}")
    more, larger = len(fitting) - len(rows), len(others)
    rest = [f"{more} more fit and are slower"] if more > 0 else []
    rest += [f"{larger} do not fit in {gib(room.usable)}"] if larger else []
    return [*lines, *([f"  {', '.join(rest)}"] if rest else [])]


def named(tried: Tried) -> str:
    return f"{tried.plan.dims}, {knobs(tried.plan)}"


def knobs(plan: Parts) -> str:
    """What of a layout's plan trades memory for speed."""
    words = [f"{plan.steps.microbatch_tokens:,} tokens per forward"]
    words += ["recomputation"] if plan.memory.recompute else []
    words += ["weights kept gathered"] if not plan.parallel.reshard_after_forward else []
    words += ["offload"] if plan.memory.offload else []
    words += ["embedding and head not gathered"] if plan.parallel.vocab_parallel else []
    return ", ".join(words)


def _slower(one: Tried, first: Tried) -> str:
    if one is first or one.time is None or first.time is None:
        return ""
    more = {n: s / one.rows - first.time.items.get(n, 0.0) / first.rows for n, s in one.time.items.items()}
    name = max(more, key=lambda n: more[n])
    return f"  (more {name})" if more[name] > 0 else ""
