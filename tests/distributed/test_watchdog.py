"""Ranks that die or stop responding: the others end with one line that names them."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from finetune.distributed.env import RankEnv
from finetune.distributed.launcher import GRACE_S
from finetune.distributed.watchdog import BEAT_S, Connection, Watchdog
from finetune.system.owned_files import OwnedFiles
from tests.support import ranks
from tests.support.commands import (
    LONG,
    PYTHON,
    ROOT,
    by_hand,
    command,
    finish,
    free_port,
    rank_processes,
    wait_for_steps,
)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_with_one_line_and_the_next_start_resumes(base, tmp_path, victim):
    argv = command(base, LONG, "--world_size 2 --batch_size 2", output_dir=tmp_path / "out")
    process = ranks.start(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_steps(tmp_path / "out", 25, process)
        mine = ranks.members(process.pid)
        listening = listening_addresses(mine)
        assert len(listening) >= 2 and all(a.endswith("0100007F") for a in listening), "on other than loopback"
        os.kill(rank_processes(process.pid)[victim], signal.SIGKILL)
        began = time.monotonic()
        _, err = process.communicate(timeout=40)
        assert time.monotonic() - began < 30
        assert process.returncode == 69
        said = f"error: rank {victim} of 2 was killed by SIGKILL; the others were stopped. Rerun with --resume auto."
        assert err.strip() == said
        assert len(mine) == 3 and not any(Path(f"/proc/{pid}").exists() for pid in mine)
    finally:
        ranks.kill_session(process)
    resumed = "--world_size 2 --batch_size 2 --max_steps 45 --resume auto"
    code, out, err = finish(command(base, LONG, resumed, output_dir=tmp_path / "out"))
    assert code == 0 and "resumed from" in out, err


def listening_addresses(pids: list[int]) -> list[str]:
    """Addresses in /proc's hexadecimal form on which these processes listen for TCP connections."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(file)
            except OSError:
                continue
            inodes |= {target[8:-1]} if target.startswith("socket:[") else set()
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return [f[1].split(":")[0] for f in lines if f[3] == "0A" and f[9] in inodes]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_after_rank_timeout_and_the_others_leave_their_stacks(base, tmp_path, victim):
    argv = command(base, LONG, "--world_size 2 --batch_size 2 --rank_timeout 5", output_dir=tmp_path / "out")
    process = ranks.start(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_steps(tmp_path / "out", 5, process)
        os.kill(rank_processes(process.pid)[victim], signal.SIGSTOP)
        began = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 5 + GRACE_S + 10
    finally:
        ranks.kill_session(process)
    assert process.returncode == 69 and err.startswith(f"error: rank {victim} of 2 sent no heartbeat"), err
    stacks = list((tmp_path / "out" / "stacks").glob("rank-*.txt"))
    assert [s.name for s in stacks] == [f"rank-{1 - victim}.txt"] and "train_step" in stacks[0].read_text()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_for_longer_than_rank_timeout_goes_on(base, tmp_path):
    argv = command(base, "--max_steps 60 --world_size 2 --batch_size 2 --rank_timeout 5", output_dir=tmp_path / "out")
    process = ranks.start(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_steps(tmp_path / "out", 3, process)
        job = [process.pid, *rank_processes(process.pid)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in job:
                os.kill(pid, number)
            time.sleep(12 * (number == signal.SIGSTOP))
        _, err = process.communicate(timeout=90)
    finally:
        ranks.kill_session(process)
    assert process.returncode == 0, err


ENDLESS = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from train import fine_tune
fine_tune(**json.loads(sys.argv[2]), on_step=lambda event: time.sleep(600 * (event["step"] == 2)))
"""


@pytest.mark.slow
def test_a_callback_that_never_returns_is_named_once_the_others_have_waited(base, tmp_path):
    flags = {name: str(value) for name, value in base.items()} | {"batch_size": 2, "rank_timeout": 6, "lr": 5e-3}
    flags |= {"output_dir": str(tmp_path / "out"), "master_port": free_port()}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    argv = [*PYTHON, "-c", ENDLESS, str(ROOT), json.dumps(flags)]
    both = [ranks.start(argv, {"RANK": str(rank), "WORLD_SIZE": "2"}, **pipes) for rank in range(2)]
    try:
        said = "".join(process.communicate(timeout=90)[1] for process in both)
    finally:
        for process in both:
            ranks.kill_session(process)
    assert re.search(r"error: fine_tune\(on_step=...\) has not returned for \d+ s on rank 0; rank 1: ", said), said
    assert both[0].returncode == 69


def alone(base, folder, rank, **values):
    """One of two ranks that are started by hand, the other missing."""
    values = {"output_dir": folder, "master_port": free_port()} | values
    argv = command(base, "--batch_size 2 --rank_timeout 4", **values)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return ranks.start(argv, {"RANK": str(rank), "WORLD_SIZE": "2"}, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_the_other_ends_after_rank_timeout_and_names_it(base, tmp_path, rank):
    process = alone(base, tmp_path / "out", rank)
    began = time.monotonic()
    try:
        _, err = process.communicate(timeout=60)
    finally:
        ranks.kill_session(process)
    fact = "rank 1 of 2 did not join within 4 s" if rank == 0 else "rank 0 of 2 does not listen at 127.0.0.1:"
    waited, line = err.splitlines()
    assert waited.startswith(f"rank {rank} of 2 waits for")
    assert process.returncode == 69 and line.startswith(f"error: {fact}") and "(--rank_timeout)" in line, err
    assert time.monotonic() - began < 4 + 25


@pytest.mark.slow
def test_a_stranger_that_listens_in_the_place_of_rank_0_and_says_nothing_is_not_waited_for(base, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        process = alone(base, tmp_path / "out", 1, master_port=stranger.getsockname()[1])
        try:
            _, err = process.communicate(timeout=60)
        finally:
            ranks.kill_session(process)
    assert process.returncode == 69 and "rank 0 of 2 does not answer at localhost:" in err, err


@pytest.mark.slow
def test_a_rank_waits_longer_than_rank_timeout_for_a_plan_and_is_told_when_rank_0_is_stopped(base, tmp_path):
    """What makes the plan sleeps, as a download does: rank 0 is alive."""
    program = (
        "import os, time; from finetune.distributed.env import rank_env\n"
        "from finetune.torch_engine.parallel.rank_process import run_launched\n"
        "run_launched(None, lambda: time.sleep(600), rank_env(os.environ), 3.0)"
    )
    env = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    argv, pipes = [*PYTHON, "-c", program], dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    processes = [ranks.start(argv, env | {"RANK": str(rank)}, **pipes) for rank in range(2)]
    try:
        time.sleep(25)
        assert [p.poll() for p in processes] == [None, None]
        processes[0].send_signal(signal.SIGSTOP)
        _, err = processes[1].communicate(timeout=30)
    finally:
        [ranks.kill_session(p) for p in processes]
    assert processes[1].returncode == 69 and "rank 0 of 2 sent no heartbeat for" in err, err


PROGRAM_OF_RANKS = """
import os, time, torch, torch.distributed as dist
from finetune.distributed.env import rank_env
from finetune.system.process import exit_with
from finetune.torch_engine.parallel.rank_process import run_launched
from train import make_plan

def run(plan, env, watchdog):
    {body}

flags = dict(model_name={model!r}, dataset={rows!r}, output_dir={out!r}, rank_timeout=1.0, backend="cpu")
env = rank_env(os.environ)
exit_with(lambda: run_launched(run, lambda: (make_plan(flags, env), None), env, 20.0).exit_code)
"""
BODIES = {
    "a collective that another rank never reaches": (
        "dist.all_reduce(torch.ones(1)) if env.rank == 0 else time.sleep(600)",
        69,
        "error: a rank stopped responding (",
    ),
    "memory that one rank does not get": (
        "torch.empty(2**60) if env.rank else time.sleep(600)",
        71,
        "error: rank 1: out of memory (",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in BODIES])
def test_a_failure_of_torch_on_one_rank_is_one_line_of_the_job_and_its_code(base, tmp_path, name):
    body, code, said = BODIES[name]
    program = PROGRAM_OF_RANKS.format(
        body=body, model=str(base["model_name"]), rows=str(base["dataset"]), out=str(tmp_path / "out")
    )
    env = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    argv, pipes = [*PYTHON, "-c", program], dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    processes = [ranks.start(argv, env | {"RANK": str(rank)}, **pipes) for rank in range(2)]
    try:
        lines = [line for p in processes for line in p.communicate(timeout=90)[1].splitlines()]
    finally:
        [ranks.kill_session(p) for p in processes]
    assert [p.returncode for p in processes] == [code, code], lines
    assert len(lines) == 1 and lines[0].startswith(said), lines


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_kill_the_same_port_is_free_at_once(base, tmp_path, victim):
    port = free_port()
    first = by_hand(base, tmp_path / "out", LONG, master_port=port)
    try:
        wait_for_steps(tmp_path / "out", 25, first[0])
        first[victim].kill()
        first[1 - victim].communicate(timeout=30)
    finally:
        [ranks.kill_session(p) for p in first]
    again = by_hand(base, tmp_path / "out", LONG, "--max_steps 45 --resume auto", master_port=port)
    try:
        said = [p.communicate(timeout=120) for p in again]
    finally:
        [ranks.kill_session(p) for p in again]
    assert [p.returncode for p in again] == [0, 0] and "resumed from" in said[0][0], said


TOKEN = "job-token"
STRANGERS = {
    "says nothing": [],
    "a line of garbage": [b"hello x\n"],
    "a rank without the token": [b"hello 1\n"],
    "a rank with a wrong token": [b"hello 1 " + b"0" * len(TOKEN) + b"\n"],
    "a forged end": [b"hello 7\nend 0 \n"],
    "the token with a rank that is connected": [f"hello 1 {TOKEN}\nend 0 \n".encode()],
    "the token with a rank beyond the world size": [f'hello 7 {TOKEN}\nend [0, ""]\n'.encode()],
    "the token with a rank that is no number": [f"hello -1 {TOKEN}\n".encode()],
    "no newline": [b"x" * 65536] * 100,
    "HTTP": [b"GET / HTTP/1.0\r\n\r\n"],
    "bytes that are not UTF-8": [b"hello \xff\xfe\n"],
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """(process of two watchdogs with a heartbeat limit of 2 s, its port)."""
    argv = [*PYTHON, "-m", "tests.support.two_watchdogs", TOKEN, "2"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = ranks.start(argv, {"PYTHONPATH": str(ROOT)}, cwd=tmp_path_factory.mktemp("watched"), **pipes)
    yield process, json.loads(process.stdout.readline())
    ranks.kill_session(process)


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_on_the_port_changes_nothing(watched, said):
    process, port = watched
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        try:
            for part in said:
                stranger.sendall(part)
        except OSError:
            pass  # it was disconnected
        time.sleep(0.05)
        assert process.poll() is None, process.stderr.read()


def test_many_silent_connections_neither_block_nor_pile_up(watched):
    process, port = watched
    before = len(os.listdir(f"/proc/{process.pid}/fd"))
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    time.sleep(3.0)  # longer than the heartbeat limit
    assert process.poll() is None, process.stderr.read()
    assert len(os.listdir(f"/proc/{process.pid}/fd")) <= before + 70
    for stranger in strangers:
        stranger.close()
    _, err = process.communicate("\n", timeout=10)
    assert process.returncode == 0 and not err


@pytest.mark.parametrize("claimed", [False, True])
def test_a_watchdog_that_dies_ends_its_process_with_the_reason(tmp_path, claimed):
    """Its stacks go into the run's folder once that is the run's: before, the next start would refuse the file."""
    if claimed:
        OwnedFiles(tmp_path, "").claim("stacks/rank-0.txt")
    program = (
        "import sys, time; from tests.support import two_watchdogs as t\n"
        "t.Watchdog._read_hello = None\n"  # a TypeError in the thread of rank 0
        "t.main('token', 5)"
    )
    argv = [*PYTHON, "-c", program]
    process = ranks.start(
        argv, {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _, err = process.communicate(timeout=20)
    finally:
        ranks.kill_session(process)
    assert process.returncode == 69 and "the watchdog of rank 0 of 2 failed (TypeError:" in err, err
    assert (tmp_path / "stacks/rank-0.txt").exists() == claimed


class Starved:
    """A clock of a process that is starved for so long in each wait."""

    def __init__(self, seconds: float):
        self.now = 0.0
        self.seconds = seconds

    def monotonic(self) -> float:
        self.now += self.seconds
        return self.now


@pytest.mark.parametrize(("seconds", "excused"), [(5.0, (4.75, 8.0, 8.0)), (60.0, (59.75, 59.75))])
def test_pauses_excuse_a_rank_once_or_for_one_timeout_until_it_is_heard(monkeypatch, seconds, excused):
    monkeypatch.setattr("finetune.distributed.watchdog.time", Starved(seconds))
    settings = dict(stacks=None, log_error=print, is_peer_failure=bool, token=TOKEN)
    mine, theirs = socket.socketpair()
    with Watchdog.listen("127.0.0.1") as listener, mine, theirs:
        watchdog = Watchdog(RankEnv(0, 3, 0, 3), 8.0, **settings, listener=listener)
        began = dict(watchdog.awaited)
        for all_of_them in excused:
            watchdog._ready()
            assert watchdog.awaited == {rank: when + all_of_them for rank, when in began.items()}
        watchdog._add(1, Connection(mine))
        theirs.sendall(b"beat\n")
        watchdog._read(watchdog.peers[1], 1)
        heard = watchdog.awaited[1]
        watchdog._ready()
        assert watchdog.awaited == {1: heard + seconds - BEAT_S / 2, 2: began[2] + excused[-1]}
