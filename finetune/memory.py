"""Bytes a run will need, by item, from the model's config and the tokenized lengths, before weights are read.

Saved activations of one token in one layer: b (9 h + 4 f) + 4 * 7 r for a gated decoder block with adapters on all linears
(h hidden, f intermediate, r rank, b bytes of the compute type), and b * 2 per head and key of its document where attention
keeps its probabilities. Held against measurement in dev/LOG.md.
"""

from finetune.plan import ModelShape, RunPlan

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "sgd": 4, "adadelta": 8, "adamw_8bit": 2}
LIBRARY_BYTES = 50 * 2**20  # GEMM packing and thread buffers on a CPU
CHUNK_BYTES = 3 * 64 * 2**20  # one chunk of logits, its exponentials and its gradient


def estimate(plan: RunPlan, shape: ModelShape, microbatch_tokens: int, longest: int) -> dict:
    """{'total': bytes, 'items': {name: bytes}} at the peak of training; items named as the engine measures them.

    `microbatch_tokens` of the largest microbatch, `longest` document in it. Zeros where the config says too little.
    """
    s, h, layers = plan.settings, shape.hidden_size, shape.num_layers
    if not (h and layers and shape.vocab_size and shape.num_weights):
        return {"total": 0, "items": {}}
    weight = BYTES[s.precision.split("_")[0]] if "autocast" not in s.precision else 4
    compute = BYTES[s.precision.split("_")[0]]
    f = shape.intermediate_size or 4 * h
    outside = shape.vocab_size * h * (1 if shape.tied else 2)
    linear = max(0, shape.num_weights - outside)
    if s.train_type == "full":
        trainable, base = shape.num_weights, 0
    else:
        trainable, base = _adapter_weights(s, shape, f), outside * weight
        base += linear * (
            weight if s.train_type == "lora" else 0.5 + (1.25 if s.double_quant else 4) / s.group_size
        )
    per_token = layers * (compute * (9 * h + 4 * f) + (28 * s.lora_rank if plan.adapter else 0))
    heads = shape.num_heads or h // 64
    probabilities = layers * heads * longest * 2 * compute if longest <= 256 else 0
    if s.use_gradient_checkpointing == "true":
        per_token = 2 * h * compute * layers + per_token // layers
        probabilities //= layers
    items = {
        "base": int(base),
        "trainable": 4 * trainable,
        "optimizer": OPTIMIZER_BYTES[s.optimizer] * trainable,
        "dequantized": linear * compute if s.cache_dequantized == "true" else 0,
        "activations and workspace": int(
            microbatch_tokens * (per_token + probabilities) + 4 * trainable + CHUNK_BYTES + LIBRARY_BYTES
        ),
    }
    return {"total": sum(items.values()), "items": items}


def _adapter_weights(s, shape: ModelShape, f: int) -> int:
    """Weights of adapters on every linear of a gated decoder block; on two of them for 'default'."""
    h, r = shape.hidden_size, s.lora_rank
    size = shape.head_dim or (h // shape.num_heads if shape.num_heads else 64)
    q = (shape.num_heads or h // size) * size
    kv = (shape.num_kv_heads or shape.num_heads or h // size) * size
    block = 2 * (h + q) + 2 * (h + kv) + 3 * (h + f)
    if s.lora_target_modules == "default":
        block = (h + q) + (h + kv)
    magnitudes = 2 * q + 2 * kv + 3 * f if s.use_dora else 0
    return shape.num_layers * (r * block + magnitudes)


def largest_microbatch(lengths, rows_of_steps, batch_size: int, most: int) -> int:
    """Tokens of the largest microbatch over the given steps' rows, cut as data.microbatches cuts them."""
    groups = (rows[i : i + batch_size] for rows in rows_of_steps for i in range(0, len(rows), batch_size))
    return max(min(int(lengths[group].sum()), max(most, int(lengths[group].max()))) for group in groups)
