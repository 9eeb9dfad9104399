"""Predicted memory of a run per item, from the model's dimensions, the settings and the largest microbatch.

Activations are counted per tensor as autograd saves them for this engine's layers; the constants were fitted with
`python benchmarks/memory_table.py --fit`, on shapes other than those of docs/memory.md. h hidden, f intermediate, q and
k widths of query and KV heads, T tokens of the microbatch, b bytes of the compute dtype.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from finetune.estimate import traced
from finetune.estimate.activations import (
    READS,
    WITH_SINKS,
    activation_bytes,
    attends_by_bounds,
    dense_attention_sizes,
    final_norm_bytes,
    layer_activation_bytes,
    product_activation_bytes,
    takes_swiglu,
)
from finetune.estimate.model_cost import (
    OUTER_NAMES,
    MicrobatchShape,
    ModelCost,
    adapted_experts,
    expert_rank,
    remembered,
)
from finetune.estimate.model_shape import STORED_TRANSPOSED, WITHOUT_TP_PLAN, KnownShape
from finetune.estimate.process_memory import allocator_bytes, kernel_bytes, library_bytes
from finetune.parts.engine_limits import (
    ATTENTION_TILE,
    CACHED_LOGITS,
    DEVICE_ATTENTION_TILE,
    FREE_STAGING_BYTES,
    HEAD_BYTES,
    MLX_UPDATED_BYTES,
    OFFLOAD_BUFFERS,
    logits_rows,
)
from finetune.parts.optimizers import OPTIMIZERS
from finetune.parts.parallel_dims import ParallelDims, stage_layers
from finetune.parts.parts import Parts, loads_full_model
from finetune.parts.quantization import Quantization
from finetune.parts.trains import AddedLayers
from quantization_wrapper import METHODS, rows_independent

ONE_RANK = ParallelDims()
LOADING_BYTES = 36 * 2**20  # code paged in while loading
QUANTIZING_BYTES = 20 * 2**20  # workspace of quantization
LOADING_WORKERS = 2  # at most engine_limits.MAX_LOADING_WORKERS; more made no measurable difference
# MLX keeps more of a layer for backward than torch's layers do, whose own backward recomputes: fitted to five cells of
# `benchmarks/memory_table.py --mlx 1`. An update computes weights, moments and a clipped gradient beside the old ones.
MLX_KEPT_PARTS = 1.35
MLX_UPDATE_PARTS = 4.2
MLX_SLICED_UPDATE_PARTS = 2.6  # where it is in slices, as 8-bit moments are
# Of a trained head, whose gradient is summed over chunks of logits, beside adapters (fitted to two cells) and in full.
MLX_HEAD_PARTS = {False: 4.5, True: 2.7}
RESIDUAL_WIDTH = 16  # bytes per weight of a matrix whose initial adapter is computed: fp32 copies and products


# ---- weights and optimizer state


Sizes = Counter[tuple[int, int]]  # number of tensors per (rows, columns), as they are sharded row-wise


def weights_of(sizes: Sizes, ranks: int = 1) -> int:
    """Number of weights in these tensors; with row-wise sharding over `ranks`, those of one rank."""
    return sum(-(-rows // ranks) * columns * n for (rows, columns), n in sizes.items())


@remembered
def base_bytes(m: ModelCost, ranks: int = 1) -> int:
    """Bytes of the frozen weights: quantized linears and experts with their scales, all others in the weight dtype.

    With row-wise sharding over `ranks`, those of one rank.
    """
    every = weights_of(dense_sizes(m.shape), ranks)
    seeing = m.weight * weights_of(frozen_vision(m), ranks)
    if m.full:
        if m.freezes:
            return m.weight * (every - trainable_weights(m, ranks)) + seeing
        return seeing + m.weight * (m.frozen_head // ranks)
    quantization = m.plan.quantization
    quantized = 0
    frozen = every - weights_of(new_sizes(m) + saved_sizes(m), ranks)
    if quantization is None:
        return frozen * m.weight + seeing
    saved = {name for name, _, _ in m.saved}
    linears = [item[1:] for item in m.shape.linears if item[0] not in saved]
    for (rows, columns), count in Counter(linears + _quantized_experts(m, quantization)).items():
        quantized += count * quantization.weight_bytes(rows, columns, m.weight, ranks)
    counted = weights_of(dense_sizes(m.shape, others=False), ranks)
    counted -= weights_of(Counter(item[1:] for item in m.shape.linears if item[0] in saved), ranks)
    # Added layers are trained, not quantized: subtract their fraction of all layers.
    part = 1 - m.shape.new_layers / m.shape.num_layers
    return int(quantized * part) + int(frozen - counted * part) * m.weight + seeing


def trained_vision(m: ModelCost) -> Sizes:
    """Sizes of what trains in full of the part that sees images."""
    word = m.plan.trains.vision if m.plan.data.images and not isinstance(m.plan.trains, AddedLayers) else "none"
    sizes = {"projector": m.shape.projector, "full": (*m.shape.towers, *m.shape.projector)}
    return Counter(sizes.get(word, ()))


def frozen_vision(m: ModelCost) -> Sizes:
    """Sizes of what is held in addition to see images, and does not train: towers. What joins them is held by runs on
    text too, and only less of it is frozen if it trains.
    """
    if not m.plan.data.images:
        return Counter()
    return Counter(m.shape.towers) - trained_vision(m)


@remembered
def layers_bytes(m: ModelCost) -> int:
    """Bytes of the frozen weights inside the decoder layers."""
    return base_bytes(m) - (m.shape.outer_weights - m.outer_trained) * m.weight


def held_base_bytes(m: ModelCost, ranks: int = 1) -> int:
    """Bytes of the frozen weights on the device: all, or with --base_offload those that are in no file, and the
    buffers, each of the largest layer.
    """
    if m.plan.memory.base_offload is None:
        return base_bytes(m, ranks)
    return base_bytes(m) - layers_bytes(m) - outer_file_bytes(m) + buffers_bytes(m)


def buffers_bytes(m: ModelCost) -> int:
    """Bytes of the buffers that layers pass through."""
    stored = 0
    if m.shape.expert_matrices():
        stored = expert_bytes(m)[0] - expert_bytes(m)[1]
    largest = (layers_bytes(m) - stored) / m.shape.num_layers + stored / layers_with_experts(m)
    return int(min(OFFLOAD_BUFFERS, m.shape.num_layers) * largest)


def outer_file_bytes(m: ModelCost) -> int:
    """Bytes of embedding and head that are in files, where the base is not on the device."""
    ends = sum(_is_in_file(m, end) for end in range(2))
    return _outer_bytes(m) * (ends if not m.shape.tied else min(ends, 1))


def head_read_bytes(m: ModelCost) -> int:
    """Bytes of the head that are read for each loss and are on the device for its time."""
    return _outer_bytes(m) * _is_in_file(m, 1)


def head_for_loss_bytes(m: ModelCost) -> int:
    """Bytes that a head adds while it is read for the loss: the layers' buffers give theirs meanwhile."""
    read = head_read_bytes(m)
    if not read or m.device == "mps":
        return read
    return read - buffers_bytes(m)


def _outer_bytes(m: ModelCost) -> int:
    return m.shape.vocab_size * m.shape.hidden_size * m.weight


def _is_in_file(m: ModelCost, end: int) -> bool:
    """True of the embedding (0) or head (1) that is frozen without an adapter; of one weight for both, if both are."""
    if m.plan.memory.base_offload is None:
        return False
    adapted = {name for name, _, _ in m.adapted}
    return not any(OUTER_NAMES[i] in adapted or m.trains_outer(i) for i in (range(2) if m.shape.tied else (end,)))


@lru_cache(maxsize=256)
def dense_sizes(shape: KnownShape, others: bool = True) -> Sizes:
    """Sizes of all tensors, unquantized; fused experts are sharded by expert. Shared: not to be changed."""
    linears = Counter(item[1:] for item in shape.linears)
    if shape.kind in STORED_TRANSPOSED:
        linears = Counter({(columns, rows): n for (rows, columns), n in linears.items()})
    experts = Counter((shape.num_experts, r // shape.num_experts * c) for r, c in shape.expert_matrices())
    return linears + experts + Counter(shape.others if others else ())


def trained_in_full(m: ModelCost) -> Sizes:
    """Sizes of what full fine-tuning trains: all tensors, or those of some decoder layers."""
    shape = m.shape
    layers = m.trained_layers
    if not m.freezes:
        return dense_sizes(shape)
    inside = tuple(item for item in shape.linears if m.in_its_layers(item[0]))
    linears = dense_sizes(replace(shape, linears=inside, num_experts=0, experts=()), others=False)
    matrices = shape.expert_matrices()
    per_layer = len(matrices) // shape.num_layers
    experts = [(shape.num_experts, r // shape.num_experts * c) for r, c in matrices[: per_layer * len(layers)]]
    # Embeddings and head are outside, and a final norm is one more of its size than the layers have.
    others = Counter(size for size in shape.others if size[0] != shape.vocab_size)
    norms = Counter({size: n // shape.num_layers * len(layers) for size, n in others.items()})
    return linears + Counter(experts) + norms


def _quantized_experts(m: ModelCost, quantization: Quantization) -> list[tuple[int, int]]:
    """(rows, columns) of experts as they are quantized: one by one if the method needs the full matrix."""
    matrices = m.shape.expert_matrices()
    if not quantization.needs_full_matrix:
        return matrices
    return [(r // m.shape.num_experts, c) for r, c in matrices for _ in range(m.shape.num_experts)]


def new_sizes(m: ModelCost) -> Sizes:
    """Sizes of the layers added by expand.py, which train in full and are sharded by weight; empty without them."""
    shape = m.shape
    if not shape.new_layers or m.full:
        return Counter()
    layers = shape.new_layers / shape.num_layers
    matrices = [rows * columns for _, rows, columns in shape.linears] + [r * c for r, c in shape.expert_matrices()]
    return Counter((int(n * layers), 1) for n in matrices)


def saved_sizes(m: ModelCost) -> Sizes:
    """Sizes of what trains in full beside adapters."""
    return Counter((rows, columns) for _, rows, columns in m.saved)


@remembered
def trainable_sizes(m: ModelCost) -> Sizes:
    """Sizes of all trainable tensors."""
    of_head: Sizes = Counter()
    if m.plan.objective.outputs:
        of_head[m.plan.objective.outputs, m.shape.hidden_size] += 1
    if m.full:
        of_model = trained_in_full(m)
        if m.frozen_head:
            of_model = of_model - Counter([(m.shape.vocab_size, m.shape.hidden_size)])
        return of_model + trained_vision(m) + of_head
    if m.shape.new_layers:
        return new_sizes(m)
    experts = m.shape.num_experts
    sizes = saved_sizes(m) + trained_vision(m) + of_head
    if m.plan.data.images and m.adapter.vision == "lora":
        for rows, columns in m.shape.towers:
            if rows > 1 and columns > 1:
                sizes.update([(rows, m.adapter.rank), (m.adapter.rank, columns)])
    for rows, columns in adapted_experts(m):
        r = expert_rank(m)
        sizes.update([(rows // experts, r * experts), (r * experts, columns)])
    adapted = Counter((name == OUTER_NAMES[0], w, c, m.adapter.at(name).rank) for name, w, c in m.adapted)
    for (outer, rows, columns, r), n in adapted.items():
        out, inner = (columns, rows) if outer else (rows, columns)
        for size in [(out, r), (r, inner)] + ([(out, 1)] if m.adapter.dora else []):
            sizes[size] += n
    return sizes


@remembered
def trainable_weights(m: ModelCost, ranks: int = 1) -> int:
    """Number of trainable weights; with row-wise sharding over `ranks`, those of one rank."""
    return weights_of(trainable_sizes(m), ranks)


@dataclass(frozen=True)
class TrainedWeights:
    """The weights that train, as the state of an optimizer is computed from them: see parts.optimizers.Trained."""

    m: ModelCost
    ranks: int = 1

    @property
    def weights(self) -> int:
        return trainable_weights(self.m, self.ranks)

    @property
    def sizes(self) -> Sizes:
        return trainable_sizes(self.m)

    @property
    def linears(self) -> list[tuple[int, int]]:
        return [(rows, columns) for name, rows, columns in self.m.shape.linears if self.m.in_its_layers(name)]

    @property
    def share(self) -> float:
        """The layers' matrices; only those in added layers, if only these train."""
        adds = self.m.shape.new_layers and not self.m.full
        if adds:
            return self.m.shape.new_layers / self.m.shape.num_layers
        return 1

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        m = self.m
        experts = m.shape.num_experts
        if m.freezes:
            return [(n, rows, columns) for (rows, columns), n in trained_in_full(m).items()]
        linears = [(1, rows, columns) for _, rows, columns in m.shape.linears]
        if m.full:
            linears += [(1, rows, columns) for rows, columns in m.shape.others]
            return linears + [(experts, rows // experts, columns) for rows, columns in m.shape.expert_matrices()]
        if m.shape.new_layers:
            return linears
        found = [(1, rows, columns) for _, rows, columns in m.saved]
        for name, width, columns in m.adapted:
            out, inner = (columns, width) if name == OUTER_NAMES[0] else (width, columns)
            rank = m.adapter.at(name).rank
            found += [(1, out, rank), (1, rank, inner)]
            if m.adapter.dora:
                found.append((1, out, 1))
        for rows, columns in adapted_experts(m):
            rank = expert_rank(m)
            found += [(1, rows // experts, rank * experts), (1, rank * experts, columns)]
        return found


def optimizer_bytes(m: ModelCost, ranks: int = 1) -> int:
    """Bytes of the optimizer's state; with row-wise sharding over `ranks`, those of one rank."""
    facts = OPTIMIZERS[m.plan.steps.optimizer]
    trained = TrainedWeights(m, ranks)
    if facts.state_bytes is None:
        return facts.bytes_per_weight * trained.weights
    return facts.state_bytes(trained)


def update_bytes(m: ModelCost, ranks: int = 1) -> int:
    """Bytes that the optimizer's update takes beside its state; with row-wise sharding over `ranks`, on one rank."""
    if m.device == "mlx":
        largest = 4 * max((rows * columns for rows, columns in trainable_sizes(m)), default=0)
        parts = MLX_UPDATE_PARTS
        if m.plan.steps.moments_are_8_bit and largest > MLX_UPDATED_BYTES:
            parts = MLX_SLICED_UPDATE_PARTS
        return int(parts * max(largest, min(MLX_UPDATED_BYTES, 4 * trainable_weights(m))))
    facts = OPTIMIZERS[m.plan.steps.optimizer]
    if facts.update_bytes is None or (facts.package == "bitsandbytes" and m.device != "cpu"):
        return 0
    return facts.update_bytes(TrainedWeights(m, ranks))


def snapshot_bytes(m: ModelCost, ranks: int = 1) -> int:
    """Bytes of the copy in host memory from which a checkpoint is written beside steps; 0 if steps wait for it.

    Of all weights each rank copies what it holds; of adapters rank 0 copies them in full.
    """
    if not m.plan.output.takes_snapshots:
        return 0
    ranks = ranks if m.full else 1
    return 4 * trainable_weights(m, ranks) + optimizer_bytes(m, ranks)


@remembered
def frozen_extras(m: ModelCost) -> int:
    """Bytes of DoRA's squared row norms, and of the initial adapter if its initialization changed the base."""
    if m.full:
        return 0
    starts = 0
    if m.adapter.init.changes_base:
        starts = 4 * trainable_weights(m)
    rows = sum(c if name == OUTER_NAMES[0] else r for name, r, c in m.adapted)
    return starts + (4 * rows if m.adapter.dora else 0)


# ---- temporaries within a step


def logits_bytes(m: ModelCost, microbatch: MicrobatchShape) -> int:
    """Peak bytes of the chunked cross-entropy: logits, two small blocks in fp32, and the cast head or its gradient.
    A head of documents has none of the vocabulary's size.
    """
    if m.has_head:
        return 8 * len(microbatch.lengths) * m.plan.objective.outputs
    vocab = m.shape.vocab_size
    h = m.shape.hidden_size
    b = m.compute
    rows = min(logits_rows(vocab, m.device == "cpu"), max(1, microbatch.num_targets))
    parallel = m.plan.parallel
    shards = 1
    if parallel.vocab_parallel:
        shards = parallel.dp_shards
    in_blocks = m.device == "cpu" and parallel.tp == shards == 1  # ranks exchange the sums of a chunk
    blocks = 8 * (min(rows * vocab, max(vocab, CACHED_LOGITS)) if in_blocks else rows * vocab)
    total = b * rows * vocab + blocks + 2 * microbatch.num_tokens * h * b
    total += 2 * shards * rows * h * b if shards > 1 else 0  # hidden states of all ranks' chunks, and their gradients
    total += vocab * h * b // shards if m.autocast else 0
    if m.trains_head:
        total += vocab * h * (b + (4 if b < 4 else 0)) // shards
    return int(total)


def taught_bytes(m: ModelCost, microbatch: MicrobatchShape) -> tuple[int, int]:
    """(bytes in host memory of what a teacher gave for the rows of a step, bytes within the loss of a microbatch).

    A step's batches have a token of 4 bytes and a log-probability of 4 for each of the K that are kept, at every
    position. The loss has them at the targets, with the tokens as indices of 8 bytes, and eight arrays in fp32 of the
    positions that are computed at a time: see data/taught_rows.py and torch_engine/divergence.py.
    """
    teacher = m.plan.teacher
    if teacher is None or m.plan.objective.facts.of_samples or m.device == "mlx":
        return 0, 0
    vocab = m.shape.vocab_size
    kept = min(teacher.top_k, vocab)
    steps = m.plan.steps
    microbatches = 1
    if isinstance(steps.batch_size, int):
        microbatches = -(-steps.batch_size * steps.accumulation // len(microbatch.lengths))
    at_once = min(microbatch.num_targets, logits_rows(vocab, m.device == "cpu"))
    if m.device == "cpu":
        at_once = min(at_once, max(1, CACHED_LOGITS // vocab))
    of_step = 8 * kept * microbatch.num_tokens * max(1, microbatches)
    return of_step, 12 * kept * microbatch.num_targets + 8 * 4 * kept * at_once


def loss_bytes(m: ModelCost, microbatch: MicrobatchShape) -> int:
    """Bytes within the loss of a microbatch: of its logits, and of what a teacher gave."""
    return logits_bytes(m, microbatch) + taught_bytes(m, microbatch)[1]


def dequantized_once(m: ModelCost) -> tuple[int, int]:
    """(peak, held) bytes while the largest frozen weight is dequantized for a matmul; zeros if it is stored dense."""
    n = m.shape.largest_linear
    b = m.compute
    if m.full:
        return 0, 0
    if m.fuses and b < 4:  # a GPU multiplies all experts of a projection at once
        n = max(n, *(rows * columns for rows, columns in m.shape.expert_matrices()), 0)
    if m.plan.quantization:
        if m.plan.memory.cache_dequantized:
            return 0, 0
        method = METHODS[m.plan.quantization.method]
        if method.cuda_kernel and m.device == "cuda":
            return b * n, b * n
        width = method.dequantizing_bytes or 4 + (b if b < 4 else 0)
        return width * n, b * n
    if m.autocast:
        return (b * n, b * n)
    return (0, 0)


def step_bytes(m: ModelCost, microbatch: MicrobatchShape, kept: int, ranks: int = 1) -> dict:
    """{'total'}: peak bytes within a step beyond weights and optimizer state, gradients included; of `ranks` shards,
    those of one rank's rows, and full ones of a unit while they are reduced. 'logits', 'head': of it the loss's own,
    and a head's that is read for it.

    The maximum over: the loss, with all activations live; the last layer's backward, including its recomputation; of
    shards in full fine-tuning the first layer's, with the shards of the others' gradients; the end of backward, with
    all gradients live; the optimizer's update.
    """
    shape = m.shape
    b = m.compute
    tokens = microbatch.num_tokens
    h = shape.hidden_size
    gradients = 4 * trainable_weights(m, ranks)
    layer, root = reduced_bytes(m) if ranks > 1 else (0, 0)
    f = max(shape.intermediate_size, shape.expert_size * shape.experts_per_token)
    peak, held = dequantized_once(m)
    if shape.tracer is not None:
        return _traced_step(m, microbatch, gradients, peak - held, (layer, root) if ranks > 1 else None)
    largest = shape.largest_linear
    # Of a step's first microbatch there are none yet; a heap that is kept has their holes.
    standing = gradients if microbatch.several or m.flattens or not (m.full or m.device == "cuda") else 0
    logits = loss_bytes(m, microbatch)
    head = 0
    if m.trains_head:
        head = 4 * shape.vocab_size * h
    recomputed: float = 0
    if m.plan.memory.recompute:
        recomputed = layer_activation_bytes(m, microbatch)
    if m.plan.parallel.ep > 1:  # hidden states on their way to the experts, and in their order
        held += 2 * tokens * shape.experts_per_token * h * b
    between = held + 2 * tokens * f * b
    if takes_swiglu(m):  # gate and up are freed by its backward, in which their gradients are made
        # The input of the linear after it, kept for its weights' gradient, is gone by then.
        frees_input = not shape.num_experts and any(name.endswith("down_proj") for name, _, _ in m.adapted)
        between = max(held + tokens * f * b, (2 if frees_input else 3) * tokens * f * b)
    products = 2 * tokens * h * b + max(peak, between)
    # Of shards, the layer's gradients are counted in full.
    products += ((4 if ranks == 1 else 0) + (b if b < 4 else 0)) * largest if m.full else 0
    if m.plan.precision.in_fp8:  # a weight and its product's rows, rounded
        products += largest + tokens * f
        if m.device == "cpu":  # torch multiplies copies in fp32: of the weight two while it is scaled, rows and product
            products += 8 * largest + 4 * tokens * (f + h)
    squares = sum(n * length * length for n, length in microbatch.groups()) * shape.num_heads
    packed_on_cpu = microbatch.layout == "padding_free" and m.device == "cpu" and not microbatch.shares_prompts
    kept_squares = (
        m.plan.parallel.cp == 1 and packed_on_cpu and (shape.softcap or shape.dropout or shape.kind in WITH_SINKS)
    )
    inner = 4 * tokens * m.q * b + ((8 + 2 * b) * squares if kept_squares else 0) + 12 * tokens * h
    inner = max(inner, ring_bytes(m, tokens))
    bias, scores = dense_attention_sizes(m, microbatch)
    inner += scores
    mlp_kept = tokens * (product_activation_bytes(m)[0] or product_activation_bytes(m)[1])
    backward = recomputed + max(products, inner - mlp_kept)
    # Two layers are counted as gathered; while the loss is computed, the last one is.
    waiting = 0
    if ranks > 1 and m.plan.parallel.reshard_after_forward:
        waiting = int(units(m).beside)
    beside = layer if ranks > 1 else head  # FSDP2 keeps the head's gradient as it was made, until it is reduced
    # By then what the last norm saved is free; on a CPU the heap keeps its holes.
    frees_norm = m.device == "cuda" and not m.plan.memory.offload_activations
    of_layers = kept - (final_norm_bytes(m, tokens) if frees_norm else 0)
    phases = {
        "loss": standing + kept + bias + max(0, logits + head_for_loss_bytes(m) - waiting),
        "backward": bias + max(standing, gradients // shape.num_layers * (not m.full)) + of_layers + backward + beside,
        "end": gradients + (root if ranks > 1 else head * (shape.tied + microbatch.several)),
        "update": gradients + update_bytes(m, ranks),
    }
    if m.full and ranks > 1:  # in the first layer's backward the shards of the others' gradients are there
        layers = m.num_full_layers
        others = (gradients - 4 * m.outer_full // ranks) * (layers - 1) // layers
        of_head = head // (m.plan.parallel.dp_shards if m.plan.parallel.vocab_parallel else 1)
        phases["first layer"] = others + of_head + backward + beside
    others = max(size for name, size in phases.items() if name != "loss")
    return step_sizes(m, logits, int(phases["loss"]), int(others))


def ring_bytes(m: ModelCost, tokens: int) -> int:
    """Bytes within ring attention's backward: gradients of outputs, queries and the layer; those of queries in fp32, of
    keys and values also another rank's and the next one's; keys and values of two ranks; scores of a tile.
    """
    if m.plan.parallel.cp == 1:
        return 0
    tile = min(ATTENTION_TILE if m.device == "cpu" else DEVICE_ATTENTION_TILE, tokens)
    tile = 0 if attends_by_bounds(m) else tile
    numbers = (4 + 3 * m.compute) * m.q + 2 * m.k * (2 * m.compute + 3 * 4) + 2 * m.shape.hidden_size * m.compute
    return tokens * numbers + 5 * 4 * m.shape.num_heads * tile**2


def reduced_bytes(m: ModelCost) -> tuple[int, int]:
    """Bytes of the full gradients of FSDP's units, (the largest layer, the root group), and of the copies that are
    reduced.
    """
    outer = m.outer_full
    of_experts = expert_bytes(m)[1] // 4
    inner = max(0, trainable_weights(m) - outer - of_experts)
    if m.plan.parallel.ep > 1:
        here = 0
    else:
        here = 2 * 4 * of_experts
    layer = 2 * 4 * inner // m.num_full_layers + (here + 4 * padding(m)[1]) // layers_with_experts(m)
    if m.plan.parallel.vocab_parallel:
        return layer, 0
    # The root's weights, counted as gathered, are freed before its gradients are reduced.
    freed: float = 0
    if outer:
        freed = held_bytes(m)
    return layer, int(max(0, 2 * 4 * outer - freed))


def _traced_step(
    m: ModelCost, microbatch: MicrobatchShape, gradients: int, dequantized: int, reduced: tuple[int, int] | None
) -> dict:
    """step_bytes of a model whose layers are traced."""
    head = 0
    if m.full:
        head = 4 * m.shape.vocab_size * m.shape.hidden_size
    standing = gradients if microbatch.several or m.flattens or not (m.full or m.device == "cuda") else 0
    logits = partial(loss_bytes, m)
    of_layers = max(0, gradients - 4 * m.outer_full - standing)
    found = traced.peaks(m, microbatch, logits, standing, of_layers, dequantized)
    end = gradients + max(update_bytes(m), reduced[1] if reduced else head * (m.shape.tied + microbatch.several))
    # A layer's gradients in full are in its own peak; what is reduced is their copy.
    loss = int(found.loss) + head_for_loss_bytes(m)
    others = max(found.layers + (reduced[0] // 2 if reduced else 0), end)
    return step_sizes(m, logits(microbatch), loss, int(others))


def step_sizes(m: ModelCost, logits: int, loss: int, others: int) -> dict:
    """Result of step_bytes, from the loss's peak, `logits` of it being the loss's own, and the peak of the `others`."""
    if others > loss:
        return {"total": others, "logits": 0, "head": 0}
    return {"total": loss, "logits": logits, "head": max(0, head_for_loss_bytes(m))}


def cached_bytes(m: ModelCost) -> int:
    """Bytes of cached dequantized weights."""
    quantization = m.plan.quantization
    shape = m.shape
    if quantization is None or not m.plan.memory.cache_dequantized:
        return 0
    whole = 1
    if METHODS[quantization.method].pads_rows and m.compute == 4:
        whole = quantization.group_size
    dense = [item[1:] for item in shape.linears] + shape.expert_matrices()
    cached = m.compute * sum(rows * -(-columns // whole) * whole for rows, columns in dense)
    return int(cached * (1 - shape.new_layers / shape.num_layers))


def per_rank(shape: KnownShape, microbatch: MicrobatchShape, dims: ParallelDims) -> tuple[KnownShape, MicrobatchShape]:
    """One rank's part of the model and of a microbatch under tensor, pipeline and context parallelism.

    For a pipeline, the largest stage.
    """
    ranks = dims.position_ranks
    if ranks > 1:
        microbatch = replace(
            microbatch,
            lengths=tuple(-(-n // ranks) for n in microbatch.lengths),
            num_targets=-(-microbatch.num_targets // ranks),
        )
    return model_per_rank(shape, dims), microbatch


def model_per_rank(shape: KnownShape, dims: ParallelDims) -> KnownShape:
    """One rank's part of the model under tensor and pipeline parallelism: of the largest stage."""
    if dims.tp * dims.pp == 1:
        return shape
    return part_of(shape, dims.tp, dims.pp)


@lru_cache(maxsize=256)
def part_of(shape: KnownShape, tp: int, pp: int) -> KnownShape:
    layers = max(map(len, stage_layers(shape.num_layers, pp, shape.head_in_layers)))
    linears = []
    for name, rows, columns in shape.linears:
        found = re.search(r"\.(\d+)\.", name)
        if found and int(found[1]) >= layers:
            continue
        cut = tp if found and shape.kind not in WITHOUT_TP_PLAN else 1
        by_rows = name.rpartition(".")[2] in READS
        linears.append((name, rows // cut, columns) if by_rows else (name, rows, columns // cut))
    kept = sum(rows * columns for _, rows, columns in linears)
    experts = shape.expert_weights * layers // shape.num_layers // tp
    weights = shape.num_weights - (shape.linear_weights - kept) - (shape.expert_weights - experts)
    vocab = -(-shape.vocab_size // tp)
    ends = [columns for rows, columns in shape.others if rows == shape.vocab_size]
    weights -= (shape.vocab_size - vocab) * sum(ends)
    if pp > 1 and not shape.tied:  # the embedding on the first stage, the head on the last
        weights -= vocab * shape.hidden_size
    return replace(
        shape,
        vocab_size=vocab,
        others=tuple((vocab if rows == shape.vocab_size else rows, columns) for rows, columns in shape.others),
        num_layers=layers,
        linears=tuple(linears),
        num_weights=weights,
        expert_weights=experts,
        expert_size=shape.expert_size and shape.expert_size // tp,
        num_heads=shape.num_heads and shape.num_heads // tp,
        num_kv_heads=shape.num_kv_heads and shape.num_kv_heads // tp,
        intermediate_size=shape.intermediate_size and shape.intermediate_size // tp,
        tied=shape.tied or pp > 1,
    )


def estimate(
    plan: Parts, shape: KnownShape, microbatch: MicrobatchShape, device: str = "cpu", ranks: int = 1, in_flight: int = 1
) -> dict:
    """{'total': bytes, 'items': {name: bytes}}: peak memory per rank in training, above the process after its imports.

    `ranks`: FSDP2 shards of weights, gradients and optimizer state. `in_flight`: microbatches whose activations a
    pipeline stage keeps. Item `overlap` is negative: the amount counted twice. With --use_cpu_offload, or with
    --async_save beside a device, also {'host': bytes}, in the memory of the host.
    """
    m = ModelCost(shape, plan, device)
    kept = activation_bytes(m, microbatch)
    if device == "mlx":
        head = 4 * shape.vocab_size * shape.hidden_size * m.trains_head
        kept = int(MLX_KEPT_PARTS * (kept - head) + MLX_HEAD_PARTS[m.full] * head)
    gradients = 4 * trainable_weights(m, ranks)
    cached = cached_bytes(m)
    step = step_bytes(m, microbatch, kept, ranks)
    taken = step["total"] - kept - gradients - step["logits"] - step["head"]
    if head_read_bytes(m):  # before which the heap is trimmed
        holes = 0
    else:
        holes = allocator_bytes(m, microbatch, kept, spare=step["total"] - gradients if ranks == 1 else None)
    kept *= in_flight
    items = {
        "base": held_base_bytes(m, ranks) + frozen_extras(m),
        "trainable": gradients,
        "gradients": gradients,
        "optimizer": optimizer_bytes(m, ranks),
        "dequantized": cached,
        "activations": kept,
        "graphs": kept * (plan.memory.graphs is True),
        "logits": step["logits"],
        "head": step["head"],
        "workspace": max(0, taken),
        "overlap": min(0, taken),
        "gathered": gathered_bytes(m, kept + gradients + step["logits"] + taken, kept) if ranks > 1 else 0,
        "staged": staged_bytes(m, ranks) if ranks > 1 and device == "mps" else 0,
        "libraries": library_bytes(m),
        "kernels": kernel_bytes(m),
        "allocator": holes,
        "snapshot": snapshot_bytes(m, ranks),
        "taught": taught_bytes(m, microbatch)[0],
    }
    if device == "cpu":
        host = 0
    else:
        host = items.pop("snapshot") + items.pop("taught")
    if plan.memory.base_offload == "host" and device != "cpu":
        host += layers_bytes(m) + head_read_bytes(m)
    if plan.memory.offload and ranks > 1 and device != "cpu":
        on_device = frozen_extras(m)
        host += sum(items.pop(name) for name in ("base", "trainable", "gradients", "optimizer")) - on_device
        items = {"base": on_device} | items
    items = {name: int(n) for name, n in items.items() if n}
    return {"total": sum(items.values()), "items": items} | ({"host": host} if host else {})


def peak_of(before: dict | None, now: dict) -> dict:
    """The larger of two peaks.

    Counted items are the latest values, which never decrease; workspace is the rest of the total.
    """
    total = max(now["total"], before["total"] if before else 0)
    items = {name: n for name, n in now["items"].items() if name != "workspace"}
    items["allocator"] = max(items.get("allocator", 0), before["items"].get("allocator", 0) if before else 0)
    return {"total": total, "items": items | {"workspace": total - sum(items.values())}}


def gathered_bytes(m: ModelCost, step: int = 0, kept: int | None = None) -> int:
    """Bytes of all-gathered weights on a sharded rank: two layers (one prefetched), or all of them where they stay
    gathered until the backward pass, and the FSDP root group.

    The root group is the embedding and, unless tied, the head; with --vocab_parallel neither is gathered. FSDP2 keeps
    the buffer of a gather until the next one is copied out. At a step's start root and first layer are held twice,
    while `step`, the bytes that the step's peak has beside them, is not there yet. Between two layers there are the
    buffers of both and the copies of one, while of `step` only what is `kept` is there.
    """
    unit = units(m)
    between = 0.0
    if kept is not None:
        between = 2 * unit.largest + unit.beside + unit.root - (step - kept)
    return int(max(held_bytes(m), 2 * (unit.smallest + unit.root) - step, between))


def held_bytes(m: ModelCost) -> float:
    """Bytes of gathered weights while layers compute."""
    unit = units(m)
    two = unit.largest + unit.beside
    return unit.root + (two if m.plan.parallel.reshard_after_forward else max(two, unit.layers))


def staged_bytes(m: ModelCost, ranks: int) -> int:
    """Bytes of host copies of the largest unit in an all-gather, and of the buffers kept, where collectives are staged.

    Host and device share the memory of an Apple GPU.
    """
    unit = units(m)
    return int(max(unit.largest, unit.root) * (1 + 1 / ranks)) + FREE_STAGING_BYTES


@dataclass(frozen=True)
class Units:
    """Bytes of FSDP's units, in full: all layers, the largest of them, the one beside it, the smallest, and the root
    group. Layers differ where only some have experts.
    """

    layers: float
    largest: float
    beside: float
    smallest: float
    root: float


def layers_with_experts(m: ModelCost) -> int:
    """Number of decoder layers with experts, each of two fused matrices; all layers of a model without experts."""
    return min(len(m.shape.expert_matrices()) // 2, m.shape.num_layers) or m.shape.num_layers


def units(m: ModelCost) -> Units:
    """Weights of one rank's part of the model."""
    shape = m.shape
    frozen = (shape.outer_weights - m.outer_trained) * m.weight
    trained = 4 * m.outer_trained
    stored, filled = padding(m)
    weights = base_bytes(m) + 4 * trainable_weights(m) - frozen - trained
    # Shards that are filled up are the experts'; those of other ranks are not gathered.
    stored_experts = expert_bytes(m)[0]
    dense = (weights - stored_experts) / shape.num_layers
    of_experts = stored_experts + stored + 4 * filled - _experts_elsewhere(m)
    count = layers_with_experts(m)
    largest = dense + of_experts / count
    beside = largest if 2 * count > shape.num_layers else dense
    smallest = largest if count == shape.num_layers else dense
    if m.plan.parallel.vocab_parallel:
        root = 0
    else:
        root = frozen + trained
    return Units(dense * shape.num_layers + of_experts, largest, beside, smallest, root)


def padding(m: ModelCost) -> tuple[int, int]:
    """(bytes of the frozen weights, number of the trainable ones) that fill shards up, in full: FSDP2 gathers as many
    rows of all ranks. They count where experts, which are the rows of one tensor, are fewer than the ranks.
    """
    return _padding(m, m.plan.dims.shards if m.plan.parallel.ep == 1 else 1)


@remembered
def _padding(m: ModelCost, shards: int) -> tuple[int, int]:
    stored = shards * base_bytes(m, shards) - base_bytes(m)
    return max(0, stored), shards * trainable_weights(m, shards) - trainable_weights(m)


def _experts_elsewhere(m: ModelCost) -> float:
    """Bytes of the experts that expert parallelism does not gather: other ranks', and whole ones of this rank."""
    degree = m.plan.parallel.ep
    if degree == 1:
        return 0
    stored, _ = expert_bytes(m)
    return stored * (1 if m.plan.dims.expert_shards == 1 else 1 - 1 / degree)


@remembered
def expert_bytes(m: ModelCost) -> tuple[int, int]:
    """(stored bytes of all experts, adapters included; bytes of their gradients)."""
    if not m.shape.expert_matrices():
        return 0, 0
    weights = sum(rows * columns for rows, columns in m.shape.expert_matrices())
    without = replace(m.shape, experts=(), expert_weights=0, num_weights=m.shape.num_weights - weights)
    dense = ModelCost(without, m.plan, m.device)
    trained = 4 * (trainable_weights(m) - trainable_weights(dense))
    return base_bytes(m) - base_bytes(dense) + trained, trained


def _width_in_flight(m: ModelCost, quantization: Quantization) -> float:
    """Bytes per weight that is read and quantized: as stored, in the run's dtype if that differs, and the solver's."""
    stored = _stored_width(m)
    solver = METHODS[quantization.method].solver_bytes
    return stored + (m.weight if m.weight != round(stored) else 0) + solver


def _stored_width(m: ModelCost) -> float:
    """Bytes per weight in the model's files."""
    return (m.shape.stored_bytes or 2 * m.shape.num_weights) / m.shape.num_weights


def _residual_bytes(m: ModelCost) -> int:
    """Bytes of initial adapters that are subtracted from the base, and of the arithmetic on one full matrix."""
    if m.full or not m.adapter.init.changes_base:
        return 0
    return frozen_extras(m) + RESIDUAL_WIDTH * m.shape.largest_linear


def _experts_in_flight(m: ModelCost) -> int:
    """Weights in memory while experts are read: files store them one by one, and they are concatenated, twice."""
    return 3 * max((rows * columns for rows, columns in m.shape.expert_matrices()), default=0)


def _slices_in_flight(m: ModelCost, ranks: int) -> int:
    """Bytes that a rank holds beside its part while loading: what two workers quantize, or cast.

    Slices that are read in the dtype they stay in are no copy. `m`: of the full model; `ranks`: those that divide a
    matrix.
    """
    quantization = m.plan.quantization
    largest = m.shape.largest_linear
    experts = _experts_in_flight(m)
    if quantization:
        by_rows = all(rows_independent(quantization.config, columns) for _, _, columns in m.shape.linears)
        if by_rows:
            read = -(-largest // ranks)
        else:
            read = largest
        return int(LOADING_WORKERS * max(read, experts) * _width_in_flight(m, quantization)) + QUANTIZING_BYTES
    if m.full:
        size = 4
    else:
        size = m.weight
    stored = _stored_width(m)
    copied = 0.0
    if size != round(stored):
        copied = -(-largest // ranks) * (stored + size)
    return int(LOADING_WORKERS * max(copied, experts * stored))


def _proof_bytes(m: ModelCost) -> int:
    """Bytes beside a rank's part while logits of the full model are computed: a decoder layer, its last matrix in
    flight, and some rows of the head.
    """
    quantization = m.plan.quantization
    largest = max(m.shape.largest_linear, _experts_in_flight(m))
    width: float = 0
    if quantization:
        width = _width_in_flight(m, quantization)
    return int(units(m).largest + largest * width) + 2 * HEAD_BYTES


def loading_bytes(plan: Parts, shape: KnownShape, ranks: int = 1, dims: ParallelDims = ONE_RANK) -> int:
    """Peak host memory per rank while loading: the final base plus the unquantized weights in flight.

    `ranks`: FSDP2 shards of each weight; `dims`: the other degrees. Each rank reads only its part if it can; before the
    first step it then computes layers of the full model, one at a time. Adapters that start from what flows through the
    unquantized model need all of it first.
    """
    if loads_full_model(plan):
        ranks = 1
        dims = ONE_RANK
    whole = ModelCost(shape, plan)
    memory = plan.memory
    m = ModelCost(model_per_rank(shape, dims), plan)
    trainable = 4 * trainable_weights(m, ranks)
    divided = dims.tp * dims.pp * dims.ep > 1
    if ranks > 1 or divided:
        in_flight = _slices_in_flight(whole, ranks * dims.tp) + _residual_bytes(whole)
        in_flight = max(in_flight, _proof_bytes(whole) if divided else 0)
        return int(base_bytes(m, ranks) + trainable + in_flight) + LOADING_BYTES
    if m.full or m.adapter.init.needs_data:
        dense = shape.num_weights * m.weight
        return dense + LOADING_BYTES + trainable * (not m.full) + (base_bytes(m) if not m.full else 0)
    # What trains in full is cast once it is read.
    trainable += m.weight * max((rows * columns for _, rows, columns in m.saved), default=0)
    if plan.quantization is None:
        return held_base_bytes(m) + LOADING_BYTES + trainable + _residual_bytes(m)
    if memory.loading_workers > 0:
        workers = memory.loading_workers
    else:
        workers = LOADING_WORKERS
    workers = 1 if memory.low_memory or m.adapter.init.changes_base else workers
    # Embeddings are loaded first, when little memory is in use.
    largest = max(shape.largest_linear, _experts_in_flight(m))
    in_flight = int(largest * _width_in_flight(m, plan.quantization)) * workers + _residual_bytes(m)
    if memory.base_offload:
        # A layer or an end at a time is written, before there are buffers; then checks read the head.
        in_flight = max(in_flight, _outer_bytes(m) if outer_file_bytes(m) else 0)
        return held_base_bytes(m) + in_flight + QUANTIZING_BYTES + LOADING_BYTES + trainable
    return base_bytes(m) + cached_bytes(m) + in_flight + QUANTIZING_BYTES + LOADING_BYTES + trainable
