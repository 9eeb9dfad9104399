"""A run as one of the ranks that mlx.launch started: rank 0 makes the plan and sends it to the others."""

from dataclasses import asdict, replace

from finetune import process
from finetune.distributed.env import RankEnv
from finetune.errors import EXPECTED, RankLostError, first_line
from finetune.mlx_engine.ranks import Ranks
from finetune.model_files.files import find_model_of
from finetune.plan.run_plan import RunPlan, TrainState


def run_launched(run, announced_plan, env: RankEnv) -> TrainState:
    """`announced_plan()`: (plan, its end if there is nothing to train), called on rank 0."""
    process.mute_nonzero_ranks(env.rank)
    ranks, message, done = Ranks.of(env.size), None, None
    if env.rank == 0:
        code = 1  # of an error that is not expected
        try:
            plan, done = announced_plan()
            code = done.exit_code if done else None
        except EXPECTED as error:
            code = error.exit_code
            raise
        finally:
            message = {"plan": plan.serialize()} if code is None else {"exit_code": code}
            ranks.gather_object(message)
        if done:
            return done
    else:
        message = ranks.gather_object(None)[0]
        if "exit_code" in message:  # rank 0 has printed why
            return TrainState(status="ended", exit_code=message["exit_code"])
        plan = RunPlan.deserialize(message["plan"])
        plan = replace(plan, files=find_model_of(asdict(plan.settings)))
    try:
        return run(plan, env)
    except RuntimeError as error:
        if "[ring]" not in str(error) and "[distributed]" not in str(error):
            raise
        raise RankLostError(f"a rank stopped responding ({first_line(error)}). Rerun with --resume auto.") from error
