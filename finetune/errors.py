"""Expected failures of a run, each with a stable exit code for scripts."""

import errno


def first_line(error: BaseException) -> str:
    """What an error says in its first line, at most 200 characters; its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# What code of other people's models raises when inputs, dtypes or lengths do not suit it.
MODEL_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class PlanError(ValueError):
    """An error the user can fix: one line naming the flag or file, the fact and the remedy.
    Raised before anything is loaded.
    """

    exit_code = 2


class NonFiniteError(ArithmeticError):
    """The loss or gradient of a step is not finite. The optimizer step was not applied."""

    exit_code = 65


class DivergedError(ArithmeticError):
    """With --stop_on_divergence: the loss is finite and far above its start."""

    exit_code = 66


class RankLostError(RuntimeError):
    """Another rank or its host died or stopped responding.
    This rank is healthy; the job can resume from its last checkpoint.
    """

    exit_code = 69


class OutOfMemoryError(MemoryError):
    """The device or host ran out of memory; the message names what to lower, with the current values."""

    exit_code = 71


class StorageError(OSError):
    """A write failed (disk full, no permission); the message names the path and the free bytes."""

    exit_code = 74


class OutputDirInUseError(RuntimeError):
    """Another live process holds the lock on this output_dir; the message names its pid, host and start time."""

    exit_code = 75


class CheckpointDamagedError(RuntimeError):
    """The requested checkpoint does not verify, and there is no valid older one to fall back to."""

    exit_code = 76


# What libraries say when memory, or an address for a thread, a lock or a library, is refused.
MEMORY_REFUSED = ("can't allocate", "out of memory", "can't start new thread", "bad_alloc", "failed to map segment")


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory was refused, whatever type the library raised."""
    refused = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return refused or any(text in str(error).lower() for text in MEMORY_REFUSED)


class OutputClosedError(BrokenPipeError):
    """Who read what this process prints has closed the pipe, as `| head` does. SIGPIPE's exit code; nothing is said."""

    exit_code = 141


# Failures reported as one line and an exit code, without a traceback.
EXPECTED = (
    PlanError,
    NonFiniteError,
    DivergedError,
    RankLostError,
    OutOfMemoryError,
    StorageError,
    OutputDirInUseError,
    CheckpointDamagedError,
    OutputClosedError,
)
