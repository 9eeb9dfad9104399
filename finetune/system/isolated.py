"""Commands that run a module in an interpreter of its own: `python -m` would take modules of the current directory."""

import json
import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
RUN = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); module = sys.argv[2]; del sys.argv[1:3]; "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def python_command(module: str, *args: str) -> list[str]:
    """argv of `python -m module args` with the import path of this process, without the current directory, but with
    the folder that has this package: a prompt of Python's in a clone finds it in the current directory only.

    -I: PYTHON* variables and a user's start-up files are ignored; -P alone needs Python 3.11.
    """
    path = [entry for entry in sys.path if os.path.isabs(entry)]
    path += [] if ROOT in path else [ROOT]
    return [sys.executable, "-I", "-c", RUN, json.dumps(path), module, *args]
