"""Threads whose start has a timeout.

`threading.Thread.start` waits until the new thread says that it runs. A thread that ends before that, because it was
refused memory, would be waited for forever.
"""

import _thread
import atexit

# Both register for the interpreter's end, as no import can from then on: a thread that trains may outlive the main one.
import concurrent.futures.process
import concurrent.futures.thread
import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any

# waited for in slices: a process that was stopped meanwhile loses one of them
START_TIMEOUT_S = 10.0
SLICES = 10
_working: set[Future] = set()
os.register_at_fork(after_in_child=_working.clear)  # a child has none of its parent's threads


def start_thread(work: Callable[[], None]) -> None:
    """Starts work() in a thread that nothing waits for, not even the end of the process."""
    _thread.start_new_thread(work, ())


def in_background(work: Callable, *args: Any, wait_at_exit: bool = True) -> Future:
    """The future of work(*args), which runs in a thread. With `wait_at_exit`, a normal exit of the interpreter waits
    for it; os._exit does not. Raises MemoryError if the thread does not start.
    """
    future: Future = Future()
    started = threading.Event()

    def run():
        started.set()
        _complete(future, work, args)

    start_thread(run)
    if not any(started.wait(START_TIMEOUT_S / SLICES) for _ in range(SLICES)) and future.cancel():
        raise MemoryError(f"a thread did not start in {START_TIMEOUT_S:g} s")
    if wait_at_exit:
        return _awaited_at_exit(future)
    return future


class Pool:
    """A context that runs work in up to `size` threads, started by the first `submit` calls. Its end waits for all the
    work; after an error, only for the work that has begun: the rest is cancelled.
    """

    def __init__(self, size: int):
        assert size > 0, size
        self.size = size
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        self.threads: list[Future] = []

    def submit(self, work: Callable, *args: Any) -> Future:
        """The future of work(*args). Raises MemoryError if a thread does not start."""
        if len(self.threads) < self.size:
            self.threads.append(in_background(self._work, wait_at_exit=False))
        future = _awaited_at_exit(Future())
        self.waiting.put((future, work, args))
        return future

    def map(self, work: Callable, items: Iterable) -> Iterator:
        """work(item) of each item, in the order of the items. A result is kept until it is read."""
        futures = deque(self.submit(work, item) for item in items)
        while futures:
            yield futures.popleft().result()

    def _work(self) -> None:
        while entry := self.waiting.get():
            _complete(*entry)
            del entry  # its result may be large, and the next one may take a while to come

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while kind is not None and not self.waiting.empty():
            with contextlib.suppress(queue.Empty):  # a thread took it
                self.waiting.get_nowait()[0].cancel()
        for _ in self.threads:
            self.waiting.put(None)
        concurrent.futures.wait(self.threads)


def _awaited_at_exit(future: Future) -> Future:
    _working.add(future)
    future.add_done_callback(_working.discard)
    return future


def _complete(future: Future, work: Callable, args: tuple) -> None:
    with _ErrorOf(future):
        if future.set_running_or_notify_cancel():
            future.set_result(work(*args))


class _ErrorOf:
    """A context that hands an error of any class to the future, whose result() raises it."""

    def __init__(self, future: Future):
        self.future = future

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None and not self.future.done():
            self.future.set_exception(error)
        return True


@atexit.register
def _wait_for_work() -> None:
    while _working:
        concurrent.futures.wait(list(_working))
