"""A program: a rank of a job whose ranks take the collectives that COLLECTIVES says, by rank, and train nothing."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from finetune.distributed.env import rank_env
from finetune.torch_engine.parallel.rank_process import run_spawned

TAKEN = {
    "4 numbers": lambda: dist.all_reduce(torch.ones(4)),
    "80,000 numbers": lambda: dist.all_reduce(torch.ones(80_000)),
    "a barrier": lambda: dist.barrier(),
}


def run(plan, env, watchdog):
    TAKEN[os.environ["COLLECTIVES"].split(";")[env.rank]]()


if __name__ == "__main__":
    sys.exit(run_spawned(run, rank_env(os.environ)))
