"""Launched as on several hosts: network namespaces of this machine, a SLURM cluster of two nodes in them, accelerate's launcher."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.distributed.launcher import GRACE_S
from tests.promises.test_parallel_equals_one_process import (  # noqa: F401  fixtures too
    LONG,
    LOSS,
    alone,
    assert_same_run,
    base,
    command,
    finish,
    free_port,
    losses,
    rank_processes,
    wait_for_steps,
)
from tests.support import ranks

ROOT = Path(__file__).parents[2]
TWO_HOSTS = ROOT / "tests/support/two_hosts.sh"
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
    flags = (
        [*base, "--lora_rank", 4]
        if train_type == "lora"
        else base[: base.index("--lora_rank")] + base[base.index("--lora_rank") + 2 :]
    )
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
    process = ranks.start([TWO_HOSTS, "hand", tmp_path, *words], HERE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        wait_for_steps(tmp_path / "out", 25, process)
        mine = rank_processes(process.pid)
        os.kill(mine[victim], signal.SIGKILL)
        began = time.monotonic()
        process.communicate(timeout=60)
        assert time.monotonic() - began < 30
    finally:
        end(process)
    line = f"error: rank {victim} of 2 died; the others were stopped. Start it again."
    said = errors_in(tmp_path / f"h{2 - victim}.log")
    assert said == [line] and not errors_in(tmp_path / f"h{1 + victim}.log")
    assert process.returncode == (137 if victim == 0 else 69)  # the first host's code
    assert (tmp_path / f"h{2 - victim}.code").read_text().strip() == "69"
    assert len(mine) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in mine)


@pytest.mark.slow
def test_a_cable_pulled_between_hosts_ends_both_after_rank_timeout(hosts, base, tmp_path):  # noqa: F811
    more = ["--batch_size", 2, "--rank_timeout", 5, "--output_dir", tmp_path / "out"]
    words = flags_of(base, *LONG, *more)
    process = ranks.start([TWO_HOSTS, "hand", tmp_path, *words], HERE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
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
        assert len(said) == 1 and said[0].startswith(f"error: rank {other} of 2 sent no heartbeat"), said
        assert (tmp_path / f"h{host}.code").read_text().strip() == "69"


@pytest.mark.slow
def test_torchrun_restarts_both_hosts_when_one_loses_its_rank(hosts, base, alone, tmp_path):  # noqa: F811
    more = ["--batch_size", 2, "--save_every", 1, "--resume", "auto", "--output_dir", tmp_path / "out"]
    environment = HERE | {"TORCHRUN_FLAGS": "--max-restarts=3"}
    argv = [TWO_HOSTS, "c10d", tmp_path, *flags_of(base, *more)]
    process = ranks.start(argv, environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        wait_for_steps(tmp_path / "out", 4, process)
        os.kill(rank_on(f"ft{process.pid}-2"), signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == 0, err
    assert "resumed from" in (tmp_path / "h1.log").read_text()
    assert losses(tmp_path / "out") == pytest.approx(losses(alone), rel=LOSS)


def rank_on(namespace: str) -> int:
    """The process id of the rank in a network namespace."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return next(p for p in map(int, found.stdout.split()) if b"\0RANK=" in Path(f"/proc/{p}/environ").read_bytes())


def errors_in(log) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("error")]


def end(process):
    """SIGTERM first: the script takes its hosts away."""
    process.terminate()
    try:
        process.wait(timeout=20)
    finally:
        ranks.finish(process)


# ---- SLURM


def why_no_slurm() -> str | None:
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "srun", "munged") if not shutil.which(name)]
    return f"{missing[0]} is not installed (Debian: slurm-wlm and munge)" if missing else None


@pytest.fixture
def slurm(hosts, tiny_model, tmp_path):
    """start(rows, sbatch options) -> tests/support/slurm.sh with runs/slurm.sh as its job; its output goes to tmp_path / "out"."""
    reason = why_no_slurm()
    if reason:
        pytest.skip(reason)
    started = []

    def start(rows, *options):
        job = [ROOT / "runs" / "slurm.sh", tiny_model, rows, tmp_path / "out"]
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        argv = [ROOT / "tests/support/slurm.sh", tmp_path, "--gpus-per-node=0", "--cpus-per-task=1", *options, *job]
        started.append(ranks.start(argv, environment, stderr=subprocess.PIPE, text=True, cwd=ROOT))
        return started[0]

    yield start
    end(started[0])
    left = [
        file.parent.name
        for file in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in read_or_nothing(file)
    ]
    assert not left, "processes of the cluster are left"


def read_or_nothing(file) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def one_process(tiny_model, rows, folder):
    """The job of runs/slurm.sh over two ranks, as one process."""
    flags = [
        "--model_name",
        tiny_model,
        "--train_type",
        "lora",
        "--dataset",
        rows,
        "--num_epochs",
        3,
        "--batch_size",
        8,
        "--lr",
        "2e-4",
        "--backend",
        "cpu",
        "--output_dir",
        folder,
    ]
    code, _, err = finish(command(flags))
    assert code == 0, err
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "tasks"), [(2, 1), (1, 2)])
def test_a_slurm_job_trains_as_one_process_does(slurm, tiny_model, rows_file, tmp_path, nodes, tasks):
    process = slurm(rows_file, f"--nodes={nodes}", f"--ntasks-per-node={tasks}")
    _, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    said = (tmp_path / "job.log").read_text()
    assert "ranks: 2 (dp_shards 2)" in said and said.count("step     9/9") == 1
    one = one_process(tiny_model, rows_file, tmp_path / "one")
    assert losses(tmp_path / "out") == pytest.approx(one, rel=LOSS)


@pytest.mark.slow
def test_a_slurm_job_that_is_told_to_stop_saves_and_comes_back(slurm, tiny_model, rows_file, tmp_path):
    """What --signal=TERM@180 does before the time limit, sent by hand: the second attempt ends the run as one process would."""
    many = tmp_path / "many.jsonl"
    many.write_text(rows_file.read_text() * 25)
    process = slurm(many, "--nodes=2", "--ntasks-per-node=1")
    wait_for_steps(tmp_path / "out", 20, process)
    inside = ["nsenter", f"--net=/run/netns/ft{process.pid}-1", "scancel", "--signal=TERM", "1"]
    subprocess.run(inside, env=os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}, check=True)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    said = (tmp_path / "job.log").read_text()
    assert "continue with --resume" in said and "resumed from" in said
    assert losses(tmp_path / "out") == pytest.approx(one_process(tiny_model, many, tmp_path / "one"), rel=LOSS)


# ---- accelerate's launcher


ACCELERATE = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch"]
# What `accelerate config` writes for several processes of one machine; it starts them as torchrun does.
SEVERAL = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\nmixed_precision: 'no'\n"


@pytest.mark.slow
@pytest.mark.parametrize("started_by", ["config file", "cpu"])
def test_accelerate_launch_starts_no_second_set_of_ranks(base, alone, tmp_path, started_by):  # noqa: F811
    """With --cpu it starts one process, whatever --num_processes says, and that one starts the ranks."""
    file = tmp_path / "several.yaml"
    file.write_text(SEVERAL + f"main_process_port: {free_port()}\n")
    options = ["--config_file", file] if started_by == "config file" else ["--cpu", "--num_processes", 2]
    flags = [] if started_by == "config file" else ["--world_size", 2]
    flags = [*base, *flags, "--batch_size", 2, "--output_dir", tmp_path / "out"]
    process = ranks.start(
        [*ACCELERATE, *options, ROOT / "train.py", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        wait_for_steps(tmp_path / "out", 2, process)
        found = [p for p in descendants(process.pid) if b"\0RANK=" in read_or_nothing(Path(f"/proc/{p}/environ"))]
        out, err = process.communicate(timeout=120)
    finally:
        ranks.finish(process)
    assert process.returncode == 0, err
    assert len(found) == 2 and out.count("step    12/12") == 1 and "ranks: 2 (dp_shards 2)" in out
    assert_same_run(tmp_path / "out", alone)


def descendants(pid: int) -> list[int]:
    """The process ids that came from a process, however far down."""
    below = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return [*below, *(further for child in below for further in descendants(child))]
