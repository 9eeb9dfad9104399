"""CUDA_VISIBLE_DEVICES decides how many ranks a run has. Real processes, on a driver that has devices to count."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.commands import ROOT

# What NVIDIA's driver answers on a host of four devices, by the same variable.
DRIVER = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = visible ? *visible != 0 : 4;
    while (visible && (visible = strchr(visible, ','))) { visible++; (*count)++; }
    return 0;
}
"""
# Detection by the documented extension point, as this torch may have no CUDA; the plan is that of train.py.
SCRIPT = """
from backend_manager import Backend, BackendManager
from finetune.plan import backend, make
class Cuda(BackendManager):
    def _detect_available_backends(self):
        return [Backend.CUDA, Backend.CPU]
backend.BackendManager = Cuda
for overrides in ({}, {"world_size": 1}, {"backend": "cpu"}):
    plan = make.make_plan({"dry_run": True, "dataset": "rows.jsonl", "model_name": "a/b"} | overrides)
    print(plan.dims.world_size, plan.settings.dp_shards)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A folder with a libcuda.so.1."""
    if not sys.platform.startswith("linux") or not shutil.which("cc"):
        pytest.skip("builds a library for Linux: no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    return folder


@pytest.mark.promise("ENV_02")
@pytest.mark.parametrize(("visible", "ranks"), [("0,1", "2"), (None, "4")])
def test_each_visible_device_is_a_rank_unless_the_user_says_otherwise(driver, visible, ranks, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    hidden = ("CUDA_VISIBLE_DEVICES", "FSDP_BACKEND", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"LD_LIBRARY_PATH": str(driver), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    argv = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{ranks} {ranks}", "1 1", "1 1"]
