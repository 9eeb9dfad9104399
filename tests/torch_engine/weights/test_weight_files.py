"""Slices of tensors in weight files: the numbers of the full tensor, and no other bytes are read."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune.torch_engine.weights.files import WeightFiles

SPANS = [slice(None), slice(0, 2), slice(1, 4), slice(2, 3), slice(3, 3), slice(5, 99)]
TENSORS = {
    "vector": torch.randn(9),
    "matrix": torch.randn(8, 10).to(torch.bfloat16),
    "experts": torch.arange(7 * 6 * 5, dtype=torch.int32).view(7, 6, 5),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_slice_is_that_of_the_full_tensor(name, tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    files, full = WeightFiles([tmp_path / "model.safetensors"]), TENSORS[name]
    for index in (i for n in range(1, full.ndim + 1) for i in itertools.product(SPANS, repeat=n)):
        found = files.read(name, index)
        assert (found.dtype, found.shape) == (full.dtype, full[index].shape), index
        assert torch.equal(found, full[index]), index


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts the bytes that a process reads")
@pytest.mark.parametrize(
    "index", [(slice(100, 200),), (slice(0, 1000), slice(500, 600)), (slice(10, 20), slice(0, 10))]
)
def test_only_the_bytes_of_the_slice_are_read(index, tmp_path):
    save_file({"matrix": torch.zeros(1000, 1000)}, tmp_path / "model.safetensors")
    files = WeightFiles([tmp_path / "model.safetensors"])
    files.kind("matrix")

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    counting = -(read() - read())  # reading the counter is counted too
    before = read()
    found = files.read("matrix", index)
    assert read() - before - counting == found.nbytes


def test_a_file_that_ends_early_is_said(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"matrix": torch.zeros(1000, 1000)}, file)
    files = WeightFiles([file])
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(ValueError, match="model.safetensors ends before its tensors do"):
        files.read("matrix", (slice(999, 1000),))
