"""Progress of what takes long: bars on a terminal, drawn by tqdm; a line every ten seconds everywhere else.

Work that knows how far it is opens a `Progress` around itself. The innermost open one speaks, so that a phase shows
what it is busy with, and nothing is silent for longer than SILENCE_S.
"""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from finetune.errors import OutputClosedError
from finetune.system.terminal import encodable, is_terminal, say
from finetune.system.threads import start_thread

SILENCE_S = 8.0  # before a line says what goes on, where nothing can be redrawn
DRAWN_S = 5.0  # in which a line is drawn; in a forked child the watcher that holds the lock does not exist
REDRAW_S = 1.0  # of a bar whose work does not move
BAR = "{desc} |{bar}|"

Item = TypeVar("Item")


@functools.cache
def tqdm_class():
    """tqdm, whose lock is one of threads: its own one of processes needs semaphores that a container may refuse."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0  # its own thread is not needed, as bars are redrawn here
    return tqdm


class Progress:
    """A context around work. `total`: how many `unit`s it has, if that is known.

    `describe()`, if given, is the whole text, and begins with what a narrow terminal must show. On ranks other than 0
    and with `quiet` nothing is printed. `pinned`: drawn from the beginning, and below what is open inside it; others
    are drawn once they have taken a second. `update` and `drawn` may be called from any thread.
    """

    # As tqdm keeps its bars: what is open in this process, and when the last of them spoke.
    _open: ClassVar[list["Progress"]] = []
    _spoke: ClassVar[float] = 0.0
    lines_only: ClassVar[bool] = False  # set for a process by --log_to stdout

    def __init__(
        self,
        name: str,
        total: int | None = None,
        unit: str = "",
        describe: Callable[[], str] | None = None,
        quiet: bool = False,
        pinned: bool = False,
    ):
        self.name = name
        self.total = total
        self.unit = unit
        self.quiet = quiet or bool(os.environ.get("TQDM_DISABLE"))
        self.describe = describe or self._described
        self.done = 0
        self.began = time.monotonic()
        self.pinned = pinned
        self.live = False
        self.bar = None
        self.over = threading.Event()
        self.drawing = threading.RLock()

    def __enter__(self) -> "Progress":
        self.began = time.monotonic()
        if self.quiet:
            return self
        if not Progress._open:  # what came before it may have been long and silent
            Progress._spoke = max(Progress._spoke, time.monotonic() - SILENCE_S / 2)
        self.live = not Progress.lines_only and is_terminal(sys.stdout)
        if self.pinned:
            self.drawn()
        start_thread(self._watch)
        Progress._open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self not in Progress._open:
            return
        self.over.set()
        if self.drawing.acquire(timeout=DRAWN_S):  # the watcher ends its line; it draws nothing after it
            self.drawing.release()
        Progress._open.remove(self)
        self._hide()

    @staticmethod
    def spoke() -> None:
        """Called when a line was printed: the next is due SILENCE_S later."""
        Progress._spoke = time.monotonic()

    def update(self, number: int = 1) -> None:
        """Counts `number` more units as done."""
        self.done += number

    def counting(self, function: Callable) -> Callable:
        """`function`, each call of which counts as one unit that begins."""

        def counted(*args: Any):
            self.done = min(self.done + 1, self.total or self.done + 1)
            return function(*args)

        return counted

    def drawn(self) -> None:
        """Draws the bar at once, on a terminal."""
        if not self.live:
            return
        tqdm = tqdm_class()
        with tqdm.get_lock():
            if self.bar is None:
                how = dict(total=self.total or 1, bar_format=BAR, dynamic_ncols=True, leave=False)
                self.bar = tqdm(desc=self._text(), initial=min(self.done, self.total or 1), file=sys.stdout, **how)
            else:
                self.bar.n = min(self.done, self.bar.total)
                self.bar.set_description_str(self._text(), refresh=False)
                self.bar.refresh(nolock=True)

    def _watch(self) -> None:
        with contextlib.suppress(MemoryError):  # the work itself hears of it
            while not self.over.wait(REDRAW_S if self.live else max(0.2, self._due())):
                with self.drawing:
                    if not self.over.is_set():
                        self._look()

    def _look(self) -> None:
        innermost = Progress._open[-1:] == [self]
        if self.live and (self.pinned or innermost):
            self.drawn()
        elif self.bar is not None:
            self._hide()
        elif not self.live and innermost and self._due() <= 0:
            Progress.spoke()
            with contextlib.suppress(OutputClosedError):  # the run itself hears of it with its next line
                say(self._text())

    def _hide(self) -> None:
        bar = self.bar
        self.bar = None
        if bar is not None:
            with tqdm_class().get_lock():
                bar.close()
                with contextlib.suppress(OSError, ValueError):  # of a terminal that is gone, a stream that was closed
                    sys.stdout.write("\r")  # below another bar, tqdm leaves the cursor at the end of the line

    @staticmethod
    def _due() -> float:
        return Progress._spoke + SILENCE_S - time.monotonic()

    def _text(self) -> str:
        return encodable(self.describe(), getattr(sys.stdout, "encoding", None))

    def _described(self) -> str:
        passed = time.monotonic() - self.began
        if not self.total:
            return f"{self.name} {duration(passed)}"
        unit = ""
        if self.unit:
            unit = f" {self.unit}"
        left = ""
        if 0 < self.done < self.total:
            left = f", {duration(passed * (self.total / self.done - 1))} left"
        return f"{self.name} {self.done:,}/{self.total:,}{unit}, {duration(passed)}{left}"


def each(name: str, items: Sequence[Item], unit: str = "") -> Iterator[Item]:
    """The items, one after the other, within a Progress that counts them."""
    with Progress(name, len(items), unit) as progress:
        for item in items:
            yield item
            progress.update()


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"
