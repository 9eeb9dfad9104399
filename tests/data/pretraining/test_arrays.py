"""finetune/data/pretraining/arrays.py: what is replaced, and what a damaged data set says."""

import json

import numpy as np
import pytest

from finetune.data.pretraining.arrays import new_dataset, read_split, write_rows
from finetune.data.pretraining.data import load_pretrain_data
from finetune.errors import PlanError
from finetune.recipe import of_flat


def write(folder, symmetries="sudoku"):
    rows = np.full((3, 16), 2, np.int32)
    write_rows(folder / "train", rows, rows, 0, 6, symmetries=symmetries)
    return folder


@pytest.mark.parametrize("extra", ["model.safetensors", "notes.txt", "checkpoints/step_1/x"])
def test_only_a_folder_that_is_a_data_set_and_nothing_else_is_replaced(tmp_path, extra):
    file = tmp_path / "mine" / extra
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    (tmp_path / "mine/config.json").write_text("{}")
    for is_dataset in (False, True):
        if is_dataset:
            write(tmp_path / "mine")
        with pytest.raises(PlanError, match="is not a data set"), new_dataset(tmp_path / "mine"):
            pass
        assert file.read_text() == "mine"


def test_a_model_folder_with_the_names_of_a_data_set_is_not_replaced(tmp_path):
    (tmp_path / "mine/tokenizer").mkdir(parents=True)
    (tmp_path / "mine/config.json").write_text("{}")
    with pytest.raises(PlanError, match="no train/dataset.json"), new_dataset(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine/config.json").is_file()


def test_a_data_set_and_an_empty_folder_are_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    for count in (1, 2):
        with new_dataset(tmp_path / "mine") as beside:
            write(beside)
            (beside / "config.json").write_text(str(count))
        assert (tmp_path / "mine/config.json").read_text() == str(count)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"sets": []}, "sets is"),
        ({"sets": ["../all"]}, "sets is"),
        ({"sets": [""]}, "sets is"),
        ({"pad_id": 6}, "pad_id is 6; the vocabulary is 0 to 5"),
        ({"pad_id": -1}, "pad_id is -1"),
        ({"seq_len": 17}, "17 cells are not its square"),
        ({"symmetries": "cube"}, "symmetries is 'cube'"),
    ],
)
def test_a_wrong_dataset_json_is_one_line(tmp_path, change, said):
    file = write(tmp_path) / "train/dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(PlanError, match=said):
        read_split(str(tmp_path), "train")


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("labels", -7, "has label -7; only -100 is ignored"),
        ("puzzle_identifiers", 5, "has puzzle identifier 5; they are 0 to 0"),
        ("puzzle_identifiers", -1, "has puzzle identifier -1"),
    ],
)
def test_a_number_out_of_range_is_one_line(tmp_path, name, value, said):
    file = write(tmp_path) / f"train/all__{name}.npy"
    array = np.load(file)
    array.flat[0] = value
    np.save(file, array)
    with pytest.raises(PlanError, match=said):
        read_split(str(tmp_path), "train")


def test_symmetries_need_the_whole_puzzle(tmp_path):
    base = {"data_paths": (str(write(tmp_path)),), "dataset_type": "puzzle", "arch.causal": False, "arch.seq_len": 9}
    with pytest.raises(PlanError, match=r"arch.seq_len=9: the puzzles have 16 cells"):
        load_pretrain_data(of_flat(base), 1)
    assert load_pretrain_data(of_flat(base | {"symmetries": False}), 1).train.seq_len == 9


def test_mazes_of_two_sizes_do_not_share_symmetries(tmp_path):
    for side in (5, 7):
        rows = np.full((2, side * side), 2, np.int32)
        write_rows(tmp_path / str(side) / "train", rows, rows, 0, 6, symmetries="maze")
    paths = (str(tmp_path / "5"), str(tmp_path / "7"))
    with pytest.raises(PlanError, match="do not share symmetries"):
        load_pretrain_data(of_flat({"data_paths": paths, "dataset_type": "puzzle", "arch.causal": False}), 1)
