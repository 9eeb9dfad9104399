"""Predicted memory of a model opened for generation and scoring, without training.

The peak is at loading, in a forward pass over scored rows, or in generation, which holds dense weights while it runs
(torch_engine/generation/generate.py) and each row's keys and values.
"""

from dataclasses import dataclass

from finetune.estimate.memory import (
    base_bytes,
    cached_bytes,
    dequantized_once,
    frozen_extras,
    gathered_bytes,
    head_for_loss_bytes,
    head_read_bytes,
    held_base_bytes,
    loading_bytes,
    trainable_weights,
)
from finetune.estimate.model_cost import ModelCost
from finetune.estimate.model_shape import KnownShape
from finetune.estimate.process_memory import KERNEL_BYTES, library_bytes, uses_onednn
from finetune.parts.engine_limits import MOST_PACKED_BYTES, logits_rows
from finetune.parts.parts import Parts


@dataclass(frozen=True)
class Work:
    """The most that an opened model does: `rows` answered at once, of `prompt` tokens, with `new` ones; `scored` tokens
    of rows in one forward, of which `targets` are targets.
    """

    rows: int = 0
    prompt: int = 0
    new: int = 0
    scored: int = 0
    targets: int = 0


def predicted(
    plan: Parts,
    shape: KnownShape,
    device: str,
    work: Work,
    adapted: bool = True,
    ranks: int = 1,
    keeps_shards: bool = False,
) -> dict:
    """{"total": bytes, "items": {name: bytes}} above the process after its imports; `loading` is beside the total's sum
    where it is the peak. `adapted`: an adapter is on it. Of one of several `ranks`, which hold shards: `keeps_shards`,
    or all weights are gathered to answer.
    """
    m = ModelCost(shape, plan, device)
    adapter = 0
    if adapted:
        adapter = 4 * trainable_weights(m, ranks)
    in_host_memory = plan.memory.offload and device != "cpu"
    items = {
        "base": (0 if in_host_memory else held_base_bytes(m, ranks)) + (frozen_extras(m) if adapted else 0),
        "adapter": 0 if in_host_memory else adapter,
        "dequantized": cached_bytes(m),
        "libraries": library_bytes(m),
        "kernels": KERNEL_BYTES if uses_onednn(m) else 0,
    }
    densely = ranks == 1 and plan.memory.base_offload is None
    answering = generation_items(m, work, adapted and densely, densely)
    scoring = scoring_items(m, work)
    for items_of in (answering, scoring):
        if items_of and head_read_bytes(m):
            items_of["head"] = max(0, head_for_loss_bytes(m))
    if ranks > 1:
        one_layer = gathered_bytes(m)
        scoring["gathered"] = one_layer
        if answering:
            everything = base_bytes(m) + (4 * trainable_weights(m) if adapted else 0)
            answering["gathered"] = one_layer if keeps_shards else everything
            answering["dequantized once"] = dequantized_once(m)[0]
    largest = max((answering, scoring), key=lambda parts: sum(parts.values()))
    total = sum(items.values()) + sum(largest.values())
    loading = loading_bytes(plan, shape, ranks)
    found = {name: int(n) for name, n in (items | largest).items() if n}
    return {"total": int(max(total, loading)), "items": found | {"loading": int(loading)}}


def generation_items(m: ModelCost, work: Work, adapted: bool, densely: bool = True) -> dict:
    """Bytes beside the weights while `work.rows` are answered: dense copies, keys and values, one forward, logits.
    `densely`: quantized weights are kept dense meanwhile.
    """
    if not work.rows:
        return {}
    shape = m.shape
    b = m.compute
    width = shape.num_kv_heads * shape.head_dim
    # Growing a layer's keys or values copies them.
    cache = 2 * work.rows * (work.prompt + work.new) * width * b * (shape.num_layers + 1)
    tokens = work.rows * work.prompt
    forward = layer_bytes(m, tokens)
    logits = work.rows * shape.vocab_size * (b + 8)
    return {"dense": dense_copies(m, adapted) if densely else 0, "cache": cache, "forward": forward, "logits": logits}


def layer_bytes(m: ModelCost, tokens: int) -> int:
    """Bytes of one layer's forward over tokens that keeps nothing, where its MLP holds most.

    A GPU multiplies all experts at once: their inputs [T * k, h] and gate and up [T * k, 2f] are there beside the
    unpacked gate_up [E, 2f, h]; then inputs, products and outputs [T * k, h] beside the unpacked down [E, h, f].
    """
    shape = m.shape
    b = m.compute
    h = shape.hidden_size
    inner = max(shape.intermediate_size, shape.expert_size * shape.experts_per_token)
    dense = tokens * b * (4 * h + 3 * inner)
    matrices = [rows * columns for rows, columns in shape.expert_matrices()[:2]]
    if not (m.fuses and b < 4 and matrices):
        return dense
    unpacked = [b * n if m.plan.quantization and not m.plan.memory.cache_dequantized else 0 for n in matrices]
    routed = tokens * shape.experts_per_token
    inner = shape.expert_size
    return max(
        dense,
        unpacked[0] + b * (routed * (h + 2 * inner) + 3 * tokens * h),
        unpacked[1] + b * (routed * (3 * h + 3 * inner) + 4 * tokens * h),
    )


def dense_copies(m: ModelCost, adapted: bool) -> int:
    """Bytes of dense weights that generation keeps: adapted ones merged in fp32, quantized ones in the compute type."""
    linears = [(name, rows * columns) for name, rows, columns in m.shape.linears]
    if m.compute == 4 and not m.autocast:
        if adapted:
            merged = {name for name, _, _ in m.adapted}
        else:
            merged = set()
        quantized = m.plan.quantization is not None and not m.plan.memory.cache_dequantized
        return 4 * sum(n for name, n in linears if name in merged or quantized)
    if m.plan.quantization is None:
        return _packed_copies(m) if adapted else 0
    if m.plan.memory.cache_dequantized:
        return 0
    return m.compute * sum(n for _, n in linears)


def _packed_copies(m: ModelCost) -> int:
    """Bytes of the adapted weights in oneDNN's order, see generation.generate.dense_weights."""
    adapted = {name for name, _, _ in m.adapted}
    size = 2 * sum(rows * columns for name, rows, columns in m.shape.linears if name in adapted)
    if m.device != "cpu" or m.full or m.weight != 2 or size > MOST_PACKED_BYTES:
        return 0
    return size


def scoring_items(m: ModelCost, work: Work) -> dict:
    """Bytes beside the weights in a forward pass whose activations are not kept."""
    if not work.scored:
        return {}
    shape = m.shape
    b = m.compute
    inner = max(shape.intermediate_size, shape.expert_size * shape.experts_per_token)
    rows = min(logits_rows(shape.vocab_size, m.device == "cpu"), max(1, work.targets))
    forward = work.scored * b * (4 * shape.hidden_size + 3 * inner)
    return {"forward": forward + dequantized_once(m)[0], "logits": rows * shape.vocab_size * (b + 8)}
