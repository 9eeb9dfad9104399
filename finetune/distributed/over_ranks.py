"""generate.py and score.py over several ranks: started by torchrun or srun, or here by --world_size, as train.py's are.

Rank 0 reads and finds everything first and alone prints; a rank that fails ends the others with one line.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.distributed.env import RankEnv, rank_env
from finetune.distributed.launcher import spawn_ranks
from finetune.errors import PlanError, RankLostError
from finetune.system import process

RESUME = "Rerun with --resume auto."  # the remedy that a lost rank of a run names


@dataclass
class Ranks:
    """This rank of a command, and what it needs to hear from rank 0. `store`: torch's, of the job; None for one rank.
    `address`, `watchdog`: see rank_process.join.
    """

    env: RankEnv = field(default_factory=RankEnv)
    store: Any = None
    address: str = ""
    watchdog: Any = None
    shared: int = 0

    @classmethod
    def alone(cls, env: RankEnv) -> "Ranks":
        """This process as the only rank of what it opens beside a run, on the run's device."""
        return cls(RankEnv(local_rank=env.local_rank, local_size=env.local_size))

    @property
    def size(self) -> int:
        return self.env.size

    @property
    def is_first(self) -> bool:
        return self.env.rank == 0

    def share(self, read: Callable[[], Any]):
        """read() of rank 0, on every rank, as JSON. The others wait as long as it takes: it may be typed."""
        if self.store is None:
            return read()
        self.shared += 1
        key = f"shared-{self.shared}"
        if not self.is_first:
            return json.loads(self.store.get(key))
        value = read()
        self.store.set(key, json.dumps(value))
        return value


def run(
    program: Path,
    argv: list[str] | None,
    parsed: Callable[[list[str] | None], Namespace],
    prepared: Callable[[Namespace, int], str],
    work: Callable[[Namespace, Ranks], int],
    on_rank: Callable[..., int],
) -> int:
    """The exit code of a command on one rank or on several.

    `parsed(argv)`: its arguments, with `world_size`. `prepared(args, size)`: finds what is asked for, downloads it, and
    returns the device's name; called by rank 0 before the others. `work(args, ranks)`: the exit code.
    `on_rank(env, args, prepared, work)`: the same as one of the ranks that a launcher started. Raises PlanError.
    """
    env = rank_env(os.environ)
    if env and env.launcher == "spawned":
        assert env.folder is not None
        argv = json.loads((env.folder / "plan.json").read_text(encoding="utf-8"))
    args = parsed(argv)
    asked = args.world_size
    if asked < 1:
        raise PlanError(f"--world_size {asked}: must be >= 1.")
    if env and env.size > 1:
        if env.launcher == "mlx.launch":
            raise PlanError("mlx.launch: starts ranks of MLX, which answer in one process. Start one process.")
        if asked not in (1, env.size):
            raise PlanError(f"--world_size {asked}: {env.launcher} started {env.size} ranks. Omit --world_size.")
        process.mute_nonzero_ranks(env.rank)
    else:
        prepared(args, asked)  # an error ends the command before any rank is started
    try:
        if env and env.size > 1:
            return on_rank(env, args, prepared, work)
        if asked > 1:
            words = list(sys.argv[1:] if argv is None else argv)
            return spawn_ranks(program, asked, json.dumps(words), keeps_stdin=True)["exit_code"]
    except RankLostError as error:
        raise RankLostError(without_resume(error)) from None
    return work(args, Ranks())


def without_resume(text: object) -> str:
    """Message on a lost rank, for a command that has nothing to resume."""
    return str(text).replace(RESUME, "Start it again.")
