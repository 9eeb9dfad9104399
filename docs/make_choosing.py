"""Writes the table of sizes in docs/choosing.md from the memory prediction: `python docs/make_choosing.py`. The test
suite checks that it was run.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from finetune.config import TrainConfig  # noqa: E402
from finetune.estimate.budget import GIB, MemoryBudget, predicted_bytes  # noqa: E402
from finetune.estimate.model_shape import ModelShape  # noqa: E402
from finetune.parts.parts import Parts  # noqa: E402

PAGE = ROOT / "docs" / "choosing.md"
BEGIN, END = "<!-- sizes: written by docs/make_choosing.py -->\n", "<!-- end of sizes -->"
CONFIGS = ROOT / "examples" / "configs"


def llama(width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **other) -> dict:
    """A config.json of the Llama family by its dimensions."""
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **other,
    }


MODELS = {
    "SmolLM2-135M": llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
    "Qwen2.5-0.5B": llama(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True, model_type="qwen2"),
    "Qwen3-1.7B": llama(2048, 6144, 28, 16, 8, 151936, tie_word_embeddings=True, model_type="qwen3", head_dim=128),
    "Llama-3-8B": llama(4096, 14336, 32, 32, 8, 128256),
    "Qwen3-32B": json.loads((CONFIGS / "qwen3-32b" / "config.json").read_text()),
    "Llama-3-70B": json.loads((CONFIGS / "llama-3-70b" / "config.json").read_text()),
}
WAYS = {"qlora": {"quantization_backend": "nf4", "n_bits": 4}, "lora": {}, "full": {}}


def sizes() -> str:
    """A row per model, GiB of a step: each train type with recomputation and, in brackets, without."""
    lines = ["| model | `qlora`, 4 bits | `lora` | `full` |", "|---|---|---|---|"]
    for name, config in MODELS.items():
        shape = ModelShape.from_config(config)
        cells = [f"{gib_of(shape, way, 'true')} ({gib_of(shape, way, 'false')})" for way in WAYS]
        lines.append(" | ".join([f"| {name}", *cells]) + " |")
    return "\n".join(lines) + "\n"


def gib_of(shape: ModelShape, train_type: str, recompute: str) -> str:
    """In bf16, adapters of rank 16, 2,048 tokens per forward, on a CUDA device."""
    settings = TrainConfig(
        train_type=train_type,
        precision="bf16",
        use_gradient_checkpointing=recompute,
        microbatch_tokens=2048,
        context_length=2048,
        **WAYS[train_type],
    )
    number = predicted_bytes(Parts(settings), shape, MemoryBudget(80 * GIB, "cuda")) / GIB
    return f"{number:,.1f}" if number < 100 else f"{number:,.0f}"


def page() -> str:
    """The text of docs/choosing.md with its table."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n{sizes()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
