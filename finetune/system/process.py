"""Process start and exit: environment variables, signals, one error line and an exit code per failure.
No framework is imported here: libraries read the environment at import.
"""

import contextlib
import errno
import importlib.util
import locale
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from finetune.errors import (
    EXPECTED,
    NO_SPACE,
    OutOfMemoryError,
    OutputClosedError,
    PlanError,
    StorageError,
    is_out_of_memory,
)
from finetune.system.imports import lighten
from finetune.system.terminal import is_closed, log_error, outliving_its_reader, say
from finetune.system.threads import start_thread
from finetune.system.untrusted import tokenizer_failures

REQUIRED = ("numpy", "safetensors", "yaml", "fastcore", "torch", "transformers")
# A terminal is closed, or what reads the output has ended: often by the signal that ends the run, and more than once.
GONE = (signal.SIGHUP, signal.SIGPIPE)
# Schedulers warn by them before they end the job; the limit of processor time does so every second. An alarm may have
# been set before an exec, as a limit of time where there is no timeout(1).
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM)
MORE_MEMORY = "Raise the limits of memory and processes (ulimit -a), or use a smaller model or smaller batches."


def prepare_environment() -> None:
    """Sets environment variables that libraries read at import. Values set by the user are kept.

    OpenMP threads that busy-wait take cores from other threads: a tenth of the speed on a shared machine. oneDNN keeps
    half a MiB of code per shape of a product, and rows of uneven length have ever new shapes: its two caches, of 1,024
    each, grew a run by gigabytes. 64 hold what one microbatch multiplies.
    """
    if sys.platform == "win32":
        raise PlanError("Windows: not supported (no flock). Use Linux, macOS, or WSL.")
    if sys.flags.optimize > 1:
        raise PlanError("python -OO, PYTHONOPTIMIZE=2: removes docstrings, which transformers reads. Use 1 at most.")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise PlanError("the working directory was removed. Change to one that exists.") from None
    check_compiler_cache()
    if locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8"):
        with contextlib.suppress(locale.Error):  # torch reads its own files, which are UTF-8, by the locale
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    # Microbatches differ in length: blocks of fixed size would leave holes that no later one fits.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def check_compiler_cache() -> None:
    """Raises PlanError for a TORCHINDUCTOR_CACHE_DIR that cannot be made: torch's import fails there."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given:
        try:
            os.makedirs(given, exist_ok=True)
        except OSError as error:
            raise PlanError(
                f"TORCHINDUCTOR_CACHE_DIR {given}: {error.strerror}, and torch keeps compiled code there. Set another "
                "folder, or unset it."
            ) from None


# Environment variables that are set here, by ranks and by what they start with.
SET_HERE = (
    *("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"),
    *("PYTORCH_CUDA_ALLOC_CONF", "HF_HUB_DISABLE_TELEMETRY", "TQDM_DISABLE"),
    *("DS_ACCELERATOR", "ACCELERATE_USE_DEEPSPEED", "MKL_THREADING_LAYER", "GLOO_SOCKET_IFNAME"),
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)
# Those that libraries set for themselves, as they are imported or used. Others may be a callback's.
OF_LIBRARIES = ("ACCELERATE_", "HF_", "TOKENIZERS_", "TORCH", "_TORCH", "TRANSFORMERS_", "TRITON_", "WANDB_")


# What torch says where oneDNN got no memory, before it takes another kernel, whose sums are rounded otherwise.
NO_MEMORY_FOR_KERNEL = r"mkldnn\w* failed.*could not create a primitive(?! descriptor)"


@contextlib.contextmanager
def warnings_not_raised() -> Iterator[None]:
    """A context in which no warning is an error, as `python -W error` makes them: libraries warn in the middle of their
    work, which would end there. One is: torch's of memory that was refused, after which a run would have other bits.
    At its end the filters are as before, behind those of libraries that were imported.
    """
    filters: Any = warnings.filters
    before = list(filters)
    filters[:] = [found for found in before if found[0] != "error"]
    warnings.filterwarnings("error", message=NO_MEMORY_FOR_KERNEL)
    added = warnings.filters[0]
    try:
        yield
    finally:
        filters = warnings.filters
        filters[:] = [*(found for found in filters if found not in before and found != added), *before]


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """A context with `prepare_environment` in which no warning is an error and no file takes the number of a standard
    stream. At its end environment variables, locale, stdout and the filters of warnings are as before. So are the hook
    of uncaught exceptions, which torch's process groups set, and what its compiler sets: the limit of recursion and how
    multiprocessing starts.
    """
    hook = sys.excepthook
    limit = sys.getrecursionlimit()
    starts = multiprocessing.get_start_method(allow_none=True)
    environment = dict(os.environ)
    character_type = locale.setlocale(locale.LC_CTYPE)
    stdout = sys.stdout
    stderr = sys.stderr
    lacks_stderr = stderr is None or is_closed(stderr)
    prepare_environment()
    try:
        # A program without a console has none, and a program may have closed its own.
        if stdout is None or is_closed(stdout):
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open for the call
        if lacks_stderr:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  open for the call
        with standard_numbers_taken(), warnings_not_raised():
            yield
    finally:
        # Only what differs: a thread that still loads weights may be reading the environment.
        for name in {*SET_HERE, *(n for n in {*os.environ, *environment} if n.startswith(OF_LIBRARIES))}:
            before = environment.get(name)
            if os.environ.get(name) == before:
                continue
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
        sys.excepthook = hook
        sys.setrecursionlimit(limit)
        multiprocessing.set_start_method(starts, force=True)
        locale.setlocale(locale.LC_CTYPE, character_type)
        if getattr(sys.stdout, "name", None) == os.devnull:  # this process is a rank that prints nothing
            sys.stdout = stdout
        if lacks_stderr:
            sys.stderr = stderr


@contextlib.contextmanager
def standard_numbers_taken() -> Iterator[None]:
    """A context in which /dev/null has the numbers of standard streams that the caller closed: what is printed would go
    to the file that takes one.
    """
    opened = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            opened.append(number)
    try:
        yield
    finally:
        for number in opened:
            os.close(number)


def restorer_of_folder() -> Callable[[], None]:
    """A function that goes back to the present working directory, if that still exists."""
    folder = None
    with contextlib.suppress(OSError):
        folder = os.getcwd()

    def restore() -> None:
        if folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(folder)

    return restore


_own: list[bool] = []  # not empty in a program of ours, which may end as it likes
_former: list[dict[int, Any]] = []  # {signal: handler before}, of contexts that handle some, outermost first


class StopSignal:
    """Set by the first SIGTERM, SIGINT or SIGQUIT, SIGHUP, one of WARNINGS, or SIGPIPE where nobody reads the output
    any more; the loop saves at the next step boundary. A second SIGTERM, SIGINT or SIGQUIT exits immediately; in the
    process of a caller it is the caller's, whose handler gets it.

    `received` is this process's signal; `signal` is what the run acts on, agreed on by all ranks between steps.
    """

    def __init__(self, single_process: bool = True):
        self.single_process = single_process
        self.received: int | None = None
        self.signal: int | None = None

    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        assert self.signal is not None, "no signal was received"
        return 128 + self.signal

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number in (*GONE, *WARNINGS):
            return
        if self.received not in (None, *GONE, *WARNINGS):
            if _own:
                os._exit(128 + number)
            _restore({number: _former[-1][number]})
            signal.raise_signal(number)
            return
        self.received = number
        if not _own and self.single_process:
            start_thread(partial(_tell_of, number))  # this one may have interrupted a print
        if self.single_process:
            self.signal = number

    def sync(self, all_reduce_max: Callable[[int], int]) -> None:
        """Synchronizes the signal over ranks. `all_reduce_max(number)`: all-reduce max. Collective."""
        if not self.single_process:
            self.signal = all_reduce_max(self.received or 0) or None

    @contextlib.contextmanager
    def forwarding(self, send: Callable[[int], None]) -> Iterator["StopSignal"]:
        """Forwards signals through `send(number)` inside: the launcher process has nothing to save itself."""

        def handle(number: int, frame: FrameType | None):
            self.received = number
            send(number)

        with self._handling(handle):
            yield self

    @contextlib.contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        """Handles signals, and output that nobody reads any more, inside."""
        with self._handling(self._handle), outliving_its_reader(partial(self._handle, signal.SIGPIPE, None)):
            yield self

    @contextlib.contextmanager
    def _handling(self, handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
        """Restores the previous handlers on exit. Only the main thread may install handlers. SIGHUP, SIGQUIT and
        WARNINGS stay what the caller, or nohup, has made of them.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGTERM, signal.SIGINT]
        unheard = (signal.SIGHUP, signal.SIGQUIT, *WARNINGS)
        numbers += [n for n in unheard if signal.getsignal(n) is signal.SIG_DFL and not _is_caught(n)]
        former: dict[int, Any] = {n: signal.signal(n, handle) for n in numbers}
        _former.append(former)
        try:
            yield
        finally:
            _restore(former)
            _former.remove(former)


def _tell_of(number: int) -> None:
    with contextlib.suppress(OutputClosedError, OSError, ValueError):
        say(f"{signal.Signals(number).name}: the run saves after this step, and returns; another ends it at once")


def _restore(former: dict[int, Any]) -> None:
    for number, handler in former.items():
        signal.signal(number, handler)


def _as_caller() -> None:
    """Gives a child that a callback forked the caller's handlers: it has no run to save, and is to end when it is told
    to, as multiprocessing's pools tell their workers.
    """
    for former in reversed(_former):
        _restore(former)


os.register_at_fork(after_in_child=_as_caller)


def _is_caught(number: int) -> bool:
    """True if code beside Python's handles a signal, as faulthandler.register and profilers do; Linux alone says so."""
    with contextlib.suppress(OSError, StopIteration):
        with open("/proc/self/status") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


def end_child(returned: str) -> NoReturn:
    """Ends a forked child as Python ends a process by the error that is raised now, but for what its parent's run would
    do on the way; without an error with the line `returned`.
    """
    error = sys.exc_info()[1]
    code: Any = 1
    if error is None:
        log_error(returned)
        code = PlanError.exit_code
    elif isinstance(error, SystemExit):
        code = error.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    else:
        traceback.print_exception(error)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def mute_nonzero_ranks(rank: int) -> None:
    """Discards the stdout of every rank but 0."""
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open for the life of the process
        os.environ["TQDM_DISABLE"] = "1"


@contextlib.contextmanager
def result_on_stdout(wanted: bool) -> Iterator[None]:
    """Context that sends prints to stderr, if `wanted`: stdout is for a result that another program reads.

    Muted ranks stay muted.
    """
    muted = getattr(sys.stdout, "name", None) == os.devnull
    with contextlib.redirect_stdout(sys.stderr) if wanted and not muted else contextlib.nullcontext():
        yield


def open_standard_streams() -> None:
    """Opens the standard streams that the caller closed (`>&-`) on /dev/null, before a file takes their number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode))  # open for the life of the process


def out_of_memory(error: BaseException) -> str | None:
    """The line of a failure for want of memory; None for any other error."""
    if is_out_of_memory(error):
        return f"out of memory ({(str(error).splitlines() or ['no detail'])[0][:200]}). {MORE_MEMORY}"
    return None


def parse_or_exit(parser: ArgumentParser) -> None:
    """Exits for --help, and with one error line for an invalid command line or a Python without the requirements."""
    open_standard_streams()
    try:
        parser.parse_args()
        check_installed()
    except PlanError as error:
        exit_with(partial(_raise, error))


def require_installed(names: tuple[str, ...] = REQUIRED) -> None:
    """Exits with one error line if this Python lacks a package, before a module that imports it is imported."""
    open_standard_streams()
    try:
        check_installed(names)
    except PlanError as error:
        exit_with(partial(_raise, error))


def check_installed(names: tuple[str, ...] = REQUIRED) -> None:
    """Raises PlanError if this Python lacks a package that every run imports, as one beside .venv does."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise PlanError(
                f"{name}: is not installed for {sys.executable}. Run source .venv/bin/activate after make setup, or "
                "pip install -r requirements.txt."
            )


def _raise(error: BaseException) -> NoReturn:
    raise error


def exit_with(main: Callable[[], int]) -> None:
    """Runs `main() -> exit code` and exits with it; an expected failure prints one line and exits with its code.
    os._exit: a normal exit would wait for threads that are still reading weights.
    """
    _own.append(True)
    open_standard_streams()
    lighten()
    # Not for callers from Python: children that they fork would tokenize with threads that only the parent has.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with tokenizer_failures():
            code = main()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = OutputClosedError.exit_code
    except EXPECTED as error:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        log_error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except (OSError, MemoryError, RuntimeError, ImportError, SystemError, UserWarning) as error:
        line = out_of_memory(error)
        if line is not None:
            code = OutOfMemoryError.exit_code
        elif isinstance(error, OSError) and error.errno in NO_SPACE:
            remedy = "Free some space"
            if error.errno == errno.EFBIG:
                remedy = "Raise the limit of a file's size (ulimit -f)"
            line = f"{error.filename or 'output'}: {error.strerror}. {remedy}."
            code = StorageError.exit_code
        elif isinstance(error, PermissionError) and error.filename:
            line = f"{error.filename}: permission denied. Change its permissions."
            code = PlanError.exit_code
        else:
            raise
        log_error(line)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
