"""Expected failures of a run, each with a stable exit code for scripts."""

import errno
from typing import NamedTuple


def first_line(error: BaseException) -> str:
    """First line of an error, at most 200 characters; its type if it says nothing."""
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
    """The loss is finite and far above its start, under --stop_on_divergence."""

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


# Errors of writes by which a disk, a quota or a limit has no room.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


class OutputDirInUseError(RuntimeError):
    """Another live process holds the lock on this output_dir; the message names its pid, host and start time."""

    exit_code = 75


class CheckpointDamagedError(RuntimeError):
    """The requested checkpoint does not verify, and there is no valid older one to fall back to."""

    exit_code = 76


# What libraries say when memory, or an address for a thread, a lock or a library, is refused.
MEMORY_REFUSED = (
    *("can't allocate", "out of memory", "can't start new thread", "bad_alloc", "failed to map segment"),
    # Python itself, where one of its types does not check that it got memory.
    "returned null without setting",
    # oneDNN, whose product found no memory for its code; of a product that it lacks it says "a primitive descriptor".
    "could not create a primitive",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory was refused, whatever type the library raised."""
    refused = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    said = str(error).lower().replace("a primitive descriptor", "")
    return refused or any(text in said for text in MEMORY_REFUSED)


class OutputClosedError(BrokenPipeError):
    """Raised when the reader of this process's output has closed the pipe, as `| head` does, and no run goes on. Exits
    silently, with SIGPIPE's code.
    """

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


class ExitCode(NamedTuple):
    """Meaning of an exit code, and its remedy. Rows of the page that docs/make_trouble.py writes."""

    meaning: str
    remedy: str


EXIT_CODES = {
    0: ExitCode("finished, or already complete", "Ask the model: the last line has the command."),
    1: ExitCode("a bug in this program, with a traceback", "Report it with `run_plan.json` of the output folder."),
    PlanError.exit_code: ExitCode(
        "something you can fix, found before training: a flag, the plan, the model, the data, a missing file",
        "Do what the line says: it names the flag or file, the fact and the remedy.",
    ),
    NonFiniteError.exit_code: ExitCode(
        "the loss or gradient is not finite; names the step, its rows and the last good checkpoint",
        "Look at those rows, halve `--lr`, or use `--precision bf16` or fp32 in place of fp16.",
    ),
    DivergedError.exit_code: ExitCode(
        "with `--stop_on_divergence`: the loss is finite and far above its start; names the last checkpoint",
        "Start again with a third of `--lr`.",
    ),
    RankLostError.exit_code: ExitCode(
        "another rank died or stopped responding; names it",
        "Look at that rank's output, then run the same command with `--resume auto`.",
    ),
    OutOfMemoryError.exit_code: ExitCode(
        "out of memory; names what to lower",
        "Lower `--microbatch_tokens` first, which never changes the result; `--dry_run` lists every change that fits.",
    ),
    StorageError.exit_code: ExitCode(
        "disk full, or a write failed; earlier checkpoints are intact",
        "Make room, then run the same command with `--resume auto`.",
    ),
    OutputDirInUseError.exit_code: ExitCode(
        "another live process uses this `--output_dir`", "Wait for it, end it, or give another folder."
    ),
    CheckpointDamagedError.exit_code: ExitCode(
        "the checkpoint is damaged and no older one verifies",
        "Restore the folder from a copy, or start again; a published file that you edited is used once its "
        "`manifest.json` is deleted.",
    ),
    129: ExitCode(
        "stopped by SIGHUP, as by a terminal that is closed; saved", "Run the same command with `--resume auto`."
    ),
    130: ExitCode("stopped by SIGINT, as by Ctrl-C; saved", "Run the same command with `--resume auto`."),
    143: ExitCode("stopped by SIGTERM, as by a scheduler; saved", "Run the same command with `--resume auto`."),
    138: ExitCode(
        "stopped by SIGUSR1, as by a scheduler that warns before it ends the job (158 on macOS); saved",
        "Run the same command with `--resume auto`.",
    ),
    140: ExitCode("stopped by SIGUSR2, likewise (159 on macOS); saved", "Run the same command with `--resume auto`."),
    131: ExitCode("stopped by SIGQUIT, as by Ctrl-\\; saved", "Run the same command with `--resume auto`."),
    142: ExitCode(
        "stopped by SIGALRM, a limit of time that was set before the start; saved",
        "Run the same command with `--resume auto`.",
    ),
    152: ExitCode(
        "stopped by SIGXCPU: the limit of processor time (`ulimit -t`); saved",
        "Raise the limit, then run the same command with `--resume auto`.",
    ),
    OutputClosedError.exit_code: ExitCode(
        "what reads the output has closed it, as in `| head -1`; a run that trains has saved",
        "Run the same command with `--resume auto`.",
    ),
}
