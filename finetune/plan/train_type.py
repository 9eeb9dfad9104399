"""--train_type auto: adapters on the base as it is where that fits with room, else on a quantized one."""

from backend_manager import Backend
from finetune.estimate import budget
from finetune.estimate.budget import MemoryBudget, gib
from finetune.parts.inits import DEFAULT_INIT, INITS
from finetune.parts.parts import Parts
from finetune.parts.precision import BYTES
from finetune.plan.asked import Asked, Change, Said
from finetune.plan.conflicts import QUANTIZATION_SETTINGS
from finetune.plan.facts import Facts
from quantization_wrapper import FIRST_METHOD

ROOM = 0.8  # of the usable memory: what lora with recomputation and one row per forward may take
WEIGHTS_ROOM = 0.5  # of the usable memory: what the base may take where no formula describes the rest
LONGEST = 2048  # tokens of a row that room is kept for, where the rows' length is open


def train_type_asked(asked: Asked, facts: Facts) -> Said:
    """qlora if a flag asks for a quantized base; else it stays open until precision and ranks are known."""
    if facts.prequantized or not asked.is_open("train_type"):
        return
    yield Change("train_type", "auto")
    word = _asked_word(asked)
    if word:
        yield Change("train_type", word[0], word[1])


def _asked_word(asked: Asked) -> tuple[str, str] | None:
    """(train type, reason) that another flag asks for."""
    asks = [name for name in QUANTIZATION_SETTINGS if asked.given(name)]
    method = None
    if asked.given("quantization_backend"):
        method = asked.requested.get("quantization_backend")
    if method not in (None, "auto", "none"):
        asks.append("quantization_backend")
    if asked.requested.get("cache_dequantized") == "true":
        asks.append("cache_dequantized")
    if INITS[asked.requested.get("init_lora_weights", DEFAULT_INIT)].needs_quantized:
        asks.append("init_lora_weights")
    if asks:
        return "qlora", f"--{asks[0]} is of a quantized base"
    if method == "none":
        return "lora", "--quantization_backend none: nothing is quantized"
    return None


def train_type_is_open(asked: Asked, facts: Facts) -> bool:
    """True if memory decides between lora and qlora, even after it has decided."""
    if asked.requested.get("train_type", "auto") != "auto":
        return False
    return not (facts.prequantized or asked.is_resumed or "train_type" in asked.demo or _asked_word(asked))


def train_type(asked: Asked, facts: Facts, trial: Parts, room: MemoryBudget | None) -> Said:
    """auto: lora or qlora, by what each takes of this device's memory."""
    if asked.train_type == "auto":
        word, reason = _chosen(asked, facts, trial, room)
        yield Change("train_type", word, reason)


def _chosen(asked: Asked, facts: Facts, trial: Parts, room: MemoryBudget | None) -> tuple[str, str]:
    shape = facts.shape
    if room is None or shape is None or not shape.num_weights:
        return "qlora", "the model's sizes or the memory are not known yet"
    usable = room.usable
    if shape.known is None:
        base = shape.num_weights * BYTES[trial.precision.weights] // room.sharing
        fact = f"its weights take {gib(base)} of {gib(usable)}"
        if base <= WEIGHTS_ROOM * usable:
            return "lora", fact
        return "qlora", f"{fact}, without anything that trains"
    length = asked.typed("context_length")
    if not asked.given("context_length"):
        length = min(LONGEST, shape.context_limit or LONGEST)
    least = trial.with_settings(
        cache_dequantized="false",
        use_gradient_checkpointing="true",
        batch_size=1,
        microbatch_tokens=None,
        context_length=length,
    )
    method = "mlx" if facts.backend is Backend.MLX else FIRST_METHOD
    as_it_is = least.with_settings(train_type="lora", quantization_backend="none")
    quantized = least.with_settings(train_type="qlora", quantization_backend=method)
    lora, qlora = (
        budget.predicted_bytes(plan, shape.known, room, budget.full_microbatch(plan, 1))
        for plan in (as_it_is, quantized)
    )
    if lora <= ROOM * usable:
        return "lora", f"at least {gib(lora)} of {gib(usable)}; qlora, {gib(qlora)}, would round the base's weights"
    return "qlora", f"lora takes at least {gib(lora)}, and {gib(usable)} are usable; qlora takes {gib(qlora)}"
