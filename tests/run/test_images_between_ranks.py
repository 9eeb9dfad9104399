"""Two ranks of which one shows images and the other does not in the same forward."""

import numpy as np
import pytest

from tests.support import vision
from tests.support.cells import but_slow
from tests.support.commands import command, finish
from tests.support.runs import PLAIN, losses, read_events

SHOWN = (1, 0) * 8


@pytest.mark.parametrize("depth", but_slow([2, 3], [2]))  # of the tower; of the language model 2
@pytest.mark.parametrize(
    "changes",
    but_slow(
        [
            dict(train_vision="full"),
            dict(train_vision="lora"),
            dict(train_type="full", lora_rank=None, train_vision="full", num_layers=1),
            dict(),
        ],
        [],
    ),
)
def test_ranks_that_show_images_and_others_take_the_steps_of_one(tmp_path, depth, changes):
    base = vision.save_model("qwen2_5_vl", tmp_path / "model", tower=dict(depth=depth))
    rows = vision.write_chats(tmp_path / "rows", SHOWN)
    flags = PLAIN | dict(model_name=str(base), dataset=str(rows), context_length=256, max_steps=6, lora_dropout=0.0)
    flags = {name: value for name, value in (flags | changes).items() if value is not None}
    one = flags | dict(output_dir=str(tmp_path / "one"), batch_size=2)
    two = flags | dict(output_dir=str(tmp_path / "two"), batch_size=1, world_size=2, dp_shards=2)
    for some in (one, two):
        done = finish(command(some))
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)
    norms = [[e["grad_norm"] for e in read_events(tmp_path / name, "step")] for name in ("two", "one")]
    np.testing.assert_allclose(*norms, rtol=1e-4)
