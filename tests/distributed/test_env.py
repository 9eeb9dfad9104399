"""Rank and world size from the environment of every launcher."""

import pytest

from finetune.config import DEFAULTS
from finetune.distributed.env import RankEnv, check_devices, listen_for_ranks, rank_env, rendezvous_address
from finetune.errors import PlanError
from tests.support import ranks
from tests.support.commands import by_hand
from tests.support.runs import assert_same_run


@pytest.mark.promise("ENV_03", "ENV_04", "FT_12")
def test_every_launcher_gives_a_process_its_rank():
    assert rank_env({}) is None and rank_env({"WORLD_SIZE": "1"}) is None
    by_hand = rank_env({"RANK": "1", "WORLD_SIZE": "2"})
    assert (by_hand.rank, by_hand.size, by_hand.local_rank, by_hand.host, by_hand.port) == (1, 2, 1, "localhost", 12355)
    assert (DEFAULTS["master_addr"], DEFAULTS["master_port"]) == ("localhost", 12355)
    torchrun = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "9",
    }
    found = rank_env(torchrun)
    assert (found.rank, found.local_rank, found.local_size, found.host, found.port) == (5, 1, 4, "a", 9)
    slurm = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_NODELIST": "node[03-04,07]",
    }
    found = rank_env(slurm)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.host) == (3, 4, 1, 2, "node03")


def test_a_host_with_fewer_devices_than_ranks_is_refused():
    """One device that a launcher shows a rank is its own."""
    of_torchrun, of_srun = (RankEnv(1, 8, 1, 4, launcher=word) for word in ("torchrun", "srun"))
    by_hand = RankEnv(1, 4, 1, 4, launcher="RANK and WORLD_SIZE")
    check_devices(2, None, 2, {})
    check_devices(8, of_torchrun, 4, {})
    check_devices(8, of_torchrun, 1, {"CUDA_VISIBLE_DEVICES": "3"})  # --virtual_local_rank
    check_devices(8, of_srun, 1, {})
    check_devices(4, by_hand, 1, {})  # hosts with one device each, and no LOCAL_WORLD_SIZE
    for size, env, devices, said in (
        (2, None, 1, "--world_size 2: this machine has 1 device for 2 ranks. Use --world_size 1, or --backend cpu."),
        (8, of_torchrun, 1, "--nproc_per_node 4: this machine has 1 device for 4 ranks. Use --nproc_per_node 1."),
        (8, of_srun, 2, "srun: 8 ranks: this machine has 2 devices for 4 ranks. Use --ntasks-per-node 2."),
        (4, by_hand, 2, "WORLD_SIZE=4: this machine has 2 devices for 4 ranks. Start 2 on a host and set LOCAL_WORLD_"),
    ):
        with pytest.raises(PlanError, match=f"^{said}"):
            check_devices(size, env, devices, {})


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "abc"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "5", "LOCAL_RANK": "1"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "9"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "x"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "x"},
    ],
    ids=lambda environment: " ".join(f"{k}={v}" for k, v in environment.items()),
)
def test_an_environment_that_is_not_a_rank_is_one_line(environment):
    with pytest.raises(PlanError) as error:
        rank_env(environment)
    assert "\n" not in str(error.value) and "=" in str(error.value)


@pytest.mark.promise("ENV_04")
@pytest.mark.slow
def test_ranks_started_by_hand_meet_without_master_or_local_rank(base, alone, tmp_path):
    processes = by_hand(base, tmp_path / "out")
    try:
        said = [p.communicate(timeout=120) for p in processes]
    finally:
        [ranks.kill_session(p) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], said
    assert said[1][0] == ""
    assert_same_run(tmp_path / "out", alone)


@pytest.mark.parametrize(
    ("environment", "fact"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc: not a number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "the world size is 0"),
        ({"RANK": "0", "WORLD_SIZE": "99999999999999999999"}, "the world size is 99999999999999999999"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999999"}, "MASTER_PORT is 99999999"),
        ({"RANK": "0", "WORLD_SIZE": "2", "FINETUNE_RANKS_FOLDER": "/absent"}, "FINETUNE_RANKS_FOLDER=/absent"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "(x2)"}, "SLURM_TASKS_PER_NODE"),
    ],
)
def test_a_number_of_the_environment_is_checked_as_a_flag_is(environment, fact):
    with pytest.raises(PlanError, match=fact):
        rank_env(environment)


def test_a_name_that_does_not_resolve_and_a_host_that_is_not_this_one_are_one_line():
    with pytest.raises(PlanError, match="MASTER_ADDR=no.such.host: cannot be resolved"):
        rendezvous_address(RankEnv(0, 2, 0, 1, "no.such.host", 29500), patience_s=0.1)
    with pytest.raises(PlanError, match="MASTER_ADDR=192.0.2.1: is another host, but all 2 ranks"):
        rendezvous_address(RankEnv(1, 2, 1, 2, "192.0.2.1", 29500))
    assert rendezvous_address(RankEnv(1, 2, 1, 2, "localhost", 29500)) == "127.0.0.1"
    with listen_for_ranks(RankEnv(0, 2, 0, 2, "localhost", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PlanError, match=f"MASTER_PORT={port}: Address already in use"):
            listen_for_ranks(RankEnv(0, 2, 0, 2, "localhost", port))
