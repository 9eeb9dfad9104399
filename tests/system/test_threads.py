"""Work in threads: its result, its errors, its end before the process's, and threads that never start."""

import _thread
import signal
import subprocess
import sys
import threading

import pytest

from finetune.system import progress, threads
from finetune.system.progress import Progress
from finetune.system.threads import in_background


@pytest.fixture
def no_thread_starts(monkeypatch):
    """Threads end before their first line, as those that memory is refused to. Ends a hang after 5 s."""

    def ended(signum, frame):
        pytest.fail("waited for a thread that never started")  # no Exception, which tqdm would make a warning

    for module, name in ((_thread, "start_new_thread"), (threading, "_start_new_thread")):
        monkeypatch.setattr(module, name, lambda *args: 0)
    former = signal.signal(signal.SIGALRM, ended)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def test_the_future_has_the_result_or_the_error():
    assert in_background(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        in_background(divmod, 7, 0).result()


def test_the_end_of_the_process_waits_for_the_work(tmp_path):
    script = f"""
import time
from pathlib import Path
from finetune.system.threads import in_background
def work():
    time.sleep(0.5)
    Path({str(tmp_path / "done")!r}).write_text("done")
in_background(work)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert (tmp_path / "done").read_text() == "done"


def test_work_whose_thread_never_starts_is_an_error_of_memory(no_thread_starts, monkeypatch):
    monkeypatch.setattr(threads, "START_TIMEOUT_S", 0.1)
    with pytest.raises(MemoryError):
        in_background(divmod, 7, 2)


def test_a_forked_child_does_not_wait_for_the_work_of_its_parent():
    script = """
import os, signal, sys, time
from finetune.system.threads import in_background
in_background(time.sleep, 1)
child = os.fork()
if child == 0:
    signal.alarm(20)
    sys.exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_pinned_bar_on_a_terminal_starts_no_thread_of_tqdm(no_thread_starts, monkeypatch):
    monkeypatch.setattr(progress, "is_terminal", lambda stream: True)
    with Progress("training", pinned=True):
        pass
    assert Progress._open == []


def test_progress_whose_thread_never_starts_comes_to_its_end(no_thread_starts, capsys):
    with Progress("evaluating"):
        pass
    assert Progress._open == []
