"""Positions and records of expanded models."""

import pytest

from finetune.errors import PlanError
from finetune.model_files import llama_pro as llama_pro_files


def test_positions_are_the_ends_of_equal_groups():
    assert llama_pro_files.new_positions(32, 8) == [3, 7, 11, 15, 19, 23, 27, 31]
    assert llama_pro_files.new_positions(32, 3) == [9, 20, 31]
    assert llama_pro_files.order_of(4, [1, 3]) == ([0, 1, 1, 2, 3, 3], [2, 5])


def test_an_older_scripts_folder_is_read_by_its_name(tmp_path):
    folder = tmp_path / "blk_exp-32-36"
    folder.mkdir()
    assert llama_pro_files.read_record(folder, "x")["new_layers"] == [8, 17, 26, 35]
    with pytest.raises(PlanError, match="not an expanded model"):
        llama_pro_files.read_record(tmp_path, "--llama_pro_path x")
