"""Evaluation during a run."""

import pytest

from finetune.errors import NonFiniteError
from tests.support.runs import read_events


def test_an_evaluation_that_is_not_finite_ends_the_run(plain_run, rows_file, tmp_path):
    with pytest.raises(NonFiniteError):
        plain_run(lr=1e30, validation_dataset=str(rows_file), max_steps=1, apply_gradient_clipping=False)
    assert read_events(tmp_path / "out", "end")[-1]["exit_code"] == 65
