"""Reading of the packed base's files while a run goes on: by position, and never another file than was verified."""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

from finetune.errors import CheckpointDamagedError
from finetune.system.files import identity_of, open_file
from finetune.torch_engine.weights.packed_base import LayerFile, discard, read_verified, unreadable, verify

MOST_PARTS = 512  # of one call: the system's limit is 1024
MOST_BYTES = 2**30  # of one call: the system's limit is 2 GiB


class PackedFile:
    """A file that a run reads again and again. All of it is verified the first time, and where it is not the same one
    any more.
    """

    def __init__(self, file: LayerFile):
        self.file = file
        self.identity: tuple = ()  # of the file when it was verified

    def fill(self, parts: list[memoryview]) -> None:
        """Reads the tensors' bytes into `parts`, in the order of the file. Raises CheckpointDamagedError."""
        with self._opened() as (handle, identity):
            if self.identity != identity:
                self._verify(identity, read_verified, parts)
                return
            _read_at(handle, parts, self.file.start)
            if identity_of(handle) != identity:
                raise unreadable(self.file, "it was changed while it was read")

    def rows(self, ids: list[int]) -> torch.Tensor:
        """[ids, width]: rows of the one matrix that the file has. Raises CheckpointDamagedError."""
        ((dtype, (_, width)),) = self.file.tensors.values()
        rows = torch.empty(len(ids), width, dtype=dtype)
        content = rows.view(torch.uint8).numpy()
        with self._opened() as (handle, identity):
            if self.identity != identity:
                self._verify(identity, verify)
            for row, number in zip(content, ids, strict=True):
                _read_at(handle, [row.data], self.file.start + number * width * dtype.itemsize)
        return rows

    def _verify(self, identity: tuple, read: Callable[..., None], *into: list[memoryview]) -> None:
        try:
            read(self.file, *into)
        except CheckpointDamagedError as error:
            discard(self.file)
            fact = str(error).partition(". Remove")[0]
            raise CheckpointDamagedError(f"{fact}. Start again: the packed base is made anew.") from None
        self.identity = identity

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[int, tuple]]:
        try:
            with open_file(self.file.path, "rb", buffering=0) as file:
                yield file.fileno(), identity_of(file.fileno())
        except OSError as error:
            raise unreadable(self.file, error.strerror or str(error)) from None


def _read_at(handle: int, parts: list[memoryview], start: int) -> None:
    """Fills `parts` from the file's bytes at `start` on. OSError where it ends before."""
    left = [part for part in parts if len(part)]
    while left:
        some = []
        size = 0
        for part in left[:MOST_PARTS]:
            some.append(part[: MOST_BYTES - size])
            size += len(some[-1])
            if size >= MOST_BYTES:
                break
        count = os.preadv(handle, some, start)
        if not count:
            raise OSError(0, "is cut")
        start += count
        while count:
            first = left[0]
            if count >= len(first):
                count -= len(first)
                left.pop(0)
            else:
                left[0] = first[count:]
                count = 0
