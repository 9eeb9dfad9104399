"""Communication volume: bytes that one rank passes to each collective per step, from the degrees and tensor sizes.

FSDP2 (Zhao et al. 2023, section 3.1): all-gathers a layer's weights in forward and again in backward, those outside the
layers once per step, and reduce-scatters gradients: 2 P / N gathered and T reduced per microbatch, P0 / N gathered per
step. DDP all-reduces T once per step. Tensor parallelism (Shoeybi et al. 2019, section 3) all-reduces hidden states
twice per layer in forward and twice in backward, once after the embedding and once before the head, and a few numbers
per target. Context parallelism (Liu et al. 2023) passes keys and values around a ring in forward and, with their
gradients, in backward. Expert parallelism (Lepikhin et al. 2020, section 3.2) sends each token's hidden state to its
experts and back, and their gradients. Preferences add forwards without a backward before a step (Passes), and under
context parallelism a sum per document. Scalars such as losses are left out: a few hundred bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from finetune.estimate import activations, memory
from finetune.estimate.model_cost import (
    OUTER_NAMES,
    MicrobatchShape,
    ModelCost,
    adapted_experts,
    expert_rank,
    remembered,
)
from finetune.estimate.model_shape import WITHOUT_TP_PLAN, KnownShape
from finetune.parts.degrees import DEGREES
from finetune.parts.objective import ObjectivePlan
from finetune.parts.parallel_dims import ParallelDims, stage_layers
from finetune.parts.parts import Parts
from finetune.parts.rows import implementation

LOSS_NUMBER = 4  # bytes of a number per target
KEY_GRADIENT = 4  # bytes per number of the gradients of keys and values, which ranks add to one after the other
ROUTER_WEIGHT = 4  # bytes of a token's weight for one expert, whose gradient is a sum over slices of the expert


@dataclass(frozen=True)
class Passes:
    """Forwards without a backward before a step, in runs over some microbatches. `tokens`: per run the positions of
    each microbatch, over all context-parallel ranks; `targets`: of all on this rank.
    """

    tokens: tuple[tuple[int, ...], ...] = ()
    targets: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.tokens))

    @property
    def num_forwards(self) -> int:
        return sum(map(len, self.tokens))


@dataclass(frozen=True)
class StepTraffic:
    """Tensor sizes that determine one rank's communication in a step.

    Bytes of weights and gradients are per shard group.

    `layers`, `outside`: stored weights inside and outside the decoder layers; `trained`: gradients; `partial`:
    gradients that are partial sums on each tensor-parallel rank; `tied`: of trained tied embeddings on two pipeline
    stages. With expert parallelism, `experts` and `trained_experts`: weights and gradients of one rank's experts,
    beside `layers` and `trained`. `routed`: (token, expert) pairs of this rank's tokens, over all layers with
    experts; `arrived`: of this rank's experts; `shared_experts`: layers with experts for every token. `tokens`:
    positions of each microbatch over all context-parallel ranks; `element`: bytes per number that a linear computes;
    `residual`: of the hidden states between them and of their gradients, which autocast leaves in fp32;
    `key_value_width`: elements of keys and values per token and layer; `targets`: of all microbatches on this rank;
    `first_is_frozen`: the input of the first layer needs no gradient; `attention_is_sliced`: by tensor parallelism;
    `smoothed`: labels are. `chunks`: of layers per pipeline stage. `sequence_parallel`: beside tensor parallelism.
    `vocab_parallel`: under FSDP2 no rank gathers embedding and head, whose gradients have `trained_ends` bytes and are
    in no other size here; `most_positions`, `most_targets`: of all microbatches, each the most that a rank of the shard
    group has. `passes`: of preferences. `documents`: in all forwards, whose log-probabilities context-parallel ranks
    sum. `logits_twice`: those of a trained head are computed again in backward, as its gradient weighs each document.
    """

    layers: int
    outside: int
    trained: int
    tokens: tuple[int, ...]
    num_layers: int
    hidden_size: int
    key_value_width: int
    experts: int = 0
    trained_experts: int = 0
    routed: int = 0
    arrived: int = 0
    shared_experts: int = 0
    attention_is_sliced: bool = True
    targets: int = 0
    partial: int = 0
    tied: int = 0
    element: int = 4
    residual: int = 4
    no_sync: bool = False
    keeps_gathered: bool = False
    recomputed: bool = False
    first_is_frozen: bool = False
    smoothed: bool = False
    chunks: int = 1
    sequence_parallel: bool = False
    vocab_parallel: bool = False
    trained_ends: int = 0
    most_positions: int = 0
    most_targets: int = 0
    passes: Passes = Passes()
    documents: int = 0
    logits_twice: bool = False

    def loss_bytes(self, dims: ParallelDims) -> int:
        """Bytes exchanged per target: its largest logit, its own, and sums over the vocabulary."""
        if self.vocab_parallel:
            learned = dims.shards * self.most_targets
        else:
            learned = self.targets
        return LOSS_NUMBER * (3 + self.smoothed) * (learned * (1 + self.logits_twice) + self.passes.targets)

    def hidden_numbers(self, dims: ParallelDims) -> tuple[int, int]:
        """Numbers in the hidden states of this rank's positions: of all microbatches, and of all passes."""
        tokens, of_passes = (n // dims.position_ranks for n in (sum(self.tokens), self.passes.num_tokens))
        return tokens * self.hidden_size, of_passes * self.hidden_size


@dataclass(frozen=True)
class Exchange:
    """A rank's part in one kind of collective in a step: bytes in all, over the ranks that differ in `axes`, in
    `calls` calls. `beside_products`: the next layer's runs while this layer computes.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    calls: int
    beside_products: bool = False


def bytes_per_step(dims: ParallelDims, work: StepTraffic, stage: int = 0) -> dict[str, int]:
    """{collective: bytes} that a rank of pipeline stage `stage` passes to it per step, by torch.distributed names."""
    found = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"), 0)
    for exchange in exchanges(dims, work, stage):
        found[exchange.kind] += exchange.num_bytes
    return {name: n for name, n in found.items() if n}


def exchanges(dims: ParallelDims, work: StepTraffic, stage: int = 0) -> list[Exchange]:
    """Every collective of a step of a rank of pipeline stage `stage`, by who takes part: those of each degree's row."""
    found: list[Exchange] = []
    for facts in DEGREES.values():
        found += implementation(facts.exchanges)(dims, work, stage)
    return [exchange for exchange in found if exchange.num_bytes]


def of_replicas(dims: ParallelDims, work: StepTraffic, stage: int) -> list[Exchange]:
    """All-reduces of gradients over replicas: DDP's, or of shards under hybrid FSDP2."""
    if dims.dp_replicate == 1:
        return []
    axes = ("dp_replicate",)
    if dims.shards == 1:
        return [Exchange("all_reduce", axes, work.trained, 1)]
    times = 1 if work.no_sync else len(work.tokens)
    of_experts = 1 if dims.expert_shards == 1 else times
    reduced = times * work.trained // dims.shards + of_experts * work.trained_experts // dims.expert_shards
    found = [Exchange("all_reduce", axes, reduced, times * work.num_layers, True)]
    if work.vocab_parallel:
        found.append(Exchange("all_reduce", axes, work.trained_ends // dims.shards, 1))
    return found


def of_shards(dims: ParallelDims, work: StepTraffic, stage: int) -> list[Exchange]:
    """Weights gathered and gradients reduced by FSDP2."""
    if dims.shards == 1:
        return []
    count = len(work.tokens)
    layers = work.num_layers
    times = 1 if work.no_sync else count
    shard_axes = ("dp_shard", "cp")
    gathers = count * (1 if work.keeps_gathered else 2)
    gathers += len(work.passes.tokens) if work.keeps_gathered else work.passes.num_forwards
    calls = gathers * layers
    times_outside = 1 + len(work.passes.tokens)
    found = [
        Exchange("all_gather", shard_axes, gathers * work.layers // dims.shards, calls, True),
        Exchange("all_gather", shard_axes, times_outside * work.outside // dims.shards, times_outside),
        Exchange("reduce_scatter", shard_axes, times * work.trained, times * layers, True),
    ]
    if dims.expert_shards > 1:
        gathered = gathers * work.experts // dims.expert_shards
        found.append(Exchange("all_gather", ("expert_shard",), gathered, calls, True))
        found.append(Exchange("reduce_scatter", ("expert_shard",), times * work.trained_experts, times * layers, True))
    if work.vocab_parallel:
        found += _of_vocabulary(dims, work, stage)
    return found


def of_routes(dims: ParallelDims, work: StepTraffic, stage: int) -> list[Exchange]:
    """Hidden states to the experts and back, and their gradients; the tokens of passes are routed as the others."""
    if dims.ep == 1:
        return []
    runs = 2 if work.recomputed else 1
    pairs = work.routed + work.arrived
    sent = (1 + runs) * pairs * work.hidden_size * work.element
    sent += pairs * work.passes.num_tokens // max(1, sum(work.tokens)) * work.hidden_size * work.element
    calls = 2 * ((1 + runs) * len(work.tokens) + work.passes.num_forwards) * work.num_layers
    return [Exchange("all_to_all", ("ep",), sent, calls)]


def of_ring(dims: ParallelDims, work: StepTraffic, stage: int) -> list[Exchange]:
    """Keys and values around the ring, in backward with their gradients; log-probabilities of documents are summed."""
    if dims.cp == 1:
        return []
    runs = 2 if work.recomputed else 1
    count = len(work.tokens)
    forwards = work.passes.num_forwards
    last = stage == dims.pp - 1
    width = work.key_value_width // (dims.tp if work.attention_is_sliced else 1)
    each = (dims.cp - 1) * work.num_layers * width
    sent = each * (sum(work.tokens) // dims.position_ranks) * ((runs + 1) * work.element + KEY_GRADIENT)
    sent += each * (work.passes.num_tokens // dims.position_ranks) * work.element
    calls = ((runs + 2) * count + forwards) * (dims.cp - 1) * work.num_layers
    return [
        Exchange("send", ("cp",), sent, calls, True),
        Exchange("all_reduce", ("cp",), LOSS_NUMBER * work.documents * last, count + forwards),
    ]


def of_stages(dims: ParallelDims, work: StepTraffic, stage: int) -> list[Exchange]:
    """Hidden states and their gradients between the stages of a pipeline, and gradients of tied embeddings."""
    if dims.pp == 1:
        return []
    states, states_of_passes = work.hidden_numbers(dims)
    count = len(work.tokens)
    # Of all chunks, after and before; in a pass only after.
    after = work.chunks - (stage == dims.pp - 1)
    before = work.chunks - (stage == 0)
    sent = (states * (after + before) + states_of_passes * after) * work.residual
    return [
        Exchange("send", ("pp",), sent, count * (after + before) + work.passes.num_forwards * after),
        Exchange("all_reduce", ("pp",), work.tied // dims.shards, bool(work.tied)),
    ]


def _of_vocabulary(dims: ParallelDims, work: StepTraffic, stage: int) -> list[Exchange]:
    """Tokens and hidden states that travel in place of embedding and head."""
    axes = ("dp_shard", "cp")
    count = len(work.tokens)
    width = work.hidden_size * work.residual
    found = []
    if stage == 0:
        found.append(Exchange("reduce_scatter", axes, dims.shards * work.most_positions * width, count))
        found.append(Exchange("all_gather", axes, work.most_positions * width * bool(work.trained_ends), count))
    if stage == dims.pp - 1:
        width = work.hidden_size * work.element
        found.append(Exchange("all_gather", axes, work.most_targets * width, count))
        found.append(Exchange("all_reduce", axes, work.loss_bytes(dims), 2 * count))
        found.append(Exchange("reduce_scatter", axes, dims.shards * work.most_targets * width, count))
    return found


def of_slices(dims: ParallelDims, work: StepTraffic, stage: int) -> list[Exchange]:
    """Sums of tensor parallelism."""
    if dims.tp == 1:
        return []
    count = len(work.tokens)
    layers = work.num_layers
    runs = 2 if work.recomputed else 1
    states, states_of_passes = work.hidden_numbers(dims)
    frozen = work.first_is_frozen and stage == 0
    first = stage == 0
    last = stage == dims.pp - 1
    forwards = work.passes.num_forwards
    others = [Exchange("all_reduce", ("tp",), work.partial // dims.shards, bool(work.partial))]
    # Embeddings, and gradients of the head's inputs.
    ends = (states * (first + last) + states_of_passes * first) * work.residual + last * work.loss_bytes(dims)
    calls = count * (first + last) + forwards * first
    if work.sequence_parallel:
        others.append(Exchange("all_reduce", ("tp",), ends, calls))
        return others + _of_positions(dims, work, runs, frozen)
    # After attention and after the MLP, whose last matmul is not recomputed, and gradients of their inputs.
    sliced = work.attention_is_sliced
    outputs = layers * (1 + runs * sliced) + work.shared_experts * runs
    gradients = layers * (1 + sliced) - (frozen and sliced)
    outputs_of_passes = layers * (1 + sliced) + work.shared_experts
    sent = states * (outputs * work.element + gradients * work.residual) + ends + ROUTER_WEIGHT * work.routed
    sent += states_of_passes * outputs_of_passes * work.element
    calls += count * (outputs + gradients) + forwards * outputs_of_passes
    return [Exchange("all_reduce", ("tp",), sent, calls), *others]


def _of_positions(dims: ParallelDims, work: StepTraffic, runs: int, frozen: bool) -> list[Exchange]:
    """Exchanges of sequence parallelism: gathers before attention and MLP, reductions after them, and the reverse in
    backward.
    """
    layers = work.num_layers
    count = len(work.tokens)
    forwards = work.passes.num_forwards

    def shards_of(tokens: Iterable[int]) -> int:
        return sum(-(-(n // dims.position_ranks) // dims.tp) for n in tokens) * work.hidden_size

    each = shards_of(work.tokens)
    of_passes = sum(map(shards_of, work.passes.tokens))
    # Of outputs, and of inputs and their gradients, also after the last layer and before the first in backward.
    gathered = layers * 2
    inputs = layers * 2 * runs + 1 + (not frozen)
    reduced = layers * (runs + 1)
    of_inputs = layers * 2 - frozen
    gather_bytes = each * (gathered * work.element + inputs * work.residual)
    gather_bytes += of_passes * (2 * layers + 1) * work.residual
    reduce_bytes = each * (reduced * work.element + of_inputs * work.residual) + of_passes * 2 * layers * work.element
    return [
        Exchange("all_gather", ("tp",), gather_bytes, count * (gathered + inputs) + forwards * (2 * layers + 1)),
        Exchange(
            "reduce_scatter", ("tp",), dims.tp * reduce_bytes, count * (reduced + of_inputs) + forwards * 2 * layers
        ),
    ]


def traffic_of(
    plan: Parts, shape: KnownShape, dims: ParallelDims, microbatch: MicrobatchShape, count: int | None = None
) -> StepTraffic:
    """Tensor sizes of a step, from the model's dimensions. `microbatch`: one of `count`; None: as many as full rows
    fill.
    """
    m = ModelCost(shape, plan)
    steps = plan.steps
    largest = max(map(len, stage_layers(shape.num_layers, dims.pp, shape.head_in_layers)))

    def of_stage(amount: int) -> int:
        return amount * largest // shape.num_layers

    def of_slice(amount: int, whole: int) -> int:
        """One tensor-parallel rank's part. `whole`: what each of them has in full, of the amount."""
        return (amount - whole) // dims.tp + whole

    if m.full:
        element = 4
    else:
        element = m.weight
    outside = shape.outer_weights * element
    last_norm = shape.hidden_size * element
    targets = min(1.0, microbatch.num_targets / microbatch.num_tokens)
    ends = plan.parallel.vocab_parallel and dims.shards > 1
    trained_ends = outside if ends and m.full else 0
    # Rows that do not divide are padded: FSDP2 sends them too.
    trained = 4 * dims.shards * memory.trainable_weights(m, dims.shards)
    stored = dims.shards * memory.base_bytes(m, dims.shards) + trained
    halves = 4 * partial_sums(m)
    norms = shape.hidden_size * (shape.others.count((shape.hidden_size, 1)) - 1)
    trained_norms = 0
    if m.full and not m.freezes:
        trained_norms = 4 * norms + last_norm
    if m.full and plan.parallel.sequence_parallel:
        partial = 4 * norms
    else:
        partial = halves
    in_experts, trained_experts = map(of_stage, memory.expert_bytes(m)) if dims.ep > 1 else (0, 0)
    positions = steps.batch_size * steps.accumulation * plan.data.row_length
    tokens = (microbatch.num_tokens,) * (count or max(1, positions // microbatch.num_tokens))
    learned = int(positions // dims.position_ranks * targets)
    passes = Passes((tokens,) * num_passes(plan.objective), learned * num_passes(plan.objective))
    routed = of_stage(positions // dims.position_ranks * shape.experts_per_token * memory.layers_with_experts(m))
    return StepTraffic(
        layers=of_slice(of_stage(stored - outside - last_norm) - in_experts, of_stage(norms * element + halves)),
        outside=last_norm + (0 if ends else outside // dims.pp // dims.tp),
        trained=of_slice(of_stage(trained - trained_ends) - trained_experts, of_stage(trained_norms + halves)),
        vocab_parallel=ends,
        trained_ends=trained_ends // dims.pp // dims.tp,
        most_positions=positions // dims.position_ranks if ends else 0,
        most_targets=learned if ends else 0,
        experts=in_experts // dims.ep,
        trained_experts=trained_experts // dims.ep,
        routed=routed,
        arrived=routed,  # if the routers are balanced
        shared_experts=of_stage(layers_with_shared_experts(m)),
        attention_is_sliced=shape.kind not in WITHOUT_TP_PLAN,
        tokens=tokens,
        num_layers=largest,
        hidden_size=shape.hidden_size,
        key_value_width=2 * m.k,
        targets=learned,
        partial=of_stage(partial),
        tied=shape.vocab_size * shape.hidden_size * 4 // dims.tp if m.full and shape.tied else 0,
        element=m.compute,
        residual=4 if m.autocast else m.compute,
        no_sync=plan.parallel.no_sync,
        keeps_gathered=not plan.parallel.reshard_after_forward,
        recomputed=plan.memory.recompute,
        first_is_frozen=not m.full,
        smoothed=bool(plan.objective.label_smoothing),
        chunks=plan.parallel.pp_chunks,
        sequence_parallel=plan.parallel.sequence_parallel,
        passes=passes,
        documents=plan.objective.facts.is_preference * len(microbatch.lengths) * (len(tokens) + passes.num_forwards),
        logits_twice=plan.objective.facts.is_preference and (m.trains_head or adapts_head(m)),
    )


@remembered
def partial_sums(m: ModelCost) -> int:
    """Weights of adapters that each tensor-parallel rank has in full: their gradients are partial sums on each."""
    if m.full:
        return 0
    columns = activations.READS
    count = m.shape.num_experts
    halves = [
        m.adapter.at(name).rank * (width if name.rpartition(".")[2] in columns else height)
        for name, height, width in m.adapted
    ]
    first = next(iter(m.shape.expert_matrices()), None)  # of which each rank holds A, as of a column-parallel linear
    for height, width in adapted_experts(m):
        halves.append(expert_rank(m) * (count * width if (height, width) == first else height))
    return sum(halves)


@remembered
def layers_with_shared_experts(m: ModelCost) -> int:
    return sum(".shared_expert" in name and name.endswith("down_proj") for name, _, _ in m.shape.linears)


@remembered
def adapts_head(m: ModelCost) -> bool:
    return any(name == OUTER_NAMES[1] for name, _, _ in m.adapted)


def num_passes(objective: ObjectivePlan) -> int:
    """Runs of forwards before a step over its rows, or over as many mismatched ones: of those the model and its
    reference, of the others the reference unless it is computed once; of vectors those of the step.
    """
    facts = objective.facts
    reference = facts.needs_reference and not objective.precomputes_reference
    return 2 * facts.mismatches + reference + (facts.head == "vector")
