"""Work in threads: its result, its errors, its end before the process's, and threads that never start."""

import _thread
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from finetune.system import progress, threads
from finetune.system.progress import Progress
from finetune.system.threads import Pool, in_background


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


def test_the_end_of_the_process_does_not_wait_for_work_that_it_need_not():
    script = """
import time
from finetune.system.threads import in_background
in_background(time.sleep, 300, wait_at_exit=False)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


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


def test_a_pool_gives_the_results_in_order_and_uses_its_threads_at_once():
    meeting = threading.Barrier(3)

    def squared(number: int) -> int:
        meeting.wait(timeout=20)  # comes to an end only if three work at once
        return number**2

    with Pool(3) as pool:
        assert list(pool.map(squared, range(9))) == [number**2 for number in range(9)]


def test_a_pool_starts_no_more_threads_than_it_may():
    working, most, lock = set(), [0], threading.Lock()

    def work(number: int) -> None:
        with lock:
            working.add(number)
            most[0] = max(most[0], len(working))
        time.sleep(0.01)
        with lock:
            working.remove(number)

    with Pool(2) as pool:
        list(pool.map(work, range(10)))
    assert most == [2]


def test_a_pool_does_all_its_work_before_it_ends_and_hands_errors_on():
    done = []
    with Pool(1) as pool:
        failed = pool.submit(divmod, 7, 0)
        for number in range(5):
            pool.submit(done.append, number)
    assert done == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_a_pool_left_by_an_error_drops_what_has_not_begun():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        go_on.wait(timeout=20)
        done.append("first")

    with pytest.raises(KeyError), Pool(1) as pool:
        pool.submit(first)
        dropped = [pool.submit(done.append, number) for number in range(5)]
        dropped[-1].add_done_callback(lambda _: go_on.set())  # the pool has begun to end
        begun.wait(timeout=20)
        raise KeyError
    assert done == ["first"]
    assert all(future.cancelled() for future in dropped)


def test_a_process_ends_although_a_pool_was_never_left():
    """As after an interruption in its first or last lines. The work it was given is waited for."""
    script = """
import time
from finetune.system.threads import Pool
pool = Pool(2)
pool.submit(time.sleep, 0.1)
pool.submit(print, "done")
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout == "done\n"


def test_a_pool_keeps_no_result_that_was_read():
    class Result:
        pass

    with Pool(2) as pool:
        results = pool.map(lambda _: Result(), range(4))
        for result in results:
            read = weakref.ref(result)
            del result
            gc.collect()
            assert read() is None


def test_a_pool_whose_threads_never_start_is_an_error_of_memory(no_thread_starts, monkeypatch):
    monkeypatch.setattr(threads, "START_TIMEOUT_S", 0.1)
    with pytest.raises(MemoryError), Pool(2) as pool:
        list(pool.map(str, range(3)))
