"""Initializations of adapters: one row per word of --init_lora_weights. A new one is a row here and a function that
makes its factors.
"""

from dataclasses import dataclass

from finetune.parts.rows import sharing, words_with

FACTORS = "finetune.torch_engine.lora.factors"


@dataclass(frozen=True)
class InitFacts:
    """A row of INITS. `help`: what --help says of it, of {words} that share it. `factors`: what computes A_0 and B_0 of
    a base weight, from which their product is subtracted: the base becomes a residual.

    `is_drawn`: A is random and B zero, in both engines; `is_gaussian`: A is normal. `needs_data`: it starts from what
    flows through the unquantized base. `needs_quantized`: it starts from what quantization loses. `peft_word`: PEFT's
    `init_lora_weights`; of a changed base that of the plain adapter that is saved. `rate`: its learning rate divided by
    that of a drawn one: what starts from the base's own directions moves farther per step than what starts at zero.
    """

    help: str
    factors: str | None = None
    is_drawn: bool = False
    is_gaussian: bool = False
    needs_data: bool = False
    needs_quantized: bool = False
    peft_word: bool | str = True
    rate: float = 1.0


RESIDUAL = "{words}: from the base weights, saved as LoRA of twice the rank"
INITS = {
    "default": InitFacts("{words}: Kaiming A, zero B", is_drawn=True),
    "gaussian": InitFacts("{words}: normal A, zero B", is_drawn=True, is_gaussian=True, peft_word="gaussian"),
    "eva": InitFacts("{words}: from activations on the data", needs_data=True, peft_word="eva"),
    "pissa": InitFacts(RESIDUAL, f"{FACTORS}.pissa", rate=0.1),
    "olora": InitFacts(RESIDUAL, f"{FACTORS}.olora", rate=0.1),
    "loftq": InitFacts(RESIDUAL, f"{FACTORS}.loftq", needs_quantized=True, rate=0.5),
}
DEFAULT_INIT = "default"


def drawn_inits() -> tuple[str, ...]:
    return words_with(INITS, lambda facts: facts.is_drawn)


def init_help() -> str:
    """The help of --init_lora_weights."""
    texts = sharing(INITS, lambda facts: facts.help)
    return "; ".join(text.format(words=", ".join(words)) for text, words in texts.items())
