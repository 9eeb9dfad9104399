"""A run as one of the ranks that mlx.launch started: rank 0 makes the plan and sends it to the others."""

from collections.abc import Callable
from dataclasses import asdict, replace

from finetune.distributed.env import RankEnv
from finetune.distributed.launcher import received_end, send_plan
from finetune.mlx_engine.ranks import Ranks, ring_errors
from finetune.model_files.files import find_model_of
from finetune.parts.train_state import TrainState
from finetune.plan.run_plan import RunPlan
from finetune.system import process


def run_launched(run: Callable[..., TrainState], announced_plan: Callable[[], tuple], env: RankEnv) -> TrainState:
    """`announced_plan()`: (plan, its end if there is nothing to train), called on rank 0."""
    process.mute_nonzero_ranks(env.rank)
    ranks = Ranks.of(env.size)
    if env.rank == 0:
        plan, done = send_plan(announced_plan, ranks.gather_object)
        if done:
            return done
    else:
        message = ranks.gather_object(None)[0]
        end = received_end(message)
        if end:
            return end
        plan = RunPlan.deserialize(message["plan"])
        plan = replace(plan, files=find_model_of(asdict(plan.settings)))
    with ring_errors():
        return run(plan, env)
