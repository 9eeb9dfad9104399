"""Every Python block of docs/mps_fsdp.md runs, in order, on the emulated device in place of an Apple GPU."""

import ast
import subprocess
import sys

import pytest

from tests.support import emulated_device
from tests.support.commands import ROOT, finish_fork

pytestmark = pytest.mark.skipif(emulated_device.missing() is not None, reason=str(emulated_device.missing()))
TAKES_DEVICE_TYPE = {"MPSFSDPWrapper", "create_mps_fsdp_wrapper", "wrap_model_for_mps", "check_mps_fsdp_compatibility"}


def blocks() -> list[str]:
    parts = (ROOT / "docs" / "mps_fsdp.md").read_text().split("```python\n")[1:]
    return [part.partition("```")[0] for part in parts]


class OnDevice(ast.NodeTransformer):
    """The same code with `device_type=` this device, and its name in place of "mps"."""

    def __init__(self, device: str):
        self.device = device

    def visit_Call(self, node):
        self.generic_visit(node)
        if getattr(node.func, "id", None) in TAKES_DEVICE_TYPE:
            node.keywords.append(ast.keyword("device_type", ast.Constant(self.device)))
        return node

    def visit_Constant(self, node):
        return ast.Constant({"mps": self.device, "mps_available": "gloo_available"}.get(node.value, node.value))


def script(device: str = emulated_device.NAME) -> str:
    tree = OnDevice(device).visit(ast.parse("\n".join(blocks())))
    begin = "from tests.support import emulated_device\nemulated_device.load()\n" if device != "cpu" else ""
    return begin + ast.unparse(ast.fix_missing_locations(tree)) + "\nprint('all blocks ran')\n"


def test_the_guide_has_its_blocks():
    assert len(blocks()) == 20


@pytest.mark.promise("FS_17", "FS_20")
def test_every_block_runs_in_one_process(tmp_path):
    begin = f"import os\nos.chdir({str(tmp_path)!r})\nos.environ['GLOO_SOCKET_IFNAME'] = 'lo'\n"
    (tmp_path / "guide.py").write_text(begin + script())
    done = finish_fork([tmp_path / "guide.py"], timeout_s=300)
    assert done.returncode == 0 and "all blocks ran" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
def test_every_block_runs_on_a_cpu_as_the_page_says(tmp_path):
    (tmp_path / "guide.py").write_text(script("cpu"))
    argv = [sys.executable, "-W", "ignore::FutureWarning", tmp_path / "guide.py"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=emulated_device.environment())
    assert done.returncode == 0 and "all blocks ran" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
def test_every_block_runs_under_torchrun(tmp_path):
    (tmp_path / "guide.py").write_text(script())
    command = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    done = subprocess.run(
        [sys.executable, *command, tmp_path / "guide.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=emulated_device.environment(),
    )
    assert done.returncode == 0 and done.stdout.count("all blocks ran") == 2, done.stderr[-3000:]
