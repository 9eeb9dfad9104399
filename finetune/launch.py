"""How a process starts and ends: environment before any framework, signals, one line and an exit code for each failure."""

import contextlib
import errno
import os
import signal
import sys

from finetune.errors import (
    CheckpointDamaged,
    NonFiniteError,
    OutOfMemoryError,
    OutputDirInUse,
    PlanError,
    StorageError,
)

EXPECTED = (PlanError, NonFiniteError, OutOfMemoryError, StorageError, OutputDirInUse, CheckpointDamaged)


def prepare_environment() -> None:
    """Settings that libraries read when they are first imported. Whatever the user has set stays.

    OpenMP threads that spin while they wait steal the core another thread needs: on a shared machine a tenth of the speed.
    """
    if sys.platform == "win32":
        raise PlanError("Windows: is not supported (no flock). Use Linux, macOS, or WSL.")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class Stop:
    """Set by the first SIGTERM or SIGINT; the loop saves at the next step boundary. The second leaves at once."""

    def __init__(self):
        self.signal = None

    @property
    def exit_code(self) -> int:
        return 128 + self.signal

    def _handle(self, number, frame):
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number

    @contextlib.contextmanager
    def listening(self):
        """Handles both signals inside, and puts the former handlers back. Only the main thread may install handlers."""
        import threading

        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        former = {n: signal.signal(n, self._handle) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def answer_early(parser) -> None:
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
        print(f"error: {error}" if not str(error).startswith("error") else error, file=sys.stderr)
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
