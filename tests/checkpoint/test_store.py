"""One checkpoint: written beside, verified by digest, rotated; gathered and sharded."""

import errno
import json
import multiprocessing
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from finetune import safetensors_io
from finetune.checkpoint.lock import Lock
from finetune.checkpoint.store import (
    begin_checkpoint,
    clean_leftovers,
    commit_checkpoint,
    newest_checkpoint,
    owned_files,
    save_checkpoint,
    steps_of,
    storage,
    verify_checkpoint,
    write_parts,
)
from finetune.errors import CheckpointDamagedError, NonFiniteError, OutputDirInUseError, PlanError, StorageError


def save(root, step, value=None, keep_last=2):
    value = step if value is None else value
    arrays = {"a": np.full((8, 8), value, np.float32), "b": np.arange(5, dtype=np.int64)}
    texts = {"train_state.json": json.dumps({"step": step})}
    owned = owned_files(root)
    owned.claim()
    return save_checkpoint(root, step, {"w.safetensors": arrays}, texts, keep_last, owned.id)


def test_what_was_saved_is_read_back(tmp_path):
    folder = save(tmp_path, 3, 1.5)
    saved = verify_checkpoint(folder)
    assert saved.step == 3 and saved.json("train_state.json", {"step": int}) == {"step": 3}
    np.testing.assert_array_equal(saved.tensors("w.safetensors")["a"], np.full((8, 8), 1.5))
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-3"


def test_the_newest_are_kept_and_a_damaged_one_does_not_count(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [p.name for p in steps_of(tmp_path)] == ["step-3", "step-2"]
    (tmp_path / "checkpoints" / "step-3" / "w.safetensors").write_bytes(b"")
    save(tmp_path, 4)
    assert [p.name for p in steps_of(tmp_path)] == ["step-4", "step-3", "step-2"]
    save(tmp_path, 5)
    assert [p.name for p in steps_of(tmp_path)] == ["step-5", "step-4"]


def damage_flip(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def damage_cut(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


def damage_zero_tail(path, rng):
    data = path.read_bytes()
    keep = rng.randrange(len(data.rstrip(b"\0")))
    path.write_bytes(data[:keep] + b"\0" * (len(data) - keep))


def damage_extra(path, rng):
    path.write_bytes(path.read_bytes() + b"x")


def damage_delete(path, rng):
    path.unlink()


DAMAGES = [damage_flip, damage_cut, damage_zero_tail, damage_extra, damage_delete]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["w.safetensors", "train_state.json"])
def test_any_damage_is_found_names_the_file_and_the_one_before_is_taken(tmp_path, damage, file):
    rng = random.Random(0)
    save(tmp_path, 1)
    whole = save(tmp_path, 2)
    for _ in range(20):
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        damage(whole / file, rng)
        with pytest.raises(CheckpointDamagedError, match=file):
            verify_checkpoint(whole)
        newest, skipped = newest_checkpoint(tmp_path)
        assert newest.step == 1 and file in skipped[0]
        shutil.rmtree(whole)
        copy.rename(whole)


def test_a_damaged_manifest_is_found(tmp_path):
    rng = random.Random(1)
    folder = save(tmp_path, 1)
    text = (folder / "manifest.json").read_bytes()
    for cut in range(0, len(text) - 1, 7):
        (folder / "manifest.json").write_bytes(text[:cut])
        with pytest.raises(CheckpointDamagedError):
            verify_checkpoint(folder)
    for _ in range(50):
        (folder / "manifest.json").write_bytes(text)
        damage_flip(folder / "manifest.json", rng)
        try:
            verify_checkpoint(folder)
        except CheckpointDamagedError:
            continue
        # A flip in white space, in the run's name or in a digit's unread field changes nothing that is loaded.
        changed = json.loads((folder / "manifest.json").read_text())
        assert changed["files"] == json.loads(text)["files"] and changed["step"] == 1


def test_a_checkpoint_of_another_step_or_a_newer_format_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    other = folder.with_name("step-7")
    shutil.copytree(folder, other)
    with pytest.raises(CheckpointDamagedError, match="its manifest is for step 1"):
        verify_checkpoint(other)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(CheckpointDamagedError, match="version 99 is newer"):
        verify_checkpoint(folder)
    manifest["files"]["../../etc/passwd"] = {"size": 1, "sha256": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointDamagedError):
        verify_checkpoint(folder)


def test_a_tensor_that_is_not_finite_is_never_saved(tmp_path):
    with pytest.raises(NonFiniteError, match="tensor a at step 1"):
        save(tmp_path, 1, np.nan)
    assert newest_checkpoint(tmp_path) == (None, [])


CALLS = [(os, "fsync"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree"), (os, "open"), (Path, "mkdir")]


class Faults:
    """Counts calls of the system functions a save makes, and calls `act` at the one numbered `fail_at`."""

    def __init__(self, monkeypatch, fail_at, act):
        self.count = 0
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name), fail_at, act))

    def wrap(self, real, fail_at, act):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == fail_at:
                act()
            return real(*args, **kwargs)

        return call


def crash_points(tmp_path_factory) -> int:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("count")
        save(root, 1), save(root, 2)
        faults = Faults(patch, -1, None)
        save(root, 3)
        return faults.count


def _crash_while_saving(root, fail_at):
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, fail_at, lambda: os.kill(os.getpid(), 9))
        save(root, 3)


def test_a_kill_at_every_system_call_of_a_save_leaves_the_old_checkpoint_or_the_new(tmp_path_factory):
    points = crash_points(tmp_path_factory)
    assert points > 10
    context = multiprocessing.get_context("fork")
    seen = set()
    for point in range(1, points + 1):
        root = tmp_path_factory.mktemp("kill")
        save(root, 1), save(root, 2)
        child = context.Process(target=_crash_while_saving, args=(root, point))
        child.start()
        child.join()
        assert child.exitcode == -9, point
        newest, _ = newest_checkpoint(root)
        assert newest.step in (2, 3)
        seen.add(newest.step)
        clean_leftovers(root, owned_files(root))
        save(root, 4)
        assert newest_checkpoint(root)[0].step == 4
        assert not list((root / "checkpoints").glob(".*"))
    assert seen == {2, 3}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_at_any_point_is_reported_with_path_and_free_bytes(tmp_path_factory, code):
    def fail():
        raise OSError(code, os.strerror(code))

    for point in range(1, crash_points(tmp_path_factory) + 1):
        root = tmp_path_factory.mktemp("full")
        save(root, 1), save(root, 2)
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, point, fail)
            try:
                save(root, 3)
            except StorageError as error:
                assert "bytes free" in str(error) and str(root) in str(error) and error.exit_code == 74
        assert newest_checkpoint(root)[0].step in (2, 3)


def test_a_file_over_the_limit_of_its_size_names_the_limit(tmp_path):
    with pytest.raises(StorageError, match="ulimit -f.*Earlier checkpoints are intact"), storage(tmp_path):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def test_crashes_in_a_row_never_rotate_the_last_good_one_away(tmp_path):
    context = multiprocessing.get_context("fork")
    save(tmp_path, 2, keep_last=1)
    for _ in range(5):
        child = context.Process(target=_crash_while_saving, args=(tmp_path, 5))
        child.start()
        child.join()
        assert newest_checkpoint(tmp_path)[0].step == 2


def _hold(root, ready, done):
    lock = Lock(root)
    ready.set()
    done.wait(30)
    lock.release()


def test_a_second_owner_is_refused_by_name_and_a_killed_one_frees_the_folder_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(tmp_path, ready, done))
    child.start()
    assert ready.wait(30)
    with pytest.raises(OutputDirInUseError, match=f"in use by pid {child.pid} on .*started 20") as error:
        Lock(tmp_path)
    assert error.value.exit_code == 75
    child.kill()
    child.join()
    Lock(tmp_path).release()


def test_an_output_dir_that_is_a_file_is_the_users_to_fix(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="is a file"):
        Lock(tmp_path / "file")


def written(root: Path, step: int, cuts: int = 3, seed: int = 0) -> dict:
    """A checkpoint of random tensors, each split along another dim into `cuts` shards, one per rank."""
    rng = np.random.default_rng(seed + step)
    arrays = {
        "a": rng.standard_normal((7, 5), np.float32),
        "b": rng.standard_normal(11, np.float32),
        "c": np.array(step, np.int64),
        "d": rng.integers(0, 255, (2, 6, 3), np.uint8),
    }
    beside, files = begin_checkpoint(root, step, "run"), {}
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


def test_any_slice_of_a_sharded_tensor_is_that_of_the_full_one(tmp_path):
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
