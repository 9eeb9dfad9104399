"""Quantization of the frozen base."""

from dataclasses import dataclass
from functools import cached_property

import quantization_wrapper
from finetune.parts.fields import Settings


@dataclass(frozen=True)
class Quantization:
    """Quantization of the frozen base; `method`: a row of quantization_wrapper.METHODS, or MLX's own modes."""

    method: str
    bits: int
    group_size: int
    quant_type: str | None
    double_quant: bool

    def __str__(self) -> str:
        return f"{self.method} {self.bits} bits"

    @cached_property
    def config(self) -> quantization_wrapper.QuantizationConfig:
        return quantization_wrapper.config_for(
            self.method, self.bits, self.quant_type, self.group_size, self.double_quant
        )

    @property
    def needs_full_matrix(self) -> bool:
        return self.bits in quantization_wrapper.METHODS[self.method].needs_full_matrix

    def weight_bytes(self, rows: int, columns: int, scale_bytes: int, ranks: int = 1) -> int:
        """Bytes of a quantized weight, see quantization_wrapper.weight_bytes."""
        return quantization_wrapper.weight_bytes(
            self.method, self.bits, self.group_size, self.double_quant, rows, columns, scale_bytes, ranks
        )

    @classmethod
    def of(cls, settings: Settings) -> "Quantization | None":
        s = settings
        if s.train_type != "qlora":
            return None
        return cls(s.quantization_backend, s.n_bits, s.group_size, s.quant_type, s.double_quant)
