"""NEFTune's noise on every engine: how large it is, and which random numbers a document gets in a step."""

import math

import numpy as np

from finetune.engine import Batch

STREAM = 5  # of a seed's uses, see data/sampler.py


def number_of(seed: int, step: int, row: int) -> int:
    """Seed of the noise generator of a row in a step."""
    entropy = np.random.SeedSequence([seed, step, row, STREAM])
    return int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))


def lengths_of(batch: Batch) -> np.ndarray:
    """Tokens per document of the batch."""
    return np.bincount(batch.document_ids_BS[batch.document_ids_BS >= 0], minlength=len(batch.rows))


def limit_of(alpha: float, length: int, hidden: int) -> float:
    """The noise of a document of so many tokens is in +- this (Jain et al. 2023, arXiv:2310.05914)."""
    return alpha / math.sqrt(length * hidden)
