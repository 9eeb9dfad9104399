"""Ranks whose weights stay sharded sample the answers of one process, whichever rank has a prompt."""

import numpy as np
import pytest

from tests.support import cases, ranks, sampling_cases


@pytest.mark.parametrize(
    "cell",
    [
        ("FSDP2 2", "lora", "llama", 4),
        pytest.param(("FSDP2 2", "nf4", "llama", 1000), marks=pytest.mark.slow),
        pytest.param(("FSDP2 2", "lora", "gemma3", 4), marks=pytest.mark.slow),
        pytest.param(("FSDP2 2", "full", "qwen3", 1), marks=pytest.mark.slow),
        pytest.param(("FSDP2 2", "lora", "llama", 0), marks=pytest.mark.slow),
    ],
)
def test_ranks_that_keep_their_shards_sample_as_one_process_does(cell, tmp_path):
    size = cases.LAYOUTS[cell[0]].world_size
    found = ranks.run(size, sampling_cases.over_ranks, tmp_path, timeout_s=300, wanted=[cell])
    alone = found[0][0]["alone"]
    assert len({tuple(ids) for part in alone for ids, *_ in part}) > 3
    for i, rank in enumerate(found):
        assert rank[0]["kept"]
        same(rank[0]["found"], alone[i])
        same(rank[0]["few"], alone[0][:3] if i == 0 else [])


def same(found: list, wanted: list) -> None:
    assert [(ids, ended) for ids, _, ended in found] == [(ids, ended) for ids, _, ended in wanted]
    for (_, mine, _), (_, theirs, _) in zip(found, wanted, strict=True):
        assert np.allclose(mine, theirs, atol=1e-5)
