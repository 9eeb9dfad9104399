"""Microbatches of few shapes, as CUDA graphs need them: padded to a bucket, in buffers that stay where they are.

S positions, T targets, D documents of a bucket.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from finetune.engine import IGNORE_INDEX, Batch, document_targets
from finetune.torch_engine.attention.per_document import BoundsOnly
from finetune.torch_engine.attention.varlen import Attention
from finetune.torch_engine.device import to_device

LEAST = 64  # positions, and targets: sizes of buckets are multiples of it
# (positions, sizes between two powers of two from there on): the host bounds small steps, whose padding costs nothing,
# and few buckets are captured; of large ones at most an eighth is padding.
SIZES = ((0, 2), (2048, 4), (8192, 8))


class Bucket(NamedTuple):
    """Sizes of a microbatch. `documents`: those of padding included. `longest`: no document is longer."""

    tokens: int
    targets: int
    documents: int
    longest: int

    @classmethod
    def of(cls, batch: Batch) -> "Bucket":
        """The bucket of a microbatch of packed documents."""
        bounds = _bounds(batch)
        real_longest = int(np.diff(bounds).max())
        tokens = rounded(int(bounds[-1]))
        padding = -(-(tokens - int(bounds[-1])) // real_longest)
        targets = rounded(int((batch.labels_BS != IGNORE_INDEX).sum()))
        documents = power_of_four(len(bounds) - 1 + padding)
        longest = power_of_four(max(LEAST, real_longest))
        return cls(tokens=tokens, targets=targets, documents=documents, longest=longest)


def rounded(size: int) -> int:
    """The next of the sizes that buckets have."""
    size = max(size, LEAST)
    parts = max(of for start, of in SIZES if size >= start)
    step = max(LEAST, (1 << size.bit_length()) // (2 * parts))
    return -(-size // step) * step


def power_of_four(size: int) -> int:
    """The smallest power of four that is not below `size`, from four on: a kernel's blocks beyond the documents end at
    once.
    """
    found = 4
    while found < size:
        found *= 4
    return found


def _bounds(batch: Batch) -> np.ndarray:
    """[documents + 1]: the first position of each document, and the number of positions."""
    positions = batch.position_ids_BS.reshape(-1)
    return np.append(np.flatnonzero(positions == 0), len(positions))


@dataclass(frozen=True)
class Fixed:
    """A microbatch of a bucket's sizes, on the device. `at_T`: positions of the targets; `labels_T`: tokens to predict
    there, -1 where the bucket has more targets than the microbatch; `counts_D`: targets of each document. `factor`:
    what the loss is multiplied by. `values`: {name: a number of each document [D]}.
    """

    ids_BS: torch.Tensor
    positions_BS: torch.Tensor
    at_T: torch.Tensor
    labels_T: torch.Tensor
    counts_D: torch.Tensor
    bounds_N: torch.Tensor
    factor: torch.Tensor
    values: Mapping[str, torch.Tensor]
    longest: int

    def documents(self, attention: Attention) -> BoundsOnly:
        return BoundsOnly(self.bounds_N.to(torch.int32), self.longest, attention)


class Buffers:
    """Buffers on the device for the microbatches of a bucket, one after the other: integers and numbers, each filled by
    one copy. `names`: of values per document.
    """

    def __init__(self, bucket: Bucket, names: tuple[str, ...], device: torch.device):
        self.bucket = bucket
        self.names = names
        self.sizes = [bucket.tokens] * 2 + [bucket.targets] * 2 + [bucket.documents, bucket.documents + 1]
        self.integers = torch.zeros(sum(self.sizes), dtype=torch.int64, device=device)
        self.numbers = torch.zeros(1 + len(names) * bucket.documents, dtype=torch.float32, device=device)

    def fill(self, batch: Batch, pad_id: int, factor: float, values: Mapping[str, Any]) -> None:
        """Puts a microbatch there. The host does not wait. `values`: arrays, or tensors of the device."""
        parts = fixed_arrays(batch, self.bucket, pad_id)
        integers = torch.from_numpy(np.concatenate(parts))
        self.integers.copy_(to_device(integers, self.integers.device), non_blocking=True)
        numbers = np.zeros(len(self.numbers), np.float32)
        numbers[0] = factor
        on_device = []
        for i, name in enumerate(self.names):
            first = 1 + i * self.bucket.documents
            at = slice(first, first + len(values[name]))
            if torch.is_tensor(values[name]):
                on_device.append((at, values[name]))
            else:
                numbers[at] = values[name]
        self.numbers.copy_(to_device(numbers, self.numbers.device), non_blocking=True)
        for at, tensor in on_device:
            self.numbers[at].copy_(tensor)

    def fixed(self) -> Fixed:
        """Views of the buffers."""
        ids, positions, at_T, labels_T, counts_D, bounds_N = self.integers.split(self.sizes)
        of_documents = self.numbers[1:].view(len(self.names), self.bucket.documents)
        values = dict(zip(self.names, of_documents, strict=True))
        return Fixed(
            ids[None],
            positions[None],
            at_T=at_T,
            labels_T=labels_T,
            counts_D=counts_D,
            bounds_N=bounds_N,
            factor=self.numbers[0],
            values=values,
            longest=self.bucket.longest,
        )


def fixed_arrays(batch: Batch, bucket: Bucket, pad_id: int) -> list[np.ndarray]:
    """Integers of a microbatch, in the order of Fixed, at the bucket's sizes.

    After the batch come documents of padding, none longer than its own: a model may have no more positions. Then empty
    ones. Labels that pad the targets are of positions from the last on: gradients of one position would be added in
    turn.
    """
    bounds = _bounds(batch)
    tokens = int(bounds[-1])
    missing = bucket.tokens - tokens
    padding = np.arange(missing) % int(np.diff(bounds).max())
    starts_of_padding = tokens + np.flatnonzero(padding == 0)
    starts = np.concatenate([bounds[:-1], starts_of_padding])
    ends = np.full(bucket.documents + 1 - len(starts), bucket.tokens)
    labels = batch.labels_BS.reshape(-1)
    at = np.flatnonzero(labels != IGNORE_INDEX)
    spread = bucket.tokens - 1 - np.arange(bucket.targets - len(at)) % bucket.tokens
    counts = document_targets(batch)
    return [
        np.concatenate([batch.input_ids_BS.reshape(-1), np.full(missing, pad_id)]),
        np.concatenate([batch.position_ids_BS.reshape(-1), padding]),
        np.concatenate([at, spread]),
        np.concatenate([labels[at], np.full(len(spread), -1)]),
        np.concatenate([counts, np.zeros(bucket.documents - len(counts), np.int64)]),
        np.concatenate([starts, ends]),
    ]
