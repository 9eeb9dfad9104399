"""A run as one of several ranks: rendezvous, process group and watchdog around `run`, and its failure told to the
others.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from finetune.config import TrainConfig
from finetune.distributed import collectives
from finetune.distributed.env import RankEnv, network_address
from finetune.distributed.launcher import GRACE_S, received_end, send_plan, stack_file, write_failure, write_result
from finetune.distributed.over_ranks import Ranks, without_resume
from finetune.distributed.watchdog import Watchdog
from finetune.errors import EXPECTED, OutOfMemoryError, RankLostError, first_line
from finetune.parts.plan_base import PlanBase
from finetune.parts.train_state import TrainState
from finetune.plan.run_plan import RunPlan
from finetune.system import process
from finetune.system.files import open_file
from finetune.system.terminal import say
from finetune.system.threads import in_background
from finetune.torch_engine.device import device_of
from finetune.torch_engine.parallel.process_groups import (
    create_store,
    destroy_process_group,
    init_process_group,
    start_watchdog,
    wait_for_ranks,
)


def run_launched(
    run: Callable[..., TrainState],
    announced_plan: Callable[[], tuple],
    env: RankEnv,
    rank_timeout: float,
    plan_type: type[PlanBase] = RunPlan,
) -> TrainState:
    """A rank that a launcher started. Rank 0 makes the plan and broadcasts it through the store.

    `announced_plan()`: (plan, its end if there is nothing to train). `plan_type`: what the other ranks read it as.
    """
    process.mute_nonzero_ranks(env.rank)
    store, address, watchdog = join(env, rank_timeout)
    if env.rank:
        message = json.loads(_from_rank0(env, store, watchdog))
        end = received_end(message)
        if end:
            watchdog.close()
            return end
        return run_rank(run, env, store, address, watchdog, plan_type.deserialize(message["plan"]))

    def send(message: dict) -> None:
        store.set("plan", json.dumps(message))
        if "exit_code" in message:  # the store ends with this process: not before each rank has read its answer
            with contextlib.suppress(dist.DistError):
                store.wait([f"read-{rank}" for rank in range(1, env.size)], timedelta(seconds=GRACE_S))
            watchdog.close()

    plan, done = send_plan(announced_plan, send)
    return done or run_rank(run, env, store, address, watchdog, plan)


def join(
    env: RankEnv, timeout_s: float, stacks: Path | None = None, log_error: Callable[[str], None] = process.log_error
) -> tuple:
    """(the store, this host's address, the watchdog) when all ranks have joined: from then on the watchdog sees them.
    Collective. RankLostError for a rank that has not joined within `timeout_s`.
    """
    text = f"rank 0 of {env.size} does not answer at {env.host}:{env.port}: no rendezvous in {timeout_s:g} s "
    text += "(--rank_timeout). Rerun with --resume auto."
    try:
        with _ended_after(env, timeout_s + 1, text):
            store = create_store(env, timeout_s)
            wait_for_ranks(env, store, timeout_s)
            address = network_address(env, store, timeout_s)
            return store, address, start_watchdog(env, store, address, timeout_s, stacks, log_error)
    except (RankLostError, dist.DistError) as error:
        if isinstance(error, RankLostError):
            lost = error
        else:
            lost = RankLostError(f"{text} ({first_line(error)})")
        if env.folder:
            write_failure(env, lost.exit_code, str(lost))
        raise lost from None


@contextlib.contextmanager
def _ended_after(env: RankEnv, timeout_s: float, text: str) -> Iterator[None]:
    """Ends this process with 69 if the block lasts longer: torch's store has no end with a peer that says nothing.
    After a moment it says what it waits for.
    """
    ended = threading.Event()
    soon = min(SAY_AFTER_S, timeout_s)

    def end() -> None:
        if ended.wait(soon):
            return
        if not env.folder:
            with contextlib.suppress(OSError, ValueError):  # of a closed stderr
                say(waiting_line(env, timeout_s - soon), file=sys.stderr)
        if ended.wait(timeout_s - soon):
            return
        try:
            if env.folder:
                write_failure(env, RankLostError.exit_code, text)
            else:
                process.log_error(text)
        finally:
            os._exit(RankLostError.exit_code)

    in_background(end, wait_at_exit=False)
    try:
        yield
    finally:
        ended.set()


def waiting_line(env: RankEnv, timeout_s: float) -> str:
    """The line that says what a rank waits for, and how to start without ranks where no launcher is known."""
    others = "the other ranks" if env.rank == 0 else "rank 0"
    text = f"rank {env.rank} of {env.size} waits for {others} at {env.host}:{env.port}, {timeout_s:.0f} s more"
    if env.launcher == "RANK and WORLD_SIZE":
        text += ": RANK and WORLD_SIZE are set. If nothing else was started, stop it and run: unset RANK WORLD_SIZE"
    return text


def _from_rank0(env: RankEnv, store: dist.Store, watchdog: Watchdog) -> bytes:
    """Rank 0's message with the plan. RankLostError if it ended before it sent one."""
    try:
        message = store.get("plan")
        store.set(f"read-{env.rank}", "")
    except dist.DistError as error:
        watchdog.caused_by_peer(error)
        raise RankLostError(
            f"rank 0 of {env.size} ended before it sent the plan ({first_line(error)}). Rerun with --resume auto."
        ) from None
    return message


SAY_AFTER_S = 3.0  # ranks that were started together have joined by then
TOLD_S = 5.0  # rank 0 waits 3 s for an error of its own, see Watchdog


def answer_on_rank(
    env: RankEnv, args: Namespace, prepared: Callable[[Namespace, int], str], work: Callable[[Namespace, Ranks], int]
) -> int:
    """A command's exit code as one of its ranks: see over_ranks.run. Collective."""
    timeout_s = TrainConfig().rank_timeout
    said = join(env, timeout_s, log_error=lambda text: process.log_error(without_resume(text)))
    ranks = Ranks(env, *said)

    def answer() -> int:
        device = ranks.share(lambda: prepared(args, env.size))
        if not ranks.is_first:
            prepared(args, env.size)
        init_process_group(env, ranks.store, ranks.address, device_of(device, env.local_rank), timeout_s)
        code = work(args, ranks)
        destroy_process_group()
        if env.folder and ranks.is_first:
            write_result(env, {"exit_code": code})
        return code

    code, failed = together(answer, env, ranks.watchdog)
    if failed and not env.folder:
        time.sleep(TOLD_S)  # a launcher ends the others as soon as this rank is gone: rank 0 says why before
    return failed or (0 if env.folder else code)


def run_spawned(run: Callable[..., TrainState], env: RankEnv) -> int:
    """A rank that launcher.run_ranks started: 0 if it left its result there, a signal's included."""
    process.mute_nonzero_ranks(env.rank)
    assert env.folder is not None, env
    faulthandler.enable(open_file(stack_file(env.folder, env.rank), "w"))  # open as long as the process
    plan = RunPlan.deserialize((env.folder / "plan.json").read_text())
    store, address, watchdog = join(env, plan.settings.rank_timeout)
    state = run_rank(run, env, store, address, watchdog, plan)
    if state.status == "failed":
        return state.exit_code
    return 0


def run_rank(
    run: Callable[..., TrainState], env: RankEnv, store: dist.Store, address: str, watchdog: Watchdog, plan: PlanBase
) -> TrainState:
    """run(plan, env, watchdog) inside the process group of all ranks. Never leaves another rank waiting."""
    s = plan.settings
    watchdog.stacks = plan.output.folder / "stacks"
    watchdog.timeout_s = s.rank_timeout

    def work() -> TrainState:
        init_process_group(env, store, address, device_of(plan.backend, env.local_rank), s.rank_timeout)
        state = run(plan.on_this_host(), env, watchdog)
        destroy_process_group()
        if env.folder and env.rank == 0:
            write_result(env, asdict(state))
        return state

    state, failed = together(work, env, watchdog)
    if state is None:
        return TrainState(status="failed", exit_code=failed)
    return state


def together(work: Callable, env: RankEnv, watchdog: Watchdog) -> tuple:
    """(work(), 0), or (None, exit code) of a failure that another process prints. Never leaves another rank waiting."""
    try:
        result = work()
        watchdog.close()
        return result, 0
    except (*EXPECTED, MemoryError, OSError, RuntimeError) as error:
        failure = _expected(error, watchdog)
        if failure is None:
            raise
        watchdog.announce_failure(failure.exit_code, str(failure))
        if env.folder:
            write_failure(env, failure.exit_code, str(failure), collectives.of_error(error))
        if env.folder or env.rank:  # printed by the process that spawned the ranks, or by rank 0
            return None, failure.exit_code
        raise failure from error


def _expected(error: BaseException, watchdog: Watchdog):
    """The failure with an exit code that this error is; None if it is not expected."""
    if isinstance(error, EXPECTED):
        return error
    memory = process.out_of_memory(error)
    if memory:
        return OutOfMemoryError(memory)
    if watchdog.caused_by_peer(error):
        return RankLostError(f"a rank stopped responding ({first_line(error)}). Rerun with --resume auto.")
    return None
