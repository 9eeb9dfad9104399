"""A SLURM cluster of two nodes on this machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.cases import LOSS
from tests.support.commands import ROOT, command, finish, read_or_nothing, wait_for_steps
from tests.support.hosts import end_hosts
from tests.support.runs import losses


def why_no_slurm() -> str | None:
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "srun", "munged") if not shutil.which(name)]
    return f"{missing[0]} is not installed (Debian: slurm-wlm and munge)" if missing else None


@pytest.fixture
def slurm(hosts, tiny_model, tmp_path):
    """start(rows, sbatch options): the cluster with runs/slurm.sh as its job, which writes to tmp_path / "out"."""
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
    end_hosts(started[0])
    left = [
        file.parent.name
        for file in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in read_or_nothing(file)
    ]
    assert not left, "processes of the cluster are left"


def one_process(tiny_model, rows, folder):
    """The job of runs/slurm.sh over two ranks, as one process."""
    flags = "--train_type lora --num_epochs 3 --batch_size 8 --lr 2e-4 --backend cpu"
    code, _, err = finish(command(flags, model_name=tiny_model, dataset=rows, output_dir=folder))
    assert code == 0, err
    return losses(folder)


@pytest.mark.promise("FT_12")
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
def test_a_slurm_job_that_receives_sigterm_saves_and_is_resumed(slurm, tiny_model, rows_file, tmp_path):
    """What --signal=TERM@180 does before the time limit, sent by hand; the second attempt ends the run."""
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
