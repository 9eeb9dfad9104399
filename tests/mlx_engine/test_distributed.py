"""Ranks of mlx.launch on loopback: replicas that take the steps of one process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from backend_manager import CAPABILITIES, Backend
from finetune.distributed.env import RankEnv, rank_env
from finetune.errors import PlanError
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from tests.mlx_engine.test_runs import flags_of
from tests.support import ranks
from tests.support.commands import command, finish, free_port, wait_for_steps
from tests.support.rows import jsonl
from tests.support.runs import losses, read_events
from tests.support.small_runs import model_in


def launched(flags: dict, *more, size: int = 2) -> list[str]:
    """mlx.launch of train.py over a ring on loopback."""
    own = str(Path(sys.executable).parent / "mlx.launch")
    ring = ["-n", str(size), "--backend", "ring", "--starting-port", str(free_port()), "--env", "OMP_NUM_THREADS=1"]
    return [sys.executable, own, *ring, "--", *command(flags, *more)]


@pytest.mark.slow
@pytest.mark.parametrize(("train_type", "microbatch_tokens"), [("lora", None), ("qlora", None), ("lora", 40)])
def test_two_ranks_with_unequal_rows_are_one_process(tiny_model, rows_file, tmp_path, train_type, microbatch_tokens):
    """Of 40 tokens the ranks have different numbers of microbatches, whose graphs MLX orders differently."""
    changes = {"train_type": train_type, "validation_split": 0.2, "eval_every": 4, "gradient_accumulation_steps": 1}
    changes |= {"group_size": 32} if train_type == "qlora" else {}
    changes |= {"microbatch_tokens": microbatch_tokens} if microbatch_tokens else {}
    alone = flags_of(tiny_model, rows_file, tmp_path / "alone", **changes, batch_size=4, max_steps=6)
    assert finish(command(alone)).returncode == 0
    code, out, err = finish(launched(alone | {"batch_size": 2, "output_dir": str(tmp_path / "two")}))
    assert code == 0, err + out
    assert "ranks: 2 (dp_degree 2)" in out and out.count("trainable parameters") == 1
    # Sums over ranks in another order, fp32.
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    one, two = ([e["loss"] for e in read_events(tmp_path / n, "eval")] for n in ("alone", "two"))
    assert one == pytest.approx(two, rel=1e-5)
    a, b = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("alone", "two"))
    assert all(np.allclose(a[k], b[k], atol=1e-5) for k in a)
    code, out, err = finish(launched({"resume": tmp_path / "two", "max_steps": 8}))
    assert code == 0 and "at step 6 of 8" in out and "saved by another engine" not in out, err + out


@pytest.mark.slow
def test_two_ranks_sample_and_learn_by_rewards_as_one_process(tmp_path):
    (tmp_path / "mine.py").write_text("def length(prompts, answers, rows):\n    return [len(a) for a in answers]\n")
    rows = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{i} + {i} = "} for i in range(9)])
    flags = flags_of(model_in(tmp_path / "model", 1, 2), rows, tmp_path / "alone", batch_size=2, max_steps=6)
    flags |= dict(reward=f"{tmp_path / 'mine.py'}:length", num_generations=3, max_completion_length=6)
    flags |= dict(gradient_accumulation_steps=1, updates_per_rollout=2, kl_beta=0.05, mask_truncated="false")
    assert finish(command(flags)).returncode == 0
    code, out, err = finish(launched(flags | {"batch_size": 1, "output_dir": str(tmp_path / "two")}))
    assert code == 0, err + out
    one, two = ([(e["reward"], e["answers"]) for e in read_events(tmp_path / n, "step")] for n in ("alone", "two"))
    assert one == two
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_ends_the_other_and_the_run_continues_on_one(tiny_model, rows_file, tmp_path, lost):
    """Memory that a broken ring gives is no rank's word."""
    changes = dict(batch_size=2, gradient_accumulation_steps=1, num_epochs=4000, save_every=2, rank_timeout=10)
    process = ranks.start(
        launched(flags_of(tiny_model, rows_file, tmp_path / "out", **changes)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_steps(tmp_path / "out", 8, process)
        os.kill(next(pid for pid in ranks.members(process.pid) if is_rank(pid, lost)), signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
    finally:
        ranks.kill_session(process)
    assert "Traceback" not in said, said
    assert lost == 0 or read_events(tmp_path / "out", "end")[-1]["exit_code"] == 69
    steps = len(losses(tmp_path / "out"))
    code, out, err = finish(command(resume=tmp_path / "out", max_steps=steps + 2, rank_timeout=600))
    assert code == 0 and "saved by another engine, world size" in out, err
    assert len(losses(tmp_path / "out")) == steps + 2


def is_rank(pid: int, rank: int) -> bool:
    try:
        return f"MLX_RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def test_the_environment_of_mlx_launch_is_read(tmp_path):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.1:5001"], ["10.0.0.2:5000"]]))
    env = rank_env({"MLX_RANK": "1", "MLX_HOSTFILE": str(hosts)})
    assert (env.rank, env.size, env.local_rank, env.local_size, env.launcher) == (1, 3, 1, 2, "mlx.launch")
    env = rank_env({"MLX_RANK": "2", "MLX_HOSTFILE": str(hosts)})
    assert (env.local_rank, env.local_size) == (0, 1)
    assert rank_env({"MLX_RANK": "0", "MLX_WORLD_SIZE": "4"}).size == 4
    hosts.write_text("")
    assert rank_env({"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)}) is None
    hosts.write_text("[[")
    with pytest.raises(PlanError, match="is not a JSON list of hosts"):
        rank_env({"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)})


@pytest.mark.parametrize(
    ("backend", "launcher", "flags", "message"),
    [
        (Backend.MLX, None, dict(world_size=2), "--world_size 2: MLX backend doesn't support distributed training"),
        (Backend.MLX, None, dict(world_size=2), "mlx.launch -n 2 --backend ring"),
        (Backend.MLX, "torchrun", {}, "distributed training under torchrun"),
        (Backend.CPU, "mlx.launch", {}, "--backend cpu: mlx.launch starts ranks of MLX"),
        (Backend.MLX, "mlx.launch", dict(dp_shards=2), "--dp_shards 2: MLX's ring has no sum_scatter"),
        (
            Backend.MLX,
            "mlx.launch",
            dict(tp_degree=2),
            "--tp_degree 2: mlx-lm's sharded layers do not support adapters",
        ),
    ],
)
def test_what_mlx_does_not_distribute_is_refused(backend, launcher, flags, message):
    env = RankEnv(0, 2, 0, 2, launcher=launcher) if launcher else None
    with pytest.raises(PlanError, match=message):
        resolve_plan(flags, Facts(backend, CAPABILITIES[backend], env=env))
