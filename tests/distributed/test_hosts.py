"""Two hosts: network namespaces of this machine."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.distributed.launcher import GRACE_S
from tests.support import ranks, tiny
from tests.support.cases import LOSS
from tests.support.commands import LONG, ROOT, command, finish, rank_processes, wait_for_steps, words
from tests.support.hosts import end_hosts
from tests.support.runs import losses, read_events

TWO_HOSTS = ROOT / "tests/support/two_hosts.sh"
HERE = {"PYTHON": sys.executable}


@pytest.mark.promise("FT_12")
@pytest.mark.slow
@pytest.mark.parametrize(("how", "train_type"), [("static", "full"), ("c10d", "lora"), ("hand", "lora")])
def test_two_hosts_train_as_one_process_does(hosts, base, tmp_path, how, train_type):
    base = {name: value for name, value in base.items() if train_type == "lora" or name != "lora_rank"}
    flags = f"--train_type {train_type} --lr 1e-3"
    code, _, err = finish(command(base, flags, "--batch_size 4", output_dir=tmp_path / "one"))
    assert code == 0, err
    argv = [TWO_HOSTS, how, tmp_path, *words(base, flags, "--batch_size 2", output_dir=tmp_path / "out")]
    code, _, err = finish(argv, **HERE)
    assert code == 0, err
    said = (tmp_path / "h1.log").read_text()
    assert "ranks: 2 (dp_shards 2)" in said and said.count("step    12/12") == 1
    assert "step" not in (tmp_path / "h2.log").read_text()
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "one"), rel=LOSS)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_on_one_host_ends_the_other(hosts, base, tmp_path, victim):
    flags = words(base, LONG, "--batch_size 2", output_dir=tmp_path / "out")
    process = ranks.start([TWO_HOSTS, "hand", tmp_path, *flags], HERE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        wait_for_steps(tmp_path / "out", 25, process)
        mine = rank_processes(process.pid)
        os.kill(mine[victim], signal.SIGKILL)
        began = time.monotonic()
        process.communicate(timeout=60)
        assert time.monotonic() - began < 30
    finally:
        end_hosts(process)
    line = f"error: rank {victim} of 2 died; the others were stopped. Rerun with --resume auto."
    said = errors_in(tmp_path / f"h{2 - victim}.log")
    assert said == [line] and not errors_in(tmp_path / f"h{1 + victim}.log")
    assert process.returncode == (137 if victim == 0 else 69)  # the first host's code
    assert (tmp_path / f"h{2 - victim}.code").read_text().strip() == "69"
    assert len(mine) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in mine)


@pytest.mark.slow
def test_a_cable_pulled_between_hosts_ends_both_after_rank_timeout(hosts, base, tmp_path):
    flags = words(base, LONG, "--batch_size 2 --rank_timeout 5", output_dir=tmp_path / "out")
    process = ranks.start([TWO_HOSTS, "hand", tmp_path, *flags], HERE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        wait_for_steps(tmp_path / "out", 25, process)
        cut = ["ip", "-n", f"ft{process.pid}-1", "link", "set", f"ft{process.pid}a", "down"]
        subprocess.run(cut, check=True)
        began = time.monotonic()
        process.communicate(timeout=60)
        assert time.monotonic() - began < 5 + GRACE_S + 10
    finally:
        end_hosts(process)
    assert process.returncode == 69
    for host, other in ((1, 1), (2, 0)):  # neither receives the other's heartbeat
        said = errors_in(tmp_path / f"h{host}.log")
        assert len(said) == 1 and said[0].startswith(f"error: rank {other} of 2 sent no heartbeat"), said
        assert (tmp_path / f"h{host}.code").read_text().strip() == "69"


@pytest.mark.slow
def test_torchrun_restarts_both_hosts_when_one_loses_its_rank(hosts, base, alone, tmp_path):
    environment = HERE | {"TORCHRUN_FLAGS": "--max-restarts=3"}
    flags = words(base, "--batch_size 2 --save_every 1 --resume auto", output_dir=tmp_path / "out")
    argv = [TWO_HOSTS, "c10d", tmp_path, *flags]
    process = ranks.start(argv, environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        wait_for_steps(tmp_path / "out", 4, process)
        os.kill(rank_on(f"ft{process.pid}-2"), signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    finally:
        end_hosts(process)
    assert process.returncode == 0, err
    assert "resumed from" in (tmp_path / "h1.log").read_text()
    assert losses(tmp_path / "out") == pytest.approx(losses(alone), rel=LOSS)


@pytest.mark.slow
@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_an_elastic_job_goes_on_without_a_host_that_is_lost(hosts, base, tmp_path, train_type):
    """Every process of the second host is killed: torchrun starts the first alone, with the rows per step of both."""
    base = {name: value for name, value in base.items() if train_type == "lora" or name != "lora_rank"}
    flags = f"--train_type {train_type} --lr 1e-3 --num_epochs 5 --save_every 3"
    code, _, err = finish(command(base, flags, "--batch_size 4", output_dir=tmp_path / "one"))
    assert code == 0, err
    again = words(base, flags, "--batch_size 2 --resume auto --rank_timeout 30", output_dir=tmp_path / "out")
    environment = HERE | {"TORCHRUN_FLAGS": "--max-restarts=3"}
    argv = [TWO_HOSTS, "elastic", tmp_path, *again]
    process = ranks.start(argv, environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        wait_for_steps(tmp_path / "out", 5, process)
        for pid in pids_on(f"ft{process.pid}-2"):
            os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=240)
    finally:
        end_hosts(process)
    assert process.returncode == 0, err
    said = (tmp_path / "h1.log").read_text()
    adjusted = "batch_size: 2 -> 4 (the saved run's 4 rows per step in 1 batches)"
    assert "ranks: 2" in said and "resumed from" in said and adjusted in said
    found = losses(tmp_path / "out")
    assert len(found) == 30 and found == pytest.approx(losses(tmp_path / "one"), rel=LOSS)


def pids_on(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def rank_on(namespace: str) -> int:
    """The process id of the rank in a network namespace."""
    return next(p for p in pids_on(namespace) if b"\0RANK=" in Path(f"/proc/{p}/environ").read_bytes())


def errors_in(log) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("error")]


@pytest.mark.slow
def test_a_slow_link_changes_the_layout_that_is_chosen_as_it_changes_the_fastest(hosts, base, tmp_path):
    """Full fine-tuning, whose gradients are 29 MB: over 50 Mbit/s a pipeline, which sends activations alone."""
    model = tiny.build("llama", hidden_size=256, intermediate_size=704, num_hidden_layers=8, vocab_size=2048)
    model.save_pretrained(tmp_path / "model")
    tiny.train_tokenizer(tmp_path / "model")
    rows = "".join(json.dumps({"text": "walk " * 60 + str(i)}) + "\n" for i in range(64))
    (tmp_path / "rows.jsonl").write_text(rows)
    changes = {name: value for name, value in base.items() if name != "lora_rank"}
    changes |= {"model_name": tmp_path / "model", "dataset": tmp_path / "rows.jsonl", "context_length": 256}
    flags = "--train_type full --precision fp32 --use_gradient_checkpointing false --max_steps 4"
    chosen, seconds = {}, {}
    for rate, bytes_per_s in (("10gbit", "1GB"), ("50mbit", "6MB")):
        dry = (
            f"{flags} --batch_size 8 --dry_run --backend cpu --assume_world_size 2 --assume_interconnect {bytes_per_s}"
        )
        code, out, err = finish(command(changes, dry, output_dir=tmp_path / "dry"), OMP_NUM_THREADS="1")
        assert code == 0, err
        chosen[rate] = re.search(r"the fastest predicted first:\n  (\w+ 2)  ", out)[1]
        for layout in ("dp_degree 2", "tp_degree 2", "pp_degree 2"):
            batch, folder = 8 // (1 + layout.startswith("dp")), tmp_path / f"{rate} {layout}"
            run = words(changes, flags, f"--{layout} --batch_size {batch}", output_dir=folder)
            code, _, err = finish([TWO_HOSTS, "hand", tmp_path, *run], **HERE, LINK_RATE=rate, OMP_NUM_THREADS="1")
            assert code == 0, err
            times = [e["num_tokens"] / e["tokens_per_s"] for e in read_events(folder, "step")]
            seconds[rate, layout] = statistics.median(times[1:])
    assert chosen["10gbit"] != chosen["50mbit"] == "pp_degree 2", chosen
    for rate, layout in chosen.items():
        fastest = min(value for (at, _), value in seconds.items() if at == rate)
        assert seconds[rate, layout] < 1.3 * fastest, seconds  # steps of half a second on a shared machine
    assert seconds["50mbit", chosen["10gbit"]] > 2 * seconds["50mbit", "pp_degree 2"], seconds
