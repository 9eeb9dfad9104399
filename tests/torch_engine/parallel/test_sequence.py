"""Sequence parallelism beside tensor parallelism: hidden states split between the blocks of layers."""

import pytest

from tests.support import cases, ranks

SPLIT_LAYOUTS = [n for n, dims in cases.DENSE_LAYOUTS.items() if dims.tp > 1]


@pytest.mark.parametrize(
    ("size", "kinds", "models"),
    [
        (2, ["full split"], ["llama"]),
        pytest.param(2, list(cases.SPLIT), ["llama", "gemma3", "qwen3", "phi3", "cohere"], marks=pytest.mark.slow),
        pytest.param(4, ["full split", "nf4 recomputed split"], ["llama_uneven_tied"], marks=pytest.mark.slow),
    ],
)
def test_ranks_with_split_hidden_states_train_as_one_process_does(size, kinds, models, tmp_path):
    layouts = [n for n in SPLIT_LAYOUTS if cases.LAYOUTS[n].world_size == size]
    layouts = [n for n in layouts if "PP" not in n or "phi3" not in models]
    wanted = [(n, kind, model) for n in layouts for kind in kinds for model in models]
    for figures in ranks.run(size, cases.matrix, tmp_path, wanted=wanted)[0]:
        cases.check(figures, cases.LAYOUTS[figures["layout"]])
