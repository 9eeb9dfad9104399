"""Memory budget: what fits on a device, and the cheapest changes that make a run fit.

Bytes are from finetune/memory.py.

The price of a change is its cost in speed (measured in dev/LOG.md), in rounding error, or in truncated rows.
"""

import math
import re
from dataclasses import dataclass, field, replace

from finetune.config import DEFAULTS, TrainConfig
from finetune.distributed.parallel_dims import ParallelDims
from finetune.errors import PlanError
from finetune.estimate import communication, memory
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
MOST_RANKS = 1024


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


@dataclass(frozen=True)
class Option:
    """TrainConfig that save memory: their price, and the world size they need."""

    text: str
    price: str
    settings: TrainConfig
    saved: int = 0
    fits: bool = False


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
    length = settings.context_length
    most = max(1, (settings.microbatch_tokens or DEFAULT_MICROBATCH_TOKENS) // length)
    in_batch = settings.batch_size if isinstance(settings.batch_size, int) else most
    rows = min(in_batch, most) if rows is None else rows
    several = settings.gradient_accumulation_steps > 1 or in_batch > rows
    layout = "padded" if settings.batch_layout == "padded" else "padding_free"
    return MicrobatchShape.full_rows(rows, length, layout, several)


def predicted_bytes(
    settings: TrainConfig, shape: ModelShape, room: MemoryBudget, load: MicrobatchShape | None = None
) -> int:
    """Predicted bytes per rank."""
    return predicted(settings, shape, room, load or full_microbatch(settings))["total"]


def predicted(settings: TrainConfig, shape: ModelShape, room: MemoryBudget, load: MicrobatchShape) -> dict:
    """memory.estimate for one rank's part of the model and microbatch."""
    part, load = memory.per_rank(shape, load, room.dims)
    stages = room.dims.pp
    in_flight = 2 * stages if settings.pp_schedule == "gpipe" and stages > 1 else stages
    return memory.estimate(settings, part, load, room.device, room.ranks, in_flight)


def predicted_for_batch(plan, data, pad_id: int, loads_own_shards: bool) -> dict:
    """{"total", "items"} in bytes for the run's largest microbatch; `loading` is an item beside the total.

    `loads_own_shards`: each rank reads only its rows of the weights.
    """
    s = plan.settings
    batch = data.largest_microbatch(plan, pad_id)
    lengths = tuple(int(n) for n in data.train.lengths[list(batch.rows)])
    several = plan.rows_per_step > len(batch.rows)
    load = MicrobatchShape(lengths, batch.num_targets, s.batch_layout, several)
    shape = planned_shape(plan.files, s.llama_pro_path)
    found = predicted(s, shape, MemoryBudget(0, plan.backend, plan.dims.shards, plan.dims), load)
    if found["total"]:
        ranks = plan.dims.shards if loads_own_shards else 1
        found["items"]["loading"] = memory.loading_bytes(s, shape, ranks)
    return found


def fits(settings: TrainConfig, shape: ModelShape, room: MemoryBudget, load: MicrobatchShape | None = None) -> bool:
    return predicted_bytes(settings, shape, room, load) <= room.usable


def largest_rows(settings: TrainConfig, shape: ModelShape, room: MemoryBudget, most: int = 4096) -> int:
    """Maximum rows of context_length tokens that fit in one forward; 0 if none does."""
    if not fits(settings, shape, room, full_microbatch(settings, 1)):
        return 0
    low, high = 1, 2
    while high <= most and fits(settings, shape, room, full_microbatch(settings, high)):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(settings, shape, room, full_microbatch(settings, middle)) else (low, middle)
    return low


# ---- settings chosen by memory


def settle_memory(settings: TrainConfig, shape: ModelShape, room: MemoryBudget, given: set) -> dict:
    """{setting: (value, reason)} for use_gradient_checkpointing auto, batch_size auto and unset microbatch_tokens.

    Smaller microbatches cost less speed than activation checkpointing, so they are tried first, down to one row.
    """
    chosen, auto_rows = {}, settings.batch_size == "auto"
    words = [settings.use_gradient_checkpointing]
    if words == ["auto"]:
        words = ["true"] if settings.reentrant_checkpointing else ["false", "true"]
    default = settings.microbatch_tokens or max(DEFAULT_MICROBATCH_TOKENS, settings.context_length)
    plain = replace(
        settings,
        use_gradient_checkpointing=words[0],
        microbatch_tokens=default,
        batch_size=DEFAULTS["batch_size"] if auto_rows else settings.batch_size,
    )
    if auto_rows:
        return _settle_rows(plain, shape, room, words, given)
    tokens = [default]
    while "microbatch_tokens" not in given and tokens[-1] // 2 >= max(settings.context_length, 256):
        tokens.append(tokens[-1] // 2)
    tried = [replace(plain, use_gradient_checkpointing=w, microbatch_tokens=t) for w in words for t in tokens]
    used = next((t for t in tried if fits(t, shape, room)), tried[-1])
    without = replace(used, use_gradient_checkpointing="false")
    if len(words) > 1:
        chosen["use_gradient_checkpointing"] = _checkpointing(used, without, shape, room)
    if used.microbatch_tokens != default:
        whole = predicted_bytes(replace(used, microbatch_tokens=default), shape, room)
        chosen["microbatch_tokens"] = (
            used.microbatch_tokens,
            f"{default} tokens per forward would take {gib(whole)} of {gib(room.usable)}, these take "
            f"{gib(predicted_bytes(used, shape, room))}",
        )
    return chosen


def _checkpointing(used, without, shape, room, load=None) -> tuple[str, str]:
    word, plain = used.use_gradient_checkpointing, predicted_bytes(without, shape, room, load)
    recomputed = predicted_bytes(replace(used, use_gradient_checkpointing="true"), shape, room, load)
    if word == "false":
        return (word, f"{gib(plain)} predicted without it fits in {gib(room.usable)}; {gib(recomputed)} with it")
    fact = "fits" if recomputed <= room.usable else "does not fit either"
    return (
        word,
        f"{gib(plain)} predicted without it does not fit in {gib(room.usable)}; {gib(recomputed)} with it {fact}",
    )


def _settle_rows(plain, shape, room, words, given) -> dict:
    """Resolves batch_size auto: the largest power of two of rows that fits in one forward, at most MOST_AUTO_ROWS."""
    bounded = "microbatch_tokens" in given
    chosen = {}
    for word in words:
        used = replace(plain, use_gradient_checkpointing=word)
        rows = (
            MOST_AUTO_ROWS if bounded and fits(used, shape, room) else largest_rows(used, shape, room, MOST_AUTO_ROWS)
        )
        if rows:
            break
    rows = 2 ** int(math.log2(rows)) if rows else 1
    tokens = plain.microbatch_tokens if bounded else rows * plain.context_length
    used = replace(used, batch_size=rows, microbatch_tokens=tokens)
    load = full_microbatch(used)
    took = f"{gib(predicted_bytes(used, shape, room, load))} predicted of {gib(room.usable)}"
    why = f"the most rows of {used.context_length} tokens that fit in one forward: {took}"
    if bounded:
        why = f"--microbatch_tokens {tokens} limits the tokens per forward, not the rows: {took}"
    if rows == MOST_AUTO_ROWS:
        why += f"; more than {MOST_AUTO_ROWS} rows only if requested"
    chosen["batch_size"] = (rows, why)
    chosen["microbatch_tokens"] = (tokens, "one forward takes the full batch")
    if len(words) > 1:
        without = replace(used, use_gradient_checkpointing="false")
        chosen["use_gradient_checkpointing"] = _checkpointing(used, without, shape, room, load)
    return chosen


def rows_for_data(rows: int, num_rows: int) -> tuple[int, str | None]:
    """(batch_size auto for num_rows of data, the reason if it is less than memory allows)."""
    most = max(1, num_rows // STEPS_AN_EPOCH)
    if rows <= most:
        return rows, None
    return 2 ** int(math.log2(most)), f"{num_rows} rows of data give at least {STEPS_AN_EPOCH} steps per epoch"


# ---- changes that would make it fit


def options(settings: TrainConfig, shape: ModelShape, room: MemoryBudget) -> list[Option]:
    """Every change that saves memory, cheapest first, each on its own."""
    s, now, found = settings, predicted_bytes(settings, shape, room), []

    def offer(text, price, **new):
        other = replace(s, **new)
        took = predicted_bytes(other, shape, room)
        if now - took >= now / 1000:
            found.append(Option(text, price, other, now - took, took <= room.usable))

    if s.microbatch_tokens > s.context_length:
        offer(
            f"--microbatch_tokens {s.context_length}",
            "2 to 6 % of the speed; identical result",
            microbatch_tokens=s.context_length,
        )
    if s.cache_dequantized == "true":
        offer("--cache_dequantized false", "about 4 % of the speed", cache_dequantized="false")
    if room.device == "cpu" and not s.low_memory:
        offer("--low_memory", "up to 16 % of the speed", low_memory=True)
    if (
        s.optimizer in ("adam", "adamw", "adadelta") and room.ranks * room.dims.tp == 1
    ):  # not supported with row-wise sharding
        offer("--optimizer adamw_8bit", "moments rounded to 8 bits; needs bitsandbytes", optimizer="adamw_8bit")
    if s.train_type == "qlora" and not s.double_quant and s.quantization_backend in ("nf4", "bnb"):
        offer("--double_quant", "scales rounded to 8 bits", double_quant=True)
    if s.use_gradient_checkpointing == "false":
        offer(
            "--use_gradient_checkpointing true",
            "27 to 43 % of the speed",
            use_gradient_checkpointing="true",
            use_activation_cpu_offload=False,
        )
    if room.ranks > 1 and room.device not in ("cpu", "mps") and not s.use_cpu_offload:
        host = predicted(replace(s, use_cpu_offload=True), shape, room, full_microbatch(s))
        offer(
            "--use_cpu_offload true",
            f"{gib(host.get('host', 0))} of host memory per rank, from which weights are copied for each "
            "forward and backward; identical result",
            use_cpu_offload=True,
        )
    half = {"fp32": "bf16", "fp16_autocast": "fp16", "bf16_autocast": "bf16"}.get(s.precision)
    if half and s.train_type != "full":
        offer(f"--precision {half}", "frozen weights and products rounded to 16 bits", precision=half)
    quantized = dict(
        train_type="qlora", quantization_backend="nf4", n_bits=4, quant_type="nf4", cache_dequantized="false"
    )
    plain = {"fp32": "fp32"}.get(s.precision, s.precision.split("_")[0])
    if s.train_type == "full":
        offer("--train_type lora", "trains adapters, not all weights", train_type="lora", precision=plain)
        offer("--train_type qlora", "trains adapters on a base rounded to 4 bits", precision=plain, **quantized)
    if s.train_type == "lora":
        offer("--train_type qlora", "the base rounded to 4 bits; about 3 % of the speed", **quantized)
    if s.train_type != "full" and s.lora_rank > 8:
        offer("--lora_rank 8", "smaller adapters", lora_rank=8)
    length = s.context_length
    while length > 128:
        length //= 2
        tokens = length if s.microbatch_tokens <= s.context_length else s.microbatch_tokens
        offer(
            f"--context_length {length}",
            "longer rows are truncated at the start of the prompt",
            context_length=length,
            microbatch_tokens=tokens,
        )
        if found and found[-1].fits:
            break
    if s.train_type == "qlora" and s.n_bits > 2:
        low = dict(quantization_backend="hqq", n_bits=2, quant_type="affine", double_quant=False, group_size=64)
        offer(
            "--quantization_backend hqq --n_bits 2",
            "weights rounded to 2 bits: off by 43 % instead of 9 %, see docs/quantization.md",
            **low,
        )
    return found


def cheapest_combination(settings: TrainConfig, shape: ModelShape, room: MemoryBudget) -> list[Option]:
    """The cheapest changes, accumulated until it fits; `fits` of the last one says whether they suffice."""
    taken, s = [], settings
    for _ in range(12):
        offered = [c for c in options(s, shape, room) if c.text.split()[0] not in {t.text.split()[0] for t in taken}]
        if not offered:
            break
        taken.append(next((c for c in offered if c.fits), offered[0]))
        s = taken[-1].settings
        if taken[-1].fits:
            break
    return taken


def fewest_devices(settings: TrainConfig, shape: ModelShape, room: MemoryBudget) -> int | None:
    """Minimum number of such devices for these settings with more FSDP shards, otherwise unchanged."""
    ranks = room.ranks
    while ranks <= MOST_RANKS:
        wider = replace(room, ranks=ranks)
        if fits(settings, shape, wider):
            return wider.devices
        ranks += room.dims.cp * (1 if ranks < 16 else 8)
    return None


def remedy_lines(settings: TrainConfig, shape: ModelShape, room: MemoryBudget) -> list[str]:
    """Lines listing the changes that would make it fit, cheapest first, each with its saving and its price."""
    single, lines = options(settings, shape, room), []
    enough = [c for c in single if c.fits]
    if enough:
        lines.append("any one of these would make it fit, cheapest first:")
        lines += [f"  {c.text}: -{gib(c.saved)}; {c.price}" for c in enough]
    else:
        steps = cheapest_combination(settings, shape, room)
        if steps and steps[-1].fits:
            lines.append("these together would make it fit, cheapest first:")
        elif steps:
            least = predicted_bytes(steps[-1].settings, shape, room)
            lines.append(
                f"nothing makes it fit here: all of these together still need {gib(least)} of {gib(room.usable)}:"
            )
        lines += [f"  {c.text}: -{gib(c.saved)}; {c.price}" for c in steps]
        if steps and not steps[-1].fits:
            devices = fewest_devices(steps[-1].settings, shape, room)
            if devices:
                lines.append(f"with all of them, {devices} devices of this size suffice")
            lines.append(
                f"or {room.devices} device{'s' * (room.devices > 1)} of {gib(least / USABLE_PART)} or more each"
            )
    devices = fewest_devices(settings, shape, room)
    if devices and devices > room.devices:
        lines.append(f"unchanged, {devices} devices of this size suffice")
    return lines


def report_lines(
    settings: TrainConfig, shape: ModelShape | None, room: MemoryBudget | None, dims: ParallelDims | None = None
) -> tuple[list[str], bool]:
    """(lines of the dry run's memory table and communication volume, whether it fits)."""
    if shape is None or room is None or not (shape.known and shape.linears):
        why = "the model is not on this disk" if shape is None else "config.json lacks some of its dimensions"
        why = "this device's memory is unknown" if room is None else why
        return [f"memory: not predicted, {why}"], True
    load = full_microbatch(settings)
    found = predicted(settings, shape, room, load)
    ok, total = found["total"] <= room.usable, found["total"]
    forward = f"{len(load.lengths)} x {settings.context_length} tokens per forward"
    lines = [f"memory of {'each rank' if dims and dims.world_size > 1 else 'this run'} ({room}), {forward}:"]
    lines += [f"  {name:<12} {gib(size):>12}" for name, size in found["items"].items()]
    verdict = "fits" if ok else f"does not fit, by {gib(total - room.usable)}"
    lines.append(f"  {'total':<12} {gib(total):>12} of {gib(room.usable)} usable: {verdict}")
    if "host" in found:
        lines.append(f"  {'host':<12} {gib(found['host']):>12} of host memory per rank, during training")
    loading = memory.loading_bytes(settings, shape, room.ranks)
    lines.append(f"  {'loading':<12} {gib(loading):>12} of host memory, before training")
    largest = largest_rows(settings, shape, room)
    source = "headers of its weight files" if shape.exact else "config.json"
    lines.append(f"  sizes from {source}: {shape.num_weights:,} weights")
    if dims and dims.world_size > 1:
        sent = communication.bytes_per_step(dims, communication.traffic_of(settings, shape, dims, load)).items()
        lines.append(
            "each rank sends per step of full rows: "
            + ", ".join(f"{size / 2**20:,.1f} MiB in {name}" for name, size in sent)
        )
    if largest:
        lines.append(
            f"largest batch that fits in one forward: --batch_size {largest} at --context_length "
            f"{settings.context_length}"
        )
    if not ok:
        lines += remedy_lines(settings, shape, room)
    return lines, ok


def parameter_rows(model_size_b: float, context_length: int, memory_bytes: int, device: str, most: int = 4096) -> int:
    """Maximum rows per qlora forward with recomputation, for a Llama-like model of that many billion weights."""
    settings = replace(
        TrainConfig(),
        train_type="qlora",
        quantization_backend="nf4",
        quant_type="nf4",
        use_gradient_checkpointing="true",
        cache_dequantized="false",
        precision="fp32" if device == "cpu" else "bf16",
        context_length=context_length,
        microbatch_tokens=context_length,
    )
    return largest_rows(
        settings, llama_like(max(float(model_size_b), 1e-3) * 1e9), MemoryBudget(memory_bytes, device), most
    )


def llama_like(num_weights: float) -> ModelShape:
    """A Llama-like ModelShape of about num_weights: depth and width scale together, h = 128 layers, f = 8/3 h, tied."""
    vocab = 32000

    def off(width: int) -> float:
        return abs(vocab * width + 12 * max(2, round(width / 128)) * width * width - num_weights)

    hidden = min(range(64, 32768, 64), key=off)
    return ModelShape.from_config(
        dict(
            model_type="llama",
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=max(2, round(hidden / 128)),
            tie_word_embeddings=True,
            num_attention_heads=hidden // 64,
            intermediate_size=8 * hidden // 3,
        )
    )
