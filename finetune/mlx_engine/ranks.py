"""The ranks that mlx.launch started, and their collectives, for data parallelism. One process needs no group."""

import contextlib
import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from finetune.errors import RankLostError, first_line
from finetune.system.threads import in_background


class Ranks:
    """`group`: an mlx.core.distributed group, or None for a single process."""

    def __init__(self, group: Any = None):
        self.group = group
        self.rank = 0
        self.size = 1
        if group:
            self.rank = group.rank()
            self.size = group.size()
        self.waiting_since: float | None = None
        self.gathered = 0  # times
        self.before_exit: Callable[[int], object] = lambda code: None

    @classmethod
    def of(cls, world_size: int) -> "Ranks":
        return cls(mx.distributed.init(strict=True) if world_size > 1 else None)

    @contextlib.contextmanager
    def waiting(self):
        """Surrounds every evaluation that needs the other ranks. Raises RankLostError if one is gone."""
        self.waiting_since = time.monotonic()
        try:
            with ring_errors():
                yield
        finally:
            self.waiting_since = None

    def watch(self, timeout_s: float, log_error: Callable[[object], None]) -> None:
        """Ends this process, with exit code 69, if the others do not answer for `timeout_s`: a ring waits forever.
        `before_exit` is called then.
        """

        def look():
            while True:
                time.sleep(min(1.0, timeout_s / 4))
                since = self.waiting_since
                if since is not None and time.monotonic() - since > timeout_s:
                    lost = f"a rank did not answer for {timeout_s:.0f} s (--rank_timeout). Rerun with --resume auto."
                    log_error(RankLostError(lost))
                    self.before_exit(RankLostError.exit_code)
                    os._exit(RankLostError.exit_code)

        in_background(look, wait_at_exit=False)

    def sum(self, array: mx.array) -> mx.array:
        """The sum over ranks, evaluated when it is used."""
        if self.size > 1:
            return mx.distributed.all_sum(array, group=self.group)
        return array

    def sum_in_order(self, first: mx.array, arrays: dict) -> tuple[mx.array, dict]:
        """The sums over ranks, one after another: MLX orders a graph by its shape, which differs between ranks."""
        if self.size == 1:
            return first, arrays
        first = previous = self.sum(first)
        sums = {}
        for name in sorted(arrays):
            (array,) = mx.depends([arrays[name]], [previous])
            sums[name] = previous = self.sum(array)
        return first, sums

    def sum_numbers(self, *numbers: float) -> list[float]:
        """The sums of these numbers over ranks, exact for counts below 2**24 per rank."""
        if self.size == 1:
            return list(numbers)
        return np.array(self.gather(np.array(numbers, np.float32)), np.float64).sum(0).tolist()

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """Every rank's array, all of one shape, in rank order. Raises RankLostError for what no rank sent: without an
        error, a broken ring gives memory as it is.
        """
        if self.size == 1:
            return [array]
        self.gathered += 1
        content = array.tobytes()
        mine = np.frombuffer(self._mark(self.rank, content) + content, np.uint8)
        with self.waiting():
            found = np.array(mx.distributed.all_gather(mx.array(mine)[None], group=self.group))
        parts = [bytes(part) for part in found]
        length = len(mine) - len(content)
        if any(part[:length] != self._mark(rank, part[length:]) for rank, part in enumerate(parts)):
            raise RankLostError("a rank stopped responding. Rerun with --resume auto.")
        return [np.frombuffer(part[length:], array.dtype).reshape(array.shape) for part in parts]

    def _mark(self, rank: int, content: bytes) -> bytes:
        """The beginning of a rank's bytes in this gathering, by which they are told from those of an earlier one."""
        return struct.pack("<IQI", rank, self.gathered, zlib.crc32(content))

    def gather_object(self, value: Any) -> list:
        """Every rank's JSON value, in rank order."""
        if self.size == 1:
            return [value]
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = [int(n[0]) for n in self.gather(np.array([len(text)], np.int32))]
        padded = np.zeros(max(sizes), np.uint8)
        padded[: len(text)] = text
        return [json.loads(bytes(a[:n])) for a, n in zip(self.gather(padded), sizes, strict=True)]


@contextlib.contextmanager
def ring_errors() -> Iterator[None]:
    """A context in which MLX's errors of a broken ring are RankLostErrors."""
    try:
        yield
    except RuntimeError as error:
        if "[ring]" not in str(error) and "[distributed]" not in str(error):
            raise
        raise RankLostError(f"a rank stopped responding ({first_line(error)}). Rerun with --resume auto.") from error
