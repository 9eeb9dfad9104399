"""Blocks of attention: which parts are computed, and that parts add up to the attention of all keys."""

import pytest
import torch

from finetune.torch_engine.attention import blocks
from finetune.torch_engine.attention.blocks import Block, Gradients, Merged
from finetune.torch_engine.attention.per_document import Scoring
from finetune.torch_engine.parallel.context import Context, _pieces, rank_token_indices
from tests.support import ring_cases

TILE = 512
WINDOWS = (None, 1, 50, 700)


def seen_by(layout: Context, window: int | None) -> torch.Tensor:
    """[L, C * L]: number of tiles in which a query sees a key."""
    size = 2 * layout.chunk
    seen = torch.zeros(size, layout.num_ranks * size, dtype=torch.int)
    for source in range(layout.num_ranks):
        for block in layout.blocks(source, window):
            for tile in block.tiles(window, TILE):
                unseen = tile.unseen(window, "cpu")
                visible = torch.ones(tile.num_queries, tile.num_keys) if unseen is None else ~unseen
                assert visible.any(0).all() and visible.any(1).all()  # nothing is computed that nobody sees
                keys = slice(source * size + tile.keys.start, source * size + tile.keys.stop)
                seen[tile.queries, keys] += visible.int()
    return seen


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_pair_that_is_seen_is_computed_once_and_no_others(num_ranks, window):
    lengths = (*ring_cases.LENGTHS, 900, 2100)
    total = sum(lengths)
    total += -total % (2 * num_ranks)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()] + ([total] if total > sum(lengths) else [])
    documents = torch.repeat_interleave(torch.arange(len(starts) - 1), torch.tensor(starts).diff())
    order = torch.cat([torch.from_numpy(rank_token_indices(total, r, num_ranks)) for r in range(num_ranks)])
    for rank in range(num_ranks):
        mine = rank_token_indices(total, rank, num_ranks)
        pieces = _pieces(mine, len(mine) // 2, starts)
        layout = Context(pieces, len(mine) // 2, rank, num_ranks, None, torch.device("cpu"), None)
        at = torch.from_numpy(mine).unsqueeze(1)
        expected = (documents[at] == documents[order]) & (at >= order)
        if window is not None:
            expected &= at - order < window
        assert torch.equal(seen_by(layout, window), expected.int())


@pytest.mark.parametrize("window", [None, 300])
def test_tiles_add_up_to_the_attention_of_all_keys(window):
    heads, kv_heads, length, size = 4, 2, TILE + 188, 16
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, length, size, generator=generator)
    kv = torch.randn(kv_heads, length, 2 * size, generator=generator)
    grad = torch.randn(heads, length, size, generator=generator)
    how = Scoring(size**-0.5, 0.0, window, None, None)
    merged, block = Merged(q, size), Block(slice(0, length), slice(0, length), 0)
    for tile in block.tiles(window, TILE):
        blocks.add_tile(merged, q, kv, tile, how)
    to = Gradients(grad, merged.lse, (grad * merged.out).sum(2), torch.zeros_like(q))
    of_kv = torch.zeros_like(kv)
    for tile in block.tiles(window, TILE):
        blocks.add_tile_backward(to, q, kv, of_kv, tile, how)

    full_q, full_kv = q.double().requires_grad_(), kv.double().requires_grad_()
    k, v = (x.repeat_interleave(2, 0) for x in full_kv.split(size, 2))
    mask = block.unseen(window, "cpu")
    out = torch.softmax((full_q @ k.transpose(1, 2) * how.scaling).masked_fill(mask, float("-inf")), -1) @ v
    of_q, of_kv_full = torch.autograd.grad(out, (full_q, full_kv), grad.double())
    for one, full in ((merged.out, out), (to.of_queries_HLD, of_q), (of_kv, of_kv_full)):
        assert (one - full).abs().max() <= 2e-6 * full.abs().max()
