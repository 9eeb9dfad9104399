"""How a process starts and ends: environment before any framework, signals, one line and an exit code for each failure."""

import contextlib
import errno
import os
import signal
import sys
import threading

from finetune.errors import EXPECTED, PlanError, StorageError


def prepare_environment() -> None:
    """TrainConfig that libraries read when they are first imported. Whatever the user has set stays.

    OpenMP threads that spin while they wait steal the core another thread needs: on a shared machine a tenth of the speed.
    """
    if sys.platform == "win32":
        raise PlanError("Windows: is not supported (no flock). Use Linux, macOS, or WSL.")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class StopSignal:
    """Set by the first SIGTERM or SIGINT; the loop saves at the next step boundary. The second leaves at once.

    `heard` is this process's own; `signal` is what the run acts on. Several ranks settle it together, between steps.
    """

    def __init__(self, alone: bool = True):
        self.alone, self.received, self.signal = alone, None, None

    @property
    def exit_code(self) -> int:
        return 128 + self.signal

    def _handle(self, number, frame):
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        if self.alone:
            self.signal = number

    def sync(self, all_reduce_max) -> None:
        """`all_reduce_max(number) -> the largest of all ranks`. Every rank calls it at the same point."""
        if not self.alone:
            self.signal = all_reduce_max(self.received or 0) or None

    @contextlib.contextmanager
    def forwarding(self, send):
        """Handles both signals inside by `send(number)`: the process that started the ranks has nothing to save itself."""

        def handle(number, frame):
            self.received = number
            send(number)

        with self._handling(handle):
            yield self

    @contextlib.contextmanager
    def installed(self):
        """Handles both signals inside."""
        with self._handling(self._handle):
            yield self

    @contextlib.contextmanager
    def _handling(self, handle):
        """Puts the former handlers back at the end. Only the main thread may install handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def mute_nonzero_ranks(rank: int) -> None:
    """Of several ranks the first speaks; whatever the others print goes nowhere."""
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open as long as the process
        os.environ["TQDM_DISABLE"] = "1"


def log_error(text) -> None:
    """The line of a failure, on stderr."""
    print(f"error: {text}" if not str(text).startswith("error") else text, file=sys.stderr, flush=True)


def parse_or_exit(parser) -> None:
    """Leaves for --help, and for a command line that is wrong with its one line; returns for a right one."""
    try:
        parser.parse_args()
    except PlanError as error:
        exit_with(lambda error=error: _raise(error))


def _raise(error):
    raise error


def exit_with(main) -> None:
    """Runs `main() -> exit code` and leaves with it; an expected failure is one line on stderr and its own code.

    os._exit: a thread that still reads weights would otherwise be waited for.
    """
    try:
        code = main()
    except EXPECTED as error:
        sys.stdout.flush()
        log_error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        print(f"error: {error.filename or 'output'}: {error.strerror}. Free some space.", file=sys.stderr)
        code = StorageError.exit_code
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
