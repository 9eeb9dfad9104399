"""Bytes of the activations that autograd saves, layer by layer, tensor by tensor."""

from functools import lru_cache

from finetune.estimate import traced
from finetune.estimate.model_cost import MicrobatchShape, ModelCost, adapted_experts, expert_rank, remembered
from finetune.estimate.model_shape import KnownShape
from finetune.parts.engine_limits import DENSE_CACHED_BYTES, dense_attention_up_to

# Linears that share one input, which autograd saves once.
READS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value"), "block"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "mlp"),
}
LAYER_NORMS = ("gpt2", "gpt_neox", "falcon", "cohere")  # fused in torch: saves the input, not an fp32 copy
PARALLEL_BLOCKS = ("falcon", "cohere")
FOUR_NORMS = ("gemma2", "gemma3")
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", "olmo2")
WITH_SINKS = ("gpt_oss",)  # attention with a sink per head: probabilities are kept
UNGATED = ("gpt2", "gpt_neox", "falcon")
ONE_MATRIX = ("phi3",)  # gate and up in one linear: no fused SwiGLU
OTHER_NORMS = ("olmo2",)  # RMSNorms that round at another place: not fused
# of attention by documents' bounds, as in attention/varlen.py
MAX_KERNEL_HEAD = 256
KERNEL_HEAD_MULTIPLE = 8


# ---- activations saved for backward


def attention_activation_bytes(m: ModelCost, microbatch: MicrobatchShape) -> int:
    """Bytes saved by one layer's attention: queries, keys, values, and probabilities if attention is not fused."""
    shape = m.shape
    b = m.compute
    total = 0
    # Values are a view of what the linear of all three gives, which is kept beside rotated queries and keys.
    fused = (m.q + m.k) * (shape.kind in ONE_MATRIX)
    packed = microbatch.layout == "padding_free"
    if packed and (attends_by_bounds(m) or m.plan.parallel.cp > 1):  # over ranks too, log-sum-exps are kept
        return microbatch.num_tokens * ((m.q + 2 * m.k) * b + 4 * shape.num_heads)
    if packed and microbatch.shares_prompts:
        merged = shape.softcap or shape.kind in WITH_SINKS
        return microbatch.num_tokens * ((m.q * (2 if merged else 1) + 2 * m.k) * b + 4 * shape.num_heads)
    expanded = m.device == "cuda" and b == 4  # SDPA's kernels for fp32 take as many keys as queries
    dense_up_to = 0
    if m.device == "cpu" and packed:
        dense_up_to = dense_attention_up_to(b, m.plan.precision.onednn)
    all_padded = sum(rows * length for rows, length in microbatch.groups())
    for rows, length in microbatch.groups():
        padded = rows * length
        squares = rows * shape.num_heads * length * length
        if packed and (shape.softcap or shape.kind in WITH_SINKS or (shape.dropout and m.device == "cpu")):
            # Probabilities in fp32 and in 16 bits; with dropout also what is left of them and its mask.
            if not shape.dropout:
                copies = (b < 4) + shape.softcap
            else:
                copies = 2 + shape.softcap
            total += padded * (m.q + 2 * m.k) * b + squares * (4 + b * copies)
        elif length <= dense_up_to:  # probabilities are computed again, and the tokens are kept unpadded
            total += padded * (m.q + 2 * m.k + fused) * b * microbatch.num_tokens // all_padded
        else:
            repeated = expanded or not packed and not microbatch.even  # an explicit mask: no GQA kernel
            total += padded * ((3 * m.q if repeated else m.q + 2 * m.k) * b + 4 * shape.num_heads)
            if packed and not microbatch.even:  # the output is gathered back into token order
                total += padded * m.q * b
    return total


def dense_attention_sizes(m: ModelCost, microbatch: MicrobatchShape) -> tuple[int, int]:
    """(bytes of the biases that a microbatch's attention by matrix products is added to, bytes of scores within its
    backward); zeros where none is computed so.

    A product is of all P queries of a key, P * L x L numbers. Of two kinds of layers, with a window and without, each
    has a bias. In backward there are the last product's gradient and probabilities while the next one's scores and
    probabilities are made, see torch_engine/attention/dense.py.
    """
    shape = m.shape
    if m.device != "cpu" or microbatch.layout != "padding_free" or microbatch.shares_prompts or m.plan.parallel.cp > 1:
        return 0, 0
    if shape.softcap or shape.dropout or shape.kind in WITH_SINKS or not shape.num_kv_heads:
        return 0, 0
    limit = dense_attention_up_to(m.compute, m.plan.precision.onednn)
    bias = 0
    scores = 0
    for documents, length in microbatch.groups():
        if length > limit:
            continue
        product = shape.num_heads // shape.num_kv_heads * length * length * m.compute
        at_once = min(documents * shape.num_kv_heads, max(1, DENSE_CACHED_BYTES // product))
        bias += product * (1 + (shape.kind in FOUR_NORMS))
        scores = max(scores, 4 * at_once * product)
    return bias, scores


def attends_by_bounds(m: ModelCost) -> bool:
    """True if packed documents attend by a kernel that takes their bounds, as on a GPU in 16 bits."""
    shape = m.shape
    plain = not (shape.softcap or shape.dropout or shape.kind in WITH_SINKS)
    size = shape.head_dim <= MAX_KERNEL_HEAD and shape.head_dim % KERNEL_HEAD_MULTIPLE == 0
    return m.device == "cuda" and m.compute == 2 and plain and size and bool(m.plan.attention.kernels)


def norm_activation_bytes(m: ModelCost) -> tuple[float, float]:
    """(bytes per token and layer, bytes per token to subtract for the first layer, whose input needs no gradient)."""
    h = m.shape.hidden_size
    kind = m.shape.kind
    share = positions_share(m)
    if kind in LAYER_NORMS:
        each = h * m.weight + 2 * m.weight
        first = each * (not m.full)
        count = 1 if kind in PARALLEL_BLOCKS else 2
    else:
        each = norm_width(m) * h + 4 + (h * m.weight if m.full else 0)
        # Of a first layer behind frozen ones only what its own weight's gradient is computed from.
        first = (norm_width(m) * h + 4) * (not m.full or m.freezes)
        count = 4 if kind in FOUR_NORMS else 2
    heads = 0
    if kind in HEAD_NORMS:
        heads = norm_width(m) * (m.q + m.k) + 4 * (m.shape.num_heads + m.shape.num_kv_heads)
        heads += (m.q + m.k) * m.weight if m.full else 0
    return share * count * each + heads, share * first


def positions_share(m: ModelCost) -> float:
    """The fraction of the positions that a rank has between the blocks of a layer."""
    parallel = m.plan.parallel
    if parallel.sequence_parallel:
        return 1 / parallel.tp
    return 1.0


def norm_width(m: ModelCost) -> int:
    """Bytes per number that an RMSNorm saves: its input if it is one kernel, else that in fp32."""
    fused = m.fuses and not m.full and m.shape.kind not in OTHER_NORMS
    if fused:
        return m.weight
    return 4


@remembered
def input_activation_bytes(m: ModelCost, together: bool) -> float:
    """Bytes per token saved by the linears of all layers: inputs (shared ones once), LoRA products, dropout masks.
    `together`: linears with adapters that share an input cast it once.
    """
    b = m.compute
    adapter = m.adapter
    total = 0.0
    shared = {}
    for name, rows, columns in m.adapted:
        if m.full and not m.in_its_layers(name):  # a frozen linear keeps no input
            continue
        path, _, leaf = name.rpartition(".")
        casts_alone = m.autocast and not (together and not adapter.dropout and not adapter.dora)
        own = casts_alone or (adapter.dropout and adapter.dora and not m.full)
        shared[(path.rpartition(".")[0], READS.get(leaf, name)) if not own else name] = columns
        if m.full:
            continue
        total += adapter.at(name).rank * b
        total += columns * (m.weight + (b if b != m.weight else 0)) if adapter.dropout else 0
        total += rows * b if adapter.dora else 0
    return total + b * sum(shared.values())


def _joins(m: ModelCost) -> bool:
    return m.flattens and m.plan.parallel.tp == 1


def takes_swiglu(m: ModelCost) -> bool:
    """True if SwiGLU between dense linears is one kernel."""
    return m.fuses and m.shape.activation in ("silu", "swish") and m.shape.kind not in (*UNGATED, *ONE_MATRIX)


def product_activation_bytes(m: ModelCost) -> tuple[float, float]:
    """(bytes per token and layer saved in a dense MLP between its linears, the same for a mixture of experts)."""
    shape = m.shape
    b = m.compute
    f = shape.intermediate_size
    extra = 0
    if shape.kind == "gpt2":
        extra = 0
        if shape.dropout:
            extra = 2 * shape.hidden_size * b
    act = 4 if shape.activation == "gelu_new" else 1
    plain = (act if shape.kind in UNGATED else 2 if takes_swiglu(m) else 2 + act) * f * b + extra
    k = shape.experts_per_token
    trains = m.full or bool(adapted_experts(m))
    clamped = 3 * (shape.kind in WITH_SINKS)  # gpt_oss clamps gate and up
    inner = (3 + trains + clamped) * shape.expert_size + (1 + trains) * shape.hidden_size
    inner += 2 * expert_rank(m) if trains and not m.full else 0
    routed = k * (inner * b + 36) + 4 * shape.num_experts
    return plain, routed


def layer_activation_bytes(m: ModelCost, microbatch: MicrobatchShape) -> float:
    """Bytes saved by one layer for the microbatch, without activation checkpointing."""
    if m.shape.tracer is not None:
        return traced.layer_bytes(m, microbatch)
    tokens = microbatch.num_tokens
    plain_layers = num_layers_without_adapters(m.shape)
    plain, routed = product_activation_bytes(m)
    routed_part = 1 - plain_layers / m.shape.num_layers
    between = plain * (1 - routed_part) + routed * routed_part
    each = norm_activation_bytes(m)[0] + input_activation_bytes(m, _joins(m)) / m.learning_layers + between
    return tokens * each + attention_activation_bytes(m, microbatch)


@lru_cache(maxsize=256)
def num_layers_without_adapters(shape: KnownShape) -> int:
    """Number of layers with a dense MLP (no experts)."""
    if not shape.num_experts:
        return shape.num_layers
    return len(
        {name.partition(".mlp.")[0] for name, _, _ in shape.linears if ".mlp." in name and ".shared" not in name}
    )


def activation_bytes(m: ModelCost, microbatch: MicrobatchShape) -> int:
    """Bytes autograd saves from forward to backward: all, or only layer inputs with activation checkpointing."""
    shape = m.shape
    memory = m.plan.memory
    tokens = microbatch.num_tokens
    b = m.compute
    h = shape.hidden_size
    layers = m.learning_layers
    if memory.offload_activations:
        return 0
    if shape.tracer is not None:
        return traced.kept_bytes(m, microbatch)
    norm = norm_activation_bytes(m)
    targets = microbatch.num_targets
    if m.has_head:  # reads one position of each
        targets = len(microbatch.lengths)
    total: float = final_norm_bytes(m, tokens) + targets * (h * b + 16) + 8 * tokens * (m.full and not m.freezes)
    if memory.recompute:
        total += layers * tokens * h * m.weight * positions_share(m)
    else:
        total += layers * layer_activation_bytes(m, microbatch) - tokens * norm[1]
        if shape.kind == "gpt2":
            rotary = 0
        else:
            rotary = 2 * shape.head_dim * m.weight
        total += tokens * rotary + (0 if microbatch.even or microbatch.layout == "padded" else tokens * 25)
        if not microbatch.even and microbatch.layout == "padded":
            total += len(microbatch.lengths) * max(microbatch.lengths) ** 2
        total += dequantized_activation_bytes(m)
    if m.trains_head:
        shards = 1
        if m.plan.parallel.vocab_parallel:
            shards = m.plan.parallel.dp_shards
        total += 4 * shape.vocab_size * h // shards  # the head's gradient, computed along with the logits
    return int(total)


def final_norm_bytes(m: ModelCost, tokens: int) -> int:
    """Bytes saved by the norm after the last layer."""
    trains = m.full and not m.freezes
    return tokens * (norm_width(m) * m.shape.hidden_size + 4 + m.shape.hidden_size * m.weight * trains)


def dequantized_activation_bytes(m: ModelCost) -> int:
    """Bytes of weight copies in the compute dtype that autograd saves."""
    if m.full:
        weights = (m.shape.linear_weights + m.shape.expert_weights) * m.learning_layers // m.shape.num_layers
        if m.autocast:
            return m.compute * weights
        return 0
    if m.adapter.dora and m.adapter.dropout and m.plan.quantization:
        return 2 * m.compute * sum(rows * columns for _, rows, columns in m.adapted)
    return 0
