"""The process of whoever calls this package from Python, which is as it was when the call returns."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import finetune.system.mlx_of_caller  # noqa: F401  which notes forks from here on
from finetune.errors import PlanError
from finetune.model_files.hub import callers_requests
from finetune.system import process


class Beside(Protocol):
    """The caller's random states, kept apart from the run's."""

    def swapped_in(self) -> AbstractContextManager:
        """A context in which the caller's functions draw from the caller's states; the run's are as before."""


_run: dict[str, tuple[int, str, object]] = {}  # the thread that trains: its id and name
os.register_at_fork(after_in_child=_run.clear)  # a child has none of its parent's threads
_forked: list[bool] = []  # not empty in a child whose parent may have computed with several threads


def _note_fork() -> None:
    if "torch" in sys.modules:
        _forked.append(True)


os.register_at_fork(after_in_child=_note_fork)


@contextlib.contextmanager
def callers_process(*, loads_torch: bool = False, trains: bool = False) -> Iterator[Beside | None]:
    """A context whose end restores what a call changes: environment variables, locale, stdout, filters of warnings and
    the limits of Hub requests, and, if torch was imported before or with `loads_torch`, its settings and the random
    states of torch, MLX, numpy and Python. `trains`: the call does. Raises PlanError for modes of torch that forbid it.
    """
    with process.prepared(), callers_requests(), ExitStack() as stack:
        beside = None
        if loads_torch or "torch" in sys.modules:
            from finetune.torch_engine.callers_settings import callers_settings

            beside = stack.enter_context(callers_settings(trains, alone=bool(_forked)))
        yield beside


@contextlib.contextmanager
def only_run(function: str) -> Iterator[None]:
    """A context of one thread at a time, which may enter it again: a callback may train too. Raises PlanError."""
    mine = (threading.get_ident(), threading.current_thread().name, object())
    running = _run.setdefault("run", mine)
    if running[0] != mine[0]:
        raise PlanError(
            f"{function}: thread {running[1]} of this process is in a run, and both would draw from one random "
            "state. Wait for its end, or start each run in a process of its own."
        )
    try:
        yield
    finally:
        if running is mine:
            _run.pop("run", None)  # a child that was forked within has none
