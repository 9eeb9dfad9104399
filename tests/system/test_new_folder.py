"""Folders that appear complete or not at all."""

import os
import signal
import subprocess
import sys

import pytest

import export
from finetune.errors import PlanError
from finetune.system.new_folder import check_new, new_folder
from tests.support.commands import ROOT


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("before", ["absent", "empty", "link"])
def test_a_folder_appears_when_it_is_complete(tmp_path, before):
    target = tmp_path / "a[b]*"
    if before != "absent":
        (target if before == "empty" else tmp_path / "real").mkdir()
    if before == "link":
        target.symlink_to(tmp_path / "real")
    with new_folder(target) as folder:
        (folder / "x").write_text("x")
        assert not target.exists() or not names(target)
    assert names(target) == ["x"] and target.stat().st_mode & 0o777 == 0o777 & ~umask()
    assert [n for n in names(tmp_path) if n.startswith(".")] == []
    with pytest.raises(PlanError, match="--output_dir .*: exists and is not empty"):
        check_new(target, "--output_dir")


def umask():
    os.umask(mask := os.umask(0))
    return mask


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), new_folder(tmp_path / "deep" / "out") as folder:
        (folder / "x").write_text("x")
        raise KeyError
    assert names(tmp_path / "deep") == []


def test_what_a_killed_writer_left_is_removed_and_that_of_a_live_one_is_not(tmp_path):
    code = (
        "import sys, pathlib; from finetune.system.new_folder import new_folder\n"
        f"with new_folder(pathlib.Path({str(tmp_path / 'out')!r})) as f: (f / 'x').write_text('x'); "
        "print('there', flush=True); sys.stdin.read()"
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        assert child.stdout.readline() == b"there\n"
        with pytest.raises(KeyError), new_folder(tmp_path / "out"):
            raise KeyError
        assert len(names(tmp_path)) == 1  # the live writer's
        child.send_signal(signal.SIGKILL)
    assert len(names(tmp_path)) == 1 and not (tmp_path / "out").exists()
    with new_folder(tmp_path / "out") as folder:
        (folder / "y").write_text("y")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["y"]


def test_an_export_writes_beside_its_place(plain_run, tmp_path, monkeypatch):
    plain_run(max_steps=1)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    argv = ["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")]
    with pytest.raises(OSError, match="No space left"):
        export.main(argv)
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob(".merged*"))
    monkeypatch.undo()
    assert export.main(argv) == 0 and (tmp_path / "merged" / "tokenizer.json").is_file()
