"""What fits in a device's memory, by estimate/memory.py's bytes: the plan's choices of batch size and checkpointing."""

import math
import re
from dataclasses import dataclass, field, replace

from finetune.config import DEFAULTS, TrainConfig
from finetune.distributed.parallel_dims import ParallelDims
from finetune.errors import PlanError
from finetune.estimate import memory
from finetune.estimate.model_cost import MicrobatchShape
from finetune.estimate.model_shape import ModelShape, planned_shape

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
DEFAULT_MICROBATCH_TOKENS = 2048
MOST_AUTO_ROWS = 64  # more rows per step rarely learn better, and always mean fewer steps per epoch
STEPS_AN_EPOCH = 8  # minimum steps per epoch with --batch_size auto


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
        shared = f", {self.sharing} ranks share one copy of the weights" if self.sharing > 1 else ""
        return f"{self.device}, {gib(self.memory_bytes)}{shared}"


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 10 else f"{size / 2**20:.1f} MiB"


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


def full_microbatch(settings: TrainConfig, rows: int | None = None) -> MicrobatchShape:
    """The largest microbatch the settings allow, before data is read: rows of full length. `rows`: rows per forward."""
    length, each = settings.context_length, settings.documents_per_row
    most = max(1, (settings.microbatch_tokens or DEFAULT_MICROBATCH_TOKENS) // (each * length))
    in_batch = settings.batch_size if isinstance(settings.batch_size, int) else most
    rows = min(in_batch, most) if rows is None else rows
    several = settings.gradient_accumulation_steps > 1 or in_batch > rows
    layout = "padded" if settings.batch_layout == "padded" else "padding_free"
    return MicrobatchShape.full_rows(each * rows, length, layout, several)


def predicted_bytes(
    settings: TrainConfig, shape: ModelShape, budget: MemoryBudget, microbatch: MicrobatchShape | None = None
) -> int:
    """Predicted bytes per rank."""
    return predicted(settings, shape, budget, microbatch or full_microbatch(settings))["total"]


def predicted(settings: TrainConfig, shape: ModelShape, budget: MemoryBudget, microbatch: MicrobatchShape) -> dict:
    """memory.estimate for one rank's part of the model and microbatch."""
    part, microbatch = memory.per_rank(shape, microbatch, budget.dims)
    stages = budget.dims.pp
    in_flight = 2 * stages if settings.pp_schedule == "gpipe" and stages > 1 else stages
    return memory.estimate(settings, part, microbatch, budget.device, budget.ranks, in_flight)


def predicted_for_batch(plan, data, pad_id: int, loads_own_shards: bool) -> dict:
    """{"total", "items"} in bytes for the run's largest microbatch; `loading` is an item beside the total.

    `loads_own_shards`: each rank reads only its rows of the weights.
    """
    s = plan.settings
    batch = data.largest_microbatch(plan, pad_id)
    lengths = tuple(int(n) for n in data.train.lengths[list(batch.rows)])
    several = plan.rows_per_step * s.documents_per_row > len(batch.rows)
    microbatch = MicrobatchShape(lengths, batch.num_targets, s.batch_layout, several)
    shape = planned_shape(plan.files, s.llama_pro_path)
    found = predicted(s, shape, MemoryBudget(0, plan.backend, plan.dims.shards, plan.dims), microbatch)
    if plan.engine == "mlx" and found["total"]:  # MLX's allocator does not tell them apart
        found["items"]["workspace"] = found["items"].get("workspace", 0) + found["items"].pop("activations", 0)
    if found["total"]:
        ranks = plan.dims.shards if loads_own_shards else 1
        found["items"]["loading"] = memory.loading_bytes(s, shape, ranks)
    return found


def fits(
    settings: TrainConfig, shape: ModelShape, budget: MemoryBudget, microbatch: MicrobatchShape | None = None
) -> bool:
    return predicted_bytes(settings, shape, budget, microbatch) <= budget.usable


def largest_rows(settings: TrainConfig, shape: ModelShape, budget: MemoryBudget, most: int = 4096) -> int:
    """Maximum rows of context_length tokens that fit in one forward; 0 if none does."""
    if not fits(settings, shape, budget, full_microbatch(settings, 1)):
        return 0
    low, high = 1, 2
    while high <= most and fits(settings, shape, budget, full_microbatch(settings, high)):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if fits(settings, shape, budget, full_microbatch(settings, middle)) else (low, middle)
        )
    return low


# ---- settings chosen by memory


def settle_memory(settings: TrainConfig, shape: ModelShape, budget: MemoryBudget, given: set) -> dict:
    """{setting: (value, reason)} for use_gradient_checkpointing auto, batch_size auto and unset microbatch_tokens.

    Smaller microbatches cost less speed than activation checkpointing, so they are tried first, down to one row.
    """
    chosen, auto_rows = {}, settings.batch_size == "auto"
    words = [settings.use_gradient_checkpointing]
    if words == ["auto"]:
        words = ["true"] if settings.reentrant_checkpointing else ["false", "true"]
    default = settings.microbatch_tokens or max(DEFAULT_MICROBATCH_TOKENS, settings.row_length)
    plain = replace(
        settings,
        use_gradient_checkpointing=words[0],
        microbatch_tokens=default,
        batch_size=DEFAULTS["batch_size"] if auto_rows else settings.batch_size,
    )
    if auto_rows:
        return _settle_rows(plain, shape, budget, words, given)
    tokens = [default]
    while "microbatch_tokens" not in given and tokens[-1] // 2 >= max(settings.row_length, 256):
        tokens.append(tokens[-1] // 2)
    tried = [replace(plain, use_gradient_checkpointing=w, microbatch_tokens=t) for w in words for t in tokens]
    used = next((t for t in tried if fits(t, shape, budget)), tried[-1])
    without = replace(used, use_gradient_checkpointing="false")
    if len(words) > 1:
        chosen["use_gradient_checkpointing"] = _checkpointing(used, without, shape, budget)
    if used.microbatch_tokens != default:
        whole = predicted_bytes(replace(used, microbatch_tokens=default), shape, budget)
        chosen["microbatch_tokens"] = (
            used.microbatch_tokens,
            f"{default} tokens per forward would take {gib(whole)} of {gib(budget.usable)}, these take "
            f"{gib(predicted_bytes(used, shape, budget))}",
        )
    return chosen


def _checkpointing(used, without, shape, budget, microbatch=None) -> tuple[str, str]:
    word, plain = used.use_gradient_checkpointing, predicted_bytes(without, shape, budget, microbatch)
    recomputed = predicted_bytes(replace(used, use_gradient_checkpointing="true"), shape, budget, microbatch)
    if word == "false":
        return (word, f"{gib(plain)} predicted without it fits in {gib(budget.usable)}; {gib(recomputed)} with it")
    fact = "fits" if recomputed <= budget.usable else "does not fit either"
    return (
        word,
        f"{gib(plain)} predicted without it does not fit in {gib(budget.usable)}; {gib(recomputed)} with it {fact}",
    )


def _settle_rows(plain, shape, budget, words, given) -> dict:
    """Resolves batch_size auto: the largest power of two of rows that fits in one forward, at most MOST_AUTO_ROWS."""
    bounded = "microbatch_tokens" in given
    chosen = {}
    for word in words:
        used = replace(plain, use_gradient_checkpointing=word)
        rows = (
            MOST_AUTO_ROWS
            if bounded and fits(used, shape, budget)
            else largest_rows(used, shape, budget, MOST_AUTO_ROWS)
        )
        if rows:
            break
    rows = 2 ** int(math.log2(rows)) if rows else 1
    tokens = plain.microbatch_tokens if bounded else rows * plain.row_length
    used = replace(used, batch_size=rows, microbatch_tokens=tokens)
    microbatch = full_microbatch(used)
    took = f"{gib(predicted_bytes(used, shape, budget, microbatch))} predicted of {gib(budget.usable)}"
    why = f"the most rows of {used.context_length} tokens that fit in one forward: {took}"
    if bounded:
        why = f"--microbatch_tokens {tokens} limits the tokens per forward, not the rows: {took}"
    if rows == MOST_AUTO_ROWS:
        why += f"; more than {MOST_AUTO_ROWS} rows only if requested"
    chosen["batch_size"] = (rows, why)
    chosen["microbatch_tokens"] = (tokens, "one forward takes the full batch")
    if len(words) > 1:
        without = replace(used, use_gradient_checkpointing="false")
        chosen["use_gradient_checkpointing"] = _checkpointing(used, without, shape, budget, microbatch)
    return chosen


def rows_for_data(rows: int, num_rows: int) -> tuple[int, str | None]:
    """(batch_size auto for num_rows of data, the reason if it is less than memory allows)."""
    most = max(1, num_rows // STEPS_AN_EPOCH)
    if rows <= most:
        return rows, None
    return 2 ** int(math.log2(most)), f"{num_rows} rows of data give at least {STEPS_AN_EPOCH} steps per epoch"
