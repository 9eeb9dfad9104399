"""NEFTune on MLX: the numbers that torch's generator draws on a CPU, in the place where transformers adds them.

See torch_engine/neftune.py. torch's generators of GPUs draw other numbers. B rows, S positions, H hidden size.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from finetune.engine import Batch
from finetune.mlx_engine.model import MLXModel
from finetune.neftune import lengths_of, limit_of, number_of

BITS = 24  # of a 32-bit random number that torch takes for a number
SAME = 2e-2  # of what embeddings give, rounded to 16 bits


class Noise:
    """Noise that the embeddings of a model add to what they give. `added`: of the present microbatch, or None."""

    def __init__(self, loaded: MLXModel, alpha: float, seed: int, dtype: mx.Dtype):
        self.alpha = alpha
        self.seed = seed
        self.dtype = dtype
        self.added: mx.array | None = None
        self.given: mx.array | None = None
        self.factor = 1.0
        embedding: Any = loaded.embedding
        kind = type(embedding)
        noise = self

        def forward(self, ids: mx.array) -> mx.array:
            noise.given = kind.__call__(self, ids)
            if noise.added is None:
                return noise.given
            return noise.given + noise.added

        embedding.__class__ = type(f"Noisy{kind.__name__}", (kind,), {"__call__": forward})
        self.factor = self._factor_after(loaded)
        self.given = None

    def _factor_after(self, loaded: MLXModel) -> float:
        """Factor by which MLX's model multiplies its embeddings after noise is added, and transformers before (Gemma);
        1 if both multiply later, or nothing is multiplied.
        """
        if "embedding_multiplier" in (loaded.config.get("text_config") or loaded.config):
            return 1.0
        ids = mx.arange(3, 12)[None] % len(loaded.embedding.weight)
        first = loaded.layers[0]
        kind = type(first)
        seen: list[mx.array] = []

        def forward(self, x: mx.array, *args: Any, **kwargs: Any):
            seen.append(x)
            return kind.__call__(self, x, *args, **kwargs)

        first.__class__ = type(kind.__name__, (kind,), {"__call__": forward})
        try:
            loaded.model(ids)
        finally:
            first.__class__ = kind
        given = self.given
        if not seen or given is None or seen[0].shape != given.shape:
            return 1.0
        given, x = (array.astype(mx.float32) for array in (given, seen[0]))
        factor: Any = ((given * x).sum() / mx.square(given).sum()).item()
        off: Any = (mx.abs(x - factor * given).max() / mx.abs(x).max()).item()
        return factor if off < SAME else 1.0

    def of(self, batch: Batch, shape: tuple[int, ...], hidden: int) -> dict[str, mx.array]:
        """{"noise": [B, S, H]} of a step's microbatch, padded to `shape` [B, S]; of a check or a trial none."""
        if not batch.step:
            return {}
        noise = np.zeros((*shape, hidden), np.float32)
        documents = np.pad(
            batch.document_ids_BS, ((0, 0), (0, shape[1] - batch.document_ids_BS.shape[1])), constant_values=-1
        )
        for document, length in enumerate(lengths_of(batch).tolist()):
            generator = np.random.RandomState(number_of(self.seed, batch.step, batch.rows[document]) % 2**32)
            drawn = np.frombuffer(generator.bytes(4 * length * hidden), "<u4").reshape(length, hidden)
            noise[documents == document] = uniform(drawn, limit_of(self.alpha, length, hidden))
        return {"noise": (mx.array(noise) / self.factor).astype(self.dtype)}


def uniform(drawn: np.ndarray, limit: float) -> np.ndarray:
    """torch's uniform_(-limit, limit) of 32-bit random numbers, fp32. Product and sum are rounded once, as there."""
    part = (drawn & np.uint32(2**BITS - 1)).astype(np.float64) / 2**BITS
    low, high = np.float32(-limit), np.float32(limit)
    return (part * np.float64(high - low) + low).astype(np.float32)
