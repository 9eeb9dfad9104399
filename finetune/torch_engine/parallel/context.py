"""Context parallelism: each rank holds a shard of every sequence; keys and values go around in a ring (ring.py).

A row is split into twice as many chunks as ranks; a rank takes one from the front and one from the back (zigzag), which
balances the work under a causal mask. Attention stays within documents.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface

from finetune.engine import IGNORE_INDEX, Batch
from finetune.errors import PlanError
from finetune.quantizers.linear import autocasts, without_autocast
from finetune.torch_engine.attention.blocks import Block
from finetune.torch_engine.attention.per_document import scoring_of
from finetune.torch_engine.attention.varlen import Attention
from finetune.torch_engine.device import to_device
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.ring import RingAttention

NAME = "documents_across_ranks"


@dataclass(frozen=True)
class Piece:
    """Positions of one document within one of this rank's chunks: where they are here, in the row, and where the
    document begins in the row.
    """

    here: slice
    start: int
    document: int


@dataclass(frozen=True)
class Context:
    """The layout of one row over a context-parallel group. `chunk`: positions per chunk, of which each rank has two.

    `bounds`: where a kernel takes them, the first position of each piece and the end, and the longest piece.
    """

    pieces: tuple[Piece, ...]
    chunk: int
    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None
    device: torch.device
    attention: Attention
    bounds: tuple[torch.Tensor, int] | None = None
    made: dict = field(default_factory=dict)

    def blocks(self, source: int, window: int | None) -> tuple[Block, ...]:
        """Blocks of a rank's keys that this rank's queries see."""
        within: tuple[Block, ...] = ()
        if source == self.rank:
            within = tuple(Block(piece.here, piece.here, 0) for piece in self.pieces)
        return within + self.across(source, window)

    def across(self, source: int, window: int | None) -> tuple[Block, ...]:
        """The blocks of queries and keys that are in different chunks."""
        known = "blocks", source, window
        if known not in self.made:
            self.made[known] = tuple(self._across(source, window))
        return self.made[known]

    def _across(self, source: int, window: int | None):
        for i, begin in enumerate((source * self.chunk, (2 * self.num_ranks - 1 - source) * self.chunk)):
            for piece in self.pieces:
                first = max(begin, piece.document)
                if first < begin + self.chunk <= piece.start:
                    here = i * self.chunk - begin
                    keys = slice(first + here, (i + 1) * self.chunk)
                    block = Block(piece.here, keys, piece.start - first).trimmed(window)
                    if block is not None:
                        yield block

    def bounds_of_one(self, length: int) -> torch.Tensor:
        """The bounds of a single document, on the device."""
        known = "bounds", length
        if known not in self.made:
            self.made[known] = to_device(torch.tensor([0, length], dtype=torch.int32), self.device)
        return self.made[known]


def rank_token_indices(num_tokens: int, rank: int, num_ranks: int) -> np.ndarray:
    """Indices of the row's tokens that a rank holds, in order; the row length is a multiple of 2 * num_ranks."""
    each = num_tokens // (2 * num_ranks)
    first = rank * each
    last = (2 * num_ranks - 1 - rank) * each
    return np.concatenate([np.arange(first, first + each), np.arange(last, last + each)])


def shard_batch(batch: Batch, groups: ProcessGroups, pad_id: int, attention: Attention) -> tuple[Batch, Context]:
    """This rank's shard of a flat batch, and its layout for attention.
    Padding forms a separate document without targets.
    """
    num_ranks = groups.dims.cp
    rank = groups.coordinate("cp")
    padding = -batch.input_ids_BS.size % (2 * num_ranks)

    def padded(row_BS: np.ndarray, fill: int | np.ndarray):
        return np.concatenate([row_BS.reshape(-1), np.broadcast_to(fill, padding).astype(row_BS.dtype)])

    positions_T = padded(batch.position_ids_BS, np.arange(padding))
    mine_L = rank_token_indices(len(positions_T), rank, num_ranks)
    starts = [*np.flatnonzero(positions_T == 0).tolist(), len(positions_T)]
    part = Batch(
        padded(batch.input_ids_BS, pad_id)[mine_L][None],
        padded(batch.labels_BS, IGNORE_INDEX)[mine_L][None],
        positions_T[mine_L][None],
        padded(batch.document_ids_BS, -1)[mine_L][None],
        batch.rows,
        arrays={name: array.at_positions(mine_L, padding) for name, array in batch.arrays.items()},
    )
    device = groups.device
    group = groups.process_groups["cp"]
    chunk = len(mine_L) // 2
    pieces = _pieces(mine_L, chunk, starts)
    bounds = None
    if attention.takes_bounds(device):
        first = torch.tensor([*(piece.here.start for piece in pieces), len(mine_L)], dtype=torch.int32)
        bounds = to_device(first, device), int(first.diff().max())
    return part, Context(pieces, chunk, rank, num_ranks, group, device, attention, bounds)


def _pieces(mine_L: np.ndarray, chunk: int, starts: list[int]) -> tuple[Piece, ...]:
    found = []
    for offset in (0, chunk):
        begin = int(mine_L[offset])
        for document, after in pairwise(starts):
            first = max(begin, document)
            last = min(begin + chunk, after)
            if first < last:
                found.append(Piece(slice(offset + first - begin, offset + last - begin), first, document))
    return tuple(found)


def context_attention(
    module: nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    documents: Context | None = None,
    **scoring: Any,
):
    """transformers' attention interface: query [1, H, L, D], key and value [1, K, L, D] -> ([1, L, H, D], None)."""
    if not isinstance(documents, Context):
        raise PlanError(
            "--cp_degree: this model does not pass its keyword arguments to attention. Use --dp_shards instead."
        )
    how = scoring_of(query, **scoring)
    if autocasts(query):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    kernel = None
    if documents.bounds is not None:
        kernel = documents.attention.kernel(query, key, value, how, of_blocks=True)
    with without_autocast(query):
        return RingAttention.apply(query, key, value, how.sinks_H, documents, how, kernel), None


def register() -> None:
    """Registers NAME for `model.set_attn_implementation`, without a mask function: pieces imply the mask."""
    AttentionInterface.register(NAME, context_attention)
