"""The pool of warm workers of a rig run."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.rig.options import worker_environment
from tests.rig.pool import Pool

NEEDED_BYTES = 2 * 2**30


@pytest.fixture(scope="session")
def pool(request, tmp_path_factory):
    """The workers, on a file system in memory where there is one: the runs sync every file."""
    given, memory = request.config.getoption("--rig-folder"), Path("/dev/shm")
    in_memory = memory.is_dir() and shutil.disk_usage(memory).free > NEEDED_BYTES
    above = memory if in_memory else tmp_path_factory.mktemp("rig")
    folder = Path(given or tempfile.mkdtemp(prefix="rig-", dir=above))
    folder.mkdir(parents=True, exist_ok=True)
    made = Pool(folder.resolve(), worker_environment(request.config))
    made.start()
    yield made
    made.close()
    if not given:
        shutil.rmtree(folder, ignore_errors=True)
