"""Ranks started by --world_size, torchrun and accelerate's launcher."""

import re
import subprocess

import pytest

from finetune.distributed.launcher import run_ranks
from finetune.errors import OutOfMemoryError, RankLostError
from finetune.system.process import StopSignal
from tests.support import ranks
from tests.support.commands import (
    ACCELERATE,
    ROOT,
    TORCHRUN,
    by_hand,
    command,
    descendants,
    environment_of,
    finish,
    free_port,
    wait_for_steps,
    words,
)
from tests.support.planned import planned
from tests.support.runs import assert_same_run, read_events


def predicted_loading(folder):
    return read_events(folder, "start")[0]["predicted_memory_bytes"]["items"]["loading"]


@pytest.mark.slow
@pytest.mark.promise("FT_04")
def test_world_size_starts_its_own_ranks_and_only_the_first_speaks(base, alone, tmp_path):
    code, out, err = finish(command(base, "--batch_size 2 --world_size 2", output_dir=tmp_path / "out"))
    assert code == 0, err
    assert "ranks: 2 (dp_shards 2)" in out
    assert out.count("trainable parameters:") == out.count("step    12/12") == 1
    assert_same_run(tmp_path / "out", alone)
    # Each rank reads its own rows, and the table of predicted memory has them.
    assert predicted_loading(tmp_path / "out") < predicted_loading(alone)


@pytest.mark.promise("ENV_03", "FT_09")
def test_ranks_of_torchrun_are_those_that_train(base, alone, tmp_path):
    """None starts ranks of its own, and they train as one process does."""
    argv = [*TORCHRUN, ROOT / "train.py", *words(base, "--batch_size 2", output_dir=tmp_path / "out")]
    process = ranks.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        wait_for_steps(tmp_path / "out", 2, process)
        found = [p for p in descendants(process.pid) if b"\0RANK=" in environment_of(p)]
        out, err = process.communicate(timeout=120)
    finally:
        ranks.kill_session(process)
    assert process.returncode == 0, err
    assert len(found) == 2 and out.count("step    12/12") == out.count("ranks: 2 (dp_shards 2)") == 1
    assert_same_run(tmp_path / "out", alone)


# What `accelerate config` writes for several processes of one machine; it starts them as torchrun does.
SEVERAL = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
mixed_precision: 'no'
"""


@pytest.mark.promise("FT_11")
@pytest.mark.slow
@pytest.mark.parametrize("started_by", ["config file", "cpu"])
def test_accelerate_launch_starts_no_second_set_of_ranks(base, alone, tmp_path, started_by):
    """With --cpu it starts one process, whatever --num_processes is, and that one starts the ranks."""
    file = tmp_path / "several.yaml"
    file.write_text(SEVERAL + f"main_process_port: {free_port()}\n")
    options = ["--config_file", file] if started_by == "config file" else ["--cpu", "--num_processes", 2]
    more = "" if started_by == "config file" else "--world_size 2"
    argv = [*ACCELERATE, *options, ROOT / "train.py", *words(base, more, "--batch_size 2", output_dir=tmp_path / "out")]
    process = ranks.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        wait_for_steps(tmp_path / "out", 2, process)
        found = [p for p in descendants(process.pid) if b"\0RANK=" in environment_of(p)]
        out, err = process.communicate(timeout=120)
    finally:
        ranks.kill_session(process)
    assert process.returncode == 0, err
    assert len(found) == 2 and out.count("step    12/12") == 1 and "ranks: 2 (dp_shards 2)" in out
    assert_same_run(tmp_path / "out", alone)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_alone_says_what_it_waits_for_and_how_to_start_without_ranks(base, tmp_path, rank):
    """A shell in which RANK and WORLD_SIZE were left."""
    argv = command(base, "--rank_timeout 5", output_dir=tmp_path / "out", master_port=free_port())
    process = ranks.start(argv, {"RANK": str(rank), "WORLD_SIZE": "2"}, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        line = process.stderr.readline()
        waited = process.poll() is None
        process.communicate(timeout=60)
    finally:
        ranks.kill_session(process)
    others = "rank 0" if rank else "the other ranks"
    assert re.match(rf"rank {rank} of 2 waits for {others} at (localhost|127\.0\.0\.1):\d+, ", line), line
    assert line.endswith("stop it and run: unset RANK WORLD_SIZE\n") and waited and process.returncode == 69


@pytest.mark.promise("ENV_04")
@pytest.mark.slow
def test_ranks_started_by_hand_all_answer_what_rank_0_answers(base, tmp_path):
    """Rank 0 hosts the store: it must not leave before the others have read `already complete` or a refusal."""
    assert [p.wait(120) for p in by_hand(base, tmp_path / "out", "--max_steps 1")] == [0, 0]
    for flags, code in (("--max_steps 1 --resume auto", 0), ("--max_steps 1", 2)):
        processes = by_hand(base, tmp_path / "out", flags)
        said = [p.communicate(timeout=60) for p in processes]
        assert [p.returncode for p in processes] == [code, code] and "Traceback" not in said[1][1], said


SILENT = {
    "69,69": (RankLostError, "rank 0 of 2 lost another rank. Rerun with --resume auto."),
    "0,69": (RankLostError, "rank 1 of 2 lost another rank. Rerun with --resume auto."),
    "69,71": (OutOfMemoryError, "rank 1 of 2 exited with code 71; see its output above"),
}


@pytest.mark.parametrize("codes", SILENT)
def test_ranks_that_end_without_writing_why_are_one_line_and_their_code(codes, monkeypatch):
    monkeypatch.setenv("EXIT_CODES", codes)
    kind, text = SILENT[codes]
    with pytest.raises(kind, match=text):
        run_ranks(ROOT / "tests/support/ranks_that_end.py", 2, "{}", StopSignal().forwarding)


DISAGREE = {
    "4 numbers;80,000 numbers": r"by SIGABRT; .* match: rank 0 was in all_reduce \(.*, rank 1 was in all_reduce",
    "4 numbers;a barrier": r"did not match: rank 0 was in all_reduce \(.*, line \d+\), rank 1 was in barrier \(.*line",
}


# The second waits for the process group's own timeout.
@pytest.mark.parametrize(
    "collectives", [pytest.param(c, marks=[pytest.mark.slow] if "barrier" in c else []) for c in DISAGREE]
)
def test_ranks_that_take_other_collectives_are_named_with_them(collectives, flags, monkeypatch):
    monkeypatch.setenv("COLLECTIVES", collectives)
    plan = planned(8, **flags, world_size=2, rank_timeout=2)
    with pytest.raises(RankLostError, match=DISAGREE[collectives]):
        run_ranks(ROOT / "tests/support/ranks_that_disagree.py", 2, plan.serialize(), StopSignal().forwarding)
