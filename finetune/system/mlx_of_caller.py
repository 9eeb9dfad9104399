"""The caller's random state and limits of MLX, kept from where a call first computes on MLX until it ends.

Not from its beginning: in a child that was forked after its parent had computed on MLX, asking for them waits for ever.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial

from finetune.errors import PlanError

Restorers = list[Callable[[], object]]
_calls: list[Restorers] = []  # of each call that goes on, the innermost last


_forked: list[bool] = []  # not empty in a child whose parent may have computed on MLX


def _forget() -> None:
    for kept in _calls:
        kept.clear()
    if "mlx.core" in sys.modules:
        _forked.append(True)


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def mlx_of_caller() -> Iterator[None]:
    """A context whose end restores what `keep_mlx` kept within it."""
    kept: Restorers = []
    _calls.append(kept)
    try:
        yield
    finally:
        # By identity: of two calls that have kept nothing, the lists are equal.
        _calls[:] = [other for other in _calls if other is not kept]
        for restore in kept:
            restore()


def keep_mlx() -> None:
    """Keeps the caller's. Called by the engine before it first computes. Raises PlanError in a forked child, where MLX
    waits for ever for threads that only its parent has.
    """
    if _forked:
        raise PlanError(
            "--backend mlx: this process was forked after MLX was imported, and MLX computes in no such child. Start "
            "it with spawn, or use --backend cpu."
        )
    if not _calls or _calls[-1]:
        return
    mx = sys.modules["mlx.core"]
    kept = [*_random_state()]
    # Each is set to be read. The wired one is not raised for it, which not every machine allows.
    for set_limit, meanwhile in ((mx.set_cache_limit, 2**62), (mx.set_wired_limit, 0)):
        before = set_limit(meanwhile)
        set_limit(before)
        kept.append(partial(set_limit, before))
    _calls[-1].extend(kept)


def callers_random_state() -> Restorers:
    """A function that restores the random state that was kept; none where the call has not computed on MLX."""
    return _calls[-1][:1] if _calls else []


def present_random_state() -> Restorers:
    """A function that restores the present random state, likewise."""
    return _random_state() if callers_random_state() else []


def _random_state() -> Restorers:
    mx = sys.modules["mlx.core"]
    high, low = list(mx.random.state)[0].tolist()  # which is what a seed of 64 bits makes
    return [partial(mx.random.seed, high << 32 | low)]
