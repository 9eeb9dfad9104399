"""Files and folders that appear complete or not at all, and locks."""

import os
import signal
import subprocess
import sys

import pytest

import export
from finetune.errors import PlanError
from finetune.system.files import WRITING, check_new, locked, locked_in_cache, new_folder, replace
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
        "import sys, pathlib; from finetune.system.files import new_folder\n"
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


def test_a_folder_that_only_looks_like_a_killed_writers_stays(tmp_path):
    mine = tmp_path / ".out.tmp-mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    (mine / ".unfinished").write_text(".out.tmp-other")
    with new_folder(tmp_path / "out") as folder:
        (folder / "x").write_text("x")
    assert names(tmp_path) == [".out.tmp-mine", "out"] and names(mine) == [".unfinished", "notes.txt"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_not_a_file_is_not_replaced_by_one(tmp_path, kind):
    path = tmp_path / "x"
    {"link": lambda: path.symlink_to("y"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    before = os.lstat(path)
    with pytest.raises(OSError, match="is not a regular file"), replace(path) as file:
        file.write(b"new")
    assert os.lstat(path).st_ino == before.st_ino and names(tmp_path) == ["x"]


def test_an_export_writes_beside_its_place(plain_run, tmp_path, monkeypatch):
    plain_run(max_steps=1)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    argv = ["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")]
    with pytest.raises(OSError, match="No space left"):
        export.main(argv)
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob(".merged*"))
    monkeypatch.undo()
    assert export.main(argv) == 0 and (tmp_path / "merged" / "tokenizer.json").is_file()


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_when_it_is_complete(tmp_path, durable):
    path = tmp_path / "a.json"
    path.write_text("old")
    with replace(path, durable) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new" and names(tmp_path) == ["a.json"]


def test_a_file_that_fails_leaves_the_old_one_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyError), replace(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]


def test_a_file_is_not_written_through_a_link(tmp_path):
    (tmp_path / f"{WRITING}{os.getpid()}-a").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError), replace(tmp_path / "a") as file:
        file.write(b"new")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("name", ["file", ""])
def test_a_lock_has_one_holder(tmp_path, name):
    with locked(tmp_path / name):
        with pytest.raises(BlockingIOError), locked(tmp_path / name, wait=False):
            pass
    with locked(tmp_path / name, wait=False):
        pass


def test_a_cache_that_cannot_be_written_is_used_unlocked(tmp_path):
    (tmp_path / "file").write_text("")
    with locked_in_cache(tmp_path / "file" / "x.lock"):
        pass
    with locked_in_cache(tmp_path / "new" / "x.lock"):
        with pytest.raises(BlockingIOError), locked(tmp_path / "new" / "x.lock", wait=False):
            pass


HOLDS = (
    "import sys, time, pathlib; from finetune.system.files import locked\n"
    "with locked(pathlib.Path(sys.argv[1])) as progress:\n"
    "    print('there', flush=True)\n"
    "    for _ in range(40 if sys.argv[2] == 'works' else 0): time.sleep(0.05), progress()\n"
    "    if sys.argv[2] == 'stops': time.sleep(60)\n"
)


def holder(path, what):
    child = subprocess.Popen([sys.executable, "-c", HOLDS, path, what], stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout.readline() == b"there\n"
    return child


def test_a_lock_of_a_stopped_process_is_waited_for_a_while_and_its_owner_named(tmp_path, capsys):
    path = tmp_path / "x.lock"
    with holder(path, "stops") as child:
        child.send_signal(signal.SIGSTOP)
        with locked_in_cache(path, patience_s=2.5):
            said = capsys.readouterr().out
        child.kill()
    owner = f"pid {child.pid} (-c), since 20"
    waiting, note = said.splitlines()
    assert waiting.startswith(f"waiting for {owner}") and waiting.endswith(f", which holds {path}")
    assert note.startswith(f"note: {owner}") and f"no progress for 2 s: going on without {path}" in note


def test_a_lock_whose_owner_makes_progress_is_waited_for(tmp_path, capsys):
    with holder(tmp_path / "x.lock", "works") as child:
        with locked_in_cache(tmp_path / "x.lock", patience_s=0.5):
            assert child.wait(5) == 0
    assert "going on" not in capsys.readouterr().out


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: p.symlink_to("/dev/zero")], ids=["pipe", "link"])
def test_what_is_no_file_is_not_locked_as_one(tmp_path, make):
    make(tmp_path / "x.lock")
    with pytest.raises(OSError), locked(tmp_path / "x.lock"):
        pass
    with locked_in_cache(tmp_path / "x.lock"):
        pass
