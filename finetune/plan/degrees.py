"""--parallel: the degrees that are not given, by predicted time among the layouts that fit."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from backend_manager import Backend
from finetune.config import DEFAULTS
from finetune.errors import PlanError
from finetune.estimate.budget import MemoryBudget, gib
from finetune.estimate.model_cost import shards_ends
from finetune.estimate.model_shape import KnownShape
from finetune.estimate.step_time import Machine, seconds_said
from finetune.parts.degrees import DEGREES
from finetune.parts.parallel_dims import ParallelDims, check_expert_parallelism, check_model
from finetune.parts.parts import Parts
from finetune.parts.plan_base import Adjustment
from finetune.plan.amount import rows_per_batch
from finetune.plan.asked import Asked, Standing
from finetune.plan.context_length import wanted_length
from finetune.plan.machine import room_of
from finetune.plan.memory import WORTH, Tried, best_of, combinations
from finetune.plan.settle import Fold
from finetune.plan.train_type import train_type_is_open

# What of a plan is of its base, quantized or not.
BASE_SETTINGS = ("train_type", "quantization_backend", "n_bits", "group_size", "cache_dequantized")
LONG_ROW = 8192  # tokens from which splitting a row over ranks is tried
MOST_STAGES = 16
MOST_SLICES = 8
SHOWN = 3
# What is chosen again for each layout, and the words by which it is open.
MEMORY_SETTINGS = {
    "use_gradient_checkpointing": "auto",
    "microbatch_tokens": None,
    "use_cpu_offload": False,
    "sharding_strategy": None,
    "vocab_parallel": "auto",
}


def with_degrees(fold: Fold, plan: Standing) -> tuple[Standing, tuple[str, ...]]:
    """(plan with the layout of ranks predicted fastest, notices); the plan unchanged if the layout is not open.

    Under --train_type auto, layouts are compared with a dense base, and with a quantized one only if the fastest layout
    has no room for a dense one.
    """
    machine = fold.machine(plan)
    room = room_of(plan.asked, plan.facts, plan.ranks)
    shape = None
    if plan.facts.shape:
        shape = plan.facts.shape.known
    if not (is_open(plan) and machine and room and shape):
        return plan, ()
    chosen: list[tuple[float, Standing, tuple[str, ...]]] = []
    lines: tuple[str, ...] = ()
    for base in bases(fold, plan):
        fitting, others = choices(fold, plan, base, shape, machine)
        composing, one = with_fastest(fold, plan, fitting)
        lines = tuple(lines_of(composing or fitting, others, room))
        if composing:
            chosen.append((cost(plan.asked, composing[0]), one, lines))
        if composing and composing[0] is fitting[0]:
            break
    if not chosen:
        return plan, lines
    _, best, said = min(chosen, key=lambda one: one[0])
    return best, said


def bases(fold: Fold, plan: Standing) -> Iterator[Parts]:
    """The settled plan, or where --train_type is open, that with the base in 16 bits and that with a quantized one."""
    own = plan.asked.train_type
    words = [own]
    if train_type_is_open(plan.asked, plan.facts):
        words = ["lora", "qlora"]
    for word in words:
        other = plan
        if word != own:
            try:
                other = fold.settle(plan.facts, train_type=word)
            except PlanError:
                continue
        yield plan.parts.with_settings(**{name: getattr(other.asked, name) for name in BASE_SETTINGS})


def with_fastest(fold: Fold, plan: Standing, fitting: list[Tried]) -> tuple[list[Tried], Standing]:
    """(layouts, plan): the layouts from the first one that composes with the other flags and keeps the compared type of
    base, with its plan; no layouts and the unchanged plan if none does.
    """
    for number, tried in enumerate(fitting):
        settled = plan
        if tried.plan.dims != plan.ranks.dims:
            try:
                settled = fold.settle(replace(plan.facts, degrees=flags(tried.plan.dims)))
            except PlanError:
                continue
        if all(getattr(settled.asked, name) == getattr(tried.plan.settings, name) for name in BASE_SETTINGS):
            if settled is not plan:
                settled = saying(settled, tried, fitting[number:])
            return fitting[number:], settled
    return [], plan


def is_open(plan: Standing) -> bool:
    """True if the plan may choose the degrees of this run."""
    asked = plan.asked
    wanted = asked.parallel == "fastest" or (asked.parallel == "auto" and bool(asked.assume_world_size))
    given = any(asked.given(name) for name in (*DEGREES, "sharding_strategy"))
    settled = plan.ranks.distribution != "ptd" or plan.facts.backend is Backend.MPS or asked.is_resumed
    return wanted and plan.ranks.dims.world_size > 1 and not (given or settled)


def choices(
    fold: Fold, plan: Standing, base: Parts, shape: KnownShape, machine: Machine
) -> tuple[list[Tried], list[Tried]]:
    """(layouts that fit, the fastest run first; those that do not, the smallest first). `base`: the settled plan, with
    what quantizes its base.

    A number of passes fixes the rows of a run, so that a row's time counts; --max_steps fixes the steps.
    """
    asked = plan.asked
    room = room_of(asked, plan.facts, plan.ranks)
    assert room is not None
    given = {name for name in MEMORY_SETTINGS if not asked.is_open(name)}
    words = {name: asked.requested.get(name, value) for name, value in MEMORY_SETTINGS.items()}
    if words["vocab_parallel"] == "auto" and not shards_ends(base, shape):
        words["vocab_parallel"] = "false"
    tried_layouts: list[Tried] = []
    timed: list[Tried] = []
    for length in lengths(fold, plan):
        open_plan = base.with_settings(**words, context_length=length)
        tried_layouts = [
            best_of(one, combinations(one, its_room, given, timed=True), shape, its_room, machine)
            for one, its_room in candidates(fold, plan, open_plan, shape, room, machine.ranks_per_host)
        ]
        timed = [tried for tried in tried_layouts if tried.time]
        if timed:
            break
    fitting = sorted(timed, key=partial(cost, asked))
    nearly = [tried for tried in timed if WORTH * cost(asked, tried) <= cost(asked, fitting[0])]
    fitting = nearly[:1] + [tried for tried in fitting if tried is not nearly[0]]  # of equals, what shards more
    return fitting, sorted((tried for tried in tried_layouts if not tried.time), key=lambda tried: tried.needed)


def lengths(fold: Fold, plan: Standing) -> list[int]:
    """Context lengths at which layouts are compared, the longest first: what memory allows depends on the layout."""
    settled = plan.asked.context_length
    length = settled
    if plan.asked.is_open("context_length"):
        length, _ = wanted_length(fold.sample(plan), plan.facts.context_limit)
    lengths = []
    while length > settled:
        lengths.append(length)
        length //= 2
    return [*lengths, settled]


def cost(asked: Asked, tried: Tried) -> float:
    """Seconds by which layouts are compared: of a row, or of a step where its rows may differ."""
    assert tried.time
    if asked.max_steps > 0 and asked.is_open("batch_size"):
        return tried.time.total
    return tried.seconds_per_row


def candidates(fold: Fold, plan: Standing, open_plan: Parts, shape: KnownShape, room: MemoryBudget, per_host: int):
    """(plan, memory budget) for every layout of the world size that the model allows and whose base could fit, with the
    rows per rank of the plan there.
    """
    rows = None
    if plan.asked.is_open("batch_size"):
        rows = fold.rows(plan)
    for dims in layouts(plan.ranks.dims.world_size, shape, open_plan.data.context_length, per_host):
        batch_size = open_plan.steps.batch_size
        if rows is not None:
            batch_size, _ = rows_per_batch(plan.asked, rows, dims.data_ranks)
        one = replace(open_plan.with_settings(**flags(dims), batch_size=batch_size), dims=dims)
        yield one, replace(room, ranks=dims.shards, dims=dims)


def flags(dims: ParallelDims) -> dict[str, int]:
    """The settings that give these degrees."""
    return {name: getattr(dims, row.axis) for name, row in DEGREES.items()}


def saying(plan: Standing, chosen: Tried, fitting: list[Tried]) -> Standing:
    """The plan with adjustments of the degrees that were chosen."""
    assert chosen.time
    reason = f"predicted {seconds_said(chosen.time.total)} per step, the fastest of {len(fitting)} layouts that fit"
    shards = next((t for t in fitting if t.plan.dims.dp_shard == t.plan.dims.world_size and t.plan.dims.ep == 1), None)
    if shards and shards.time:
        reason += f"; {seconds_said(shards.time.total)} if all ranks shard"
    adjustments = list(plan.adjustments)
    for name, value in flags(chosen.plan.dims).items():
        if value != DEFAULTS[name]:
            adjustments.append(Adjustment(name, DEFAULTS[name], value, reason))
            reason = "of the same layout"
    return replace(plan, adjustments=tuple(adjustments))


def layouts(world_size: int, shape: KnownShape, context_length: int, per_host: int) -> list[ParallelDims]:
    """Degrees whose product is the world size and that divide the model; FSDP over all of them first."""
    products = []
    for tp in powers(min(per_host, MOST_SLICES)):
        for pp in powers(MOST_STAGES):
            for cp in powers(world_size) if context_length >= LONG_ROW else [1]:
                if world_size % (tp * pp * cp) or context_length // cp < LONG_ROW // 2 and cp > 1:
                    continue
                rest = world_size // (tp * pp * cp)
                for shards in sorted({rest, *(s for s in powers(rest) if rest % s == 0)}, reverse=True):
                    dims = ParallelDims(rest // shards, shards, cp, tp, pp)
                    products.append(dims)
                    if shape.num_experts and tp == 1:
                        products += [replace(dims, ep=ep) for ep in powers(shards)[1:]]
    return [dims for dims in products if is_possible(dims, shape)]


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
    """Text table of the best layouts, and the number of the others."""
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
    more = len(fitting) - len(rows)
    larger = len(others)
    rest = []
    if more > 0:
        rest = [f"{more} more fit and are slower"]
    rest += [f"{larger} do not fit in {gib(room.usable)}"] if larger else []
    return [*lines, *([f"  {', '.join(rest)}"] if rest else [])]


def named(tried: Tried) -> str:
    return f"{tried.plan.dims}, {knobs(tried.plan)}"


def knobs(plan: Parts) -> str:
    """Settings of a layout's plan that trade memory for speed, in words."""
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
    if more[name] > 0:
        return f"  (more {name})"
    return ""
