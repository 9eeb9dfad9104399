"""Remedies that make a run fit, cheapest first, and the dry run's report.

Prices: speed as measured in dev/LOG.md, or the loss of precision or rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from finetune.estimate import communication, memory
from finetune.estimate.budget import (
    USABLE_PART,
    MemoryBudget,
    fits,
    full_microbatch,
    gib,
    largest_rows,
    predicted,
    predicted_bytes,
)
from finetune.estimate.model_cost import ModelCost, shards_ends
from finetune.estimate.model_shape import KnownShape, ModelShape
from finetune.estimate.step_time import Machine, seconds_per_step
from finetune.parts.optimizers import OPTIMIZERS
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter
from quantization_wrapper import FIRST_METHOD, METHODS, settings_of

MOST_RANKS = 1024
MOST_CHANGES = 16
PLAIN_OPTIMIZER = next(iter(OPTIMIZERS))  # which every run has
MLX = "mlx"  # whose ranks are replicas, with the base in memory
TWO_MOMENTS = 8  # bytes per weight, in fp32


@dataclass(frozen=True)
class Option:
    """A change of settings that saves memory, its price, and the plan with it."""

    text: str
    price: str
    plan: Parts
    changes: dict[str, Any]
    saved: int = 0
    fits: bool = False


def options(plan: Parts, shape: KnownShape, budget: MemoryBudget) -> list[Option]:
    """Every change that saves memory, cheapest first, each on its own."""
    now = predicted_bytes(plan, shape, budget)
    found = []
    data = plan.data
    steps = plan.steps
    memory_plan = plan.memory

    def offer(text: str, price: str, **new: object):
        other = plan.with_settings(**new)
        took = predicted_bytes(other, shape, budget)
        if now - took >= now / 1000:
            found.append(Option(text, price, other, new, now - took, took <= budget.usable))

    if steps.microbatch_tokens > data.row_length:
        offer(
            f"--microbatch_tokens {data.row_length}",
            "2 to 6 % of the speed; identical result",
            microbatch_tokens=data.row_length,
        )
    if plan.output.takes_snapshots:
        offer("--async_save false", "steps wait for saves", async_save="false")
    if memory_plan.cache_dequantized:
        offer("--cache_dequantized false", "about 4 % of the speed", cache_dequantized="false")
    if budget.device == "cpu" and not memory_plan.low_memory:
        offer("--low_memory", "up to 16 % of the speed", low_memory=True)
    for word, facts in OPTIMIZERS.items():
        if facts.offered and OPTIMIZERS[steps.optimizer].bytes_per_weight >= TWO_MOMENTS:
            offer(f"--optimizer {word}", facts.offered, optimizer=word)
    quantization = plan.quantization
    if quantization and not quantization.double_quant and METHODS[quantization.method].double_quant:
        offer("--double_quant", "scales rounded to 8 bits", double_quant=True)
    if not memory_plan.recompute:
        offer(
            "--use_gradient_checkpointing true",
            "27 to 43 % of the speed",
            use_gradient_checkpointing="true",
            use_activation_cpu_offload=False,
        )
    if budget.ranks > 1 and not plan.parallel.vocab_parallel and shards_ends(plan, shape):
        offer(
            "--vocab_parallel true", "hidden states travel in each microbatch; identical result", vocab_parallel="true"
        )
    if budget.dims.tp > 1 and not plan.parallel.sequence_parallel and not shape.num_experts:
        offer("--sequence_parallel", "identical result", sequence_parallel=True)
    if budget.ranks > 1 and budget.device not in ("cpu", "mps") and not memory_plan.offload:
        host = predicted(plan.with_settings(use_cpu_offload=True), shape, budget, full_microbatch(plan))
        offer(
            "--use_cpu_offload true",
            f"{gib(host.get('host', 0))} of host memory per rank, from which weights are copied for each "
            "forward and backward; identical result",
            use_cpu_offload=True,
        )
    trains = plan.trains
    streams = isinstance(trains, Adapter) and not trains.init.reads_base and budget.device != MLX
    if plan.settings.base_offload == "none" and budget.ranks == budget.dims.world_size == 1 and streams:
        read = (
            f"{gib(memory.layers_bytes(ModelCost(shape, plan)))} are read for each forward and again for its backward"
        )
        beside = " --cache_dequantized false" if memory_plan.cache_dequantized else ""
        disk = dict(base_offload="disk", cache_dequantized="false")
        offer(f"--base_offload disk{beside}", f"{read}; identical result", **disk)
    _offer_less_precision(plan, budget.device, offer, found)
    return found


def _offer_less_precision(plan: Parts, device: str, offer: Callable[..., None], found: list) -> None:
    """Fewer trainable weights, fewer bits, shorter rows: changes of the result."""
    trains = plan.trains
    quantization = plan.quantization
    data = plan.data
    precision = plan.precision
    half = {"fp32": "bf16", "fp16_autocast": "fp16", "bf16_autocast": "bf16"}.get(precision.word)
    if half and not plan.all_weights:
        offer(f"--precision {half}", "frozen weights and products rounded to 16 bits", precision=half)
    quantized = dict(train_type="qlora", cache_dequantized="false") | settings_of(
        MLX if device == MLX else FIRST_METHOD
    )
    plain = precision.compute
    if plan.all_weights:
        other = ""
        new: dict[str, Any] = {"precision": plain}
        if not _trains_adapters(plan):
            other = f" --optimizer {PLAIN_OPTIMIZER}"
            new["optimizer"] = PLAIN_OPTIMIZER
        offer(f"--train_type lora{other}", "trains adapters, not all weights", train_type="lora", **new)
        offer(f"--train_type qlora{other}", "trains adapters on a base rounded to 4 bits", **new | quantized)
    elif quantization is None:
        offer("--train_type qlora", "the base rounded to 4 bits; about 3 % of the speed", **quantized)
    if isinstance(trains, Adapter) and trains.rank > 8:
        offer("--lora_rank 8", "smaller adapters", lora_rank=8)
    length = data.context_length
    while length > 128:
        length //= 2
        fewer = length * data.documents_per_row
        tokens = plan.steps.microbatch_tokens
        is_one_row = tokens <= data.row_length
        tokens = fewer if is_one_row else tokens
        beside = f" --microbatch_tokens {fewer}" if is_one_row and device == MLX else ""  # others fit their own
        offer(
            f"--context_length {length}{beside}",
            "longer rows are truncated at the start of the prompt",
            context_length=length,
            microbatch_tokens=tokens,
        )
        if found and found[-1].fits:
            break
    for word, method in METHODS.items() if device != MLX else ():  # whose own method has the bits of the plan
        for bits, price in method.offered.items():
            if quantization and quantization.bits > bits:
                low = settings_of(word, bits) | dict(double_quant=False, group_size=64)
                offer(f"--quantization_backend {word} --n_bits {bits}", price, **low)


def _trains_adapters(plan: Parts) -> bool:
    """True if adapters train with the plan's optimizer."""
    return all(limit.beside != "adapters" for limit in OPTIMIZERS[plan.steps.optimizer].limits)


def cheapest_combination(plan: Parts, shape: KnownShape, budget: MemoryBudget) -> list[Option]:
    """The cheapest changes, accumulated until it fits, less those that are not needed then; all of them where it does
    not fit, as `fits` of the last one says.
    """
    taken: list[Option] = []
    now = plan
    for _ in range(MOST_CHANGES):
        offered = [c for c in options(now, shape, budget) if c.text not in {t.text for t in taken}]
        if not _trains_adapters(now):  # another optimizer comes with the adapters, if these are needed
            offered = [c for c in offered if c.changes.keys() != {"optimizer"}] or offered
        if not offered:
            break
        taken.append(next((c for c in offered if c.fits), offered[0]))
        now = taken[-1].plan
        if taken[-1].fits:
            return _needed(taken, plan, shape, budget)
    return taken


def _needed(taken: list[Option], plan: Parts, shape: KnownShape, budget: MemoryBudget) -> list[Option]:
    """A minimal subset of changes that fits, dropping the costliest first. `saved`:
    by a change beside the others.
    """
    kept = taken
    for one in reversed(taken):
        if fits(_without(one, kept, plan), shape, budget):
            kept = [change for change in kept if change is not one]
    whole = _changed(plan, kept)
    took = predicted_bytes(whole, shape, budget)
    return [
        replace(c, plan=whole, fits=True, saved=predicted_bytes(_without(c, kept, plan), shape, budget) - took)
        for c in kept
    ]


def _without(one: Option, changes: list[Option], plan: Parts) -> Parts:
    return _changed(plan, [change for change in changes if change is not one])


def _changed(plan: Parts, changes: list[Option]) -> Parts:
    for change in changes:
        plan = plan.with_settings(**change.changes)
    return plan


def fewest_devices(plan: Parts, shape: KnownShape, budget: MemoryBudget) -> int | None:
    """Minimum number of such devices for these settings with more FSDP shards, otherwise unchanged."""
    if budget.device == MLX:
        return None
    ranks = budget.ranks
    while ranks <= MOST_RANKS:
        wider = replace(budget, ranks=ranks)
        shards = plan.settings.dp_shards * ranks // budget.ranks
        if fits(plan.with_settings(dp_shards=shards), shape, wider):
            return wider.devices
        ranks += budget.dims.cp * (1 if ranks < 16 else 8)
    return None


def remedy_lines(plan: Parts, shape: KnownShape, budget: MemoryBudget) -> list[str]:
    """Lines listing the changes that would make it fit, cheapest first, each with its saving and its price."""
    single = options(plan, shape, budget)
    lines = []
    enough = [c for c in single if c.fits]
    if enough:
        lines.append("any one of these changes makes it fit, cheapest first:")
        lines += [f"  {c.text}: -{gib(c.saved)}; {c.price}" for c in enough]
    else:
        steps = cheapest_combination(plan, shape, budget)
        if steps and steps[-1].fits:
            lines.append("these changes together make it fit, cheapest first:")
        elif steps:
            least = predicted_bytes(steps[-1].plan, shape, budget)
            lines.append(
                f"nothing makes it fit here: with all of these it still needs {gib(least)} of {gib(budget.usable)}:"
            )
        lines += [f"  {c.text}: -{gib(c.saved)}; {c.price}" for c in steps]
        if steps and not steps[-1].fits:
            devices = fewest_devices(_changed(plan, steps), shape, budget)
            if devices:
                wider = replace(budget, ranks=devices * budget.ranks // budget.devices)
                needed = [c.text for c in _needed(steps, plan, shape, wider)]
                lines.append(f"{devices} such devices are enough with {', '.join(needed)}")
            lines.append(
                f"or {budget.devices} device{'s' * (budget.devices > 1)} of {gib(least / USABLE_PART)} or more each"
            )
    devices = fewest_devices(plan, shape, budget)
    if devices and devices > budget.devices:
        lines.append(f"with these settings you need {devices} such devices{_fewer(devices, plan, shape, budget)}")
    return lines


def _fewer(devices: int, plan: Parts, shape: KnownShape, budget: MemoryBudget) -> str:
    """The words on fewer devices with --vocab_parallel true, which a plan of several ranks chooses by itself."""
    if plan.parallel.vocab_parallel or not shards_ends(plan, shape):
        return ""
    fewer = fewest_devices(plan.with_settings(vocab_parallel="true"), shape, budget)
    if fewer is None or not budget.devices < fewer < devices:
        return ""
    return f", or {fewer} with --vocab_parallel true"


def time_line(plan: Parts, shape: KnownShape, budget: MemoryBudget, machine: Machine) -> str:
    """The predicted time of a step, by what it is spent on."""
    if plan.precision.in_fp8:
        return "time of a step: not predicted, the rates of products in fp8 are not known"
    found = seconds_per_step(plan, shape, budget, machine)
    kind = "rows" if plan.data.reward is None else "prompts"
    if machine.row_tokens is None:
        rows = f"full {kind}"
    else:
        rows = f"{kind} of {machine.row_tokens:,.0f} tokens"
    links = ""
    if machine.links:
        links = f", {machine.links.name}"
    return f"predicted {found}; with {rows}, {machine.rates.source}{links}"


def report_lines(
    plan: Parts,
    model: ModelShape | None,
    budget: MemoryBudget | None,
    dims: ParallelDims | None = None,
    machine: Machine | None = None,
    layouts: tuple[str, ...] = (),
) -> tuple[list[str], bool]:
    """(lines of the dry run's memory table, communication volume and time, whether it fits). `layouts`: lines on those
    that were compared.
    """
    shape = None
    if model:
        shape = model.known
    if shape is None or budget is None:
        why = "the model is not on this disk" if model is None else "config.json lacks some of its dimensions"
        if model and model.tracer and model.tracer.error:
            why = f"no formula describes its layers, and they cannot be traced: {model.tracer.error}"
        why = "this device's memory is unknown" if budget is None else why
        return [f"memory: not predicted, {why}"], True
    microbatch = full_microbatch(plan)
    found = predicted(plan, shape, budget, microbatch)
    ok = found["total"] <= budget.usable
    total = found["total"]
    forward = f"{len(microbatch.lengths)} x {plan.data.context_length} tokens per forward"
    lines = [f"memory of {'each rank' if dims and dims.world_size > 1 else 'this run'} ({budget}), {forward}:"]
    lines += [f"  {name:<12} {gib(size):>12}" for name, size in found["items"].items()]
    if ok:
        verdict = "fits"
    else:
        verdict = f"does not fit, by {gib(total - budget.usable)}"
    lines.append(f"  {'total':<12} {gib(total):>12} of {gib(budget.usable)} usable: {verdict}")
    if "host" in found:
        together = 1
        if machine and machine.ranks_per_host > 1:
            together = machine.ranks_per_host
        of_all = ""
        if together > 1:
            of_all = f"; {gib(together * found['host'])} for the {together} ranks of a host"
        lines.append(f"  {'host':<12} {gib(found['host']):>12} of host memory per rank, during training{of_all}")
    loading = memory.loading_bytes(plan, shape, budget.ranks, budget.dims)
    lines.append(f"  {'loading':<12} {gib(loading):>12} of host memory, before training")
    largest = largest_rows(plan, shape, budget)
    source = "the file headers" if shape.exact else "config.json"
    lines.append(f"  {shape.num_weights:,} weights (read from {source})")
    if dims and dims.world_size > 1:
        sent = communication.bytes_per_step(dims, communication.traffic_of(plan, shape, dims, microbatch)).items()
        lines.append(
            "each rank sends per step of full rows: " + ", ".join(f"{gib(size)} in {name}" for name, size in sent)
        )
    if machine:
        lines.append(time_line(plan, shape, budget, machine))
    lines += layouts
    if largest:
        lines.append(
            f"largest batch that fits in one forward: --batch_size {largest} at --context_length "
            f"{plan.data.context_length}"
        )
    if not ok:
        lines += remedy_lines(plan, shape, budget)
    return lines, ok
