"""Ring attention over real ranks equals attention of the full row in one process, and holds a rank's share of it."""

import pytest

from tests.support import ranks, ring_cases

# fp32 sums of some hundred terms, in another order than the reference's in fp64.
ROUNDING = 3e-6


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_over_ranks_is_that_of_the_full_row(size, tmp_path):
    """Outputs and the gradients of queries, keys, values and sinks: documents, windows, softcap, sinks and GQA."""
    for found in ranks.run(size, ring_cases.ring_over, tmp_path):
        assert set(found) == set(ring_cases.VARIANTS)
        assert max(found.values()) <= ROUNDING, found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_kernel_of_blocks_gets_the_right_bounds_and_windows(size, tmp_path):
    for found in ranks.run(size, ring_cases.ring_over, tmp_path, by_kernel=True):
        assert set(found) == {"plain", "window of 50", "window of 1"}
        assert max(found.values()) <= ROUNDING, found


@pytest.mark.slow
def test_values_may_have_another_size_than_keys(tmp_path):
    for found in ranks.run(2, ring_cases.ring_over, tmp_path, value_size=5):
        assert max(found.values()) <= ROUNDING, found


@pytest.mark.slow
def test_backward_draws_the_masks_of_dropout_again(tmp_path):
    for found in ranks.run(2, ring_cases.dropout_over, tmp_path):
        assert found["values"] <= 1e-5 and found["queries"] <= 1e-2, found
        assert found["drops"] > 0.1, found


@pytest.mark.slow
def test_what_attention_holds_falls_as_one_over_the_ranks(tmp_path):
    """What is kept for backward exactly; of the peak all but tiles, which are of one size."""
    length, found = 8192, {}
    for size in (1, 2, 4):
        found[size] = ranks.run(size, ring_cases.bytes_of_attention, tmp_path / str(size), length=length)[0]
    for size in (2, 4):
        assert found[size]["kept"] <= 1.02 * found[1]["kept"] / size, found
    assert found[4]["peak"] <= 0.75 * found[2]["peak"], found
