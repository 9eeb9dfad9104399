"""A microbatch's activations on disk: written as the forward goes on, and read again in backward."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.checkpoint.store import storage
from finetune.torch_engine.memory_stats import held_storages

LEAST_BYTES = 2**18  # of a tensor that is worth a write


class SpilledTensors:
    """A file without a name in `folder`, which goes with the last of the graph whose tensors it has."""

    def __init__(self, folder: Path):
        self.folder = folder
        with storage(folder):
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  closed with the graph
        self.end = 0

    def write(self, tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
        """Appends a tensor; what `read` takes. Raises StorageError."""
        left = _bytes(tensor.detach().contiguous())
        place = (self.end, tensor.shape, tensor.dtype)
        with storage(self.folder):
            while left:
                written = os.pwrite(self.file.fileno(), left, self.end)
                self.end += written
                left = left[written:]
        return place

    def read(self, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that `write` took. Raises StorageError."""
        tensor = torch.empty(shape, dtype=dtype)
        left = _bytes(tensor)
        with storage(self.folder):
            while left:
                found = os.preadv(self.file.fileno(), [left], start)
                if not found:
                    raise OSError(5, "a file of activations ends early")
                start += found
                left = left[found:]
        return tensor


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data


def spilled(model: nn.Module, folder: Path) -> torch.autograd.graph.saved_tensors_hooks:
    """A context that keeps what autograd saves in a file in `folder`, but for weights, buffers and small tensors."""
    held = held_storages(model)
    tensors = SpilledTensors(folder)

    def pack(tensor: torch.Tensor) -> Any:
        small = tensor.numel() * tensor.element_size() < LEAST_BYTES
        if small or tensor.device.type != "cpu" or tensor.untyped_storage().data_ptr() in held:
            return tensor
        return tensors.write(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        return tensors.read(*packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
