"""Predicted bytes of a process beside its tensors: libraries, code that they generate, and holes of the heap.

Constants were fitted with `python benchmarks/memory_table.py`, to cells of its options that each one names.
"""

import importlib.util
from functools import cache

from finetune.estimate.activations import layer_activation_bytes
from finetune.estimate.model_cost import MicrobatchShape, ModelCost
from finetune.parts.engine_limits import MAPPED_FROM_BYTES
from finetune.parts.optimizers import OPTIMIZERS
from quantization_wrapper import METHODS

KERNEL_BYTES = 40 * 2**20  # code that oneDNN generates for the shapes of its products, see process.prepare_environment
UPDATE_KERNEL_BYTES = 16 * 2**20  # for Muon's products in bf16: measured on matrices of three shapes
# Code paged in, GEMM packing, thread buffers; of CUDA what cuBLAS takes for forward's thread and for backward's, 32 MiB
# each on Hopper (measured on an H200, to 0.5 MiB), 8 on others.
# MLX counts its own arrays alone.
LIBRARY_BYTES = {"cpu": 50 * 2**20, "cuda": 64 * 2**20, "mlx": 0}
BITSANDBYTES_BYTES = 43 * 2**20  # of its modules and those of torch that it imports, once the run needs it on a CPU
# Fragmentation of glibc's heap (an aligned block does not fit the hole left by an equal one), as a fraction of the
# saved activations, or under activation checkpointing of one layer's, times the layers. With --low_memory, large blocks
# are mmapped.
HEAP_PART = 0.28
HEAP_PART_SHARED = 0.45  # where answers share a prompt: fitted to the pairs of draws 4 to 6
HEAP_PART_LOW_MEMORY = 0.25
HEAP_PART_RECOMPUTED = {4: 0.44, 2: 0.32}  # by bytes per unquantized weight: fitted to draws 4 to 6
LAYERS_WITH_HOLES = 10  # at most: those of the first are filled again
# Weights that are dequantized for a product, each up to what malloc maps by itself, leave holes that activations fill
# in part; and a gradient [O, I] fits no hole of an activation [tokens, I] where tokens are few. Both were fitted to
# cells of benchmarks/memory_table.py --draw 1 and --draw 2, the first to the 18 QLoRA cells of draws 4, 5 and 7.
DEQUANTIZED_PART = 0.25  # of the smaller of such weights and the saved activations
FEW_TOKENS_PART = 1.5  # of the activations, which stay beside all gradients, times 1 - tokens / hidden size
# of runs that sample answers, by whether all weights train, and bytes of the compute dtype: fitted to
# `benchmarks/memory_table.py --rewards 1`, those of adapters to 9 cells of --rewards 5
HEAP_PART_REWARDED = {(False, 4): 0.55, (False, 2): 0.7, (True, 4): 0.3, (True, 2): 0.55}
# of models whose layers are neither attention nor MLPs: fitted to D and E too
HEAP_PART_ODD = 0.21
HEAP_PART_ODD_RECOMPUTED = 1.6


# ---- libraries


def library_bytes(m: ModelCost) -> int:
    """Bytes of code that is paged in and of its workspaces; on a CPU of bitsandbytes too, if it is there and used."""
    found = LIBRARY_BYTES.get(m.device, LIBRARY_BYTES["cuda"])
    if m.device == "cpu":
        found += OPTIMIZERS[m.plan.steps.optimizer].code_bytes
    quantization = m.plan.quantization
    updates = OPTIMIZERS[m.plan.steps.optimizer].package == "bitsandbytes"
    dequantizes = quantization is not None and METHODS[quantization.method].cpu_kernel
    if m.device == "cpu" and (updates or dequantizes) and has_bitsandbytes():
        found += BITSANDBYTES_BYTES
    return found


@cache
def has_bitsandbytes() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def uses_onednn(m: ModelCost) -> bool:
    """True if oneDNN computes the matrix products: in 16 bits on every CPU, in fp32 where the plan chose it."""
    return m.device == "cpu" and (m.compute == 2 or m.plan.precision.onednn)


def kernel_bytes(m: ModelCost) -> int:
    """Bytes of the code that oneDNN generates for this run's products, and for those of an update in bf16."""
    found = 0
    if uses_onednn(m):
        found += KERNEL_BYTES
    if m.device == "cpu" and OPTIMIZERS[m.plan.steps.optimizer].tells_matrices:
        found += UPDATE_KERNEL_BYTES
    return found


# ---- the heap


def allocator_bytes(m: ModelCost, microbatch: MicrobatchShape, kept: int, spare: int | None = None) -> int:
    """Bytes of heap fragmentation; zero on devices whose allocator reports its own peak. `spare`: bytes that a step's
    peak has beyond the gradients at its end; None: of shards.
    """
    if m.device != "cpu":
        return 0
    recomputed = m.plan.memory.recompute
    odd = m.shape.tracer is not None and not m.shape.is_timed
    of_layer = HEAP_PART_RECOMPUTED[m.weight] * min(m.shape.num_layers, LAYERS_WITH_HOLES)
    part = HEAP_PART
    if odd:
        of_layer = HEAP_PART_ODD_RECOMPUTED
        part = HEAP_PART_ODD
    if m.plan.data.reward is not None:
        part = HEAP_PART_REWARDED[m.full, m.compute]
    elif microbatch.shares_prompts:
        part = HEAP_PART_SHARED
    if recomputed:
        grown = of_layer * layer_activation_bytes(m, microbatch)
    else:
        grown = part * kept
    if m.plan.memory.low_memory:
        return int(grown * HEAP_PART_LOW_MEMORY)
    if not odd and not recomputed and m.plan.data.reward is None:
        grown += DEQUANTIZED_PART * min(dequantized_holes(m), kept)
        few = 1 - microbatch.num_tokens / m.shape.hidden_size
        if m.full and spare is not None:
            grown += max(0, min(1.0, FEW_TOKENS_PART * max(0.0, few)) * kept - spare)
    return int(grown)


def dequantized_holes(m: ModelCost) -> int:
    """Bytes of the weights that a forward dequantizes and frees, one by one, and malloc does not map by itself; of
    experts, which are alike, those of one.
    """
    if m.plan.quantization is None or m.plan.memory.cache_dequantized:
        return 0
    shape = m.shape
    experts = [(r // shape.num_experts, c) for r, c in shape.expert_matrices()]
    sizes = [m.compute * rows * columns for rows, columns in [item[1:] for item in shape.linears] + experts]
    return sum(size for size in sizes if size < MAPPED_FROM_BYTES)
