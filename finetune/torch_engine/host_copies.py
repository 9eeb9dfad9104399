"""Copies of tensors in host memory that a checkpoint is written from while steps change the tensors themselves."""

import contextlib
from collections.abc import Iterator

import torch


class HostCopies:
    """One copy per tensor, made inside `taken` and valid until the next. Its memory is then used again: pages that are
    new to the process cost as much time as the copy itself.
    """

    def __init__(self):
        self.kept: dict[str, torch.Tensor] = {}
        self.taking = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, `of` copies."""
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
        return sum(copy.nbytes for copy in self.kept.values())
