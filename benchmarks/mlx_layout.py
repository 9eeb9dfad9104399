"""Layouts of MLX batches: a packed row with a block mask against padded rows of similar length, forward and backward.

    python benchmarks/mlx_layout.py --rounds 7

Both get the same documents, sorted by length and split at the same number of positions per forward. The packed row's
attention is mlx-lm's own, given a dense mask that is causal within each document; rotary positions are relative, so
they need not restart. The layouts take turns; losses are equal, and shown. One thread; CPU seconds of the process.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
sys.path.insert(0, str(Path(__file__).parent.parent))
from finetune.mlx_engine import BLAS  # noqa: E402  opens the fast BLAS before mlx

import mlx.core as mx  # noqa: E402  isort: skip
import mlx.nn as nn  # noqa: E402  isort: skip
import numpy as np  # noqa: E402  isort: skip
from mlx_lm.models.llama import Model, ModelArgs  # noqa: E402  isort: skip
from mlx_lm.tuner.utils import linear_to_lora_layers  # noqa: E402  isort: skip

from benchmarks.vs_mlx_lm import RANK, ROWS, SCALE, SHAPE, documents  # noqa: E402  isort: skip

LIMITS, STEPS = (256, 512, 2048), 4


def make_model() -> Model:
    mx.random.seed(0)
    model = Model(ModelArgs(model_type="llama", rms_norm_eps=1e-5, **SHAPE))
    model.freeze()
    linear_to_lora_layers(model, SHAPE["num_hidden_layers"], {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    return model


def nll(model, ids_BS, mask, rows, targets) -> mx.array:
    """Summed nll of `targets` at `rows` of the flattened batch."""
    hidden = model.model.embed_tokens(ids_BS)
    for layer in model.model.layers:
        hidden = layer(hidden, mask, cache=None)
    hidden = model.model.norm(hidden).reshape(-1, hidden.shape[-1])[rows]
    return nn.losses.cross_entropy(model.model.embed_tokens.as_linear(hidden), targets, reduction="sum")


def padded(docs):
    width = max(len(ids) for ids, _ in docs) - 1
    ids_BS = np.zeros((len(docs), width), np.int32)
    for row, (ids, _) in zip(ids_BS, docs, strict=True):
        row[: len(ids) - 1] = ids[:-1]
    return ids_BS, "causal", [i * width for i in range(len(docs))]


def packed(docs):
    numbers = np.concatenate([[i] * (len(ids) - 1) for i, (ids, _) in enumerate(docs)])
    mask = (numbers[:, None] == numbers) & np.tri(len(numbers), dtype=bool)
    starts = np.cumsum([0, *(len(ids) - 1 for ids, _ in docs[:-1])])
    return np.concatenate([ids[:-1] for ids, _ in docs])[None].astype(np.int32), mx.array(mask), starts


def forwards(docs, layout, limit: int) -> list:
    """Documents of similar length per forward, at most `limit` positions each, padding included."""
    parts = [[]]
    for doc in sorted(docs, key=lambda d: len(d[0])):
        part = [*parts[-1], doc]
        positions = len(part) * len(doc[0]) if layout is padded else sum(len(ids) for ids, _ in part)
        parts[-1:] = [part] if len(part) == 1 or positions <= limit else [parts[-1], [doc]]
    return parts


def step(gradients_of, docs, layout, limit: int) -> float:
    """The summed nll of a step, its gradients computed."""
    loss, total = 0.0, None
    for part in forwards(docs, layout, limit):
        ids_BS, mask, starts = layout(part)
        rows = [s + t for s, (ids, first) in zip(starts, part, strict=True) for t in range(first - 1, len(ids) - 1)]
        targets = np.concatenate([ids[first:] for ids, first in part])
        nll_here, gradients = gradients_of(mx.array(ids_BS), mask, mx.array(np.array(rows)), mx.array(targets))
        total = gradients if total is None else nn.utils.tree_map(mx.add, total, gradients)
        mx.eval(nll_here, total)
        loss += nll_here.item()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    model = make_model()
    gradients_of = nn.value_and_grad(model, lambda *args: nll(model, *args))
    steps = [documents(seed, ROWS) for seed in range(STEPS)]
    tokens = sum(len(ids) for docs in steps for ids, _ in docs)
    ways = [(layout, limit) for limit in LIMITS for layout in (padded, packed)]
    speeds, peaks = {way: [] for way in ways}, {}
    for layout, limit in ways:
        print(f"{layout.__name__:6} {limit:5}: summed nll {step(gradients_of, steps[0], layout, limit):.3f}")
    for _ in range(rounds):
        for way in ways:
            mx.reset_peak_memory()
            began = time.process_time()
            for docs in steps:
                step(gradients_of, docs, *way)
            speeds[way].append(tokens / (time.process_time() - began))
            peaks[way] = mx.get_peak_memory() / 2**20
    print(f"{BLAS}; {tokens} tokens, tokens per CPU second, median [min..max] of {rounds}")
    for way in ways:
        print(f"{way[0].__name__:6} {way[1]:5}: {spread(speeds[way], 0)}, peak {peaks[way]:.0f} MiB")
    for limit in LIMITS:
        ratios = [b / a for a, b in zip(speeds[padded, limit], speeds[packed, limit], strict=True)]
        print(f"packed / padded at {limit}: {spread(ratios, 2)}")


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}..{max(values):.{digits}f}]"


if __name__ == "__main__":
    main()
