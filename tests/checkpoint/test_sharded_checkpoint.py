"""Checkpoints in which each rank writes its own parts: read back by any ranks, whole or not there at all."""

import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from finetune import safetensors_io
from finetune.checkpoint import output_dir
from finetune.checkpoint.store import (
    begin_checkpoint,
    clean_leftovers,
    commit_checkpoint,
    newest_checkpoint,
    steps_of,
    verify_checkpoint,
    write_parts,
)
from finetune.errors import CheckpointDamagedError
from tests.checkpoint.test_store import DAMAGES
from tests.promises.test_parallel_equals_one_process import ROOT, command, finish, losses
from tests.support import ranks

TWO = ["FSDP2 2", "TP 2", "PP 2"]
FOUR = ["FSDP2 4", "FSDP2 2 x TP 2", "PP 2 x FSDP2 2", "HSDP 2x2", "FSDP2 2 x CP 2", "PP 2 x TP 2"]


def check(found, size):
    for entry in found:
        saved_on, layout = entry["pair"]
        assert entry["same"], entry
        if saved_on == layout:
            assert entry["same after"], entry


def written(root: Path, step: int, cuts: int = 3, seed: int = 0) -> dict:
    """A checkpoint of random tensors, cut in `cuts` along changing dimensions as that many ranks would hold them."""
    rng = np.random.default_rng(seed + step)
    arrays = {
        "a": rng.standard_normal((7, 5), np.float32),
        "b": rng.standard_normal(11, np.float32),
        "c": np.array(step, np.int64),
        "d": rng.integers(0, 255, (2, 6, 3), np.uint8),
    }
    beside, files = begin_checkpoint(root, step), {}
    for rank in range(cuts):
        mine = []
        for i, (name, array) in enumerate(arrays.items()):
            region = [slice(0, n) for n in array.shape]
            if array.ndim:
                dim = i % array.ndim
                each = -(-array.shape[dim] // cuts)
                region[dim] = slice(rank * each, min((rank + 1) * each, array.shape[dim]))
            elif rank:
                continue
            part = np.ascontiguousarray(array[tuple(region)]) if array.ndim else array
            if part.size:
                word, offset = safetensors_io.FROM_NUMPY[str(part.dtype)], tuple(r.start for r in region)
                mine.append(
                    safetensors_io.TensorShard(name, word, part.shape, lambda part=part: part, offset, array.shape)
                )
        files |= write_parts(beside, rank, {"w.safetensors": mine})
    texts = {safetensors_io.INDEX: json.dumps(safetensors_io.index_of(beside, files)), "train_state.json": "{}"}
    commit_checkpoint(root, step, beside, files, texts, 9, "run")
    return arrays


def test_any_slice_of_a_tensor_in_parts_is_that_of_the_whole(tmp_path):
    rng = random.Random(0)
    for cuts in (1, 2, 3, 7):
        arrays = written(tmp_path / str(cuts), 1, cuts)
        saved = verify_checkpoint(tmp_path / str(cuts) / "checkpoints" / "step-1")
        for name, array in saved.tensors("w.safetensors").items():
            np.testing.assert_array_equal(array, arrays[name])
            assert array.dtype == arrays[name].dtype
        for name, stored in saved.slices("w.safetensors").items():
            for _ in range(60):
                region = tuple(slice(*sorted(rng.choices(range(n + 1), k=2))) for n in stored.shape)
                region = region[: rng.randrange(len(region) + 1)]
                np.testing.assert_array_equal(stored[region], arrays[name][region])


@pytest.mark.parametrize("damage", [*DAMAGES, "swap"])
def test_a_damaged_missing_or_swapped_file_of_a_rank_is_named_and_the_checkpoint_before_is_taken(tmp_path, damage):
    written(tmp_path, 1)
    written(tmp_path, 2)
    folder = tmp_path / "checkpoints" / "step-2"
    one, two = (folder / f"w-rank0000{rank}.safetensors" for rank in (1, 2))
    if damage == "swap":
        one.rename(folder / "x"), two.rename(one), (folder / "x").rename(two)
    else:
        damage(one, random.Random(0))
    with pytest.raises(CheckpointDamagedError, match=one.name):
        verify_checkpoint(folder)
    newest, skipped = newest_checkpoint(tmp_path)
    assert newest.step == 1 and one.name in skipped[0]


def test_a_file_that_the_index_names_and_the_manifest_does_not_is_missed(tmp_path):
    written(tmp_path, 1)
    folder = tmp_path / "checkpoints" / "step-1"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["w-rank00001.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "w-rank00001.safetensors").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"w-rank00001\.safetensors"):
        verify_checkpoint(folder)


def test_what_ranks_saved_in_parts_is_bitwise_taken_up_by_any_degrees_and_by_one_process(tmp_path):
    pairs = [(a, b) for a in TWO for b in (*TWO, "alone")]
    found = ranks.run(
        2,
        "tests.support.sharded_checkpoint_cases:both",
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
        assert "model.safetensors" not in names and not any(p.suffix in (".pt", ".bin") for p in folder.iterdir())
        index = json.loads((folder / safetensors_io.INDEX).read_text())
        manifest = json.loads((folder / "manifest.json").read_text())
        assert all(manifest["files"][n] == e for n, e in index["files"].items())


@pytest.mark.slow
def test_any_number_of_ranks_takes_up_what_any_other_saved(tmp_path):
    """Six layouts of four ranks and one of three, each taken up by others of four, three, two and by one process."""

    def run(size, function, **arguments):
        folder = tmp_path / f"{size} {function} {len(list(tmp_path.iterdir()))}"
        return ranks.run(
            size, f"tests.support.sharded_checkpoint_cases:{function}", {"folder": str(tmp_path), **arguments}, folder
        )[0]

    pairs = [(a, a) for a in FOUR] + [(a, b) for a in FOUR[:3] for b in FOUR[:3] if a != b]
    _, taken = run(4, "both", layouts=FOUR, pairs=pairs)
    check(taken, 4)
    check(run(3, "both", layouts=["FSDP2 3"], pairs=[(a, "FSDP2 3") for a in (*FOUR, "FSDP2 3")])[1], 3)
    check(run(4, "taken_up_as", pairs=[("FSDP2 3", b) for b in FOUR]), 4)
    every = [*FOUR, "FSDP2 3"]
    check(run(2, "taken_up_as", pairs=[(a, b) for a in every for b in TWO]), 2)
    check(run(1, "taken_up_as", pairs=[(a, "alone") for a in every]), 1)


@pytest.mark.slow
def test_tied_tables_and_experts_are_saved_in_parts(tmp_path):
    for architecture, layouts in {"llama_tied": TWO, "mixtral": ["FSDP2 2"], "gpt2": ["FSDP2 2"]}.items():
        folder = tmp_path / architecture
        found = ranks.run(
            2,
            "tests.support.sharded_checkpoint_cases:both",
            {
                "layouts": layouts,
                "pairs": [(a, b) for a in layouts for b in (*layouts, "alone")],
                "folder": str(folder),
                "architecture": architecture,
            },
            folder / "ranks",
        )
        check(found[0][1], 2)


@pytest.mark.slow
def test_a_rank_that_cannot_write_ends_all_and_one_that_sees_no_folder_makes_them_gather(tmp_path):
    found = ranks.run(2, "tests.support.sharded_checkpoint_cases:faults", {"folder": str(tmp_path)}, tmp_path / "ranks")
    for entry in found:
        assert entry["code"] == 74 and entry["error"].startswith("rank 1: ") and "too large" in entry["error"]
        assert "Earlier checkpoints are intact." in entry["error"]
    assert found[0]["left"] == ["latest", "step-1"]
    assert [verify_checkpoint(f).step for f in steps_of(tmp_path / "full")] == [3, 1]
    (line,) = found[0]["told"]
    assert line.startswith("rank 1 does not see --output_dir")
    assert (
        found[0]["same"] and "model.safetensors" in found[0]["files"] and safetensors_io.INDEX not in found[0]["files"]
    )


@pytest.mark.slow
def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before_which_is_taken_up(tmp_path):
    root = tmp_path / "FSDP2 2"
    with pytest.raises(AssertionError):
        ranks.run(
            2, "tests.support.sharded_checkpoint_cases:killed_while_saving", {"folder": str(root)}, tmp_path / "killed"
        )
    assert list((root / "checkpoints").glob(".tmp-step-3-*"))
    newest, skipped = newest_checkpoint(root)
    assert newest.step == 2 and not skipped
    arguments = {"pairs": [("FSDP2 2", "FSDP2 2")], "folder": str(tmp_path)}
    found = ranks.run(2, "tests.support.sharded_checkpoint_cases:taken_up_as", arguments, tmp_path / "again")
    assert found[0][0]["same"]
    clean_leftovers(root)
    assert not list((root / "checkpoints").glob(".tmp*"))


SLACK = 16 * 2**20  # the interpreter's own objects, headers, buffers of sockets; measured: see dev/LOG.md


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon in /proc")
@pytest.mark.parametrize("layout", TWO)
def test_saving_takes_no_more_than_a_tensor_beside_what_a_rank_holds(tmp_path, layout):
    found = ranks.run(
        2,
        "tests.support.sharded_checkpoint_cases:memory",
        {"layout": layout, "folder": str(tmp_path)},
        tmp_path / "ranks",
    )
    print(layout, found)
    for entry in found:
        for how in ("parts", "taken up"):
            assert entry[how] <= entry["largest"] + SLACK, (how, found)
        # A tensor gathered and what it was gathered from, and the bytes it is written as.
        assert entry["published"] <= 4 * entry["largest"] + SLACK, found
    assert found[0]["gathered"] > found[0]["model"]


@pytest.mark.slow
def test_the_program_saves_in_parts_goes_on_bitwise_and_its_step_folder_is_a_model(tiny_model, rows_file, tmp_path):
    """Twelve steps of full fine-tuning on two ranks; cut back and resumed on two and on one; a failing disk; other scripts."""
    base = [
        "--model_name",
        tiny_model,
        "--dataset",
        rows_file,
        "--backend",
        "cpu",
        "--train_type",
        "full",
        "--context_length",
        64,
        "--num_epochs",
        2,
        "--lr",
        "1e-3",
        "--log_to",
        "stdout",
        "--batch_size",
        2,
        "--save_every",
        4,
        "--keep_last",
        9,
        "--precision",
        "fp32",
        "--world_size",
        2,
    ]
    whole = tmp_path / "whole"
    code, _, err = finish(command(base, "--output_dir", whole))
    assert code == 0, err
    step = whole / "checkpoints" / "step-12"
    assert (step / "model-rank00001.safetensors").is_file() and not (step / "model.safetensors").exists()

    for name in ("two", "one"):
        shutil.copytree(whole, tmp_path / name)
        for later in steps_of(tmp_path / name)[:-1]:
            shutil.rmtree(later)
        (tmp_path / name / "train_state.json").unlink()
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "-"]  # KiB: a part of the model is larger
    resumed = ["--resume", "auto", "--output_dir"]
    full_disk = [*map(str, limited), *map(str, command(base, *resumed, tmp_path / "two"))]
    code, _, err = finish(full_disk)
    assert code == 74 and err.count("error:") == 1 and "File too large" in err, err
    assert [p.name for p in steps_of(tmp_path / "two")] == ["step-4"]
    for name, flags in (("two", ()), ("one", ("--world_size", 1, "--batch_size", 4))):
        code, out, err = finish(command(base, *flags, *resumed, tmp_path / name))
        assert code == 0 and "at step 4 of 12" in out, err
    assert losses(tmp_path / "two") == losses(whole)
    assert losses(tmp_path / "one") == pytest.approx(losses(whole), rel=2e-6)
    again = verify_checkpoint(tmp_path / "two" / "checkpoints" / "step-12")
    for file in (output_dir.FULL, output_dir.MOMENTS):
        saved = verify_checkpoint(step).tensors(file)
        found = again.tensors(file)
        assert saved.keys() == found.keys()
        assert all(np.array_equal(saved[n], found[n]) for n in saved)

    said = []
    for folder in (whole, step):  # the published model is that of the last step
        script = [
            sys.executable,
            "-W",
            "ignore",
            ROOT / "generate.py",
            "--checkpoint",
            folder,
            "--prompt",
            "What is 3 plus 3?",
            "--device",
            "cpu",
            "--precision",
            "fp32",
            "--max_new_tokens",
            12,
        ]
        code, out, err = finish(script)
        assert code == 0, err
        said.append(out)
    assert said[0] == said[1]
    script = [sys.executable, "-W", "ignore", ROOT / "export.py", "--checkpoint", step, "--output_dir", tmp_path / "m"]
    code, _, err = finish(script)
    assert code == 2 and "nothing to merge" in err
    code, _, err = finish(
        [sys.executable, "-W", "ignore", ROOT / "expand.py", "--model_name", step, "--output_dir", tmp_path / "grown"]
    )
    assert code == 2 and "is a sharded checkpoint" in err, err
