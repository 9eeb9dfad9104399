"""Launched as on several hosts: network namespaces of this machine, a SLURM cluster of two nodes in them, accelerate's launcher."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune import checkpoint
from finetune.metrics import read_events
from finetune.ranks import GRACE_S
from tests import ranks
from tests.test_parallel import (  # noqa: F401  fixtures too
    LOSS, LONG, alone, assert_same_run, base, command, finish, losses, rank_processes, wait_for_steps,
)  # fmt: skip

ROOT = Path(__file__).parent.parent
TWO_HOSTS = ROOT / "tests" / "two_hosts.sh"
HERE = {"PYTHON": sys.executable}


def why_no_hosts() -> str | None:
    """Why this machine cannot make network namespaces; None where it can."""
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
def hosts():
    """Skips where there can be no second host; looks after the module whether all are gone."""
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)
    before = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    yield
    assert subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout == before


def flags_of(base, *more):  # noqa: F811
    """The words after train.py."""
    argv = command(base, *more)
    return argv[argv.index(ROOT / "train.py") + 1 :]


# ---- two hosts


@pytest.mark.slow
@pytest.mark.parametrize(("how", "train_type"), [("static", "full"), ("c10d", "lora"), ("hand", "lora")])
def test_two_hosts_train_as_one_process_does(hosts, base, tmp_path, how, train_type):  # noqa: F811
    flags = [*base, "--lora_rank", 4] if train_type == "lora" else base[: base.index("--lora_rank")] + base[base.index("--lora_rank") + 2 :]  # fmt: skip
    flags = [*flags, "--train_type", train_type, "--lr", "1e-3"]
    code, _, err = finish(command(flags, "--batch_size", 4, "--output_dir", tmp_path / "one"))
    assert code == 0, err
    words = flags_of(flags, "--batch_size", 2, "--output_dir", tmp_path / "out")
    code, _, err = finish([TWO_HOSTS, how, tmp_path, *words], **HERE)
    assert code == 0, err
    said = (tmp_path / "h1.log").read_text()
    assert "ranks: 2 (dp_shards 2)" in said and said.count("step    12/12") == 1
    assert "step" not in (tmp_path / "h2.log").read_text()
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "one"), rel=LOSS)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_on_one_host_ends_the_other(hosts, base, tmp_path, victim):  # noqa: F811
    words = flags_of(base, *LONG, "--batch_size", 2, "--output_dir", tmp_path / "out")
    process = ranks.start(
        [TWO_HOSTS, "hand", tmp_path, *words], HERE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        wait_for_steps(tmp_path / "out", 25, process)
        mine = rank_processes(process.pid)
        os.kill(mine[victim], signal.SIGKILL)
        began = time.monotonic()
        process.communicate(timeout=60)
        assert time.monotonic() - began < 30
    finally:
        end(process)
    line = f"error: rank {victim} of 2 died; the others were ended. Start it again."
    said = errors_in(tmp_path / f"h{2 - victim}.log")
    assert said == [line] and not errors_in(tmp_path / f"h{1 + victim}.log")
    assert process.returncode == (137 if victim == 0 else 69)  # the first host's code
    assert (tmp_path / f"h{2 - victim}.code").read_text().strip() == "69"
    assert len(mine) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in mine)


@pytest.mark.slow
def test_a_cable_pulled_between_hosts_ends_both_after_rank_timeout(hosts, base, tmp_path):  # noqa: F811
    more = ["--batch_size", 2, "--rank_timeout", 5, "--output_dir", tmp_path / "out"]
    words = flags_of(base, *LONG, *more)
    process = ranks.start(
        [TWO_HOSTS, "hand", tmp_path, *words], HERE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        wait_for_steps(tmp_path / "out", 25, process)
        cut = ["ip", "-n", f"ft{process.pid}-1", "link", "set", f"ft{process.pid}a", "down"]
        subprocess.run(cut, check=True)
        began = time.monotonic()
        process.communicate(timeout=60)
        assert time.monotonic() - began < 5 + GRACE_S + 10
    finally:
        end(process)
    assert process.returncode == 69
    for host, other in ((1, 1), (2, 0)):  # neither can hear what the other says
        said = errors_in(tmp_path / f"h{host}.log")
        assert len(said) == 1 and said[0].startswith(f"error: rank {other} of 2 is silent"), said
        assert (tmp_path / f"h{host}.code").read_text().strip() == "69"


def errors_in(log) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("error")]


def end(process):
    """SIGTERM first: the script takes its hosts away."""
    process.terminate()
    try:
        process.wait(timeout=20)
    finally:
        ranks.finish(process)
