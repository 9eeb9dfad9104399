"""A checkpoint is resumed by any number of ranks over any degrees."""

import numpy as np
import pytest

from tests.support.cases import LOSS
from tests.support.commands import command, finish
from tests.support.runs import assert_same_moments, losses


@pytest.mark.slow
def test_a_run_resumes_over_other_degrees(base, alone, tmp_path):
    """Each leg resumes the last one's checkpoint over other ranks: the losses of one process."""
    legs = ({}, dict(tp_degree=2), dict(pp_degree=2), dict(cp_degree=2), dict(tp_degree=2, dp_shards=2), {})
    for i, degrees in enumerate(legs):
        world = int(np.prod(list(degrees.values()) or [1]))
        batch = 4 // degrees.get("dp_shards", 1)
        flags = f"--batch_size {batch} --world_size {world} --max_steps {2 * (i + 1)} --lr_scheduler constant"
        resume = "--resume auto" if i else ""
        code, _, err = finish(command(base, degrees, flags, resume, output_dir=tmp_path / "out"))
        assert code == 0, err
    flags = "--batch_size 4 --lr_scheduler constant --max_steps 12"
    code, _, err = finish(command(base, flags, output_dir=tmp_path / "one"))
    assert code == 0, err
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "one"), rel=LOSS)
    assert_same_moments(tmp_path / "one", tmp_path / "out")
