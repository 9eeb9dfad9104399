"""recursive/data/arrays.py: what is replaced, and what a damaged data set says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from finetune.errors import PlanError
from finetune.system.owned_files import LIST
from recursive.data.arrays import check_output, new_dataset, read_split, write_rows
from recursive.data.data import load_pretrain_data
from recursive.recipe import of_flat
from tests.support.commands import ROOT


def write(folder, symmetries="sudoku"):
    rows = np.full((3, 16), 2, np.int32)
    write_rows(folder / "train", rows, rows, 0, 6, symmetries=symmetries)
    return folder


def fill(beside, name):
    write(beside)
    (beside / "config.json").write_text(json.dumps({"output_dir": name, "input_file": None, "seed": 0}))


def build(folder, name="new"):
    with new_dataset(folder) as beside:
        fill(beside, name)
    return folder


def text_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "extra", ["notes.txt", "train/notes.txt", "train/mine/x", "test/all__notes.npy", "tokenizer/a"]
)
@pytest.mark.parametrize("listed", [True, False], ids=["listed", "made before there were lists"])
def test_only_a_data_set_to_which_nobody_added_a_file_is_replaced(tmp_path, extra, listed):
    folder = build(tmp_path / "mine")
    if not listed:
        (folder / LIST).unlink()
    build(folder)
    if not listed:
        (folder / LIST).unlink()
    (folder / extra).parent.mkdir(parents=True, exist_ok=True)
    (folder / extra).write_text("mine")
    before = text_of(folder)
    with pytest.raises(PlanError, match=f"holds {extra}, which no builder wrote"):
        build(folder)
    assert text_of(folder) == before and [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_folder_with_the_names_of_a_data_set_is_not_replaced(tmp_path):
    write(tmp_path / "mine")
    (tmp_path / "mine/config.json").write_text("{}")
    with pytest.raises(PlanError, match="which no builder wrote"):
        build(tmp_path / "mine")
    assert (tmp_path / "mine/config.json").read_text() == "{}"


def test_what_was_added_while_it_was_built_is_not_lost(tmp_path):
    folder = build(tmp_path / "mine")
    with pytest.raises(PlanError, match="holds notes.txt"), new_dataset(folder) as beside:
        fill(beside, "newer")
        (folder / "notes.txt").write_text("mine")
    assert (folder / "notes.txt").read_text() == "mine" and "newer" not in (folder / "config.json").read_text()


def die_at(number, owner, name):
    """Ends this process at a call of owner.name."""
    real, calls = getattr(owner, name), iter(range(9))
    setattr(owner, name, lambda *a, **k: os._exit(9) if next(calls) == number else real(*a, **k))


@pytest.mark.parametrize("call", ["rename", "rmtree"])
def test_a_builder_killed_while_it_replaces_leaves_one_whole_data_set(tmp_path, call):
    """At each of its renames, and at the deletion of the old one."""
    mine = tmp_path / ".mine.new", tmp_path / ".mine.tmp-x", tmp_path / ".mine.replaced-12345678"
    for folder in mine:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    for number in range(3 if call == "rename" else 1):
        folder = build(tmp_path / "mine", "old")
        child = os.fork()
        if not child:
            die_at(number, *((Path, "rename") if call == "rename" else (shutil, "rmtree")))
            build(folder)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        check_output(folder)
        word = json.loads((folder / "config.json").read_text())["output_dir"]
        assert word == ("old" if call == "rename" and number < 2 else "new") and (ended == 9) == (number < 2)
        build(folder)
        assert {p.name for p in tmp_path.iterdir()} == {"mine", *(p.name for p in mine)}
    assert all((folder / "notes.txt").read_text() == "mine" for folder in mine)


@pytest.mark.parametrize("name", ["", ".", "./", "sub/..", "..", "file/x", "file", "link"])
def test_what_is_no_name_for_a_data_set_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("sub")
    with pytest.raises(PlanError, match=r"^--output-dir .*\. Give a"):
        build(Path(name))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "sub"]


def test_an_input_inside_the_folder_that_is_written_is_refused(tmp_path):
    folder = build(tmp_path / "mine")
    source = folder / "config.json"
    with pytest.raises(PlanError, match="holds the input .*config.json"):
        check_output(folder, str(source))


def test_a_data_set_and_an_empty_folder_are_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    for count in (1, 2):
        with new_dataset(tmp_path / "mine") as beside:
            fill(beside, str(count))
        assert json.loads((tmp_path / "mine/config.json").read_text())["output_dir"] == str(count)


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


def test_a_builder_on_a_disk_that_is_full_ends_with_a_line_and_leaves_nothing(tmp_path):
    """A limit of the size of files stands for it: writing fails in the middle, as there."""
    argv = f"x --output-dir {tmp_path / 'd'} --size 4 --count 200".split()
    limited = (
        f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); sys.argv = {argv}; "
    )
    code = limited + "runpy.run_module('dataset.build_puzzle_dataset', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 74 and len(done.stderr.splitlines()) == 1, done.stderr
    assert not list(tmp_path.iterdir())
