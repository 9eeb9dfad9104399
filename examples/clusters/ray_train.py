"""Trains over a Ray cluster: each worker of a TorchTrainer starts one rank of train.py and waits for it.

python examples/clusters/ray_train.py --num_workers 8 --use_gpu -- --dataset examples/chat.jsonl --output_dir /shared/a

What follows `--` are flags of train.py. If a worker dies, Ray starts all of them again, at most --max_failures times,
and the run resumes from its last checkpoint: --output_dir and --storage_path are on a file system that all nodes share.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import ray.train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer

ROOT = Path(__file__).resolve().parents[2]
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    trainer = TorchTrainer(
        start_rank,
        train_loop_config={"flags": with_resume(args.flags)},
        # Ray's own process group carries nothing: the ranks have theirs, over NCCL on GPUs.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=args.num_workers,
            use_gpu=args.use_gpu,
            resources_per_worker={"CPU": args.cpus_per_worker, **({"GPU": 1} if args.use_gpu else {})},
        ),
        run_config=ray.train.RunConfig(
            name=args.name,
            storage_path=args.storage_path,
            failure_config=ray.train.FailureConfig(max_failures=args.max_failures),
        ),
    )
    trainer.fit()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_workers", type=int, default=2, help="ranks, one per GPU")
    parser.add_argument("--use_gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--cpus_per_worker", type=int, default=1)
    parser.add_argument("--max_failures", type=int, default=1, help="how often the job starts again after a failure")
    parser.add_argument("--name", default="finetune", help="name of the run in --storage_path")
    parser.add_argument("--storage_path", default=None, help="where Ray keeps its own state, shared by all nodes")
    parser.add_argument("flags", nargs="+", help="after --: flags of train.py, --output_dir among them")
    return parser


def with_resume(flags: list[str]) -> list[str]:
    """The flags, with `--resume auto` if they have none: every start but the first continues the run."""
    return flags if "--resume" in flags else [*flags, "--resume", "auto"]


def start_rank(config: dict) -> None:
    """Runs this worker's rank in a process that ends with the worker. Raises RuntimeError if it fails."""
    context = ray.train.get_context()
    # Ray's own store listens on MASTER_PORT.
    port = broadcast_from_rank_zero(free_port())
    environment = os.environ | {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": os.environ["MASTER_ADDR"],
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, str(ROOT / "train.py"), *config["flags"]]
    code = subprocess.run(command, env=environment, preexec_fn=end_with_parent).returncode
    if code:
        raise RuntimeError(
            f"rank {context.get_world_rank()} ended with exit code {code}; docs/trouble.md says what it is"
        )


def end_with_parent() -> None:
    """Has the kernel kill train.py when its worker dies, so that the next start is alone. Runs in the child, before
    exec.
    """
    ctypes.CDLL(None, use_errno=True).prctl(DIES_WITH_PARENT, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return listening.getsockname()[1]


if __name__ == "__main__":
    main()
