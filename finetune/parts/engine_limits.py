"""Sizes that the torch engine works by and the estimates count with: stated once, without a framework."""

import re

LOGITS_CHUNK_BYTES = 32 * 2**20  # fp32 logits that exist at a time
DEVICE_LOGITS_CHUNK_BYTES = 256 * 2**20
CACHED_LOGITS = 2**19  # fp32 logits that a core's cache holds beside their probabilities
GROUP_WASTE = 1.25  # maximum ratio of the longest to the shortest document of an attention group
# What --lora_target_modules default means for models that do not call their projections q_proj and v_proj.
DEFAULT_TARGETS = (("q_proj", "v_proj"), ("query_key_value",), ("qkv_proj",), ("c_attn",), ("Wqkv",), ("q", "v"))
# Parts of a multimodal model's file that text does not use, by the names that transformers gives them.
TOWER = re.compile(r"(^|\.)(vision_tower|vision_model|vision_encoder|visual|audio_tower|audio_encoder)\.")
# How the names end, in transformers, of what joins a tower for images and the language model.
PROJECTORS = ("projector", "connector", "merger", "merger_list", "aligner", "adapter", "embed_vision")
MAX_LOADING_WORKERS = 4  # more tensors in flight cost memory without a gain on the disks tested
HEAD_BYTES = 2**23  # of the head's rows in memory at a time, where the full model's logits are computed layer by layer
# Queries and keys whose scores exist at a time in attention over ranks, without a kernel: those that a core's cache
# holds (measured: dev/LOG.md, 2026-11-24); a GPU takes fewer launches.
ATTENTION_TILE = 256
DEVICE_ATTENTION_TILE = 1024
MOST_PACKED_BYTES = 2**31  # of adapted dense weights in 16 bits, of which a CPU has a second copy while it samples
FIRST_TOKENS = 32  # room for keys and values of a sampled answer, doubled when it is full
MLX_ROOM = 256  # room for keys and values in mlx-lm's caches is a multiple of it
MLX_UPDATED_BYTES = 16 * 2**20  # of gradients whose update is one evaluation
PREFILL_TOKENS = 2048  # of prompts in one forward of MLX
MAPPED_FROM_BYTES = 2**25  # blocks that malloc maps by itself in a run; more glibc does not accept
OFFLOAD_BUFFERS = 2  # of a base that is not on the device: one layer computes while the next is read
FREE_STAGING_BYTES = 64 * 2**20  # host memory that staged collectives keep between operations

# Positions up to which a CPU computes attention by matrix products, by bytes of the dtype, where oneDNN computes them;
# torch's BLAS is slower at small products than SDPA is. Measured: dev/LOG.md, 2026-11-22.
DENSE_ATTENTION_UP_TO = {4: 512, 2: 1024}
DENSE_CACHED_BYTES = 2**20  # probabilities of such attention computed at a time, or those of one product


def dense_attention_up_to(width: int, onednn: bool) -> int:
    """Positions of a document up to which a CPU computes dense attention in a dtype of `width` bytes."""
    if width == 4 and not onednn:
        return 0
    return DENSE_ATTENTION_UP_TO[width]


def logits_rows(vocab_size: int, on_cpu: bool = True) -> int:
    """Positions whose logits exist at a time. Each chunk reads the head's weight, of which a GPU has no cache: there
    are fewer and larger ones.
    """
    return max(128, (LOGITS_CHUNK_BYTES if on_cpu else DEVICE_LOGITS_CHUNK_BYTES) // (4 * vocab_size))
