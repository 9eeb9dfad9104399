"""Messages to a child process and back, and what its end is to the parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.system.child import Child, ChildEnded, limit_memory, limit_time, serve


def handler(messages):
    """What the child of these tests answers, by the first part of a message."""
    start = next(messages)
    for word, *parts in messages:
        if word == b"echo":
            yield (*start, *parts)
        elif word == b"each":
            yield from ((part,) for part in parts)
        elif word == b"where":
            yield (os.getcwd().encode(), os.environ["TOLD"].encode())
        elif word == b"spin":
            limit_time(0.05)
            while True:
                pass
        elif word == b"work":
            while True:
                pass
        elif word == b"allocate":
            limit_memory(2**28)
            try:
                yield (bytes(2**29),)
            except MemoryError:
                yield (b"refused",)
        else:
            os._exit(3)


@pytest.fixture
def child():
    found = Child("tests.system.test_child", b"start", environment={"TOLD": "yes"})
    yield found
    found.close()


def test_parts_of_any_bytes_and_sizes_come_back_as_they_were(child):
    parts = [b"", b"\n", b"12 34\n", bytes(range(256)) * 4096]
    assert child.request(b"echo", *parts) == [b"start", *parts]


def test_a_message_may_have_an_answer_for_each_of_its_parts(child):
    """More than a pipe holds, in both directions: the child reads all of a message before it answers."""
    parts = [b"x" * 2**16] * 20
    child.send(b"each", *parts)
    assert [child.receive() for _ in parts] == [[part] for part in parts]


def test_a_child_is_not_in_the_current_folder_and_sees_its_variables(child):
    assert child.request(b"where") == [b"/", b"yes"]


def test_the_end_of_a_child_has_its_status(child):
    with pytest.raises(ChildEnded, match="exit status 3") as ended:
        child.request(b"exit")
    assert ended.value.status == 3
    with pytest.raises(ChildEnded):  # and again, instead of a broken pipe
        child.request(b"echo", b"x" * 2**20)


def test_the_kernel_ends_a_child_that_computes_too_long(child):
    with pytest.raises(ChildEnded) as ended:
        child.request(b"spin")
    assert ended.value.status == -signal.SIGPROF


@pytest.mark.skipif(sys.platform != "linux", reason="macOS rejects limits of the address space")
def test_a_child_that_computes_ends_soon_after_its_parent_was_killed():
    code = (
        "import os, signal; from finetune.system.child import Child; "
        "child = Child('tests.system.test_child', b'start', environment={'TOLD': 'yes'}); child.request(b'where'); "
        "child.send(b'work'); print(child.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(done.stdout)
    until = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert done.returncode == -signal.SIGKILL and not _runs(pid)


def _runs(pid: int) -> bool:
    """True for a process that has not ended; nobody may have waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_memory_beyond_the_limit_is_refused(child):
    assert child.request(b"allocate") == [b"refused"]


def test_the_parents_signals_do_not_end_a_child(child):
    child.request(b"echo")
    for number in (signal.SIGINT, signal.SIGTERM):
        child.process.send_signal(number)
    assert child.request(b"echo") == [b"start"]


if __name__ == "__main__":
    serve(handler)
