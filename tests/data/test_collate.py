"""Rows as microbatches: labels, padding, sizes."""

import numpy as np
import pytest

from finetune.data.collate import largest_microbatch, microbatches
from finetune.data.sampler import epoch_order, first_steps
from finetune.data.tokens.tokenize import tokenize
from finetune.engine import IGNORE_INDEX
from tests.support import tiny
from tests.support.engines import batches


def test_labels_are_the_next_token_and_never_cross_a_document():
    batch = batches()[0]
    at = batch.labels_BS[0] != IGNORE_INDEX
    following = np.r_[batch.input_ids_BS[0, 1:], -1]
    np.testing.assert_array_equal(batch.labels_BS[0][at], following[at])
    assert (batch.document_ids_BS[0][:-1][at[:-1]] == batch.document_ids_BS[0][1:][at[:-1]]).all()


@pytest.mark.parametrize("layout", ["padding_free", "padded"])
def test_the_largest_microbatch_is_the_largest_that_the_loop_will_make(layout):
    rows = tiny.dataset(tuple(range(3, 60)))
    steps = list(first_steps(len(rows), 10, 7, 12))
    sizes = [b.input_ids_BS.size for chosen in steps for b in microbatches(rows, chosen, layout, 5, 120, 0)]
    found = largest_microbatch(rows, steps, layout, 5, 120, 0)
    assert found.input_ids_BS.size == max(sizes)


def test_padding_is_not_a_target_although_it_is_the_eos(raw, plain_tokenizer):
    assert plain_tokenizer.pad_token_id == plain_tokenizer.eos_token_id
    dataset = tokenize(raw, "auto", plain_tokenizer, 512)
    for batch in microbatches(dataset, range(40), "padded", 8, 400, plain_tokenizer.pad_token_id):
        padding = batch.document_ids_BS < 0
        assert (batch.labels_BS[padding] == IGNORE_INDEX).all() and (batch.position_ids_BS[padding] == 0).all()
        assert (batch.labels_BS == plain_tokenizer.eos_token_id).sum() == len(batch.rows)


def pairs(batches):
    """Every (row, position, id, label) of a list of batches."""
    found = []
    for batch in batches:
        for b, s in zip(*np.nonzero(batch.document_ids_BS >= 0), strict=True):
            row = batch.rows[batch.document_ids_BS[b, s]]
            found.append(
                (row, int(batch.position_ids_BS[b, s]), int(batch.input_ids_BS[b, s]), int(batch.labels_BS[b, s]))
            )
    return sorted(found)


@pytest.mark.parametrize("microbatch_tokens", [1, 30, 100, 10**6])
def test_flat_padded_and_alone_hold_the_same_pairs(raw, plain_tokenizer, microbatch_tokens):
    dataset = tokenize(raw, "auto", plain_tokenizer, 64)
    rows = epoch_order(40, 1, 0)[:21]
    alone = [batch for row in rows for batch in microbatches(dataset, [row], "padding_free", 1, 10**6, 0)]
    expected = pairs(alone)
    assert sum(label != IGNORE_INDEX for *_, label in expected) == dataset.select(rows).counts["targets"]
    for layout in ("padding_free", "padded"):
        batches = microbatches(dataset, rows, layout, 8, microbatch_tokens, 2)
        assert pairs(batches) == expected
        assert sum(batch.num_targets for batch in batches) == dataset.select(rows).counts["targets"]
        assert sorted(row for batch in batches for row in batch.rows) == sorted(rows)
        for batch in batches:
            arrays = (batch.input_ids_BS, batch.labels_BS, batch.position_ids_BS, batch.document_ids_BS)
            assert {a.dtype for a in arrays} == {np.dtype(np.int64)} and len({a.shape for a in arrays}) == 1
            assert batch.input_ids_BS.size <= microbatch_tokens or len(batch.rows) == 1
            assert len(batch.rows) <= 8 and (layout == "padded" or len(batch.input_ids_BS) == 1)


def test_labels_are_the_next_token_of_the_same_document(raw, plain_tokenizer):
    dataset = tokenize(raw, "auto", plain_tokenizer, 64)
    (batch,) = microbatches(dataset, [3, 4], "padding_free", 8, 10**6, 0)
    ids, labels, positions = batch.input_ids_BS[0], batch.labels_BS[0], batch.position_ids_BS[0]
    starts = np.flatnonzero(positions == 0)
    assert len(starts) == 2 and (labels[np.r_[starts[1:] - 1, -1]] == IGNORE_INDEX).all()
    at = np.flatnonzero(labels != IGNORE_INDEX)
    assert (labels[at] == ids[at + 1]).all()
