"""The half of backend_manager that only programs written for the older scripts use."""

from typing import Any

from finetune.backend.capabilities import CAPABILITIES, Backend, BackendCapabilities, auto_precision
from finetune.backend.machine import GIB, memory_info
from finetune.errors import first_line

# The documented tables: precisions and quantizers documented for each backend.
PRECISION_MAP = {
    str(b): list(CAPABILITIES[b].precisions) for b in (Backend.CUDA, Backend.MPS, Backend.MLX, Backend.CPU)
}
QUANTIZATION_MAP = {"cuda": ["bnb", "hqq", "quanto"], "mps": ["mlx", "quanto"], "mlx": ["mlx"], "cpu": ["hqq"]}


def allowed(table: dict, backend: object, value: str) -> str:
    """`value` if `table` (PRECISION_MAP, QUANTIZATION_MAP) has it for the backend, else ValueError."""
    if value not in table[str(backend)]:
        raise ValueError(f"'{value}' is not documented for {backend}: it has {', '.join(table[str(backend)])}")
    return value


def rows_that_fit(model_size_b: float, context_length: int, memory_bytes: int, device: str) -> int:
    """Rows of one forward in 4-bit qlora with activation checkpointing, on a Llama-like model; 0 to 4096.

    The plan's memory prediction in closed form, for a model of which only the size is known: h hidden size, h / 128
    layers, an MLP of 8/3 h, 32,000 tokens. Bytes of the packed base, embedding, rank-16 adapters with Adam, one
    dequantized matrix; per token the inputs that checkpointing keeps and one layer's activations.
    """
    num_weights = max(float(model_size_b), 1e-3) * 1e9
    vocab_size = 32000
    hidden = 64
    while vocab_size * hidden + 12 * max(2, hidden // 128) * hidden**2 < num_weights:
        hidden += 64
    layers = max(2, hidden // 128)
    size = 4 if device == "cpu" else 2
    embedding = vocab_size * hidden
    base = 0.5625 * (num_weights - embedding) + embedding * size + 4864 * hidden * layers + 8 * hidden**2 // 3 * size
    of_layer = 22.0
    of_process = 2**27
    if device == "cpu":  # holes of its heap, by layer; the process, and bitsandbytes in it
        of_layer = 20 * (1 + 0.44 * min(layers, 10))
        of_process += 2**29 + 43 * 2**20
    per_row = context_length * hidden * size * (layers + of_layer)
    free = 0.92 * memory_bytes - base - of_process
    return int(min(max(0, free // per_row), 4096))


class OlderManager:
    """Methods of BackendManager that nothing here calls. It has `backend`, `available`, `device` and `capabilities`."""

    CAPABILITIES = CAPABILITIES
    backend: Backend
    available: list[Backend]

    @property
    def capabilities(self) -> BackendCapabilities:
        raise NotImplementedError

    @property
    def device(self) -> Any:
        raise NotImplementedError

    @property
    def _available_backends(self) -> list[Backend]:
        """Older name of `available`."""
        return self.available

    def get_device(self):
        """`device`, as a method."""
        return self.device

    def get_dtype(self, prefer_bfloat16: bool = True):
        """Compute dtype (torch): bf16 if preferred and fast here, else fp16 on GPUs and fp32 on a CPU."""
        import torch

        word = auto_precision(self.backend, prefer_bfloat16 and self.capabilities.supports_bfloat16)
        return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[word]

    def get_distributed_backend(self) -> str | None:
        return CAPABILITIES[self.backend].distributed_backend

    def get_memory_info(self) -> dict:
        """Memory in bytes: total and available (of the device, or unified), allocated and reserved by torch.

        total_memory, free_memory, allocated_memory and reserved_memory are older names of the same.
        """
        try:
            info = memory_info(self.backend)
        except (AssertionError, RuntimeError, ImportError) as error:  # as torch and mlx say it
            raise RuntimeError(f"backend {self.backend}: its memory cannot be read ({first_line(error)}).") from None
        older = {"free_memory": info["available"]}
        older |= {f"{name}_memory": info[name] for name in ("total", "allocated", "reserved")}
        return info | older

    def get_optimal_batch_size(
        self, model_size_b: float = 7, context_length: int = 512, sequence_length: int | None = None
    ) -> int:
        """Rows of `context_length` tokens that fit in one forward in the memory available now; at least 1.

        Predicted for qlora with activation checkpointing on a Llama-like model of `model_size_b` billion parameters.
        `sequence_length`: older name of context_length.
        """
        available = self.get_memory_info()["available"]
        return max(1, rows_that_fit(model_size_b, sequence_length or context_length, available, str(self.backend)))

    def fits_model_size(self, model_size_b: float) -> bool:
        """True if qlora with activation checkpointing on one row of 512 tokens is predicted to fit in memory."""
        return rows_that_fit(model_size_b, 512, self.get_memory_info()["total"], str(self.backend)) > 0

    def validate_model_size(self, model_size_b: float) -> bool:
        """True if `fits_model_size`. Raises ValueError with the largest size that fits otherwise."""
        if self.fits_model_size(model_size_b):
            return True
        low = 0.0
        high = float(model_size_b)
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.fits_model_size(middle) else (low, middle)
        raise ValueError(
            f"model of {model_size_b:g} B parameters: exceeds the recommended limit of {low:.1f} B for "
            f"{self.backend} with {self.get_memory_info()['total'] / GIB:.1f} GiB. Use a smaller model or more devices."
        )
