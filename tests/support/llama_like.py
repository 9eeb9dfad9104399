"""Models of which only the size is known: what BackendManager's closed form stands for, by the plan's prediction."""

from dataclasses import replace

from finetune.config import TrainConfig
from finetune.estimate.budget import MemoryBudget, largest_rows
from finetune.estimate.model_shape import ModelShape
from finetune.parts.parts import Parts


def predicted_rows(model_size_b: float, context_length: int, memory_bytes: int, device: str) -> int:
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
        Parts(settings), llama_like(max(float(model_size_b), 1e-3) * 1e9), MemoryBudget(memory_bytes, device)
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
