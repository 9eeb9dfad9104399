"""parts.json of a sharded checkpoint, edited: every program that reads it refuses it in one line."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import generate
import score
from finetune import safetensors_io
from finetune.errors import PlanError
from finetune.safetensors_io import INDEX, TensorShard

MODEL, NAME = "model.safetensors", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sharded(tiny_model, tmp_path_factory):
    """The tiny model as two ranks save it: matrices cut into rows, the rest on the first rank."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("sharded") / "step")
    tensors, written = load_file(folder / MODEL), {}
    (folder / MODEL).unlink()
    for rank in (0, 1):
        shards = []
        for name, t in tensors.items():
            half = len(t) // 2
            rows = slice(0, half) if rank == 0 else slice(half, len(t))
            if t.ndim == 1:
                rows = slice(0, len(t) if rank == 0 else 0)
            part = np.ascontiguousarray(t[rows])
            at = (rows.start, *(0,) * (t.ndim - 1))
            shards.append(TensorShard(name, "F32", part.shape, lambda part=part: part, at, t.shape))
        name = safetensors_io.file_of_rank(MODEL, rank)
        written[name] = safetensors_io.write_file(folder / name, shards)
    (folder / INDEX).write_text(json.dumps(safetensors_io.index_of(folder, written)))
    return folder


def run(program, folder, rows_file):
    argv = ["--prompt", "a", "--max-new-tokens", "1"] if program is generate else ["--dataset", str(rows_file)]
    return program.main(["--checkpoint", str(folder), "--device", "cpu", *argv])


@pytest.mark.parametrize("program", [generate, score])
def test_shards_that_are_complete_are_read(program, sharded, rows_file):
    assert run(program, sharded, rows_file) == 0


def part(index, i=1):
    return index["tensors"][MODEL][NAME]["parts"][i]


def entry(index):
    return index["tensors"][MODEL][NAME]


def swap(index):
    one, two = part(index, 0), part(index, 1)
    one["offset"], two["offset"] = two["offset"], one["offset"]


FIRST, SECOND = (safetensors_io.file_of_rank(MODEL, rank) for rank in (0, 1))
EDITS = {
    "a shard left out": (lambda i: entry(i)["parts"].pop(), "its shards give"),
    "swapped": (lambda i: swap(i), "it is F32"),
    "every shard left out": (lambda i: entry(i)["parts"].clear(), "its shards give 0 numbers"),
    "a shard twice": (lambda i: entry(i)["parts"].append(part(i)), "its shards give"),
    "all at 0": (lambda i: part(i).update(offset=[0, 0]), "but not each once"),
    "a negative offset": (lambda i: part(i).update(offset=[-1, 0]), "but not each once"),
    "an offset past the end": (lambda i: part(i).update(offset=[10**30, 0]), "but not each once"),
    "one overlaps by a row": (lambda i: part(i).update(offset=[part(i)["offset"][0] - 1, 0]), "but not each once"),
    "an axis too many": (lambda i: part(i).update(offset=[0, 0, 0]), "is not one of"),
    "a shape without axes": (lambda i: entry(i).update(shape=[]), "is not one of"),
    "a shard of another shape": (lambda i: part(i).update(shape=[1, 1]), "its shards give"),
    "full shape grown": (lambda i: entry(i)["shape"].__setitem__(0, 10**6), "its shards give"),
    "another dtype": (lambda i: entry(i).update(dtype="F16"), "it is F32"),
    "another file": (lambda i: part(i).update(file=FIRST, shape=[1, 64]), "its shards give"),
    "both from one file": (lambda i: part(i).update(file="gone.safetensors"), "which is missing"),
    "a path": (lambda i: part(i).update(file=f"../outside/{SECOND}"), "which is not a plain file name"),
    "an absolute path": (lambda i: part(i).update(file=f"/tmp/{SECOND}"), "which is not a plain file name"),
    "a link": (lambda i: part(i).update(file="linked.safetensors"), "outside the folder"),
    "offset is text": (lambda i: part(i).update(offset="0"), "must be a list"),
    "offset is a fraction": (lambda i: part(i).update(offset=[0.5, 0]), "must be an integer"),
    "shape is null": (lambda i: entry(i).update(shape=None), "must be a list"),
    "parts are an object": (lambda i: entry(i).update(parts={}), "must be a list"),
    "tensors are a list": (lambda i: i.update(tensors=[]), "must be an object"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("program", [generate, score])
def test_an_edited_index_is_refused_with_file_and_tensor(program, edit, sharded, rows_file, tmp_path):
    change, fact = EDITS[edit]
    folder, beside = shutil.copytree(sharded, tmp_path / "step"), tmp_path / "outside"
    beside.mkdir()
    shutil.copy(folder / SECOND, beside)
    os.symlink(beside / SECOND, folder / "linked.safetensors")
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(PlanError) as error:
        run(program, folder, rows_file)
    text = str(error.value)
    assert fact in text and INDEX in text and "\n" not in text, text
    assert NAME in text or "is not" in text or "links to" in text or "is missing" in text or "must be" in text


def test_a_grid_over_two_axes_is_complete_and_moved_shards_are_not():
    whole = {"dtype": "F32", "shape": [3, 5]}
    cuts = [((0, 0), (2, 3)), ((0, 3), (2, 2)), ((2, 0), (1, 3)), ((2, 3), (1, 2)), ((3, 5), (0, 0))]
    parts = [{"file": "a", "offset": list(o), "shape": list(s)} for o, s in cuts]
    safetensors_io._check_tiling(whole | {"parts": parts}, "")
    swap(index := {"tensors": {MODEL: {NAME: whole | {"parts": [dict(p) for p in parts]}}}})
    with pytest.raises(PlanError, match="not each once"):
        safetensors_io._check_tiling(entry(index), "")


def test_a_shard_whose_file_holds_another_tensor_is_refused(sharded, rows_file, tmp_path):
    folder = shutil.copytree(sharded, tmp_path / "step")
    tensors, metadata = load_file(folder / SECOND), safetensors_io.read_header(folder / SECOND)["__metadata__"]
    tensors["other"] = tensors.pop(NAME)
    save_file(tensors, folder / SECOND, metadata)
    with pytest.raises(PlanError, match=f"{SECOND}.*for {NAME} F32 .*: it is not there"):
        run(generate, folder, rows_file)
