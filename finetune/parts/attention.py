"""Attention of packed documents."""

from dataclasses import dataclass

from finetune.parts.fields import Settings

# Kernels that a word of --attention allows. What `kernels` fetches from the Hub is used only where it is asked for.
ATTENTION_KERNELS = {
    "auto": ("flash-attention 3", "varlen", "flash-attention 2"),
    "varlen": ("varlen",),
    "flash": ("flash-attention 3", "flash-attention 3 of kernels", "flash-attention 2"),
}
REQUIRED = ("varlen", "flash")  # words of --attention with which a run ends where their kernels are not here


@dataclass(frozen=True)
class AttentionPlan:
    """How packed documents attend. `kernels`: tried in this order, names of attention.varlen.KERNELS.

    `required`: without one of them the run ends. `own_products`: a CPU may multiply matrices where SDPA is slower.
    """

    word: str = "auto"
    kernels: tuple[str, ...] = ()
    required: bool = False
    own_products: bool = True

    @classmethod
    def of(cls, settings: Settings) -> "AttentionPlan":
        word = settings.attention
        return cls(word, ATTENTION_KERNELS.get(word, ()), word in REQUIRED, word != "sdpa")
