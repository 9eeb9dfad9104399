"""Trains a tiny recursive model from scratch: recipe -> plan -> data -> model -> the loop of train.py -> step_N.

python pretrain.py --config-name cfg_chat data_paths=[data/my-chat-dataset]
python pretrain.py --config-name cfg_chat_recursive arch.plain=true       its twin without recursion
python pretrain.py --config-name cfg_puzzle data_paths=[data/sudoku-4]
"""

import sys
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune.system import process

if __name__ == "__main__":  # one line instead of the traceback of the imports below
    process.require_installed()

import contextlib
import os
import shlex
import time
from collections.abc import Sequence

from finetune.callers_process import callers_process, only_run
from finetune.checkpoint.writer import CheckpointWriter
from finetune.distributed.env import RankEnv, rank_env
from finetune.distributed.watchdog import Watchdog
from finetune.engine import Engine
from finetune.errors import PlanError
from finetune.estimate.budget import MemoryBudget, gib
from finetune.parts.train_state import TrainState
from finetune.run.loop import begin, run_steps
from finetune.run.metrics import Metrics, Summary, table
from finetune.run.report import memory_lines, reasons, time_line
from finetune.system.program import started_as
from finetune.system.terminal import say
from recursive import memory as estimate
from recursive import recipe
from recursive.config import PretrainConfig
from recursive.data.carry import SlotBatch
from recursive.data.data import PretrainData, load_pretrain_data
from recursive.plan import PretrainPlan, finalize, finished, resolve, select_device, with_folder, with_recipe_notice


def make_plan(argv: list[str], env: RankEnv | None = None) -> PretrainPlan:
    """The settled plan, but for what depends on the data. Prints the device first. Raises PlanError."""
    name, overrides = recipe.read_arguments(argv)
    values = recipe.read_recipe(name or "cfg_chat")
    manager = select_device(overrides.get("device", values.get("device", "auto")))
    say(f"Using device: {manager.backend}")
    plan = resolve(values, overrides, manager, env)
    return with_folder(with_recipe_notice(plan, name, {k: v for k, v in values.items() if k not in overrides}))


def build_engine(plan: PretrainPlan, data: PretrainData, env: RankEnv) -> tuple[Engine[SlotBatch], int]:
    """(the engine on this rank's device, process memory after imports). Collective."""
    from finetune.torch_engine.device import device_of, set_num_threads, set_onednn
    from finetune.torch_engine.memory_stats import current_resident_bytes
    from finetune.torch_engine.parallel.process_groups import ProcessGroups
    from recursive.torch_engine.engine import build

    set_num_threads(env.local_size)
    set_onednn(plan.settings.cpu_matmul == "onednn")
    baseline = current_resident_bytes()
    groups = ProcessGroups.of(env, plan.dims, device_of(plan.backend, env.local_rank if env.size > 1 else None))
    return build(plan.settings, data.train, groups, data.carry), baseline


def run(plan: PretrainPlan, env: RankEnv = RankEnv(), watchdog: Watchdog | None = None) -> TrainState:  # noqa: B008  frozen
    """One rank's life, from data on disk to published weights. The TrainState says how it ended."""
    began = time.perf_counter()
    stop = process.StopSignal(single_process=env.size == 1)
    data = load_pretrain_data(plan.settings, plan.rows_per_step)
    plan = finalize(plan, data)
    with stop.installed(), CheckpointWriter(plan, env.rank) as writer, Metrics(plan, env.rank > 0, watchdog) as log:
        log.say("\n".join(plan_lines(plan, data)))
        engine, baseline = build_engine(plan, data, env)
        engine.verify("padded")
        log.say("\n".join(f"  {notice}" for notice in engine.notices()))
        writer.configs = engine.describe_weights("", "")
        writer.recipe = recipe.as_yaml(plan.settings)
        writer.identity = {"vocab_size": data.train.vocab_size, "dataset": data.train.digest()}
        log.summary.loading_bytes = engine.begin_memory(baseline)
        log.summary.seconds["loading"] = time.perf_counter() - began
        if plan.settings.load_checkpoint and not plan.resume_from:
            from recursive.torch_engine.weights import read_weights

            engine.load_trainable(read_weights(Path(plan.settings.load_checkpoint)))
        state = begin(engine, data, plan, log, writer, predicted_memory(plan, data))
        run_steps(engine, data, plan, state, log, writer, stop)
        if state.status == "finished":
            writer.finish(state)
    state.output_dir = str(writer.root)
    log.summary.seconds["whole run"] = time.perf_counter() - began
    with stop.installed():  # what reads the output may have ended by the same signal
        log.say("\n".join(closing_lines(plan, data, state, log.summary)))
    return state


def predicted_memory(plan: PretrainPlan, data: PretrainData) -> dict:
    """Predicted bytes of this rank's training phase."""
    s = plan.settings
    size = plan.settings.global_batch_size // plan.data_ranks
    shape = data.largest_microbatch(min(size, len(data.train)))
    slots = -(-plan.rows_per_step // plan.data_ranks)
    return estimate.predicted(s, data.train.vocab_size, shape, slots, data.train.seq_len)


def announced_plan(argv: list[str], env: RankEnv | None) -> tuple[PretrainPlan, TrainState | None]:
    """(the plan; the run's end if there is nothing to train)."""
    plan = make_plan(argv, env)
    if not plan.settings.dry_run and not plan.resume_from:
        return plan, None
    data = load_pretrain_data(plan.settings, plan.rows_per_step)
    plan_with_data = finalize(plan, data)
    if plan.settings.dry_run:
        say("\n".join(plan_lines(plan_with_data, data)), in_words=True)
        predicted = predicted_memory(plan_with_data, data)
        say(memory_line(predicted))
        exit_code = 0
        room = select_device(plan.backend).capabilities.memory_bytes
        if room and predicted["total"] > MemoryBudget(room, plan.backend).usable:
            say(f"does not fit: {plan.backend} has {gib(room)}. Use a smaller model, vocabulary or global_batch_size.")
            exit_code = PlanError.exit_code
        return plan, TrainState(status="planned", output_dir=plan.settings.checkpoint_path, exit_code=exit_code)
    total = data.total_steps(plan_with_data)
    if finished(plan, total):
        say(f"already complete: {plan.settings.checkpoint_path} is at its last step, {total}")
        return plan, TrainState(status="finished", step=total, total_steps=total)
    return plan, None


def pretrain(*argv: str) -> TrainState:
    """Trains as the command line does, from Python: pretrain("--config-name", "cfg_chat", "epochs=3")."""
    with only_run("pretrain()"), callers_process(loads_torch=True, trains=True):
        return follow(argv)


def follow(argv: Sequence[str]) -> TrainState:
    """Does what the command line asks for."""
    env = rank_env(os.environ)
    if env and env.size > 1:
        from finetune.torch_engine.parallel.rank_process import run_launched

        rank_timeout = PretrainConfig.rank_timeout
        with contextlib.suppress(PlanError):  # rank 0 says what is wrong with the arguments
            rank_timeout = recipe.read_arguments(list(argv))[1].get("rank_timeout", rank_timeout)
        return run_launched(run, lambda: announced_plan(list(argv), env), env, rank_timeout, PretrainPlan)
    plan, done = announced_plan(list(argv), env)
    return done or run(plan)


@callers_process()
def main(argv: list[str] | None = None) -> int:
    if argv is None:
        argv = sys.argv[1:]
    if "--help" in argv or "-h" in argv:
        say(f"{__doc__}\n{recipe.usage()}")
        return 0
    return follow(argv).exit_code


def plan_lines(plan: PretrainPlan, data: PretrainData) -> list[str]:
    """Lines that print the settled plan of pretrain.py and its rows."""
    s = plan.settings
    kind = "plain" if s.arch.plain else "recursive"
    tests = ", ".join(f"{len(rows)} of {path}" for path, rows in data.tests.items()) or "none"
    return [
        f"{kind} model on {plan.backend} in {s.arch.forward_dtype}, hidden_size {s.arch.hidden_size}, {s.optimizer}",
        *([f"ranks: {plan.dims.world_size}, replicas"] if plan.dims.world_size > 1 else []),
        f"data: {len(data.train)} rows of {data.train.seq_len} positions, vocabulary {data.train.vocab_size}; "
        f"test rows: {tests}",
        f"rows per step: {plan.rows_per_step} (global_batch_size {s.global_batch_size} x accumulation "
        f"{s.gradient_accumulation_steps}); {data.total_steps(plan)} steps",
        *reasons(plan),
        f"output: {s.checkpoint_path}",
    ]


def memory_line(predicted: dict) -> str:
    """Predicted memory in one line, largest items first."""
    items = sorted(predicted["items"].items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in items if size >= 2**19)
    return f"predicted memory above imports: {predicted['total'] / 2**20:,.0f} MiB ({shown})"


def closing_lines(plan: PretrainPlan, data: PretrainData, state: TrainState, summary: Summary) -> list[str]:
    """The closing report of pretrain.py."""
    s = plan.settings
    r = summary
    lines = [""]
    if r.before and r.after and not state.exit_code:
        names = ("loss", "perplexity", "targets_right", "rows_right")
        lines += [
            table([("", "before", "after"), *((n, f"{r.before[n]:.4f}", f"{r.after[n]:.4f}") for n in names)]),
            "",
        ]
    lines += [time_line(state, r), *memory_lines(r, verbose=False)]
    if state.exit_code:
        return [*lines, f"stopped by a signal at step {state.step}; continue with resume={s.checkpoint_path}"]
    lines.append(f"saved: {s.checkpoint_path}/step_{state.step}")
    question = data.example
    if question:
        command = [*started_as("generate.py").split(), "--checkpoint", f"{s.checkpoint_path}/step_{state.step}"]
        lines.append(f"try it: {shlex.join([*command, '--prompt', question[0]])}")
    return lines


if __name__ == "__main__":
    process.exit_with(main)
