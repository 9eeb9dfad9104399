"""Threads whose beginning is not waited for without end.

`threading.Thread.start` waits until the new thread says that it has begun. One that memory was refused to ends before
it can, and its starter would wait for ever.
"""

import _thread
import atexit
import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future

BEGIN_S = 10.0  # in which a thread begins on the busiest machine
_working: set[Future] = set()


def begin(work: Callable[[], None]) -> None:
    """Begins work() in a thread that nothing waits for, not even the end of the process."""
    _thread.start_new_thread(work, ())


def in_background(work: Callable, *args) -> Future:
    """The future of work(*args), which runs in a thread. The end of the process waits for it.
    Raises MemoryError if the thread does not begin.
    """
    future: Future = Future()
    begun = threading.Event()

    def run():
        begun.set()
        if not future.set_running_or_notify_cancel():
            return
        with _ErrorOf(future):
            future.set_result(work(*args))

    begin(run)
    if not begun.wait(BEGIN_S) and future.cancel():
        raise MemoryError(f"a thread did not begin in {BEGIN_S:g} s")
    _working.add(future)
    future.add_done_callback(_working.discard)
    return future


class _ErrorOf:
    """A context whose error, of whatever class, is handed to the future: who asks for its result gets it."""

    def __init__(self, future: Future):
        self.future = future

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> bool:
        if error is not None:
            self.future.set_exception(error)
        return True


@atexit.register
def _wait_for_work() -> None:
    concurrent.futures.wait(list(_working))
