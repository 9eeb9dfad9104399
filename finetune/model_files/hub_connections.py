"""Connections to the Hub. Those of an answer that is given up are closed: threads of huggingface_hub would wait for it,
and the end of a caller's process for them.
"""

import contextlib
import socket
import threading
import weakref
from concurrent.futures import Future, wait
from typing import Any

ENDS_WITHIN_S = 10.0  # huggingface_hub asks again after a second

_streams: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # {httpcore's: thread that made it}
_asking: weakref.WeakSet[Any] = weakref.WeakSet()
_given_up: weakref.WeakSet[Any] = weakref.WeakSet()


def present() -> set[int | None]:
    """The threads that are here, without those of `start_thread`: nothing waits for these."""
    # They may share one object.
    return {thread.ident for thread in threading.enumerate() if type(thread).__name__ != "_DummyThread"}


def remember(request: Any) -> None:
    """Keeps the connection of a request to the Hub in mind, and its thread. Raises HTTPError in a given-up one."""
    from huggingface_hub.errors import HTTPError

    number = threading.get_ident()
    here = next((thread for thread in threading.enumerate() if thread.ident == number), None)
    if here is not None and number in present():
        if here in _given_up:
            raise HTTPError("given up")
        _asking.add(here)
    request.extensions.setdefault("trace", _connected)


def _connected(event: str, info: dict) -> None:
    if event.endswith(("connect_tcp.complete", "connect_unix_socket.complete", "start_tls.complete")):
        _streams[info["return_value"]] = threading.get_ident()


def give_up(answer: Future, callers: set[int | None]) -> None:
    """Closes the connections, and waits for the threads that ask by them. `callers`: threads that were `present`
    before, whose requests go on.
    """
    threads = [thread for thread in _asking if thread.is_alive() and thread.ident not in callers]
    _given_up.update(threads)
    for stream in [stream for stream, thread in _streams.items() if thread not in callers]:
        with contextlib.suppress(OSError):  # one that is closed
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    if threads:
        wait([answer], ENDS_WITHIN_S)


def forget() -> None:
    """Later requests are those of others."""
    for kept in (_streams, _asking, _given_up):
        kept.clear()
