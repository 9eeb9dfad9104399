"""Degrees as data: coordinates, groups, and what flags mean."""

from itertools import product

import pytest

from finetune.config import DEFAULTS
from finetune.parts.parallel_dims import ParallelDims, dims_of, stage_layers


def test_a_rank_has_one_place_and_its_groups_hold_it():
    dims = ParallelDims(dp_replicate=2, dp_shard=3, cp=2, tp=2, pp=2)
    assert dims.world_size == 48 and dims.data_ranks == 6
    for rank in range(48):
        assert dims.rank_at(dims.coordinates(rank)) == rank
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            group = dims.group(rank, axis)
            assert rank in group and len(group) == getattr(dims, axis)
            assert all(dims.group(other, axis) == group for other in group)
    assert dims.group(0, "tp") == [0, 1]  # those that exchange most are neighbours
    assert sorted({dims.data_rank(r) for r in range(48)}) == list(range(6))


@pytest.mark.promise("FT_03", "FT_04")
@pytest.mark.parametrize(
    ("world", "local", "flags", "degrees"),
    [
        (4, 4, {}, (1, 4)),
        (4, 4, dict(dp_degree=4), (4, 1)),
        (4, 4, dict(dp_degree=2), (2, 2)),
        (8, 4, dict(sharding_strategy="full_shard"), (1, 8)),
        (8, 4, dict(sharding_strategy="shard_grad_op"), (1, 8)),
        (8, 4, dict(sharding_strategy="ddp"), (8, 1)),
        (8, 4, dict(sharding_strategy="hybrid_full_shard"), (2, 4)),
        (8, 8, dict(sharding_strategy="hybrid_shard_grad_op", dp_degree=4), (4, 2)),
    ],
)
def test_flags_and_older_words_mean_degrees(world, local, flags, degrees):
    dims = dims_of({**DEFAULTS, **flags}, world, local)
    assert (dims.dp_replicate, dims.dp_shard) == degrees


@pytest.mark.parametrize("head", [0.0, 0.4, 2.5, 9.0])
@pytest.mark.parametrize(("layers", "stages"), [(2, 2), (5, 2), (7, 3), (8, 4), (9, 4), (6, 6)])
def test_stages_are_runs_of_all_layers_and_none_is_slower_than_it_must_be(layers, stages, head):
    found = stage_layers(layers, stages, head)
    assert [i for run in found for i in run] == list(range(layers)) and all(found) and len(found) == stages
    slowest = max(*map(len, found[:-1]), len(found[-1]) + head)
    ends = [cut for cut in product(range(1, layers + 1), repeat=stages) if sum(cut) == layers]
    assert slowest == min(max(*cut[:-1], cut[-1] + head) for cut in ends)
