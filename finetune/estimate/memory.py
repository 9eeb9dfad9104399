"""Predicted memory of a run per item, from the model's dimensions, the settings and the largest microbatch.

Activations are counted per tensor as autograd saves them for this engine's layers; the constants below the dtype
table were fitted with `python benchmarks/memory_table.py --fit`, on shapes other than those of docs/memory.md. h
hidden, f intermediate, q and k widths of query and KV heads, T tokens of the microbatch, b bytes of the compute
dtype.
"""

import re
from dataclasses import replace

from finetune.config import RESIDUAL_INITS
from finetune.distributed.parallel_dims import ParallelDims, loads_full_model
from finetune.estimate.activations import READS, activation_bytes, layer_activation_bytes, product_activation_bytes
from finetune.estimate.engine_limits import DENSE_ATTENTION_UP_TO, LOGITS_CHUNK_BYTES
from finetune.estimate.model_cost import OUTER_NAMES, MicrobatchShape, ModelCost, adapted_experts
from finetune.estimate.model_shape import STORED_TRANSPOSED, ModelShape
from quantization_wrapper import METHODS, weight_bytes

# Optimizer state per trained weight. SGD keeps momentum; 8-bit Adam two bytes, plus one scale per block of 256 for
# each.
OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "sgd": 4, "adadelta": 8}
EIGHT_BIT_FROM = 4096  # bitsandbytes keeps fp32 moments for smaller tensors
LOADING_BYTES, QUANTIZING_BYTES = (36 * 2**20, 20 * 2**20)  # code paged in while loading; workspace of quantization
LOADING_WORKERS = 2  # at most engine_limits.MAX_LOADING_WORKERS; more made no measurable difference
LIBRARY_BYTES = {"cpu": 50 * 2**20, "cuda": 40 * 2**20}  # code paged in, GEMM packing, thread buffers
# Fragmentation of glibc's heap (an aligned block does not fit the hole left by an equal one), as a fraction of the
# saved
# activations, or of one layer's under activation checkpointing. With --low_memory, large blocks are mmapped instead.
HEAP_PART, HEAP_PART_RECOMPUTED, HEAP_PART_LOW_MEMORY = 0.2, 3.6, 0.25


# ---- weights and optimizer state


def base_bytes(z: ModelCost, ranks: int = 1) -> int:
    """Bytes of the frozen weights: quantized linears and experts with their scales, all others in the weight dtype.

    With row-wise sharding over `ranks`, those of one rank.
    """
    if z.full:
        return 0
    s, quantized, counted = z.settings, 0, 0
    new = sum(-(-n // ranks) for n in new_weights(z))
    frozen = sum(-(-rows // ranks) * columns for rows, columns in dense_tensors(z.shape)) - new
    if s.train_type != "qlora":
        return frozen * z.weight
    sizes = {}
    for rows, columns in [item[1:] for item in z.shape.linears] + _quantized_experts(z):
        sizes[rows, columns] = sizes.get((rows, columns), 0) + 1
    for (rows, columns), count in sizes.items():
        quantized += count * weight_bytes(
            s.quantization_backend, s.n_bits, s.group_size, s.double_quant, rows, columns, z.weight, ranks
        )
    quantized_too = dense_tensors(z.shape, others=False)
    counted = sum(-(-rows // ranks) * columns for rows, columns in quantized_too)
    # Added layers are trained, not quantized: subtract their fraction of all layers.
    part = 1 - z.shape.new_layers / z.shape.num_layers
    return int(quantized * part) + int(frozen - counted * part) * z.weight


def dense_tensors(shape: ModelShape, others: bool = True) -> list[tuple[int, int]]:
    """(rows, columns) of every unquantized tensor as it is sharded row-wise: fused experts are sharded by expert."""
    linears = [item[1:] for item in shape.linears]
    if shape.kind in STORED_TRANSPOSED:
        linears = [(columns, rows) for rows, columns in linears]
    experts = [(shape.num_experts, r // shape.num_experts * c) for r, c in shape.expert_matrices()]
    return linears + experts + (list(shape.others) if others else [])


def _quantized_experts(z: ModelCost) -> list[tuple[int, int]]:
    """(rows, columns) of experts as they are quantized: one by one if the method needs the full matrix."""
    matrices, s = z.shape.expert_matrices(), z.settings
    if s.n_bits not in METHODS[s.quantization_backend].whole:
        return matrices
    return [(r // z.shape.num_experts, c) for r, c in matrices for _ in range(z.shape.num_experts)]


def new_weights(z: ModelCost) -> list[int]:
    """Number of weights in each tensor of the layers added by expand.py, which train in full; empty without them."""
    shape = z.shape
    if not shape.new_layers or z.full:
        return []
    layers = shape.new_layers / shape.num_layers
    matrices = [rows * columns for _, rows, columns in shape.linears] + [r * c for r, c in shape.expert_matrices()]
    return [int(n * layers) for n in matrices]


def trainable_tensors(z: ModelCost, ranks: int = 1) -> list[int]:
    """Number of weights in each trainable tensor; with row-wise sharding over `ranks`, those of one rank."""
    if z.full:
        shapes = dense_tensors(z.shape)
    elif z.shape.new_layers:
        shapes = [(n, 1) for n in new_weights(z)]
    else:
        r, shapes, experts = z.settings.lora_rank, [], z.shape.num_experts
        for rows, columns in adapted_experts(z):
            shapes += [(rows // experts, r * experts), (r * experts, columns)]
        for name, rows, columns in z.adapted:
            out, inner = (columns, rows) if name == OUTER_NAMES[0] else (rows, columns)
            shapes += [(out, r), (r, inner)] + ([(out, 1)] if z.settings.use_dora else [])
    return [-(-rows // ranks) * columns for rows, columns in shapes]


def optimizer_bytes(z: ModelCost, tensors: list[int]) -> int:
    if z.settings.optimizer == "adamw_8bit":
        return sum(2 * (n + 4 * -(-n // 256)) if n >= EIGHT_BIT_FROM else 8 * n for n in tensors)
    return OPTIMIZER_BYTES[z.settings.optimizer] * sum(tensors)


def frozen_extras(z: ModelCost) -> int:
    """Bytes of DoRA's squared row norms, and of the initial adapter if its initialization changed the base."""
    if z.full:
        return 0
    starts = 4 * sum(trainable_tensors(z)) if z.settings.init_lora_weights in RESIDUAL_INITS else 0
    rows = sum(c if name == OUTER_NAMES[0] else r for name, r, c in z.adapted)
    return starts + (4 * rows if z.settings.use_dora else 0)


# ---- temporaries within a step


def logits_bytes(z: ModelCost, load: MicrobatchShape) -> int:
    """Peak bytes of the chunked cross-entropy: logits, exponentials, and the cast head or its gradient."""
    vocab, h, b = z.shape.vocab_size, z.shape.hidden_size, z.compute
    rows = min(max(128, LOGITS_CHUNK_BYTES // (4 * vocab)), max(1, load.num_targets))
    total = 8 * rows * vocab + 2 * load.num_tokens * h * b
    total += vocab * h * b if z.autocast else 0
    if z.full:
        total += vocab * h * (b + (4 if b < 4 else 0)) - 4 * rows * vocab
    return int(total)


def dequantized_once(z: ModelCost) -> tuple[int, int]:
    """(peak, held) bytes while the largest frozen weight is dequantized for a matmul; zeros if it is stored dense."""
    n, b = z.shape.largest_linear(), z.compute
    if z.full:
        return 0, 0
    if z.settings.train_type == "qlora":
        if z.settings.cache_dequantized == "true":
            return 0, 0
        peak = 6 * n if z.settings.quantization_backend == "nf4" else 4 * n + (b * n if b < 4 else 0)
        return peak, b * n
    return (b * n, b * n) if z.autocast else (0, 0)


def step_bytes(z: ModelCost, load: MicrobatchShape, kept: int) -> dict:
    """{'total', 'logits'}: peak bytes within a step beyond weights and optimizer state, gradients included.

    The maximum over: the loss, with all activations live; the last layer's backward, including its recomputation; the
    end of backward, with all gradients live.
    """
    shape, b, tokens = z.shape, z.compute, load.num_tokens
    h, gradients = shape.hidden_size, 4 * sum(trainable_tensors(z))
    f = max(shape.intermediate_size or 0, (shape.expert_size or 0) * shape.experts_per_token)
    peak, held = dequantized_once(z)
    largest = shape.largest_linear()
    standing = gradients if load.several or not z.full else 0
    logits = logits_bytes(z, load)
    head = 4 * shape.vocab_size * h if z.full else 0
    recomputed = layer_activation_bytes(z, load) if z.settings.use_gradient_checkpointing == "true" else 0
    products = 2 * tokens * h * b + max(peak, held + 2 * tokens * f * b)
    products += (4 + (b if b < 4 else 0)) * largest if z.full else 0
    squares = sum(n * length * length for n, length in load.groups()) * shape.num_heads
    dense = load.layout == "padding_free" and max(load.lengths) <= DENSE_ATTENTION_UP_TO[b] and z.device == "cpu"
    inner = 4 * tokens * z.q * b + ((8 + 2 * b) * squares if dense else 0) + 12 * tokens * h
    mlp_kept = tokens * (product_activation_bytes(z)[0] or product_activation_bytes(z)[1])
    backward = recomputed + max(products, inner - mlp_kept)
    phases = {
        "loss": standing + kept + logits,
        "backward": standing + kept + head + backward,
        "end": gradients + head * (shape.tied + load.several),
    }
    total = int(max(phases.values()))
    return {"total": total, "logits": logits if phases["loss"] == max(phases.values()) else 0}


def allocator_bytes(z: ModelCost, load: MicrobatchShape, kept: int) -> int:
    """Bytes of heap fragmentation; zero on devices whose allocator reports its own peak."""
    if z.device != "cpu":
        return 0
    recomputed = z.settings.use_gradient_checkpointing == "true"
    grown = HEAP_PART_RECOMPUTED * layer_activation_bytes(z, load) if recomputed else HEAP_PART * kept
    return int(grown * (HEAP_PART_LOW_MEMORY if z.settings.low_memory else 1))


def cached_bytes(z: ModelCost) -> int:
    """Bytes of cached dequantized weights."""
    s, shape = z.settings, z.shape
    if s.train_type != "qlora" or s.cache_dequantized != "true":
        return 0
    whole = s.group_size if s.quantization_backend == "nf4" and z.compute == 4 else 1
    dense = [item[1:] for item in shape.linears] + shape.expert_matrices()
    cached = z.compute * sum(rows * -(-columns // whole) * whole for rows, columns in dense)
    return int(cached * (1 - shape.new_layers / shape.num_layers))


def per_rank(shape: ModelShape, load: MicrobatchShape, dims: ParallelDims) -> tuple[ModelShape, MicrobatchShape]:
    """One rank's part of the model and of a microbatch under tensor, pipeline and context parallelism.

    For a pipeline, the largest stage. Embedding and head are not split.
    """
    if dims.cp > 1:
        load = replace(
            load, lengths=tuple(-(-n // dims.cp) for n in load.lengths), num_targets=-(-load.num_targets // dims.cp)
        )
    if dims.tp * dims.pp == 1 or not shape.known:
        return shape, load
    layers, linears = shape.num_layers // dims.pp, []
    for name, rows, columns in shape.linears:
        found = re.search(r"\.(\d+)\.", name)
        if found and int(found[1]) >= layers:
            continue
        cut = dims.tp if found else 1
        by_rows = name.rpartition(".")[2] in READS
        linears.append((name, rows // cut, columns) if by_rows else (name, rows, columns // cut))
    kept = sum(rows * columns for _, rows, columns in linears)
    experts = shape.expert_weights // dims.pp
    weights = shape.num_weights - (shape.linear_weights - kept) - (shape.expert_weights - experts)
    if dims.pp > 1 and not shape.tied:  # the embedding on the first stage, the head on the last
        weights -= shape.vocab_size * shape.hidden_size
    part = replace(
        shape,
        num_layers=layers,
        linears=tuple(linears),
        num_weights=weights,
        expert_weights=experts,
        num_heads=shape.num_heads and shape.num_heads // dims.tp,
        num_kv_heads=shape.num_kv_heads and shape.num_kv_heads // dims.tp,
        intermediate_size=shape.intermediate_size and shape.intermediate_size // dims.tp,
        tied=shape.tied or dims.pp > 1,
    )
    return part, load


def estimate(
    settings, shape: ModelShape, load: MicrobatchShape, device: str = "cpu", ranks: int = 1, in_flight: int = 1
) -> dict:
    """{'total': bytes, 'items': {name: bytes}}: peak memory per rank in training, above the process after its imports.

    `ranks`: FSDP2 shards of weights, gradients and optimizer state. `in_flight`: microbatches whose activations a
    pipeline stage keeps. Item `overlap` is negative: the amount counted twice. With --use_cpu_offload also
    {'host': bytes}, the memory moved to the host. Zeros if the config lacks dimensions.
    """
    if not shape.known or not shape.linears:
        return {"total": 0, "items": {}}
    z = ModelCost(shape, settings, device)
    tensors, own, kept = trainable_tensors(z), trainable_tensors(z, ranks), activation_bytes(z, load)
    gradients = 4 * sum(tensors)
    cached = cached_bytes(z)
    step = step_bytes(z, load, kept)
    taken = step["total"] - kept - gradients - step["logits"]
    kept *= in_flight
    items = {
        "base": base_bytes(z, ranks) + frozen_extras(z),
        "trainable": 4 * sum(own),
        "gradients": 4 * sum(own),
        "optimizer": optimizer_bytes(z, own),
        "dequantized": cached,
        "activations": kept,
        "logits": step["logits"],
        "workspace": max(0, taken),
        "overlap": min(0, taken),
        "gathered": gathered_bytes(z) if ranks > 1 else 0,
        "libraries": LIBRARY_BYTES.get(device, LIBRARY_BYTES["cuda"]),
        "allocator": allocator_bytes(z, load, kept),
    }
    host = 0
    if settings.use_cpu_offload and ranks > 1 and device != "cpu":
        on_device = frozen_extras(z)
        host = sum(items.pop(name) for name in ("base", "trainable", "gradients", "optimizer")) - on_device
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


def gathered_bytes(z: ModelCost) -> int:
    """Bytes of all-gathered weights on a sharded rank: two layers (one prefetched) and the FSDP root group.

    The root group is the embedding and, unless tied, the head.
    """
    shape = z.shape
    outside = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    all_layers = base_bytes(z) if not z.full else 4 * shape.num_weights
    one = (all_layers - outside * z.weight) / shape.num_layers
    adapters = 0 if z.full else 4 * sum(trainable_tensors(z)) / shape.num_layers
    return int(2 * (one + adapters) + outside * z.weight)


def loading_bytes(settings, shape: ModelShape, ranks: int = 1) -> int:
    """Peak host memory per rank while loading: the final base plus the unquantized weights in flight.

    Adapter initializations from unquantized weights hold all of those first. Sharded ranks read only their own rows if
    they can.
    """
    z = ModelCost(shape, settings)
    ranks = 1 if loads_full_model(settings) else ranks
    trainable = 4 * sum(trainable_tensors(z, ranks))
    if ranks > 1:
        size = 4 if z.full else z.weight
        most = max(rows * columns for rows, columns in dense_tensors(shape))
        slices = 2 * -(-most // ranks) * size
        if settings.train_type == "qlora" and settings.n_bits in METHODS[settings.quantization_backend].whole:
            slices = max(slices, 2 * shape.largest_linear() * size)
        return base_bytes(z, ranks) + trainable + slices + LOADING_BYTES
    if z.full or settings.init_lora_weights in (*RESIDUAL_INITS, "eva"):
        whole = shape.num_weights * z.weight
        return whole + LOADING_BYTES + trainable * (not z.full) + (base_bytes(z) if not z.full else 0)
    if settings.train_type != "qlora":
        return base_bytes(z) + LOADING_BYTES + trainable
    stored = (shape.stored_bytes or 2 * shape.num_weights) / shape.num_weights
    width = stored + (z.weight if z.weight != round(stored) else 0)
    # Files store experts one by one; they are concatenated, twice, before they are quantized. Embeddings are loaded
    # first,
    # when little memory is in use.
    experts = 3 * max((rows * columns for rows, columns in shape.expert_matrices()), default=0)
    workers = settings.loading_workers if settings.loading_workers > 0 else LOADING_WORKERS
    in_flight = int(max(shape.largest_linear(), experts) * width) * (1 if settings.low_memory else workers)
    return base_bytes(z) + cached_bytes(z) + in_flight + QUANTIZING_BYTES + LOADING_BYTES + trainable
