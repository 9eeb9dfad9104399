"""Logits of transformers' own model, by which another engine's are judged."""

from pathlib import Path

import numpy as np
import torch

from finetune.torch_engine.weights.stream import load_dense


@torch.no_grad()
def logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    """fp32 logits [S, V] of token ids [S], with the folder's weights in fp32 on the CPU."""
    model = load_dense(folder, torch.float32).eval()
    return model(input_ids=torch.from_numpy(ids[None].astype(np.int64)), use_cache=False).logits[0].float().numpy()
