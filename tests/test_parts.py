"""Checkpoints in which each rank writes its own parts: read back by any ranks, whole or not there at all."""

import json

import numpy as np
import pytest

from finetune import checkpoint, parts
from tests import ranks

TWO = ["FSDP2 2", "TP 2", "PP 2"]
FOUR = ["FSDP2 4", "FSDP2 2 x TP 2", "PP 2 x FSDP2 2", "HSDP 2x2", "FSDP2 2 x CP 2", "PP 2 x TP 2"]


def check(found, size):
    for entry in found:
        saved_on, layout = entry["pair"]
        assert entry["same"], entry
        if saved_on == layout:
            assert entry["same after"], entry


def test_what_ranks_saved_in_parts_is_bitwise_taken_up_by_any_degrees_and_by_one_process(tmp_path):
    pairs = [(a, b) for a in TWO for b in (*TWO, "alone")]
    found = ranks.run(
        2,
        "tests.part_cells:both",
        {"layouts": TWO, "pairs": pairs, "folder": str(tmp_path)},
        tmp_path / "ranks",
    )
    saved, taken = found[0]
    check(taken, 2)
    losses = {entry["layout"]: entry["loss"] for entry in saved}
    for entry in taken:
        assert entry["loss"] == pytest.approx(losses[entry["pair"][0]], rel=2e-6), entry
    for layout in TWO:
        folder = tmp_path / layout / "checkpoints" / "step-2"
        names = {p.name for p in folder.iterdir()}
        assert {f"{n}-rank0000{r}.safetensors" for n in ("model", "optimizer") for r in (0, 1)} <= names
        assert "model.safetensors" not in names and not any(
            p.suffix in (".pt", ".bin") for p in folder.iterdir()
        )
        index = json.loads((folder / parts.INDEX).read_text())
        manifest = json.loads((folder / "manifest.json").read_text())
        assert all(manifest["files"][n] == e for n, e in index["files"].items())
