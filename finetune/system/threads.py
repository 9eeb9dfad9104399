"""Threads whose start has a timeout.

`threading.Thread.start` waits until the new thread says that it runs. A thread that ends before that, because it was
refused memory, would be waited for forever.
"""

import _thread
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

START_TIMEOUT_S, SLICES = 10.0, 10  # waited for in slices: a process that was stopped meanwhile loses one of them
_working: set[Future] = set()
os.register_at_fork(after_in_child=_working.clear)  # a child has none of its parent's threads


def start_thread(work: Callable[[], None]) -> None:
    """Starts work() in a thread that nothing waits for, not even the end of the process."""
    _thread.start_new_thread(work, ())


def in_background(work: Callable, *args) -> Future:
    """The future of work(*args), which runs in a thread. A normal exit of the interpreter waits for it; os._exit does
    not. Raises MemoryError if the thread does not start.
    """
    future: Future = Future()
    started = threading.Event()

    def run():
        started.set()
        with _ErrorOf(future):
            if future.set_running_or_notify_cancel():
                future.set_result(work(*args))

    start_thread(run)
    if not any(started.wait(START_TIMEOUT_S / SLICES) for _ in range(SLICES)) and future.cancel():
        raise MemoryError(f"a thread did not start in {START_TIMEOUT_S:g} s")
    _working.add(future)
    future.add_done_callback(_working.discard)
    return future


class _ErrorOf:
    """A context that hands an error of any class to the future, whose result() raises it."""

    def __init__(self, future: Future):
        self.future = future

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> bool:
        if error is not None and not self.future.done():
            self.future.set_exception(error)
        return True


@atexit.register
def _wait_for_work() -> None:
    while _working:
        concurrent.futures.wait(list(_working))
