"""Copies of tensors in host memory that a checkpoint is written from while steps change the tensors themselves."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future

import torch

from finetune.system.threads import in_background


class HostCopies:
    """One copy per tensor, made inside `taken` and valid until the next. Its memory is then used again: pages that are
    new to the process cost as much time as the copy itself.
    """

    def __init__(self):
        self.kept: dict[str, torch.Tensor] = {}
        self.taking = False
        self.prepared: Future | None = None

    def prepare(self, sizes: dict[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Allocates and touches the memory of copies in a thread, so that the first snapshot is as short as the others.
        `sizes`: {key: (shape, dtype)}.
        """
        self.prepared = in_background(self._allocate, sizes)

    def _allocate(self, sizes: dict) -> None:
        for key, (shape, dtype) in sizes.items():
            copy = torch.empty(shape, dtype=dtype, device="cpu")
            copy.numpy().fill(0)  # numpy's, which takes this thread only and no lock of Python's
            self.kept[key] = copy

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Makes `of` copy inside the context."""
        if self.prepared:
            self.prepared.result()
        self.taking = True
        try:
            yield
        finally:
            self.taking = False

    def of(self, key: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor in host memory, contiguous, in `dtype` if it is given: a copy inside `taken`; otherwise it may
        share the memory of the tensor. `key`: names it among the copies.
        """
        tensor, dtype = tensor.detach(), dtype or tensor.dtype
        if not self.taking:
            return tensor.to("cpu", dtype).contiguous()
        copy = self.kept.get(key)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, dtype):
            copy = self.kept[key] = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        return copy.copy_(tensor)

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for copy in list(self.kept.values()))  # a thread may be adding some
