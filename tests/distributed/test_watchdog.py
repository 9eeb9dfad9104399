"""Ranks that die or stop responding: the others end with one line that names them."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from finetune.distributed.launcher import GRACE_S
from tests.support import ranks
from tests.support.commands import LONG, by_hand, command, finish, free_port, rank_processes, wait_for_steps


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_with_one_line_and_the_next_start_resumes(base, tmp_path, victim):
    argv = command(base, LONG, "--world_size 2 --batch_size 2", output_dir=tmp_path / "out")
    process = ranks.start(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_steps(tmp_path / "out", 25, process)
        mine = ranks.members(process.pid)
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


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_of_ranks_started_by_hand_a_killed_one_ends_the_other(base, tmp_path, victim):
    processes = by_hand(base, tmp_path / "out", LONG)
    try:
        wait_for_steps(tmp_path / "out", 5, processes[0])
        processes[victim].kill()
        other = processes[1 - victim]
        _, err = other.communicate(timeout=30)
    finally:
        [ranks.kill_session(p) for p in processes]
    assert other.returncode == 69, err
    assert err.strip() == f"error: rank {victim} of 2 died; the others were stopped. Rerun with --resume auto."


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
