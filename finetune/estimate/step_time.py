"""Seconds of a step, item by item, from the model's dimensions, the plan, and the rates of a device and its links.

Products are counted as in "Scaling Laws" (Kaplan et al. 2020, section 2.1): 2 FLOP per weight and token forward, the
same for the gradient of an input and for that of a weight; a product takes the longer of its FLOP at the device's rate
and of reading its weight. Collectives are those of estimate.communication, at the rates of a ring (Patarasuk and Yuan
2009). What autograd saves was written and is read again, and what lies between was too: a multiple of the saved bytes.
That multiple and the numbers of operators are estimates; what a CPU reaches of them was fitted (rates.of_cpu), and what
one accelerator does (rates.of_accelerator). benchmarks/step_time.py compares.
"""

from dataclasses import dataclass, replace
from math import prod

from finetune.estimate import activations, communication, memory
from finetune.estimate.budget import DEFAULT_MICROBATCH_TOKENS, MemoryBudget, full_microbatch
from finetune.estimate.model_cost import MicrobatchShape, ModelCost, adapted_experts, remembered
from finetune.estimate.model_shape import KnownShape
from finetune.estimate.process_memory import uses_onednn
from finetune.estimate.rates import Links, Rates
from finetune.estimate.rollout import Rollout, planned
from finetune.parts.degrees import AXES, DEGREES, FLAGS
from finetune.parts.optimizers import OPTIMIZERS
from finetune.parts.parallel_dims import ParallelDims, axes_of_the_mesh
from finetune.parts.parts import Parts
from quantization_wrapper import METHODS

TRAFFIC_PER_SAVED_BYTE = 5.0  # read and written by elementwise kernels, forward and backward
OPERATORS_PER_LAYER = {"forward": 40, "backward": 60}  # that a host starts, of a decoder layer
OPERATORS_PER_ADAPTER = {"forward": 3, "backward": 6}
OPERATORS_PER_SHARDED_TENSOR = 11  # each time that a CPU's ranks gather or reduce it: fitted on 20 runs of 2 and 4
OPERATORS_PER_REPLAY = 16  # an estimate: a microbatch to its buffers, its results from them
OPERATORS_PER_DEQUANTIZATION = 5  # what a Triton kernel's start costs, in operators
BACKWARD_OF_ATTENTION = 2.5  # times its forward: five products for two (Dao et al. 2022, section 3.1)
# Code that oneDNN generates for a product of a new shape: 456 in 12 steps of a Llama in bf16, 3,700 of a Mixtral.
KERNEL_SECONDS = 3e-3
KERNELS_OF_ATTENTION = 12  # of two groups of documents
KERNELS_OF_EXPERTS = 2  # numbers of rows of a layer's experts
OPTIMIZER_TRAFFIC = 28  # bytes per trained weight: weight, gradient and two moments read, three of them written
EIGHT_BIT_TRAFFIC = 260  # the same on a CPU, of moments in 8 bits: one thread, 26 ns a weight at 10 GB/s
OFFLOADED_UPDATE = 20e9  # bytes/s of a host's memory that all of its ranks' updates share
OPERATORS_OF_DECODING = 45  # of attention over cached keys and values, beside those of a layer's forward
LOGITS_TRAFFIC = 40  # bytes per logit that a draw reads and writes
LEFT_EMPTY = 0.4  # of a microbatch, where groups of answers are packed whole: fitted to counts of draws 1 and 2
DEQUANTIZED_TRAFFIC = 2.0  # bytes moved per byte of a dense weight while it is made


@dataclass(frozen=True)
class StepTime:
    """`items`: {name: seconds}, of which `hidden` seconds run beside products; `total` of a step."""

    items: dict[str, float]
    hidden: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.items.values()) - self.hidden

    def __str__(self) -> str:
        largest = sorted(self.items.items(), key=lambda item: -item[1])
        shown = [f"{name} {seconds_said(n)}" for name, n in largest if n >= 0.02 * self.total][:5]
        hidden = ""
        if self.hidden > 0.02 * self.total:
            hidden = f" ({seconds_said(self.hidden)} of them beside products)"
        return f"{seconds_said(self.total)} per step: {', '.join(shown)}{hidden}"


def seconds_said(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2g} s"
    return f"{seconds:,.0f} s"


@dataclass(frozen=True)
class Work:
    """One rank's work in a step: its part of the model, and `count` microbatches of one shape."""

    m: ModelCost
    microbatch: MicrobatchShape
    count: int

    @property
    def tokens(self) -> int:
        return self.microbatch.num_tokens


@dataclass(frozen=True)
class Machine:
    """Devices of a step: one rank's device and the links between ranks; `row_tokens`: mean of a row, or of one
    of a pair; None if it is not known: rows are then as long as the context.
    """

    rates: Rates
    links: Links | None = None
    row_tokens: float | None = None

    @property
    def ranks_per_host(self) -> int:
        if self.links:
            return self.links.per_host
        return 1


def seconds_per_step(plan: Parts, shape: KnownShape, budget: MemoryBudget, machine: Machine) -> StepTime:
    """Predicted time of the plan's average step on these devices."""
    if plan.sampled is None:
        microbatch, count = average_microbatch(plan, machine.row_tokens)
        return step_time(plan, shape, budget.dims, microbatch, count, machine, budget.device)
    rollout = planned(plan)
    if machine.row_tokens is not None:
        prompt = min(rollout.longest, max(1, round(machine.row_tokens)))
        rollout = replace(rollout, prompts=(prompt,) * len(rollout.prompts))
    if plan.data.reward is None:
        return judged_time(plan, shape, budget, rollout, machine)
    return rewarded_time(plan, shape, budget, rollout, len(rollout.prompts), machine)


def judged_time(
    plan: Parts,
    shape: KnownShape,
    budget: MemoryBudget,
    rollout: Rollout,
    machine: Machine,
    teacher: ModelCost | None = None,
) -> StepTime:
    """Predicted time of a step that samples these answers, and learns what `teacher` finds of them and of other rows;
    None: its time is not known, and left out.
    """
    microbatch, count = average_microbatch(plan, machine.row_tokens)
    found = step_time(plan, shape, budget.dims, microbatch, count, machine, budget.device)
    m = ModelCost(memory.model_per_rank(shape, budget.dims), plan, budget.device)
    items = sampling_seconds(m, rollout, machine.rates)
    if teacher is not None:
        items["teacher"] = count * forward_seconds(Work(teacher, microbatch, count), machine.rates)
    return replace(found, items=found.items | items)


def rewarded_time(
    plan: Parts, shape: KnownShape, budget: MemoryBudget, rollout: Rollout, learned: float, machine: Machine
) -> StepTime:
    """Predicted time of a step that samples these answers and learns from those to `learned` of the prompts."""
    part = memory.model_per_rank(shape, budget.dims)
    m = ModelCost(part, plan, budget.device)
    microbatch, count = learned_microbatch(plan, rollout, learned)
    found = step_time(plan, shape, budget.dims, microbatch, count, machine, budget.device)
    how = plan.reward
    items = sampling_seconds(m, rollout, machine.rates)
    passes = (how.kl_beta > 0) + (how.updates_per_rollout > 1)
    if passes:
        work = Work(m, microbatch, count)
        items["forwards before the step"] = passes * count * forward_seconds(work, machine.rates)
    sampled = {name: n / how.updates_per_rollout for name, n in items.items()}
    return replace(found, items=found.items | sampled)


def learned_microbatch(plan: Parts, rollout: Rollout, learned: float) -> tuple[MicrobatchShape, int]:
    """(a microbatch of answers and the prompts that they share, how many of them a rank takes per step)."""
    prompt = round(sum(rollout.prompts) / len(rollout.prompts))
    answers = max(1, round(learned * rollout.group))
    size = plan.steps.microbatch_tokens or DEFAULT_MICROBATCH_TOKENS
    if plan.data.layout == "padded":
        fitting = max(1, size // (prompt + rollout.answer))
        count = -(-answers // fitting)
        each = max(1, round(answers / count))
        return MicrobatchShape((prompt + rollout.answer,) * each, each * rollout.answer, "padded", count > 1), count
    tokens = learned * prompt + answers * (rollout.answer + 1)
    count = max(1, round(tokens / size + LEFT_EMPTY))
    each = max(1, round(answers / count))
    asked = max(1, round(each / rollout.group))
    lengths = (prompt + rollout.answer,) * asked + (rollout.answer + 1,) * (each - asked)
    several = count > 1
    return MicrobatchShape(lengths, each * rollout.answer, "padding_free", several, shares_prompts=True), count


def average_microbatch(plan: Parts, row_tokens: float | None = None) -> tuple[MicrobatchShape, int]:
    """(a microbatch of equal rows, how many of them a rank takes per step), which together have a step's tokens; of
    pairs, a row is one of the two.
    """
    data = plan.data
    steps = plan.steps
    full = full_microbatch(plan)
    rows = steps.batch_size * data.documents_per_row
    if row_tokens is None:
        groups = -(-rows // len(full.lengths))
        return full, steps.accumulation * groups
    length = min(row_tokens, data.context_length)
    fitting = max(1, int((steps.microbatch_tokens or DEFAULT_MICROBATCH_TOKENS) // length))
    groups = -(-rows // fitting)
    each = max(1, round(rows / groups))
    tokens = max(1, round(rows * length / groups / each))
    return MicrobatchShape.full_rows(
        each, tokens, full.layout, steps.accumulation * groups > 1
    ), steps.accumulation * groups


def step_time(
    plan: Parts,
    shape: KnownShape,
    dims: ParallelDims,
    microbatch: MicrobatchShape,
    count: int,
    machine: Machine,
    device: str = "cuda",
) -> StepTime:
    """Predicted time of a step of `count` microbatches per rank; context parallelism divides `microbatch` later."""
    rates = machine.rates
    links = machine.links
    part, own = memory.per_rank(shape, microbatch, dims)
    work = Work(ModelCost(part, plan, device), own, count)
    items = compute_items(work, rates)
    computed = sum(items.values())
    started = launch_seconds(work, rates)
    if rates.runs_ahead:
        items["waiting for the host"] = max(0.0, started - computed)
    else:
        items["operators"] = started + sharding_seconds(work, rates, dims)
    busy = sum(items.values())
    if dims.pp > 1:
        # Each stage but the first waits for one more microbatch in its first chunk of layers; the others may have its
        # cores meanwhile.
        waits = (dims.pp - 1) / (count * plan.parallel.pp_chunks)
        items["bubble"] = max(0.0, busy * (1 + waits) / min(dims.pp, rates.contention) - busy)
    items |= offload_items(work, rates, dims, machine.ranks_per_host)
    items["optimizer"] = optimizer_seconds(work, rates, dims)
    hidden = 0.0
    if dims.world_size > 1 and links:
        sent, beside = exchange_seconds(plan, shape, dims, microbatch, count, links)
        items |= sent
        layers = max(1, part.num_layers)
        hidden = 0.0
        if links.hides:
            hidden = min(beside, busy) * (1 - 1 / layers)
    copied = items.get("offload", 0.0)
    if rates.runs_ahead or plan.memory.base_offload:
        hidden += min(copied, max(0.0, busy - hidden))
    return StepTime({name: n for name, n in items.items() if n > 0}, hidden)


# ---- what a rank computes


def compute_items(work: Work, rates: Rates) -> dict[str, float]:
    """{item: seconds} of the products, the attention, what is dequantized and what lies between."""
    m = work.m
    plan = work.m.plan
    tokens = work.tokens
    count = work.count
    word = plan.precision.compute
    forward = forward_products(tokens, m, rates, word)
    part = m.learning_layers / max(1, m.shape.num_layers)
    times = 1 + part * (2 if m.full else 1)
    recomputed = part if plan.memory.recompute else 0.0
    targets = work.microbatch.num_targets
    if m.has_head:
        targets = 0
    head = product_seconds(targets, m.shape.vocab_size, m.shape.hidden_size, m, rates, word)
    attention = attention_seconds(work, rates, word)
    dequantized = dequantized_seconds(m, rates, word)
    between = between_seconds(work, rates, targets, word)
    passes = communication.num_passes(plan.objective)
    items = {
        "products": count * (forward * times + head * (3 if m.full else 2)),
        "adapters": count * adapter_seconds(work, rates, word),
        "recomputation": count * recomputed * (forward + attention),
        "attention": count * attention * (1 + part * BACKWARD_OF_ATTENTION),
        "dequantization": count * dequantized * (1 + part + recomputed),
        "between": count * between * (1 + recomputed / 3),
        "code of products": count * generated_kernels(m) * KERNEL_SECONDS,
        "forwards before the step": count * passes * (forward + head + attention + dequantized + between / 3),
    }
    return items


def generated_kernels(m: ModelCost) -> int:
    """Number of products of a microbatch for which oneDNN generates code: one per shape, as the code of a microbatch of
    another length is gone by then; of experts, whose rows differ from layer to layer, in each layer.
    """
    if not uses_onednn(m):
        return 0
    ways = 3 if m.full else 2
    dense = ways * (1 + len(m.shape.linear_sizes)) + KERNELS_OF_ATTENTION
    rows = {rows for _, rows, _ in m.adapted}
    columns = {columns for _, _, columns in m.adapted}
    adapters = 0
    if not m.full:
        adapters = 3 * (len(rows) + len(columns))
    of_experts = ways
    if adapted_experts(m):
        of_experts += 3 * 2
    experts = KERNELS_OF_EXPERTS * of_experts * len(m.shape.expert_matrices())
    return dense + adapters + experts


def forward_products(tokens: int, m: ModelCost, rates: Rates, word: str) -> float:
    """Seconds of the products of all layers with so many tokens."""
    dense = sum(n * product_seconds(tokens, *size, m, rates, word) for size, n in m.shape.linear_sizes.items())
    return dense + sum(_expert_products(tokens, m, rates, word))


def product_seconds(tokens: int, rows: int, columns: int, m: ModelCost, rates: Rates, word: str) -> float:
    """Seconds of one product with a matrix: by FLOP, or by reading the matrix where the tokens are few."""
    return max(2.0 * tokens * rows * columns / rates.flops(word), m.compute * rows * columns / rates.memory)


def _expert_products(tokens: int, m: ModelCost, rates: Rates, word: str) -> list[float]:
    """Products of each expert projection of all layers: the tokens' own experts are computed, all that they reach are
    read.
    """
    shape = m.shape
    found: list[float] = []
    if not shape.num_experts:
        return found
    active = tokens * shape.experts_per_token
    for rows, columns in shape.expert_matrices():
        one = rows // shape.num_experts * columns
        reached = min(shape.num_experts // max(1, m.plan.parallel.ep), active)
        found.append(max(2.0 * active * one / rates.flops(word), m.compute * reached * one / rates.memory))
    return found


def adapter_seconds(work: Work, rates: Rates, word: str) -> float:
    """Forward and backward of the adapters' thin products, which memory bounds: their inputs and outputs are read."""
    m = work.m
    tokens = work.tokens
    if m.full:
        return 0.0
    widths = tokens * adapter_widths(m)
    return max(3 * widths * m.compute / rates.between(word), 6 * widths * m.adapter.rank / rates.flops(word))


@remembered
def adapter_widths(m: ModelCost) -> int:
    """Rows and columns of all matrices with an adapter, for one token."""
    dense = sum(rows + columns for _, rows, columns in m.adapted)
    experts = sum(rows // m.shape.num_experts + columns for rows, columns in adapted_experts(m))
    return dense + m.shape.experts_per_token * experts


def attention_seconds(work: Work, rates: Rates, word: str) -> float:
    """Forward of all layers: two products over the pairs of positions that a causal mask and a window leave."""
    shape = work.m.shape
    m = work.m
    pairs = 0.0
    for rows, length in work.microbatch.groups():
        seen = min(length, shape.window or length)
        pairs += rows * (length * seen - seen * (seen - 1) / 2)
    return shape.num_layers * 4.0 * pairs * m.q / rates.attention_flops(word)


def dequantized_seconds(m: ModelCost, rates: Rates, word: str) -> float:
    """Seconds of writing every quantized matrix once in the compute dtype."""
    quantization = m.plan.quantization
    if quantization is None or not dequantizes(m):
        if m.autocast:
            return m.compute * m.shape.linear_weights / rates.between(word)
        return 0.0
    weights = m.shape.linear_weights + m.shape.expert_weights
    rate = rates.between(word)
    if m.device == "cpu" and METHODS[quantization.method].cpu_kernel:
        rate = rates.memory
    return weights * (quantization.bits / 8 + DEQUANTIZED_TRAFFIC * m.compute) / rate


def dequantizes(m: ModelCost) -> bool:
    """True if weights are made dense in every pass."""
    return not (m.full or m.plan.quantization is None or m.plan.memory.cache_dequantized)


def between_seconds(work: Work, rates: Rates, targets: int, word: str) -> float:
    """Norms, activations, rotations, sums and the loss: what reads and writes, of one forward and backward."""
    m = work.m
    saved = m.learning_layers * activations.layer_activation_bytes(m, work.microbatch)
    logits = 4.0 * targets * m.shape.vocab_size
    return (TRAFFIC_PER_SAVED_BYTE * saved + 6 * logits) / rates.between(word)


def launch_seconds(work: Work, rates: Rates) -> float:
    """Host time to start the operators of a step."""
    m = work.m
    forwards = 1 + m.plan.memory.recompute + communication.num_passes(m.plan.objective)
    runs = {"forward": forwards, "backward": 1}
    beside = 0
    if m.plan.memory.graphs is True:  # forwards before a step are none of them
        runs = {"forward": forwards - 1, "backward": 0}
        beside = OPERATORS_PER_REPLAY
    operators = beside + sum(n * operators_of(m, way) for way, n in runs.items())
    dequantized = 0
    if rates.runs_ahead and dequantizes(m):
        dequantized = OPERATORS_PER_DEQUANTIZATION * sum(runs.values()) * len(m.shape.linears)
    return work.count * (operators + dequantized) * rates.launch


def sharding_seconds(work: Work, rates: Rates, dims: ParallelDims) -> float:
    """Host time of FSDP2 to copy each tensor of a layer into and out of what it gathers and reduces."""
    m = work.m
    plan = work.m.plan
    if dims.shards == 1:
        return 0.0
    linears = len(m.shape.linears)
    norms = 2 * m.shape.num_layers
    stored = linears * (1 if m.full or plan.quantization is None else 2)  # codes and scales
    if m.full:
        adapters = 0
    else:
        adapters = 2 * len(m.adapted)
    gathers = 1 + plan.parallel.reshard_after_forward + communication.num_passes(plan.objective)
    moved = gathers * (stored + adapters + norms) + (linears + norms if m.full else adapters)
    return work.count * OPERATORS_PER_SHARDED_TENSOR * moved * rates.launch


def optimizer_seconds(work: Work, rates: Rates, dims: ParallelDims) -> float:
    trained = memory.trainable_weights(work.m, dims.shards)
    if work.m.plan.memory.offload:
        return 0.0
    traffic = OPTIMIZER_TRAFFIC
    if OPTIMIZERS[work.m.plan.steps.optimizer].eight_bit and not rates.runs_ahead:
        traffic = EIGHT_BIT_TRAFFIC
    return trained * traffic / rates.memory


def offload_items(work: Work, rates: Rates, dims: ParallelDims, per_host: int) -> dict[str, float]:
    """Copies between host and device of weights and gradients, and the update on the host; layers of a base that is not
    on the device, read for each forward and each backward.
    """
    m = work.m
    plan = work.m.plan
    found = {}
    if plan.memory.base_offload:
        rate = rates.disk
        if plan.memory.base_offload == "host":
            rate = rates.host_link
        times = 2 + communication.num_passes(plan.objective)
        found["offload"] = times * work.count * memory.layers_bytes(m) / rate
        found["reading the head"] = (times - 1) * work.count * memory.head_read_bytes(m) / rate  # beside nothing
    if plan.memory.offload and rates.runs_ahead:
        own = memory.base_bytes(m, dims.shards) + 4 * memory.trainable_weights(m, dims.shards)
        trained = memory.trainable_weights(m, dims.shards)
        gathers = 2 if plan.parallel.reshard_after_forward else 1
        found["offload"] = (work.count * gathers * own + 4 * trained) / rates.host_link
        sharing = min(per_host, dims.world_size)
        found["update on the host"] = trained * OPTIMIZER_TRAFFIC * sharing / OFFLOADED_UPDATE
    if plan.memory.offload_activations and rates.runs_ahead:
        without = plan.with_settings(use_activation_cpu_offload=False)
        kept = activations.activation_bytes(replace(m, plan=without), work.microbatch)
        found["offload"] = found.get("offload", 0.0) + 2 * work.count * kept / rates.host_link
    return found


# ---- what is sampled


def forward_seconds(work: Work, rates: Rates) -> float:
    """Seconds of a forward that keeps nothing."""
    m = work.m
    word = m.plan.precision.compute
    kept = m.shape.num_layers * activations.layer_activation_bytes(m, work.microbatch)
    found = forward_products(work.tokens, m, rates, word) + attention_seconds(work, rates, word)
    found += TRAFFIC_PER_SAVED_BYTE / 3 * kept / rates.between(word) + adapter_seconds(work, rates, word) / 3
    return found + dequantized_seconds(m, rates, word) + operators_of(m, "forward") * rates.launch


def operators_of(m: ModelCost, way: str) -> int:
    """Operators that a host starts for all layers and adapters. `way`: forward or backward."""
    layers = OPERATORS_PER_LAYER[way] * m.shape.num_layers
    if m.full:
        return layers
    return layers + OPERATORS_PER_ADAPTER[way] * len(m.adapted)


def sampling_seconds(m: ModelCost, rollout: Rollout, rates: Rates) -> dict[str, float]:
    """{item: seconds} of the forwards over prompts, and of a token of every answer, as many times as an answer has
    tokens.
    """
    tokens = sum(rollout.prompts)
    forwards = -(-tokens // rollout.forward)
    size = max(1, len(rollout.prompts) // forwards)
    prompts = Work(m, MicrobatchShape(rollout.prompts[:size], size), 1)
    steps = max(0.0, rollout.answer - 1)
    return {"prefill": forwards * forward_seconds(prompts, rates), "decoding": steps * token_seconds(m, rollout, rates)}


def token_seconds(m: ModelCost, rollout: Rollout, rates: Rates) -> float:
    """Seconds of one token of every answer, the cache half full: weights are dense, and in fp32 adapters are merged."""
    word = m.plan.precision.compute
    shape = m.shape
    rows = rollout.rows
    one = Work(m, MicrobatchShape((1,) * rows, rows), 1)
    seen = rollout.longest + rollout.answer / 2
    cached = len(rollout.prompts) * rollout.longest + rows * rollout.answer / 2
    found = forward_products(rows, m, rates, word)
    found += product_seconds(rows, shape.vocab_size, shape.hidden_size, m, rates, word)
    found += rows * shape.vocab_size * LOGITS_TRAFFIC / rates.between(word)
    found += 2 * shape.num_layers * m.k * m.compute * cached / rates.memory
    found += shape.num_layers * rows * shape.num_heads * seen * (3 * m.compute + 12) / rates.between(word)
    found += 4.0 * shape.num_layers * rows * m.q * seen / rates.attention_flops(word)
    if m.compute < 4 or m.autocast:
        found += adapter_seconds(one, rates, word) / 3
    started = (operators_of(m, "forward") + OPERATORS_OF_DECODING * shape.num_layers) * rates.launch
    if rates.runs_ahead:
        return max(found, started)
    return found + started


# ---- what ranks exchange


# Items of collectives of data parallelism; those of other degrees are in their rows.
ITEMS = {"all_gather": "gathers", "reduce_scatter": "reductions", "all_reduce": "reductions"}


def item_of(exchange: communication.Exchange) -> str:
    """The item of predicted time that a collective counts as."""
    name = FLAGS.get(exchange.axes[0])
    return (DEGREES[name].item if name else "") or ITEMS[exchange.kind]


def exchange_seconds(
    plan: Parts, shape: KnownShape, dims: ParallelDims, microbatch: MicrobatchShape, count: int, links: Links
) -> tuple[dict[str, float], float]:
    """({item: seconds}, the seconds of those that run beside products) of a step's collectives."""
    work = communication.traffic_of(plan, shape, dims, microbatch, count)
    items: dict[str, float] = {}
    beside = 0.0
    for exchange in communication.exchanges(dims, work, stage=dims.pp - 1):
        seconds = exchange.calls * links.latency + _ring_bytes(exchange, dims) / _rate(exchange.axes, dims, links)
        name = item_of(exchange)
        items[name] = items.get(name, 0.0) + seconds
        beside += seconds if exchange.beside_products else 0.0
    return items, beside


def _ring_bytes(exchange: communication.Exchange, dims: ParallelDims) -> float:
    """Bytes that a rank sends in a ring for what it passes to the collective."""
    size = group_size(exchange.axes, dims)
    times = {
        "all_gather": size - 1,
        "reduce_scatter": (size - 1) / size,
        "all_reduce": 2 * (size - 1) / size,
        "all_to_all": (size - 1) / size,
        "send": 1,
    }
    return exchange.num_bytes * times[exchange.kind]


def group_size(axes: tuple[str, ...], dims: ParallelDims) -> int:
    return prod(dims.expert_shards if axis == "expert_shard" else getattr(dims, axis) for axis in axes)


def _rate(axes: tuple[str, ...], dims: ParallelDims, links: Links) -> float:
    """Bytes/s of the slowest link of a group: within a host, if all of its ranks are."""
    along = [AXES.index(axis) for axis in axes_of_the_mesh(axes)]
    first = along[0]
    last = along[-1]
    inner = prod(dims.mesh_shape[last + 1 :])
    reach = inner * prod(dims.mesh_shape[first : last + 1])
    if axes == ("ep",):  # adjacent ones of the shards
        reach = inner * dims.ep
    if reach <= links.per_host:
        return links.near
    return links.far
