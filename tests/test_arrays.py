"""Arrays beside tokens are cut, packed, padded, shared and left empty by the rule of their first axis alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from finetune.arrays import Named, Per, joined
from finetune.data.collate import microbatches
from finetune.data.run_data import Data
from finetune.engine import IGNORE_INDEX
from finetune.torch_engine.forward import ModelForward
from tests.support import cases, tiny

LENGTHS = (4, 6, 3, 5)
IMAGES = np.array([1, 0, 2, 1])
TOKENS = sum(LENGTHS)
ROWS = tiny.dataset(lengths=LENGTHS)


def with_arrays(**facts):
    arrays = {
        "label": Named(np.arange(4) * 10, Per.DOCUMENT),
        "token": Named(ROWS.tokens.astype(np.int64), Per.TARGET),
        "place": Named(np.stack([np.arange(TOKENS)] * 3, 1), Per.POSITION, is_input=True),
        "pixels": Named(np.arange(4)[:, None] * np.ones((1, 2)), Per.IMAGE, IMAGES, is_input=True),
    }
    return replace(ROWS, arrays=arrays, **facts)


def batch_of(rows, layout: str, dataset=None):
    return microbatches(dataset or with_arrays(), rows, layout, 8, 1000, 0)[0]


@pytest.mark.parametrize("layout", ["padding_free", "padded"])
def test_arrays_follow_their_documents_into_a_batch(layout):
    batch = batch_of([2, 0, 3], layout)
    order = np.array(batch.rows)
    assert batch.arrays["label"].values.tolist() == (order * 10).tolist()
    is_target = batch.labels_BS != IGNORE_INDEX
    np.testing.assert_array_equal(batch.arrays["token"].values[is_target], batch.labels_BS[is_target])
    real = batch.document_ids_BS >= 0
    assert ROWS.tokens[batch.arrays["place"].values[real][:, 2]].tolist() == batch.input_ids_BS[real].tolist()
    assert batch.arrays["pixels"].counts_D.tolist() == IMAGES[order].tolist()
    first = np.cumsum([0, *IMAGES])
    assert batch.arrays["pixels"].values[:, 0].tolist() == [i for r in order for i in range(first[r], first[r + 1])]


def test_an_array_of_rows_is_one_for_both_documents_of_a_pair():
    pairs = replace(ROWS, documents_per_row=2, arrays={"margin": Named(np.array([7.0, 8.0]), Per.ROW)})
    assert batch_of([1], "padding_free", pairs).arrays["margin"].values.tolist() == [8.0]
    assert pairs.select([1]).arrays["margin"].values.tolist() == [8.0]


def test_datasets_are_joined_and_selected_with_their_arrays():
    one = with_arrays()
    both = joined([one.arrays, one.arrays])
    assert both["label"].values.tolist() == [0, 10, 20, 30] * 2 and both["pixels"].counts_D.tolist() == [1, 0, 2, 1] * 2
    kept = one.select([3, 0])
    assert kept.arrays["token"].values.tolist() == kept.tokens.tolist()
    assert kept.arrays["pixels"].values[:, 0].tolist() == [3, 0]


def test_what_is_read_beside_tokens_is_part_of_a_datasets_digest_and_what_is_computed_is_not():
    one = with_arrays()
    computed = Named(np.zeros(4), Per.DOCUMENT, is_data=False)
    assert replace(one, arrays={**one.arrays, "computed": computed}).digest() == one.digest()
    other = {**one.arrays, "label": Named(np.arange(4), Per.DOCUMENT)}
    assert replace(one, arrays=other).digest() != one.digest() != ROWS.digest()


def test_an_empty_microbatch_has_the_arrays_of_the_others():
    forward: ModelForward = cases.build(cases.CASES["lora"]).forward
    arrays = batch_of([0, 1], "padding_free").arrays
    empty = forward.empty_batch({name: array.empty() for name, array in arrays.items()})
    shapes = {name: array.values.shape for name, array in empty.arrays.items()}
    assert shapes == {"label": (1,), "token": (1, 2), "place": (1, 2, 3), "pixels": (0, 2)}


def test_a_model_gets_its_arrays_and_positions_of_three_dimensions():
    forward = cases.build(cases.CASES["lora"]).forward
    place = Named(np.stack([np.arange(TOKENS)] * 3, 1), Per.POSITION, is_input=True)
    one = replace(ROWS, arrays={"position_ids": place, "pixels": with_arrays().arrays["pixels"]})
    inputs, _ = forward.inputs(batch_of([0, 2], "padding_free", one))
    assert inputs["position_ids"].shape == (3, 1, 7) and inputs["pixels"].shape == (3, 2)
    given, _ = forward.inputs(batch_of([0, 2], "padding_free", ROWS))
    assert torch.equal(given["position_ids"][0], torch.tensor([*range(4), *range(3)]))


def test_the_rows_of_a_run_keep_their_arrays_in_its_microbatches():
    data = Data(None, set(), with_arrays(), None, [], None, None)
    plan = cases.build(cases.CASES["lora"]).plan
    plan = plan.with_settings(batch_layout="padding_free", microbatch_tokens=8)
    found = data.microbatches(data.train, [0, 1, 2, 3], slice(None), plan, 0, 4)
    labels = {row: int(v) for b in found for row, v in zip(b.rows, b.arrays["label"].values, strict=True)}
    assert labels == {0: 0, 1: 10, 2: 20, 3: 30} and len(found) > 1
