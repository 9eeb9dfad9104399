"""The ranks that mlx.launch started, and their collectives, for data parallelism. One process needs no group."""

import json

import mlx.core as mx
import numpy as np


class Ranks:
    """`group`: an mlx.core.distributed group, or None for a single process."""

    def __init__(self, group=None):
        self.group = group
        self.rank, self.size = (group.rank(), group.size()) if group else (0, 1)

    @classmethod
    def of(cls, world_size: int) -> "Ranks":
        return cls(mx.distributed.init(strict=True) if world_size > 1 else None)

    def sum(self, array: mx.array) -> mx.array:
        """The sum over ranks, evaluated when it is used."""
        return mx.distributed.all_sum(array, group=self.group) if self.size > 1 else array

    def sum_numbers(self, *numbers: float) -> list[float]:
        """The sums of these numbers over ranks, exact for counts below 2**24 per rank."""
        if self.size == 1:
            return list(numbers)
        return np.array(self.gather(np.array(numbers, np.float32)), np.float64).sum(0).tolist()

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """Every rank's array, all of one shape, in rank order."""
        if self.size == 1:
            return [array]
        found = mx.distributed.all_gather(mx.array(array)[None], group=self.group)
        return list(np.array(found))

    def gather_object(self, value) -> list:
        """Every rank's JSON value, in rank order."""
        if self.size == 1:
            return [value]
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = [int(n[0]) for n in self.gather(np.array([len(text)], np.int32))]
        padded = np.zeros(max(sizes), np.uint8)
        padded[: len(text)] = text
        return [json.loads(bytes(a[:n])) for a, n in zip(self.gather(padded), sizes, strict=True)]
