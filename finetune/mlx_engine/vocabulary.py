"""Embeddings and head of an MLX model with rows for new tokens, which start as the torch engine's do."""

from typing import Any

import mlx.core as mx
import numpy as np

from finetune.errors import PlanError
from finetune.mlx_engine.layers import as_numpy
from finetune.model_files.vocabulary import Vocabulary


def config_with(config: dict, vocabulary: Vocabulary | None) -> dict:
    """A model's config with as many rows as it needs: spare ones are used first."""
    text = config.get("text_config") or config
    if vocabulary is None or vocabulary.size <= (text.get("vocab_size") or 0):
        return config
    config = dict(config)
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "vocab_size": vocabulary.size}
    if "vocab_size" in config or "text_config" not in config:
        config["vocab_size"] = vocabulary.size
    return config


def grow(weights: dict[str, mx.array], wanted: dict[str, tuple], vocabulary: Vocabulary, said: str) -> None:
    """Replaces weights by those with rows for the new tokens. `wanted`: {path of one with a row per token: its shape in
    the model}. Raises PlanError if one is not stored as it is.
    """
    for path, shape in wanted.items():
        stored = weights.get(path)
        if stored is None or not mx.issubdtype(stored.dtype, mx.floating):
            raise PlanError(
                f"--new_tokens: {path} of {said.removeprefix('--model_name ')} is not stored as a plain tensor, so it "
                "cannot get rows. Give the unquantized model it was made from."
            )
        weights[path] = grown(stored, shape[0], vocabulary)


def grown(stored: mx.array, num_rows: int, vocabulary: Vocabulary) -> mx.array:
    """A tensor with more rows than `stored`: a new one is the mean of the rows of the tokens before it."""
    old, spare = vocabulary.kept(len(stored))
    total = as_numpy(stored[old]).sum(0, dtype=np.float64)
    mean = mx.array((total / old.stop).astype(np.float32)).astype(stored.dtype)

    def new(count: int) -> mx.array:
        return mx.broadcast_to(mean, (count, *stored.shape[1:]))

    return mx.concatenate(
        [stored[old], new(spare.start - old.stop), stored[spare], new(max(0, num_rows - len(stored)))]
    )


def leave_padding(embedding: Any, config: dict) -> None:
    """Makes an embedding give no gradient to the padding token's row, as torch's Embedding with a padding_idx does;
    transformers' models have one where they call it embed_tokens.
    """
    padding = (config.get("text_config") or config).get("pad_token_id")
    if padding is None:
        return
    kind = type(embedding)

    def forward(self, ids: mx.array):
        rows = kind.__call__(self, ids)
        return mx.where((ids == padding)[..., None], mx.stop_gradient(rows), rows)

    embedding.__class__ = type(kind.__name__, (kind,), {"__call__": forward})
