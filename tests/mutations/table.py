"""All mutations, in the order of the checklist."""

from tests.mutations.tables import after_training, backend, checkpoints, command_line, mps_fsdp, parallelism, recursive

MUTATIONS = (
    *backend.TABLE,
    *command_line.TABLE,
    *checkpoints.TABLE,
    *mps_fsdp.TABLE,
    *parallelism.TABLE,
    *recursive.TABLE,
    *after_training.TABLE,
)
