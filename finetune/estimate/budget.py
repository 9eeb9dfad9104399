"""Fits of a run in a device's memory, by estimate/memory.py's bytes."""

import re
from dataclasses import dataclass, field, replace

from finetune.distributed.pipeline_schedule import most_in_flight
from finetune.errors import PlanError
from finetune.estimate import memory
from finetune.estimate.model_cost import MicrobatchShape, ModelCost
from finetune.estimate.model_shape import KnownShape
from finetune.estimate.rollout import Rollout, planned, with_sampling
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts

GIB = 2**30
UNITS = {
    "": 1,
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": GIB,
    "TIB": 2**40,
}
# Usable fraction of memory: the rest is for the driver context, or this process's code and other programs.
USABLE_PART = 0.92
PROCESS_BYTES = {"cpu": 512 * 2**20}
UNIFIED = ("mps", "mlx")  # devices that share the host's memory
# Part of a Mac's memory that macOS lets its GPU take at least (Metal's recommendedMaxWorkingSetSize; 84 % was reported
# of 128 GB); `sysctl iogpu.wired_limit_mb` changes it, which a plan does not read. Not measured here.
SMALL_MAC = 36 * GIB
PART_OF_SMALL_MAC = 2 / 3
PART_OF_MAC = 3 / 4
DEFAULT_MICROBATCH_TOKENS = 2048


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of one device, the number of FSDP shards, and the other degrees that split the model."""

    memory_bytes: int
    device: str = "cpu"
    ranks: int = 1
    dims: ParallelDims = field(default_factory=ParallelDims)

    @property
    def usable(self) -> int:
        return max(0, int(USABLE_PART * self.memory_bytes) - PROCESS_BYTES.get(self.device, 0))

    @property
    def sharing(self) -> int:
        """Number of devices that share one replica of the weights."""
        return self.ranks * self.dims.tp * self.dims.pp

    @property
    def devices(self) -> int:
        """Total number of devices, replicas included."""
        return self.sharing * self.dims.dp_replicate

    def __str__(self) -> str:
        shared = ""
        if self.sharing > 1:
            shared = f", {self.sharing} ranks share one copy of the weights"
        return f"{self.device}, {gib(self.memory_bytes)}{shared}"


def metal_bytes(memory_bytes: int) -> int:
    """Bytes of a Mac's memory that its GPU may take."""
    part = PART_OF_MAC
    if memory_bytes < SMALL_MAC:
        part = PART_OF_SMALL_MAC
    return int(part * memory_bytes)


def gib(size: float) -> str:
    if abs(size) >= GIB / 10:
        return f"{size / GIB:.2f} GiB"
    return f"{size / 2**20:.1f} MiB"


def parse_size(text: str, flag: str = "--assume_memory") -> int:
    """Bytes in a size such as 24GiB, 80GB or 16384MiB; a bare number is in GiB. Raises PlanError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", text, re.I)
    unit = found and found[2].upper()
    if unit and not unit.endswith("B"):
        unit += "B"
    if not found or unit not in UNITS:
        raise PlanError(f"{flag} {text[:80]}: not a size. Give one such as 24GiB.")
    size = float(found[1]) * (UNITS[unit] if unit else GIB)
    if not 2**20 <= size < 2**60:
        raise PlanError(f"{flag} {text[:80]}: must be at least 1MiB and below 1EiB. Give one such as 24GiB.")
    return int(size)


def full_microbatch(plan: Parts, rows: int | None = None) -> MicrobatchShape:
    """The largest microbatch the plan allows, before data is read: rows of full length. `rows`: rows per forward."""
    data = plan.data
    steps = plan.steps
    most = max(1, (steps.microbatch_tokens or DEFAULT_MICROBATCH_TOKENS) // data.row_length)
    if isinstance(steps.batch_size, int):
        in_batch = steps.batch_size
        if data.reward is not None:
            in_batch *= data.reward.num_generations
    else:
        in_batch = most
    if rows is None:
        rows = min(in_batch, most)
    # Gradients stay where a graph adds them.
    several = steps.accumulation > 1 or in_batch > rows or plan.memory.graphs is True
    layout = "padded" if data.layout == "padded" else "padding_free"
    found = MicrobatchShape.full_rows(data.documents_per_row * rows, data.context_length, layout, several)
    return replace(found, shares_prompts=data.reward is not None and layout == "padding_free")


def predicted_bytes(
    plan: Parts, shape: KnownShape, budget: MemoryBudget, microbatch: MicrobatchShape | None = None
) -> int:
    """Predicted bytes per rank."""
    return predicted(plan, shape, budget, microbatch or full_microbatch(plan))["total"]


def predicted(
    plan: Parts, shape: KnownShape, budget: MemoryBudget, microbatch: MicrobatchShape, rollout: Rollout | None = None
) -> dict:
    """memory.estimate for one rank's part of the model and microbatch; where answers are sampled also of the `rollout`,
    None: of the largest that the plan allows.
    """
    part, microbatch = memory.per_rank(shape, microbatch, budget.dims)
    in_flight = most_in_flight(plan.parallel.pp_schedule, budget.dims.pp)
    found = memory.estimate(plan, part, microbatch, budget.device, budget.ranks, in_flight)
    if plan.sampled is None:
        return found
    return with_sampling(found, ModelCost(part, plan, budget.device), rollout or planned(plan), budget.ranks)


def snapshot_bytes(plan: Parts, shape: KnownShape, budget: MemoryBudget) -> int:
    """Bytes of the copy from which one rank writes checkpoints beside steps; see memory.snapshot_bytes."""
    part = memory.model_per_rank(shape, budget.dims)
    return memory.snapshot_bytes(ModelCost(part, plan, budget.device), budget.ranks)


def fits(plan: Parts, shape: KnownShape, budget: MemoryBudget, microbatch: MicrobatchShape | None = None) -> bool:
    return predicted_bytes(plan, shape, budget, microbatch) <= budget.usable


def largest_rows(plan: Parts, shape: KnownShape, budget: MemoryBudget, most: int = 4096) -> int:
    """Maximum rows of context_length tokens that fit in one forward; 0 if none does."""

    def fit(rows: int) -> bool:
        return fits(plan, shape, budget, full_microbatch(plan, rows))

    if not fit(1):
        return 0
    low = 1
    high = 2
    while high <= most and fit(high):
        low = high
        high = 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low
