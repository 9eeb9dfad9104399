"""Two hosts in network namespaces."""

import os
import shutil
import subprocess
import sys

import pytest

from finetune.model_files.demo_model import locked


def why_no_hosts() -> str | None:
    """Why this machine cannot make network namespaces; None if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not shutil.which("ip"):
        return "network namespaces need ip (iproute2)"
    name = f"ft{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    ran = subprocess.run(["ip", "netns", "exec", name, "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"ip netns exec: {ran.stderr.strip()}" if ran.returncode else None


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Skips if there can be no second host; asserts after the module that no namespace remains.
    One worker of pytest-xdist at a time: the other's namespaces would be counted.
    """
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)
    with locked(tmp_path_factory.getbasetemp().parent / "hosts.lock"):
        before = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        yield
        assert subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout == before
