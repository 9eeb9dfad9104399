"""The ways a run ends other than well, each with the exit code a script can rely on."""


class PlanError(ValueError):
    """What the user can fix: one line naming the flag or file, the fact and the remedy. Raised before anything is loaded."""

    exit_code = 2


class NonFiniteError(ArithmeticError):
    """Loss or gradient of a step is not finite. The optimizer step was not applied."""

    exit_code = 65


class RankLostError(RuntimeError):
    """Another rank or its host died, or fell silent. This rank is well; the job goes on from its last checkpoint."""

    exit_code = 69


class OutOfMemoryError(MemoryError):
    """The device or host ran out of memory; the text names what to lower, with the present values."""

    exit_code = 71


class StorageError(OSError):
    """A write failed (disk full, no permission); the text names the path, needed and free bytes."""

    exit_code = 74


class OutputDirInUseError(RuntimeError):
    """Another live process owns this output_dir; the text names its pid, host and start time."""

    exit_code = 75


class CheckpointDamagedError(RuntimeError):
    """The checkpoint asked for does not verify, and no older one may stand in."""

    exit_code = 76


# What a run ends with by its own word: one line, and the exit code.
EXPECTED = (
    PlanError,
    NonFiniteError,
    RankLostError,
    OutOfMemoryError,
    StorageError,
    OutputDirInUseError,
    CheckpointDamagedError,
)
