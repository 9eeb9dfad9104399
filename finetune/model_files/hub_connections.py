"""Connections to the Hub. Those of an answer that is given up are closed: threads of huggingface_hub would wait for it,
and the end of a caller's process for them.
"""

import contextlib
import socket
import threading
import weakref
from collections.abc import Container
from concurrent.futures import Future, wait
from typing import Any

ENDS_WITHIN_S = 10.0  # huggingface_hub asks again after a second

_streams: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # {httpcore's: thread that made it}
_asking: weakref.WeakSet[Any] = weakref.WeakSet()
_given_up: weakref.WeakSet[Any] = weakref.WeakSet()


def present() -> dict[int | None, Any]:
    """{number: thread} of those that are waited for at the end: not of `start_thread`'s."""
    # They may share one object.
    return {thread.ident: thread for thread in threading.enumerate() if type(thread).__name__ != "_DummyThread"}


def remember(request: Any) -> None:
    """Keeps the connection of a request to the Hub in mind, and its thread. Raises HTTPError in a given-up one."""
    from huggingface_hub.errors import HTTPError

    here = present().get(threading.get_ident())
    if here in _given_up:
        raise HTTPError("given up")
    if here is not None:
        _asking.add(here)
    request.extensions.setdefault("trace", _connected)


def _connected(event: str, info: dict) -> None:
    if event.endswith(("connect_tcp.complete", "connect_unix_socket.complete", "start_tls.complete")):
        _streams[info["return_value"]] = threading.get_ident()


def give_up(answer: Future, callers: Container[int | None]) -> None:
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
