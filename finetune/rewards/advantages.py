"""Rewards of a step's answers as advantages, and as weights of their tokens in the loss.

N answers in groups of G to one prompt, in order. Computed in fp64 on the host, once for all ranks.
"""

from dataclasses import dataclass

import numpy as np

from finetune.parts.objectives import Rewarded

EPSILON = 1e-4  # beside the standard deviation, as the field's implementations have it


def advantages(rewards_N: np.ndarray, group: int, scale: str, leaves_one_out: bool) -> np.ndarray:
    """[N]: by how much an answer's reward is above the others to its prompt.

    The mean of the group is subtracted and the result divided by the group's standard deviation (GRPO: Shao et al.
    2024, section 4.1.2), by that of all answers ("batch": Hu et al. 2025), or by nothing ("none": Liu et al. 2025,
    "Dr. GRPO"). Deviations are those of a sample, with G - 1. `leaves_one_out`: the mean is that of the other answers
    (RLOO: Ahmadian et al. 2024, eq. 7).
    """
    rewards_PG = rewards_N.astype(np.float64).reshape(-1, group)
    found_PG = rewards_PG - rewards_PG.mean(1, keepdims=True)
    found_PG[rewards_PG.max(1) == rewards_PG.min(1)] = 0.0  # the mean of equal numbers may round
    if leaves_one_out:
        found_PG = found_PG * (group / (group - 1))
    if scale == "group":
        found_PG = found_PG / (rewards_PG.std(1, ddof=1, keepdims=True) + EPSILON)
    elif scale == "batch":
        found_PG = found_PG / (rewards_PG.std(ddof=1) + EPSILON)
    return found_PG.reshape(-1)


def differs(rewards_N: np.ndarray, group: int) -> np.ndarray:
    """[P] bool: the answers to this prompt do not all have the same reward."""
    rewards_PG = rewards_N.reshape(-1, group)
    return rewards_PG.max(1) > rewards_PG.min(1)


@dataclass(frozen=True)
class Lengths:
    """Tokens that are learned of each answer [N], 0 of masked ones, and the most that an answer may have."""

    learned_N: np.ndarray
    most: int


def token_weights(lengths: Lengths, how: Rewarded) -> np.ndarray:
    """[N]: the weight of each token of an answer in the sum that is divided by N.

    "length": 1 / its own length, so that answers count alike (GRPO, eq. 3); "most": 1 / the most tokens of an answer
    (Dr. GRPO, section 3.1); "tokens": N / all tokens, so that tokens count alike (DAPO: Yu et al. 2025, eq. 8).
    """
    learned_N = lengths.learned_N.astype(np.float64)
    if how.divides == "length":
        return 1 / np.maximum(learned_N, 1)
    if how.divides == "most":
        return np.full(len(learned_N), 1 / lengths.most)
    return np.full(len(learned_N), len(learned_N) / max(1.0, learned_N.sum()))
