"""Precision: types of weights and of products."""

from dataclasses import dataclass

from finetune.parts.fields import Settings

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Precision:
    """Types by group of tensors: `weights` that are frozen, `compute` of products; trainable ones are fp32.

    `autocast`: what operations cast to, None without. `casts_buffers`: buffers too are in 16 bits. `onednn`: it
    computes fp32 products on a CPU. `frozen_products`: exact, by the weights as they are, or fp8.
    """

    word: str
    weights: str
    compute: str
    autocast: str | None
    casts_buffers: bool = False
    onednn: bool = False
    frozen_products: str = "exact"

    @property
    def weight_bytes(self) -> int:
        return BYTES[self.weights]

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.compute]

    @property
    def in_fp8(self) -> bool:
        """True if frozen weights are multiplied in fp8 while adapters train."""
        return self.frozen_products == "fp8"

    @property
    def casts_weights(self) -> bool:
        """True if weights are wider than products, so that each use of one casts it."""
        return self.weights != self.compute

    @property
    def scales_loss(self) -> bool:
        """True in fp16, whose gradients would underflow."""
        return self.compute == "fp16"

    @classmethod
    def of(cls, settings: Settings) -> "Precision":
        word = settings.precision
        compute = word.partition("_")[0]
        weights = "fp32" if word.endswith("autocast") else compute
        # Added layers, and modules that train beside an adapter, are in fp32 between frozen ones in 16 bits.
        in_full = settings.llama_pro_path or settings.modules_to_save or settings.new_tokens
        mixed = weights != compute or (in_full and compute != "fp32")
        buffers = word == "bf16_buffers_autocast"
        onednn = settings.cpu_matmul == "onednn"
        autocast = compute if mixed else None
        return cls(word, weights, compute, autocast, buffers, onednn, settings.frozen_products)
