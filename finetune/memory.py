"""Bytes a run will need, by item, from a model's sizes, the settings and the largest microbatch, before weights are read.

Saved activations are counted tensor by tensor as autograd keeps them for this engine's layers; the constants below the table
of types were fitted to runs of `python benchmarks/memory_table.py --fit`, whose shapes are not those of docs/memory.md.
h hidden, f intermediate, q and k widths of query and key/value heads, T tokens of the microbatch, b bytes of the compute type.
"""

import re
from dataclasses import dataclass, field, replace

from finetune.parallel import ParallelDims, loads_whole
from finetune.settings import CHANGES_BASE
from finetune.shape import STORED_TRANSPOSED, ModelShape
from quantization_wrapper import METHODS, weight_bytes

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Moments of one trained weight. SGD has momentum; 8-bit Adam has two bytes and a scale a block of 256 for each.
OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "sgd": 4, "adadelta": 8}
EIGHT_BIT_FROM = 4096  # bitsandbytes keeps fp32 moments for tensors smaller than this
LOGITS_CHUNK_BYTES = 64 * 2**20  # torch_engine/loss.CHUNK_BYTES
DENSE_UP_TO = {4: 256, 2: 512}  # torch_engine/attention.DENSE_UP_TO on a CPU, by bytes of the compute type
GROUP_WASTE = 1.25  # torch_engine/attention.GROUP_WASTE
LOADING_BYTES, QUANTIZING_BYTES = (
    36 * 2**20,
    20 * 2**20,
)  # code that loading pages in; what quantizing takes beside weights
LOADING_WORKERS = 2  # at most torch_engine/loading.MOST_WORKERS, here as many as shown to matter
LIBRARY_BYTES = {"cpu": 50 * 2**20, "cuda": 40 * 2**20}  # code paged in, GEMM packing, thread buffers
# What glibc's heap grows by beyond what is in use, because an aligned block does not fit the hole that its like has left: a
# part of what is kept, and of one layer where each layer's tensors come and go. With --low_memory larger blocks are mapped.
HEAP_PART, HEAP_PART_RECOMPUTED, HEAP_PART_LOW_MEMORY = 0.2, 3.6, 0.25
# Leaves that read one input, and which: autograd keeps it once.
READS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value"), "block"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "mlp"),
}
DEFAULT_TARGETS = (  # torch_engine/adapters.DEFAULT_TARGETS
    ("q_proj", "v_proj"), ("query_key_value",), ("qkv_proj",), ("c_attn",), ("Wqkv",), ("q", "v"),
)  # fmt: skip
OUTER_NAMES = ("model.embed_tokens", "lm_head")  # as most models call them
LAYER_NORMS = ("gpt2", "gpt_neox", "falcon", "cohere")  # fused by torch: their input is kept, no fp32 copy
PARALLEL_BLOCKS = ("falcon", "cohere")
FOUR_NORMS = ("gemma2", "gemma3")
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", "olmo2")
UNGATED = ("gpt2", "gpt_neox", "falcon")


@dataclass(frozen=True)
class Load:
    """The largest microbatch of a run: its rows' lengths, how many of its tokens are targets, and how it is laid out.

    `several`: a step has more than one microbatch, so gradients stand while the next one runs.
    """

    lengths: tuple[int, ...]
    num_targets: int
    layout: str = "flat"
    several: bool = False

    @classmethod
    def full_rows(cls, rows: int, context_length: int, layout="flat", several=False) -> "Load":
        """Rows of context_length tokens, all of them targets: no data makes a larger microbatch of that many."""
        return cls((context_length,) * rows, rows * context_length, layout, several)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) if self.layout == "flat" else len(self.lengths) * max(self.lengths)

    def groups(self) -> list[tuple[int, int]]:
        """(documents, padded length) of each rectangle that attention runs on, as attention.documents_of makes them."""
        if self.layout == "padded":
            return [(len(self.lengths), max(self.lengths))]
        left, groups = sorted(self.lengths, reverse=True), []
        while left:
            members = [n for n in left if n * GROUP_WASTE >= left[0]]
            groups.append((len(members), left[0]))
            left = left[len(members) :]
        return groups

    @property
    def even(self) -> bool:
        return len(set(self.lengths)) == 1


@dataclass(frozen=True)
class Sizes:
    """What the formulas need of a model and its settings, worked out once."""

    shape: ModelShape
    settings: object
    device: str = "cpu"
    adapted: tuple = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "adapted", tuple(adapted_linears(self.shape, self.settings)))

    @property
    def weight(self) -> int:
        """Bytes of an unquantized weight."""
        word = self.settings.precision
        return 4 if "autocast" in word else BYTES[word]

    @property
    def compute(self) -> int:
        return BYTES[self.settings.precision.split("_")[0]]

    @property
    def full(self) -> bool:
        return self.settings.train_type == "full"

    @property
    def autocast(self) -> bool:
        return "autocast" in self.settings.precision

    @property
    def q(self) -> int:
        return self.shape.num_heads * self.shape.head_dim

    @property
    def k(self) -> int:
        return self.shape.num_kv_heads * self.shape.head_dim


def named(wish: str, name: str) -> bool:
    """Whether a list of names or endings, or a regex on whole names, names this layer."""
    if re.fullmatch(r"[\w.,\s]+", wish):
        return any(f".{name}".endswith(f".{end.strip()}") for end in wish.split(",") if end.strip())
    try:
        return bool(re.fullmatch(wish, name))
    except re.error:  # told when the model is there
        return False


def adapted_linears(shape: ModelShape, settings) -> list[tuple[str, int, int]]:
    """The linears that get an adapter, embeddings and head among them where named; all of them where every weight trains."""
    wish = settings.lora_target_modules
    if settings.train_type == "full" or wish == "all":
        return list(shape.linears)
    if wish == "default":
        leaves = {name.rpartition(".")[2] for name, _, _ in shape.linears}
        chosen = next((t for t in DEFAULT_TARGETS if leaves & set(t)), ())
        return [item for item in shape.linears if item[0].rpartition(".")[2] in chosen]
    outer = [(name, shape.vocab_size, shape.hidden_size) for name in OUTER_NAMES]
    return [item for item in (*shape.linears, *outer) if named(wish, item[0])]


# ---- what stands all the time


def base_bytes(z: Sizes, ranks: int = 1) -> int:
    """Frozen weights as stored: quantized linears and experts with their scales, all else in the weights' type. Of several
    ranks that cut each tensor by rows, one's.
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
    # New layers, which train, are none of them: the same part of the quantized as of all layers.
    part = 1 - z.shape.new_layers / z.shape.num_layers
    return int(quantized * part) + int(frozen - counted * part) * z.weight


def dense_tensors(shape: ModelShape, others: bool = True) -> list[tuple[int, int]]:
    """(rows, columns) of every unquantized tensor as ranks cut it: of experts held as one, rows are experts."""
    linears = [item[1:] for item in shape.linears]
    if shape.kind in STORED_TRANSPOSED:
        linears = [(columns, rows) for rows, columns in linears]
    experts = [(shape.num_experts, r // shape.num_experts * c) for r, c in shape.expert_matrices()]
    return linears + experts + (list(shape.others) if others else [])


def _quantized_experts(z: Sizes) -> list[tuple[int, int]]:
    """(rows, columns) of experts as they are quantized: one by one where a method looks at a whole matrix."""
    matrices, s = z.shape.expert_matrices(), z.settings
    if s.n_bits not in METHODS[s.quantization_backend].whole:
        return matrices
    return [(r // z.shape.num_experts, c) for r, c in matrices for _ in range(z.shape.num_experts)]


def new_weights(z: Sizes) -> list[int]:
    """Weights of each tensor of the layers that expand.py added, which train whole; empty without them."""
    shape = z.shape
    if not shape.new_layers or z.full:
        return []
    layers = shape.new_layers / shape.num_layers
    matrices = [rows * columns for _, rows, columns in shape.linears] + [
        r * c for r, c in shape.expert_matrices()
    ]
    return [int(n * layers) for n in matrices]


def trainable_tensors(z: Sizes, ranks: int = 1) -> list[int]:
    """Number of weights of each tensor that trains. Of several ranks that cut each by rows, one's."""
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


def adapted_experts(z: Sizes) -> list[tuple[int, int]]:
    """(rows, columns) of the parameters of experts that get an adapter of their own."""
    s, matrices = z.settings, z.shape.expert_matrices()
    if z.full or z.shape.new_layers or s.use_dora:
        return []
    names = [
        f"model.layers.{i // 2}.mlp.experts.{('gate_up_proj', 'down_proj')[i % 2]}"
        for i in range(len(matrices))
    ]
    wish = s.lora_target_modules
    return [m for m, name in zip(matrices, names, strict=True) if wish == "all" or named(wish, name)]


def optimizer_bytes(z: Sizes, tensors: list[int]) -> int:
    if z.settings.optimizer == "adamw_8bit":
        return sum(2 * (n + 4 * -(-n // 256)) if n >= EIGHT_BIT_FROM else 8 * n for n in tensors)
    return OPTIMIZER_BYTES[z.settings.optimizer] * sum(tensors)


def frozen_extras(z: Sizes) -> int:
    """|w|^2 of each row, which DoRA keeps; the start of an adapter whose start changed the base."""
    if z.full:
        return 0
    starts = 4 * sum(trainable_tensors(z)) if z.settings.init_lora_weights in CHANGES_BASE else 0
    rows = sum(c if name == OUTER_NAMES[0] else r for name, r, c in z.adapted)
    return starts + (4 * rows if z.settings.use_dora else 0)


# ---- what a microbatch keeps for backward


def attention_kept(z: Sizes, load: Load) -> int:
    """Bytes that one layer's attention keeps: queries, keys, values, and probabilities where products make them."""
    shape, b, total = z.shape, z.compute, 0
    dense_up_to = DENSE_UP_TO[b] if z.device == "cpu" and load.layout == "flat" else 0
    for rows, length in load.groups():
        padded, squares = rows * length, rows * shape.num_heads * length * length
        if (shape.softcap and load.layout == "flat") or length <= dense_up_to:
            copies = (
                (b < 4) + shape.softcap if not shape.dropout else 2 + shape.softcap
            )  # dropped ones and their mask
            total += padded * (z.q + 2 * z.k) * b + squares * (4 + b * copies)
            continue
        repeated = load.layout == "padded" and not load.even  # a mask of keys: no grouped kernel
        total += padded * ((3 * z.q if repeated else z.q + 2 * z.k) * b + 4 * shape.num_heads)
        if load.layout == "flat" and not load.even:  # what attention gives is picked apart again
            total += padded * z.q * b
    return total


def norms_kept(z: Sizes) -> tuple[float, float]:
    """(bytes a token and layer, bytes a token less in the first layer, whose input asks for no gradient)."""
    h, kind = z.shape.hidden_size, z.shape.kind
    if kind in LAYER_NORMS:
        each, count = h * z.weight + 2 * z.weight, 1 if kind in PARALLEL_BLOCKS else 2
    else:
        each, count = 4 * h + 4 + (h * z.weight if z.full else 0), 4 if kind in FOUR_NORMS else 2
    heads = 0
    if kind in HEAD_NORMS:
        heads = 4 * (z.q + z.k) + 4 * (z.shape.num_heads + z.shape.num_kv_heads)
        heads += (z.q + z.k) * z.weight if z.full else 0
    return count * each + heads, 0 if z.full else each


def inputs_kept(z: Sizes) -> float:
    """Bytes a token over all layers that linears keep: inputs (once for those that share one), low-rank products, masks."""
    b, s, total, shared = z.compute, z.settings, 0.0, {}
    for name, rows, columns in z.adapted:
        path, _, leaf = name.rpartition(".")
        own = z.autocast or (s.lora_dropout and s.use_dora and not z.full)
        shared[(path.rpartition(".")[0], READS.get(leaf, name)) if not own else name] = columns
        if z.full:
            continue
        total += s.lora_rank * b
        total += columns * (z.weight + (b if b != z.weight else 0)) if s.lora_dropout else 0
        total += rows * b if s.use_dora else 0
    return total + b * sum(shared.values())


def products_kept(z: Sizes) -> tuple[float, float]:
    """(bytes a token and layer of a block's MLP between its linears, the same for a routed block)."""
    shape, b = z.shape, z.compute
    f, extra = shape.intermediate_size or 0, 0
    if shape.kind == "gpt2":
        extra = 2 * shape.hidden_size * b if shape.dropout else 0
    act = 4 if shape.activation == "gelu_new" else 1
    plain = (act if shape.kind in UNGATED else 2 + act) * f * b + extra
    k = shape.experts_per_token
    trains = z.full or bool(adapted_experts(z))
    inner = (3 + trains) * (shape.expert_size or 0) + (1 + trains) * shape.hidden_size
    inner += 2 * z.settings.lora_rank if trains and not z.full else 0
    routed = k * (inner * b + 36) + 4 * (shape.num_experts or 0)
    return plain, routed


def layer_kept(z: Sizes, load: Load) -> float:
    """Bytes one layer keeps of the microbatch, without checkpointing."""
    tokens, plain_layers = load.num_tokens, _plain_layers(z.shape)
    plain, routed = products_kept(z)
    routed_part = 1 - plain_layers / z.shape.num_layers
    between = plain * (1 - routed_part) + routed * routed_part
    each = norms_kept(z)[0] + inputs_kept(z) / z.shape.num_layers + between
    return tokens * each + attention_kept(z, load)


def _plain_layers(shape: ModelShape) -> int:
    """Layers whose MLP is no set of experts."""
    if not shape.num_experts:
        return shape.num_layers
    return len(
        {
            name.partition(".mlp.")[0]
            for name, _, _ in shape.linears
            if ".mlp." in name and ".shared" not in name
        }
    )


def activations(z: Sizes, load: Load) -> int:
    """Bytes autograd keeps from forward to backward: all layers', or their inputs where they are recomputed."""
    shape, s, tokens, b = z.shape, z.settings, load.num_tokens, z.compute
    h, layers = shape.hidden_size, shape.num_layers
    if s.use_activation_cpu_offload:
        return 0
    norm = norms_kept(z)
    final = 4 * h + 4 + (h * z.weight if z.full else 0)
    total = tokens * final + load.num_targets * (h * b + 16) + (8 * tokens if z.full else 0)
    if s.use_gradient_checkpointing == "true":
        total += layers * tokens * h * z.weight
    else:
        total += layers * layer_kept(z, load) - tokens * norm[1]
        rotary = 0 if shape.kind == "gpt2" else 2 * shape.head_dim * z.weight
        total += tokens * rotary + (0 if load.even or load.layout == "padded" else tokens * 25)
        if not load.even and load.layout == "padded":
            total += len(load.lengths) * max(load.lengths) ** 2
        total += _weights_kept(z)
    if z.full:
        total += 4 * shape.vocab_size * h  # the head's gradient, made beside the logits
    return int(total)


def _weights_kept(z: Sizes) -> int:
    """Copies of weights in the compute type that autograd keeps."""
    if z.full:
        return z.compute * z.shape.linear_weights if z.autocast else 0
    if z.settings.use_dora and z.settings.lora_dropout and z.settings.train_type == "qlora":
        return 2 * z.compute * sum(rows * columns for _, rows, columns in z.adapted)
    return 0


# ---- what comes and goes within a step


def logits_bytes(z: Sizes, load: Load) -> int:
    """Peak of the chunked cross-entropy: logits, their exponentials; the head cast or its gradient's parts."""
    vocab, h, b = z.shape.vocab_size, z.shape.hidden_size, z.compute
    rows = min(max(128, LOGITS_CHUNK_BYTES // (4 * vocab)), max(1, load.num_targets))
    total = 8 * rows * vocab + 2 * load.num_tokens * h * b
    total += vocab * h * b if z.autocast else 0
    if z.full:
        total += vocab * h * (b + (4 if b < 4 else 0)) - 4 * rows * vocab
    return int(total)


def dequantized_once(z: Sizes) -> tuple[int, int]:
    """(peak, held) bytes while the largest frozen weight is made dense for a product; zeros where it is stored so."""
    n, b = z.shape.largest_linear(), z.compute
    if z.full:
        return 0, 0
    if z.settings.train_type == "qlora":
        if z.settings.cache_dequantized == "true":
            return 0, 0
        peak = 6 * n if z.settings.quantization_backend == "nf4" else 4 * n + (b * n if b < 4 else 0)
        return peak, b * n
    return (b * n, b * n) if z.autocast else (0, 0)


def step_bytes(z: Sizes, load: Load, kept: int) -> dict:
    """{'total', 'logits', 'workspace'}: the most that is taken at once above weights and moments, gradients included.

    The larger of: the loss, made while all is kept; the last layer's backward, its recomputation included; the end of
    backward, when all gradients are there.
    """
    shape, b, tokens = z.shape, z.compute, load.num_tokens
    h, gradients = shape.hidden_size, 4 * sum(trainable_tensors(z))
    f = max(shape.intermediate_size or 0, (shape.expert_size or 0) * shape.experts_per_token)
    peak, held = dequantized_once(z)
    largest = shape.largest_linear()
    standing = gradients if load.several or not z.full else 0
    logits = logits_bytes(z, load)
    head = 4 * shape.vocab_size * h if z.full else 0
    recomputed = layer_kept(z, load) if z.settings.use_gradient_checkpointing == "true" else 0
    products = 2 * tokens * h * b + max(peak, held + 2 * tokens * f * b)
    products += (4 + (b if b < 4 else 0)) * largest if z.full else 0
    squares = sum(n * length * length for n, length in load.groups()) * shape.num_heads
    dense = load.layout == "flat" and max(load.lengths) <= DENSE_UP_TO[b] and z.device == "cpu"
    inner = 4 * tokens * z.q * b + ((8 + 2 * b) * squares if dense else 0) + 12 * tokens * h
    mlp_kept = tokens * (products_kept(z)[0] or products_kept(z)[1])
    backward = recomputed + max(products, inner - mlp_kept)
    phases = {
        "loss": standing + kept + logits,
        "backward": standing + kept + head + backward,
        "end": gradients + head * (shape.tied + load.several),
    }
    total = int(max(phases.values()))
    return {"total": total, "logits": logits if phases["loss"] == max(phases.values()) else 0}


def allocator_bytes(z: Sizes, load: Load, kept: int) -> int:
    """What the heap keeps beyond what is in use; nothing on devices whose own allocator is asked for its peak."""
    if z.device != "cpu":
        return 0
    recomputed = z.settings.use_gradient_checkpointing == "true"
    grown = HEAP_PART_RECOMPUTED * layer_kept(z, load) if recomputed else HEAP_PART * kept
    return int(grown * (HEAP_PART_LOW_MEMORY if z.settings.low_memory else 1))


def cached_bytes(z: Sizes) -> int:
    """Dense copies of the quantized weights, where they are kept."""
    s, shape = z.settings, z.shape
    if s.train_type != "qlora" or s.cache_dequantized != "true":
        return 0
    whole = s.group_size if s.quantization_backend == "nf4" and z.compute == 4 else 1
    dense = [item[1:] for item in shape.linears] + shape.expert_matrices()
    cached = z.compute * sum(rows * -(-columns // whole) * whole for rows, columns in dense)
    return int(cached * (1 - shape.new_layers / shape.num_layers))


def part_of(shape: ModelShape, load: Load, dims: ParallelDims) -> tuple[ModelShape, Load]:
    """What one rank sees of the model and of a microbatch under tensor, pipeline and context parallelism: of a pipeline the stage
    that holds most. Embedding and head stay whole on it.
    """
    if dims.cp > 1:
        load = replace(
            load,
            lengths=tuple(-(-n // dims.cp) for n in load.lengths),
            num_targets=-(-load.num_targets // dims.cp),
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
        shape, num_layers=layers, linears=tuple(linears), num_weights=weights, expert_weights=experts,
        num_heads=shape.num_heads and shape.num_heads // dims.tp, num_kv_heads=shape.num_kv_heads and shape.num_kv_heads // dims.tp,
        intermediate_size=shape.intermediate_size and shape.intermediate_size // dims.tp, tied=shape.tied or dims.pp > 1,
    )  # fmt: skip
    return part, load


def estimate(
    settings, shape: ModelShape, load: Load, device: str = "cpu", ranks: int = 1, in_flight: int = 1
) -> dict:
    """{'total': bytes, 'items': {name: bytes}} a rank at the peak of training above the process after its imports.

    `ranks` share one copy of weights, gradients and moments (FSDP2); a pipeline keeps the activations of `in_flight` microbatches.
    `overlap` is what is never there at once, below zero.
    With --use_cpu_offload {'host': bytes} beside the total: what a rank keeps in host memory instead. Zeros where the config
    says too little.
    """
    if not shape.known or not shape.linears:
        return {"total": 0, "items": {}}
    z = Sizes(shape, settings, device)
    tensors, own, kept = trainable_tensors(z), trainable_tensors(z, ranks), activations(z, load)
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
    """The larger of two peaks. Counted items are the latest, which never fall; workspace is what the total holds beyond them."""
    total = max(now["total"], before["total"] if before else 0)
    items = {name: n for name, n in now["items"].items() if name != "workspace"}
    items["allocator"] = max(items.get("allocator", 0), before["items"].get("allocator", 0) if before else 0)
    return {"total": total, "items": items | {"workspace": total - sum(items.values())}}


def gathered_bytes(z: Sizes) -> int:
    """What a sharded rank holds whole for a while: two layers, one of them fetched ahead, and the root's group, which is the
    embedding and, where it is not tied to it, the head.
    """
    shape = z.shape
    outside = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    all_layers = base_bytes(z) if not z.full else 4 * shape.num_weights
    one = (all_layers - outside * z.weight) / shape.num_layers
    adapters = 0 if z.full else 4 * sum(trainable_tensors(z)) / shape.num_layers
    return int(2 * (one + adapters) + outside * z.weight)


def loading_bytes(settings, shape: ModelShape, ranks: int = 1) -> int:
    """Host memory of a rank at the peak of loading: the base as it stays, and the weights in flight in their unquantized form.

    Starts that look at unquantized weights have those whole first. Of several ranks each reads its rows alone, where it can.
    """
    z = Sizes(shape, settings)
    ranks = 1 if loads_whole(settings) else ranks
    trainable = 4 * sum(trainable_tensors(z, ranks))
    if ranks > 1:
        size = 4 if z.full else z.weight
        most = max(rows * columns for rows, columns in dense_tensors(shape))
        slices = 2 * -(-most // ranks) * size
        if settings.train_type == "qlora" and settings.n_bits in METHODS[settings.quantization_backend].whole:
            slices = max(slices, 2 * shape.largest_linear() * size)
        return base_bytes(z, ranks) + trainable + slices + LOADING_BYTES
    if z.full or settings.init_lora_weights in (*CHANGES_BASE, "eva"):
        whole = shape.num_weights * z.weight
        return whole + LOADING_BYTES + trainable * (not z.full) + (base_bytes(z) if not z.full else 0)
    if settings.train_type != "qlora":
        return base_bytes(z) + LOADING_BYTES + trainable
    stored = (shape.stored_bytes or 2 * shape.num_weights) / shape.num_weights
    width = stored + (z.weight if z.weight != round(stored) else 0)
    # Files hold experts one by one; they are joined, twice, before they are quantized. Embeddings come first, when little is there.
    experts = 3 * max((rows * columns for rows, columns in shape.expert_matrices()), default=0)
    workers = settings.loading_workers if settings.loading_workers > 0 else LOADING_WORKERS
    in_flight = int(max(shape.largest_linear(), experts) * width) * (1 if settings.low_memory else workers)
    return base_bytes(z) + cached_bytes(z) + in_flight + QUANTIZING_BYTES + LOADING_BYTES + trainable
