"""Arrays that documents have beside their tokens: the first axis says how they are split, packed and shared.

Whatever moves documents about (datasets, packing, padding, ranks that share a row's positions, empty microbatches)
moves these by their rule and knows none of their names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np


class Per(str, Enum):
    """The owner of an array's values.

    DOCUMENT: one each; ROW: one for the documents of a row, such as a pair; POSITION: one for each token; TARGET: as
    POSITION, but aligned with labels; IMAGE: some for each document.
    """

    DOCUMENT = "document"
    ROW = "row"
    POSITION = "position"
    TARGET = "target"
    IMAGE = "image"


@dataclass(frozen=True)
class Named:
    """An array of a dataset or of a batch.

    `values`: [D, ...], [R, ...], or [I, ...] with `counts_D` images of each document. Per position or target: of a
    dataset [tokens, ...], of a batch [B, S, ...]. Numpy's, or a tensor of the engine's. `is_input`: the model takes it
    by its name. `is_data`: it was read with the rows, and not computed.
    """

    values: Any
    per: Per
    counts_D: np.ndarray | None = None
    is_input: bool = False
    is_data: bool = True

    def of_documents(self, documents: Sequence[int], offsets: np.ndarray, each: int) -> "Named":
        """Selects documents of a dataset, in this order. `offsets`: of their tokens; `each`: per row."""
        chosen_D = np.asarray(documents, np.int64)
        if self.per is Per.DOCUMENT:
            return replace(self, values=self.values[chosen_D])
        if self.per is Per.ROW:
            return replace(self, values=self.values[chosen_D[::each] // each])
        counts_D = None
        if self.per is Per.IMAGE:
            assert self.counts_D is not None, "images need the number of each document's"
            offsets = np.cumsum([0, *self.counts_D])
            counts_D = self.counts_D[chosen_D]
        parts = [self.values[offsets[i] : offsets[i + 1]] for i in documents]
        return replace(self, values=np.concatenate([self.values[:0], *parts]), counts_D=counts_D)

    def in_rows(self, lengths: Sequence[int], width: int | None) -> "Named":
        """Lays documents out as a batch: [1, S, ...] end to end, or one padded row of `width` each."""
        if self.per not in (Per.POSITION, Per.TARGET):
            return self
        each = np.split(self.values, np.cumsum(lengths)[:-1])
        if self.per is Per.TARGET:
            each = [np.concatenate([one[1:], np.zeros_like(one[:1])]) for one in each]
        if width is None:
            return replace(self, values=np.concatenate(each)[None])
        rows = [np.concatenate([one, np.zeros((width - len(one), *one.shape[1:]), one.dtype)]) for one in each]
        return replace(self, values=np.stack(rows))

    def at_positions(self, positions: np.ndarray, padding: int) -> "Named":
        """Selects positions of a flat batch's row, after `padding` zeros more."""
        if self.per not in (Per.POSITION, Per.TARGET):
            return self
        flat = self.values[0]
        filled = np.concatenate([flat, np.zeros((padding, *flat.shape[1:]), flat.dtype)])
        return replace(self, values=filled[positions][None])

    def empty(self) -> "Named":
        """An array for a batch of two tokens without a target: one document, one row, no image."""
        shape = tuple(self.values.shape)
        if self.per in (Per.POSITION, Per.TARGET):
            kept: tuple[int, ...] = (1, 2, *shape[2:])
        elif self.per is Per.IMAGE:
            kept = (0, *shape[1:])
        else:
            kept = (1, *shape[1:])
        dtype = self.values.dtype if isinstance(self.values, np.ndarray) else np.float64
        counts_D = None
        if self.counts_D is not None:
            counts_D = np.zeros(1, np.int64)
        return replace(self, values=np.zeros(kept, dtype), counts_D=counts_D)


Arrays = Mapping[str, Named]


def of_documents(arrays: Arrays, documents: Sequence[int], offsets: np.ndarray, each: int) -> dict[str, Named]:
    """Arrays of some documents of a dataset, see Named.of_documents."""
    return {name: array.of_documents(documents, offsets, each) for name, array in arrays.items()}


def joined(parts: Sequence[Arrays]) -> dict[str, Named]:
    """Arrays of several datasets one after the other, which all have the same names."""
    assert all(part.keys() == parts[0].keys() for part in parts), [sorted(part) for part in parts]
    found = {}
    for name, first in parts[0].items():
        each = [part[name] for part in parts]
        counts = [one.counts_D for one in each if one.counts_D is not None]
        counts_D = np.concatenate(counts) if counts else None
        found[name] = replace(first, values=np.concatenate([one.values for one in each]), counts_D=counts_D)
    return found
