"""The order of rows over steps and epochs."""

import numpy as np
import pytest

from finetune.data.sampler import epoch_order, split_validation, step_rows, total_steps
from finetune.errors import PlanError
from finetune.parts.train_state import Cursor
from tests.support.plans import plan_of


@pytest.mark.parametrize(("num_rows", "rows_per_step"), [(40, 8), (41, 8), (3, 8), (1, 1), (7, 7)])
def test_an_epoch_visits_each_row_once_and_a_resumed_cursor_continues_identically(num_rows, rows_per_step):
    steps_an_epoch = total_steps(num_rows, rows_per_step, 1, -1)
    cursor, seen, cursors = Cursor(), [], []
    for _ in range(3 * steps_an_epoch):
        cursors.append(cursor)
        rows, cursor = step_rows(num_rows, rows_per_step, 42, cursor)
        seen.append(rows.tolist())
    assert cursor == Cursor(3, 0)
    for epoch in range(3):
        part = seen[epoch * steps_an_epoch : (epoch + 1) * steps_an_epoch]
        assert sorted(sum(part, [])) == list(range(num_rows))
    for i, resumed in enumerate(cursors):
        assert step_rows(num_rows, rows_per_step, 42, Cursor(resumed.epoch, resumed.index))[0].tolist() == seen[i]


def test_order_depends_on_seed_and_epoch_only():
    # as any other process and day has it
    assert epoch_order(10, 1, 0).tolist() == [8, 4, 7, 0, 1, 2, 5, 9, 6, 3]
    orders = {tuple(epoch_order(100, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_total_steps():
    assert total_steps(41, 8, 2, -1) == 12
    assert total_steps(41, 8, 2, 5) == 5


def test_rows_that_are_the_last_of_their_kind_are_held_out_where_there_are_no_others():
    for number in range(2, 9):
        for fraction in (0.1, 0.5, 0.9):
            kinds = np.arange(number) // 2
            train, held_out = split_validation([str(i) for i in range(number)], fraction, 3, kinds)
            assert len(train) and len(held_out) and len(train) + len(held_out) == number
    train, held_out = split_validation(["a"] * 3 + ["b"] * 3, 0.5, 3, np.array([0] * 3 + [1] * 3))
    assert len(train) == len(held_out) == 3


def test_a_split_leaves_rows_of_each_weighted_dataset():
    parts = np.array([0, 1, 1] + [2] * 20)
    sources = [f"{part}:{i}" for i, part in enumerate(parts)]
    for seed in range(40):
        train, held_out = split_validation(sources, 0.3, seed, parts)
        assert set(parts[train]) == {0, 1, 2} and len(train) + len(held_out) == len(parts) and len(held_out) == 7
    assert any(0 not in parts[split_validation(sources, 0.3, seed)[0]] for seed in range(40))  # where none has a weight


def test_split_validation_partitions_the_rows():
    for num_rows, fraction, expected in ((100, 0.1, 10), (10, 0.01, 1), (3, 0.99, 2)):
        sources = [f"rows:{row}" for row in range(num_rows)]
        train, validation = split_validation(sources, fraction, 7)
        assert len(validation) == expected and sorted([*train, *validation]) == list(range(num_rows))
        assert (split_validation(sources, fraction, 7)[1] == validation).all()
    with pytest.raises(PlanError, match="^--validation_split 0.5: needs at least 2 rows, the data has 1."):
        split_validation(["rows:0"], 0.5, 7)


@pytest.mark.parametrize("sizes", [(4,) * 20, (1, 2, 3, 4, 5, 6, 7, 8), (9, 1), (1, 9)])
def test_what_one_row_made_is_held_out_together(sizes):
    """Answers of a conversation, windows of a text: one holds what another is asked."""
    sources = [f"rows:{i}" for i, size in enumerate(sizes) for _ in range(size)]
    for seed in range(5):
        train, validation = split_validation(sources, 0.2, seed)
        held = {sources[row] for row in validation}
        assert not held & {sources[row] for row in train} and len(train) + len(validation) == len(sources)
        assert len(validation) <= max(round(0.2 * len(sources)), min(sizes)) and len(validation)


@pytest.mark.parametrize("sizes", [(10,), (31, 31), (100, 100, 5), (5, 5)])
def test_of_long_texts_the_last_windows_are_held_out_and_the_fraction_is_what_was_asked(sizes):
    sources = [f"text {i}" for i, size in enumerate(sizes) for _ in range(size)]
    for seed in range(5):
        train, validation = split_validation(sources, 0.2, seed)
        assert len(validation) == round(0.2 * len(sources)) and len(train) + len(validation) == len(sources)
        both = {sources[row] for row in train} & {sources[row] for row in validation}
        assert len(both) == 1  # of which no row before is held out
        assert all(
            max(r for r in train if sources[r] == n) < min(r for r in validation if sources[r] == n) for n in both
        )


def test_data_seed_orders_rows_and_splits_and_seed_the_rest():
    plain, other = plan_of(seed=1), plan_of(seed=1, data_seed=2)
    assert plain.data.seed == 1 and other.data.seed == 2
    assert other.steps.seed == other.trains.init.seed == 1
    assert plan_of(seed=2).data == other.data
