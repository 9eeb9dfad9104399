"""Way in which this program was started: from files of the repository, or as the installed command `finetune`."""

import os

COMMAND = "FINETUNE_COMMAND"  # set by the installed command, for itself and the ranks it starts


def started_as(script: str) -> str:
    """The command of a script such as train.py: `python train.py`, or `finetune train` where it was started so."""
    command = os.environ.get(COMMAND)
    if command:
        return f"{command} {script.removesuffix('.py')}"
    return f"python {script}"
