"""Predicted memory of the recursive model while it trains, by item, before anything is loaded."""

from recursive.config import ArchConfig, PretrainConfig, swiglu_width

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# Code paged in and thread buffers; with bfloat16 the kernels that oneDNN compiles. Measured, dev/LOG.md.
LIBRARY_BYTES = {"float32": 20 * 2**20, "bfloat16": 70 * 2**20}
BACKWARD_COPIES = 4  # of a layer's temporaries that the heap holds: measured, it keeps holes between what is saved
LOGITS_COPIES = 3  # fp32 logits, their log-softmax and its gradient, at a time


def parameters(arch: ArchConfig, vocab_size: int, seq_len: int, num_puzzles: int = 0) -> dict[str, int]:
    """{part: parameters}: network, embedding, head, halting, puzzles."""
    size = arch.hidden_size
    positions = seq_len + arch.prefix_len
    inner = arch.num_heads * arch.head_dim
    if arch.mlp_t:
        mixing = 3 * swiglu_width(positions, arch.expansion) * positions
    else:
        mixing = 4 * size * inner
    found = {
        "network": arch.L_layers * (mixing + 3 * size * arch.swiglu_width),
        "embedding": vocab_size * size + (positions * size if arch.pos_encodings == "learned" else 0),
        "head": vocab_size * size,
        "halting": size + 1,
        "puzzles": num_puzzles * arch.puzzle_emb_ndim,
    }
    return {name: count for name, count in found.items() if count}


def activation_bytes(arch: ArchConfig, rows: int, length: int) -> int:
    """Bytes that autograd keeps of one microbatch.

    Per layer the results of both norms, q, k, v and the mixed values, the SwiGLU's inputs and product; per application
    its input.
    """
    size = ITEM_BYTES[arch.forward_dtype]
    positions = length + arch.prefix_len
    if arch.mlp_t:
        mixing = 3 * swiglu_width(positions, arch.expansion) * arch.hidden_size / positions
    else:
        mixing = 4 * arch.num_heads * arch.head_dim
    per_position = (2 * arch.hidden_size + mixing + 3 * arch.swiglu_width) * size + 8
    layers = arch.applications_with_gradient * arch.L_layers
    inputs = arch.applications_with_gradient * arch.hidden_size * size
    return int(rows * positions * (layers * per_position + inputs))


def predicted(
    settings: PretrainConfig, vocab_size: int, shape: tuple[int, int, int], num_slots: int, seq_len: int
) -> dict:
    """{"total": bytes, "items": {name: bytes}} of training.

    `shape`: (rows, positions, targets) of the largest microbatch; `num_slots`: of this rank.
    """
    arch, (rows, length, targets) = settings.arch, shape
    size = ITEM_BYTES[arch.forward_dtype]
    count = sum(parameters(arch, vocab_size, seq_len).values())
    positions = seq_len + arch.prefix_len
    cast = 0
    if size == 2:
        cast = sum(parameters(arch, vocab_size, seq_len).values()) - vocab_size * arch.hidden_size
    items = {
        "trainable": 4 * count,
        "gradients": 4 * count,
        "optimizer": 8 * count,
        "ema": 4 * count if settings.ema else 0,
        "carry": 2 * num_slots * positions * arch.hidden_size * size if arch.supervision_steps > 1 else 0,
        "activations": activation_bytes(arch, rows, length) + 2 * cast,
        "logits": targets * (vocab_size * (4 * LOGITS_COPIES + size) + 2 * arch.hidden_size * size),
        "workspace": BACKWARD_COPIES * backward_bytes(arch, rows, length),
        "libraries": LIBRARY_BYTES[arch.forward_dtype],
        "snapshot": 4 * count * (4 if settings.ema else 3) if settings.takes_snapshots else 0,
    }
    # Logits are gone when the first gradients of the network appear.
    overlap = min(items["logits"], items["workspace"])
    return {"total": sum(items.values()) - overlap, "items": {**items, "overlap": -overlap}}


def backward_bytes(arch: ArchConfig, rows: int, length: int) -> int:
    """Temporaries of one layer's backward: the gradient of the SwiGLU's input and product, and two hidden states."""
    size = ITEM_BYTES[arch.forward_dtype]
    return rows * (length + arch.prefix_len) * (5 * arch.swiglu_width + 4 * arch.hidden_size) * size
