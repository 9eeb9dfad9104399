"""Checkpoints in which each rank writes its own shards: restored by any ranks, complete or absent."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from finetune import safetensors_io
from finetune.checkpoint import output_dir, over_ranks
from finetune.checkpoint.store import clean_leftovers, newest_checkpoint, owned_files, steps_of, verify_checkpoint
from tests.support import ranks, sharded_checkpoint_cases
from tests.support.commands import command, finish
from tests.support.runs import losses

TWO = ["FSDP2 2", "TP 2", "PP 2"]
FOUR = ["FSDP2 4", "FSDP2 2 x TP 2", "PP 2 x FSDP2 2", "HSDP 2x2", "FSDP2 2 x CP 2", "PP 2 x TP 2"]


def check(found):
    """All tensors restored are bitwise those saved; on the same layout, so are those of the next step."""
    for entry in found:
        saved_on, layout = entry["pair"]
        assert entry["same"], entry
        if saved_on == layout:
            assert entry["same_after"], entry


@pytest.mark.slow
def test_what_ranks_save_sharded_is_restored_bitwise_over_any_degrees_and_by_one_process(tmp_path):
    pairs = [(a, b) for a in TWO for b in (*TWO, "alone")]
    saved, restored = ranks.run(
        2, sharded_checkpoint_cases.both, tmp_path / "ranks", layouts=TWO, pairs=pairs, folder=str(tmp_path)
    )[0]
    check(restored)
    losses = {entry["layout"]: entry["loss"] for entry in saved}
    for entry in restored:
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
def test_any_number_of_ranks_restores_what_any_other_saved(tmp_path):
    """Six layouts of four ranks and one of three, each restored by others of four, three, two and by one process."""

    def run(size, function, **arguments):
        folder = tmp_path / f"{size} {function.__name__} {len(list(tmp_path.iterdir()))}"
        return ranks.run(size, function, folder, folder=str(tmp_path), **arguments)[0]

    both, resumed_as = sharded_checkpoint_cases.both, sharded_checkpoint_cases.resumed_as
    pairs = [(a, a) for a in FOUR] + [(a, b) for a in FOUR[:3] for b in FOUR[:3] if a != b]
    _, restored = run(4, both, layouts=FOUR, pairs=pairs)
    check(restored)
    check(run(3, both, layouts=["FSDP2 3"], pairs=[(a, "FSDP2 3") for a in (*FOUR, "FSDP2 3")])[1])
    check(run(4, resumed_as, pairs=[("FSDP2 3", b) for b in FOUR]))
    every = [*FOUR, "FSDP2 3"]
    check(run(2, resumed_as, pairs=[(a, b) for a in every for b in TWO]))
    check(run(1, resumed_as, pairs=[(a, "alone") for a in every]))


@pytest.mark.slow
def test_tied_embeddings_and_experts_are_saved_sharded(tmp_path):
    for architecture, layouts in {"llama_tied": TWO, "mixtral": ["FSDP2 2"], "gpt2": ["FSDP2 2"]}.items():
        folder = tmp_path / architecture
        pairs = [(a, b) for a in layouts for b in (*layouts, "alone")]
        arguments = dict(layouts=layouts, pairs=pairs, folder=str(folder), architecture=architecture)
        check(ranks.run(2, sharded_checkpoint_cases.both, folder / "ranks", **arguments)[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_experts_over_ranks_are_saved_and_restored_bitwise_over_other_degrees(architecture, tmp_path):
    """By whole experts each rank writes its own; gate and up in one tensor, each sliced, are gathered."""
    two, four = ["EP 2", "TP 2", "FSDP2 2"], ["EP 2 x FSDP2 2", "DDP 2 x EP 2", "FSDP2 4"]
    case = dict(folder=str(tmp_path), architecture=architecture)
    for size, layouts in ((2, two), (4, four)):
        ends = [*layouts, *(["alone"] if size == 2 else [])]
        pairs = [(a, b) for a in layouts for b in ends]
        arguments = dict(layouts=layouts, pairs=pairs, **case)
        check(ranks.run(size, sharded_checkpoint_cases.both, tmp_path / f"ranks {size}", **arguments)[0][1])
    for size, pairs in ((2, [("EP 2 x FSDP2 2", b) for b in two]), (4, [("TP 2", four[0]), ("EP 2", four[1])])):
        folder = tmp_path / f"other {size}"
        check(ranks.run(size, sharded_checkpoint_cases.resumed_as, folder, pairs=pairs, **case)[0])
    written = {p.name for p in (tmp_path / "EP 2" / "checkpoints" / "step-2").iterdir()}
    assert "model-rank00001.safetensors" in written and "model.safetensors" not in written


@pytest.mark.slow
def test_a_rank_that_cannot_write_ends_all_and_one_that_sees_no_folder_makes_them_gather(tmp_path):
    found = ranks.run(2, sharded_checkpoint_cases.faults, tmp_path / "ranks", folder=str(tmp_path))
    for entry in found:
        assert entry["code"] == 74 and entry["error"].startswith("rank 1: ") and "too large" in entry["error"]
        assert "Earlier checkpoints are intact." in entry["error"]
    assert found[0]["left"] == ["latest", "step-1"]
    assert [verify_checkpoint(f).step for f in steps_of(tmp_path / "full")] == [3, 1]
    (line,) = found[0]["notes"]
    assert line.startswith("rank 1 does not see --output_dir")
    assert found[0]["same"]
    assert "model.safetensors" in found[0]["files"] and safetensors_io.INDEX not in found[0]["files"]


def test_files_are_divided_evenly_and_none_is_left_out():
    sizes = {f"{i}": size for i, size in enumerate([900, 800, 30, 20, 10, 5, 850, 860, 0])}
    for members in (1, 2, 3, 4, 20):
        divided = over_ranks.shares(sizes, members)
        assert sorted(sum(divided, [])) == sorted(sizes) and len(divided) == members
        held = [sum(sizes[name] for name in share) for share in divided]
        assert max(held) <= sum(sizes.values()) / members + max(sizes.values()) * (1 - 1 / members)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads rchar in /proc")
def test_each_rank_hashes_its_share_at_resume_and_all_say_the_same_of_damage(tmp_path):
    found = ranks.run(2, sharded_checkpoint_cases.hashed_shares, tmp_path / "ranks", folder=str(tmp_path))
    assert [entry["whole"] for entry in found] == [[2], [2]]
    total = found[0]["bytes"]
    # Beside their shares both read the manifest, headers and parts.json.
    assert max(entry["read"] for entry in found) < 0.75 * total and sum(e["read"] for e in found) > 0.99 * total, found
    assert len(found[0]["said"]) == 10 and found[0]["said"] == found[1]["said"]
    for file, (step, line) in found[0]["said"].items():
        assert step == 1 and file in line and line.startswith("  skipped a damaged checkpoint: "), line
    for entry in found:  # a copy that only one rank sees is hashed by that rank alone
        assert entry["own"][0] == 2 and "ranks find different checkpoints" in entry["own"][1], entry


@pytest.mark.slow
def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before_which_is_restored(tmp_path):
    root = tmp_path / "FSDP2 2"
    with pytest.raises(AssertionError):
        ranks.run(2, sharded_checkpoint_cases.killed_while_saving, tmp_path / "killed", folder=str(root))
    assert list((root / "checkpoints").glob(".tmp-*-step-3"))
    newest, skipped = newest_checkpoint(root)
    assert newest.step == 2 and not skipped
    arguments = dict(pairs=[("FSDP2 2", "FSDP2 2")], folder=str(tmp_path))
    found = ranks.run(2, sharded_checkpoint_cases.resumed_as, tmp_path / "again", **arguments)
    assert found[0][0]["same"]
    clean_leftovers(root, owned_files(root))
    assert not list((root / "checkpoints").glob(".tmp*"))


# The interpreter's own objects, headers, buffers of sockets; measured: see dev/LOG.md.
SLACK = 16 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon in /proc")
@pytest.mark.parametrize("layout", TWO)
def test_saving_takes_no_more_than_a_tensor_beside_what_a_rank_holds(tmp_path, layout):
    found = ranks.run(2, sharded_checkpoint_cases.memory, tmp_path / "ranks", layout=layout, folder=str(tmp_path))
    print(layout, found)
    for entry in found:
        for how in ("sharded", "restored"):
            assert entry[how] <= entry["largest"] + SLACK, (how, found)
        # A tensor gathered and what it was gathered from, and the bytes it is written as.
        assert entry["published"] <= 4 * entry["largest"] + SLACK, found
    assert found[0]["gathered"] > found[0]["model"]


@pytest.mark.slow
def test_the_program_saves_sharded_resumes_bitwise_and_its_step_folder_is_a_model(base, tmp_path):
    """Twelve steps of full fine-tuning on two ranks, resumed on two and on one; a failing disk; other scripts."""
    flags = "--train_type full --lr 1e-3 --batch_size 2 --save_every 4 --keep_last 9 --world_size 2"
    base = {name: value for name, value in base.items() if name != "lora_rank"}
    whole = tmp_path / "whole"
    code, _, err = finish(command(base, flags, output_dir=whole))
    assert code == 0, err
    step = whole / "checkpoints" / "step-12"
    assert (step / "model-rank00001.safetensors").is_file() and not (step / "model.safetensors").exists()

    for name in ("two", "one"):
        shutil.copytree(whole, tmp_path / name)
        for later in steps_of(tmp_path / name)[:-1]:
            shutil.rmtree(later)
        (tmp_path / name / "train_state.json").unlink()
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "-"]  # KiB: a rank's shard of the model is larger
    full_disk = [*limited, *command(base, flags, "--resume auto", output_dir=tmp_path / "two")]
    code, _, err = finish(full_disk)
    assert code == 74 and err.count("error:") == 1 and "File too large" in err and "ulimit -f" in err, err
    assert [p.name for p in steps_of(tmp_path / "two")] == ["step-4"]
    for name, degrees in (("two", ""), ("one", "--world_size 1 --batch_size 4")):
        code, out, err = finish(command(base, flags, degrees, "--resume auto", output_dir=tmp_path / name))
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
        asked = "--prompt 'What is 3 plus 3?' --device cpu --precision fp32 --max_new_tokens 12"
        code, out, err = finish(command(asked, script="generate.py", checkpoint=folder))
        assert code == 0, err
        said.append(out)
    assert said[0] == said[1]
    code, _, err = finish(command(script="export.py", checkpoint=step, output_dir=tmp_path / "m"))
    assert code == 2 and "has no adapter_config.json" in err
    code, _, err = finish(command(script="expand.py", model_name=step, output_dir=tmp_path / "grown"))
    assert code == 2 and "is a sharded checkpoint" in err, err
