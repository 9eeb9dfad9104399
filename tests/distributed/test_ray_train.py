"""examples/clusters/ray_train.py on a Ray cluster of this machine: two workers are one process, and one is killed."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.commands import PYTHON, ROOT
from tests.support.runs import read_events

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray[train] is not installed"),
]
SCRIPT = ROOT / "examples/clusters/ray_train.py"
STEPS = 100


@pytest.fixture
def flags(tiny_model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    texts = [{"prompt": f"What is {i} plus {i}? ", "completion": f"It is {2 * i}"} for i in range(32)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    settings = "--train_type lora --precision fp32 --backend cpu --lora_dropout 0 --save_every 5 --lr 1e-3"
    return [*f"--model_name {tiny_model} --dataset {rows} --max_steps {STEPS}".split(), *settings.split()]


def losses(folder: Path) -> list[float]:
    steps = read_events(folder, "step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    return [event["loss"] for event in steps]


def worker_of_rank(rank: int, folder: Path) -> int:
    """The process id of the Ray worker that has started this rank."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                if f"RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    return int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
    raise AssertionError(f"rank {rank} is not running")


@pytest.mark.slow
def test_two_workers_are_one_process_though_one_of_them_is_killed(flags, tmp_path):
    """The losses of all steps within 1e-6, relative: sums over two ranks round otherwise than one."""
    one, two, log = tmp_path / "one", tmp_path / "two", tmp_path / "log"
    subprocess.run([*PYTHON, "train.py", *flags, "--batch_size", "4", "--output_dir", one], cwd=ROOT, check=True)
    argv = [*PYTHON, SCRIPT, "--num_workers", "2", "--storage_path", tmp_path / "state", "--", *flags]
    argv += ["--batch_size", "2", "--output_dir", two]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with open(log, "wb") as out:
        job = subprocess.Popen([str(word) for word in argv], stdout=out, stderr=subprocess.STDOUT, env=environment)
        until, killed = time.monotonic() + 300, None
        while job.poll() is None and time.monotonic() < until:
            if killed is None and any(two.glob("checkpoints/step-*/manifest.json")):
                killed = worker_of_rank(1, two)
                os.kill(killed, signal.SIGKILL)
            time.sleep(0.02)
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
        assert job.wait(60) == 0, log.read_text()[-4000:]
    starts = [event["step"] for event in read_events(two, "start")]
    assert killed and len(starts) == 2 and starts[0] == 0 and starts[1] % 5 == 0 and starts[1] >= 5
    assert max(abs(a / b - 1) for a, b in zip(losses(two), losses(one), strict=True)) <= 1e-6


def test_flags_after_the_dashes_are_the_program_s_and_every_start_may_continue():
    from examples.clusters import ray_train

    args = ray_train.build_parser().parse_args(["--num_workers", "4", "--", "--dataset", "a.jsonl"])
    assert (args.num_workers, args.flags) == (4, ["--dataset", "a.jsonl"])
    assert ray_train.with_resume(args.flags)[-2:] == ["--resume", "auto"]
    assert ray_train.with_resume(["--resume", "never"]) == ["--resume", "never"]
    assert 1024 < ray_train.free_port() < 65536
