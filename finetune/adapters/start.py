"""Initial adapters in numpy: the numbers that torch draws from the same seed, so that runs of both engines match."""

import math
import zlib

import numpy as np


def seed_of(seed: int, name: str) -> int:
    """Random seed of one layer: the same on every machine and for any world size."""
    return (seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63


def initial_a(name: str, rank: int, in_features: int, gaussian: bool, seed: int, num_experts: int = 1) -> np.ndarray:
    """A [rank, in_features] of a layer, fp32, or [num_experts * rank, in_features] of one of experts; B starts at zero.
    `gaussian`: normal with standard deviation 1/rank; else uniform within 1/sqrt(in_features), as in PEFT.
    """
    state = np.random.RandomState(seed_of(seed, name) & 0xFFFFFFFF)
    shape = (num_experts * rank, in_features)
    if gaussian:
        return normal(state, math.prod(shape)).reshape(shape) / np.float32(rank)
    drawn = uniform(state, math.prod(shape)) * np.float32(2) - np.float32(1)
    return drawn.reshape(shape) / np.float32(math.sqrt(in_features))


def uniform(state: np.random.RandomState, count: int) -> np.ndarray:
    """torch.Tensor.uniform_ in [0, 1): the lowest 24 bits of each number of the Mersenne twister."""
    words = state.randint(0, 2**32, count, np.uint32)
    return (words & np.uint32(2**24 - 1)).astype(np.float32) * np.float32(2**-24)


def normal(state: np.random.RandomState, count: int) -> np.ndarray:
    """torch.Tensor.normal_ of 16 numbers or more: Box-Muller in blocks of 16, the last of which may overlap."""
    assert count >= 16, count
    drawn = uniform(state, count)
    out = drawn.copy()
    for i in range(0, count - 15, 16):
        out[i : i + 16] = _box_muller(drawn[i : i + 16])
    if count % 16:
        out[-16:] = _box_muller(uniform(state, 16))
    return out


def _box_muller(block: np.ndarray) -> np.ndarray:
    radius = np.sqrt(-2 * np.log(1 - block[:8]))
    theta = np.float32(2 * math.pi) * block[8:]
    return np.concatenate([radius * np.cos(theta), radius * np.sin(theta)])
