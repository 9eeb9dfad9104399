"""The plan's rules for --train_type auto: adapters on the base as it is where that fits with room, else on a quantized
one.
"""

from backend_manager import Backend
from finetune.estimate import budget
from finetune.estimate.budget import gib
from finetune.parts.precision import BYTES
from finetune.plan.conflicts import QUANTIZATION_SETTINGS
from finetune.plan.draft import Draft

ROOM = 0.8  # of the usable memory: what lora with recomputation and one row per forward may take
WEIGHTS_ROOM = 0.5  # of the usable memory: what the base may take where no formula describes the rest
LONGEST = 2048  # tokens of a row that room is kept for, where the rows' length is open


def train_type_asked(draft: Draft) -> None:
    """qlora if a flag asks for a quantized base; else it stays open until precision and ranks are known."""
    if draft.facts.prequantized or not draft.is_open("train_type"):
        return
    draft.values["train_type"] = "auto"
    asked = _asked(draft)
    if asked:
        draft.adjust("train_type", *asked)


def _asked(draft: Draft) -> tuple[str, str] | None:
    """(train type, reason) that another flag asks for."""
    asks = [name for name in QUANTIZATION_SETTINGS if draft.given(name)]
    asks += [n for n in ("quantization_backend",) if draft.given(n) and draft.requested[n] not in ("auto", "none")]
    asks += [n for n in ("cache_dequantized",) if draft.requested.get(n) == "true"]
    asks += [n for n in ("init_lora_weights",) if draft.requested.get(n) == "loftq"]
    if asks:
        return "qlora", f"--{asks[0]} is of a quantized base"
    if draft.given("quantization_backend") and draft.requested["quantization_backend"] == "none":
        return "lora", "--quantization_backend none: nothing is quantized"
    return None


def train_type_is_open(draft: Draft) -> bool:
    """Whether memory decides between lora and qlora, also once it has."""
    asked = draft.facts.prequantized or draft.is_resumed or "train_type" in draft.demo or _asked(draft)
    return draft.requested.get("train_type", "auto") == "auto" and not asked


def train_type(draft: Draft) -> None:
    """auto: lora or qlora, by what each takes of this device's memory."""
    if draft.values["train_type"] == "auto":
        draft.adjust("train_type", *_chosen(draft))


def _chosen(draft: Draft) -> tuple[str, str]:
    memory, shape = draft.memory_budget(), draft.shape
    if memory is None or shape is None or not shape.num_weights:
        return "qlora", "the model's sizes or the memory are not known yet"
    usable = memory.usable
    if shape.known is None:
        base = shape.num_weights * BYTES[draft.parts().precision.weights] // memory.sharing
        fits = base <= WEIGHTS_ROOM * usable
        fact = f"its weights take {gib(base)} of {gib(usable)}"
        return ("lora", fact) if fits else ("qlora", f"{fact}, without anything that trains")
    lora, qlora = (_bytes_of(draft, word) for word in ("lora", "qlora"))
    if lora <= ROOM * usable:
        return "lora", f"at least {gib(lora)} of {gib(usable)}; qlora, {gib(qlora)}, would round the base's weights"
    return "qlora", f"lora takes at least {gib(lora)}, and {gib(usable)} are usable; qlora takes {gib(qlora)}"


def _bytes_of(draft: Draft, word: str) -> int:
    """Predicted with recomputation and one row per forward."""
    memory = draft.memory_budget()
    assert memory and draft.shape and draft.shape.known
    method = "mlx" if draft.backend is Backend.MLX else "nf4"
    length = draft.values["context_length"]
    if not draft.given("context_length"):
        length = min(LONGEST, draft.shape.context_limit or LONGEST)
    least = dict(train_type=word, cache_dequantized="false", use_gradient_checkpointing="true", batch_size=1)
    least |= dict(quantization_backend=method if word == "qlora" else "none", microbatch_tokens=None)
    least |= dict(context_length=length)
    plan = draft.parts(**least)
    return budget.predicted_bytes(plan, draft.shape.known, memory, budget.full_microbatch(plan, 1))
