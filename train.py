"""Fine-tunes any Hugging Face causal language model on your own data.

python train.py                                   the demo: a real model on a small task
python train.py --dataset my.jsonl                your rows, on the demo's model
python train.py --model_name ID --dataset FILE --train_type lora --output_dir out
"""

import sys
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune.cli import FlagParser, add_flags, parse_overrides, with_config
from finetune.system import process


def build_parser() -> FlagParser:
    """The command line: every field of TrainConfig, grouped."""
    parser = FlagParser(prog="train.py", description=__doc__)
    add_flags(parser)
    return parser


if __name__ == "__main__":  # --help and an unknown flag are answered before numpy and the rest are imported
    process.parse_or_exit(build_parser())

import gc
import os
import time
from functools import partial

from backend_manager import CAPABILITIES
from finetune.adapters.continued import read_saved
from finetune.backend import doctor
from finetune.callers_process import callers_process, only_run
from finetune.checkpoint.output_dir import clean_finished, with_own_folder
from finetune.checkpoint.own_base import with_scaled_base
from finetune.checkpoint.saved_run import finished_run, unread_by_finished
from finetune.checkpoint.writer import CheckpointWriter
from finetune.config import DEFAULTS
from finetune.data import preview
from finetune.data.chat_template import on_day
from finetune.data.fit_template import prepare_template
from finetune.data.prepare import eva_batches, load_data, read_datasets, rows_of
from finetune.data.settled_by_rows import settled_by_rows, settled_lines
from finetune.distributed.env import RankEnv, rank_env
from finetune.distributed.launcher import spawn_ranks
from finetune.distributed.watchdog import Watchdog
from finetune.engine import EngineRank
from finetune.errors import PlanError
from finetune.estimate.remedies import report_lines
from finetune.from_python import CALLBACKS, NO_CALLBACKS, Callbacks, Result, overrides_of, typed
from finetune.model_files.files import tokenizer_folder
from finetune.model_files.hub_ranges import looks_judged
from finetune.model_files.tokenizer import FullTokenizer, load_tokenizer, pad_id
from finetune.model_files.vocabulary import add_tokens
from finetune.parts.train_state import TrainState
from finetune.parts.trains import Adapter
from finetune.plan.backend import ENGINES, select_backend
from finetune.plan.finalize import finalize
from finetune.plan.machine import predicted_for_batch, predicted_time, shape_of_run
from finetune.plan.make import make_plan
from finetune.plan.recommend import recommend
from finetune.plan.run_plan import RunPlan
from finetune.run import parity, report
from finetune.run.conclusion import conclude, uploaded
from finetune.run.evaluation import check_scored
from finetune.run.loop import begin, run_steps, start_from
from finetune.run.lr_search import with_searched_rate
from finetune.run.metrics import Metrics
from finetune.run.reference_log_probs import check_reference, with_reference
from finetune.run.reward_models import bytes_of_models, open_reward_models
from finetune.run.teacher import Judging, Teaching, bytes_of_teacher, check_teacher
from finetune.system.terminal import is_terminal, say
from finetune.system.threads import in_background
from finetune.system.untrusted import tokenizer_failures


def tokenizer_folder_of(plan: RunPlan, merged: bool = True) -> Path:
    """The model's; of a run that continues an adapter the adapter's, if it has one, which the run saves as its own, and
    reads where it is resumed.

    `merged`: with --adapter_merge, the model is merged already, and has it.
    """
    if plan.settings.adapter is None or (plan.settings.adapter_merge and (merged or plan.resume_from)):
        return plan.model.tokenizer_folder
    if plan.resume_from and (plan.resume_from.output_dir / "tokenizer_config.json").is_file():
        folder = plan.resume_from.output_dir
    else:
        folder = read_saved(plan.settings.adapter, fetch=merged).folder
    return tokenizer_folder(folder, plan.model)


def tokenizer_of(plan: RunPlan, merged: bool = True) -> FullTokenizer:
    """The run's, with its new tokens; `merged`: see tokenizer_folder_of."""
    tokenizer = load_tokenizer(tokenizer_folder_of(plan, merged))
    add_tokens(tokenizer, plan.data.new_tokens)
    return tokenizer


def open_engine(plan: RunPlan, env: RankEnv) -> EngineRank:
    """This rank of the plan's engine, joined to the others: `load(batches, initial_adapter)`, `build(model, pad_id)`.

    Collective.
    """
    if plan.engine == "mlx":
        from finetune.mlx_engine.open import MLXRank
        from finetune.torch_engine import transformers_logits

        return MLXRank(plan, transformers_logits.logits)
    from finetune.torch_engine.open import TorchRank

    return TorchRank(plan, env, wrap_model)


def wrap_model(model: Any, plan: RunPlan, groups: Any, local_shards: Any, pad_id: int):
    """The model distributed as the plan says: a Parallelism. On Apple GPUs, after known answers were right."""
    if plan.backend == "mps":
        from mps_fsdp_wrapper import MPSFSDPWrapper

        return MPSFSDPWrapper().distribute(model, plan, groups, local_shards, pad_id)
    from finetune.torch_engine.parallel.parallelize import parallelize

    return parallelize(model, plan, groups, local_shards, pad_id)


def run(
    plan: RunPlan,
    env: RankEnv = RankEnv(),  # noqa: B008  frozen
    watchdog: Watchdog | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> TrainState:
    """One rank's life, from an idle device to a saved adapter. The TrainState says how it ended.

    `watchdog`: the thread that watches the other ranks. `callbacks`: called with each event of the log.
    """
    began = time.perf_counter()
    stop = process.StopSignal(single_process=env.size == 1)
    with (
        stop.installed(),
        on_day(plan.day),
        CheckpointWriter(plan, env.rank) as writer,
        Metrics(plan, env.rank > 0, watchdog) as log,
        tokenizer_failures(),
    ):
        log.listener = callbacks
        raw_datasets = read_datasets(plan.data)
        settled = settled_by_rows(plan.data, raw_datasets)
        plan = plan.changed(settled)
        for line in settled_lines(settled):
            log.say(line)
        tokenizer = tokenizer_of(plan)
        for notice in prepare_template(tokenizer, plan.data, partial(rows_of, raw_datasets)):
            log.say(f"  note: {notice}")
        in_background(lambda: plan.model.digest)  # known when the first checkpoint needs it
        rank = open_engine(plan, env)
        # Weights stream in while rows are tokenized, unless adapters start from these or a teacher reads them first.
        from_data = isinstance(plan.trains, Adapter) and plan.trains.init.needs_data
        loading = None
        if not (from_data or plan.teacher):
            loading = in_background(rank.load, None, writer.initial_adapter())
        data = load_data(plan.data, raw_datasets, tokenizer, plan.model, log.say)
        never_right = check_scored(data, plan.data)
        log.say("\n".join(report.data_lines(data, color=is_terminal(sys.stdout))), styled=True)
        for line in never_right:
            log.say(f"  note: {line}")
        teaching = None
        if plan.teacher:
            teaching = (Judging if plan.teacher.stays else Teaching)(plan, data, env)
            teaching.prepare(plan, stop, log.say)
        if from_data:
            model = rank.load(eva_batches(data, plan))
        elif loading is None:
            model = rank.load(None, writer.initial_adapter())
        else:
            model = loading.result()
        engine = rank.build(model, pad_id(tokenizer))
        if teaching:
            data = teaching.given(engine, data, stop, log.say)
        open_reward_models(plan, data, raw_datasets["train"], env, log.say)
        plan = finalize(plan, data, engine, log.say)
        plan = with_searched_rate(plan, data, engine, log.say, stop)
        log.say("\n".join(report.engine_lines(engine)))
        writer.describe(engine, plan, data.learned_ends, data.digests(), reads_messages=data.reads_messages)
        log.summary.loading_bytes = engine.begin_memory(rank.baseline)
        log.summary.seconds["loading"] = time.perf_counter() - began
        shape = shape_of_run(plan)
        log.summary.predicted_step = predicted_time(plan, shape, data, engine, env.local_size, os.environ)
        log.summary.predicted_for = partial(predicted_time, plan, shape, data, engine, env.local_size, os.environ)
        predicted = predicted_for_batch(plan, shape, data, engine, rank.loads_own_shards)
        check_reference(engine, data, plan, writer.root)
        state = begin(engine, data, plan, log, writer, predicted, lambda: start_from(engine, plan, log.say))
        data = with_reference(engine, data, plan, writer.root, writer.run_id, log.say, stop, state.step)
        run_steps(engine, data, plan, state, log, writer, stop)
        if state.status == "finished":
            conclude(plan, data, state, log, writer, stop)
        data.close()
    state.output_dir = str(writer.root)
    log.summary.seconds["whole run"] = time.perf_counter() - began
    with stop.installed():  # what reads the output may have ended by the same signal
        log.say("\n".join(report.closing_lines(plan, data, state, log.summary, state.exit_code)))
    if state.status == "finished" and plan.output.push_to_hub and not env.rank:
        log.say(uploaded(plan))
    return state


@typed
def fine_tune(**kwargs: Any) -> Result:
    """Trains with the command line's flags as keyword arguments. Raises what the CLI prints.

    Datasets may be rows: a list of dicts, a DataFrame, a datasets.Dataset, an iterator. `on_step`, `on_eval`, `on_save`
    are called with the event of metrics.jsonl. The result says how the run ended, and answers: `result.generate(...)`.
    One thread of a process trains at a time; the process is left as it was.
    """
    lines: list[str] = []
    callbacks = Callbacks(**{name: kwargs.pop(name) for name in CALLBACKS if name in kwargs})
    with only_run("fine_tune()"), process.warnings_not_raised():
        overrides = with_config(overrides_of(kwargs, lines.append), lines.append)
        trains = not overrides.get("dry_run")
        with callers_process(loads_torch=trains, trains=trains) as beside:
            started_in = os.getcwd()
            with tokenizer_failures():
                state = follow(overrides, lines, callbacks.drawing_beside(beside))
    return Result.of(state, overrides.get("backend"), started_in)


def follow(overrides: dict, lines: list[str], callbacks: Callbacks = NO_CALLBACKS) -> TrainState:
    """Does what `overrides` {flag: value} ask for. `lines`: notes on how they were read, printed beside the plan."""
    address = (overrides.get(name, DEFAULTS[name]) for name in ("master_addr", "master_port"))
    env = rank_env(os.environ, *address)
    work = partial(run, callbacks=callbacks)
    if overrides.get("doctor", "false") != "false" or overrides.get("recommend"):
        if env and env.rank:
            return TrainState(status="examined")
        return run_doctor(overrides)
    if overrides.get("parity"):
        return parity.run(overrides, make_plan, open_engine, say)
    if env and env.launcher == "mlx.launch" and not overrides.get("dry_run"):
        from finetune.mlx_engine import launched

        return launched.run_launched(work, lambda: announced_plan(overrides, env, lines), env)
    if env and env.size > 1 and not overrides.get("dry_run"):
        from finetune.torch_engine.parallel import rank_process

        rank_timeout = overrides.get("rank_timeout", DEFAULTS["rank_timeout"])
        return rank_process.run_launched(work, lambda: announced_plan(overrides, env, lines), env, rank_timeout)
    if env and env.rank:
        return TrainState(status="planned")
    plan, done = announced_plan(overrides, env, lines)
    if done:
        return done
    if plan.dims.world_size == 1:
        state = work(plan)
        if plan.memory.base_offload:
            gc.collect()  # the model, which is in cycles, keeps the files open that it read its layers from
        return state
    callbacks.check(plan.dims.world_size)
    return TrainState(**spawn_ranks(Path(__file__), plan.dims.world_size, plan.serialize()))


@looks_judged()
def announced_plan(overrides: dict, env: RankEnv | None, lines: list[str]) -> tuple[RunPlan, TrainState | None]:
    """(the plan, printed after `lines`; the run's end if there is nothing to train)."""
    for line in lines:
        say(line, in_words=True)
    plan = with_own_folder(make_plan(overrides, env, lambda plan: bytes_of_teacher(plan) + bytes_of_models(plan)))
    say("\n".join(report.plan_lines(plan)), in_words=True)
    if plan.teacher and plan.files:
        say(check_teacher(plan, lambda: tokenizer_of(plan, merged=False)), in_words=True)
    if not overrides.get("dry_run"):
        done = finished_run(plan)
        if done:
            clean_finished(plan.output.folder)
            say(f"already complete: {plan.settings.output_dir} is at its last step, {done.step}")
            for line in unread_by_finished(plan):
                say(f"  note: {line}")
            if plan.output.push_to_hub:
                say(uploaded(plan))
        elif plan.settings.adapter_merge and not plan.resume_from:
            from finetune.torch_engine.weights.merged_base import with_merged_base

            plan = with_merged_base(plan, say)
        elif plan.settings.rope_factor is not None and not plan.resume_from:
            plan = with_scaled_base(plan, say)
        return plan, done
    lines, fits = report_lines(plan, plan.shape, plan.memory_budget, plan.dims, plan.machine, plan.layouts)
    say("\n".join(lines), in_words=True)
    if fits:
        exit_code = 0
    else:
        exit_code = PlanError.exit_code
    if plan.files:
        folder = tokenizer_folder_of(plan, merged=False)
        say("\n".join(preview.lines_of(plan.data, plan.files, folder, plan.settings.data_report)), in_words=True)
    return plan, TrainState(status="planned", output_dir=plan.settings.output_dir, exit_code=exit_code)


def run_doctor(overrides: dict) -> TrainState:
    """Prints what --doctor and --recommend ask for."""
    manager, _ = select_backend(overrides.get("backend"))
    if CAPABILITIES[manager.backend].engine not in ENGINES:
        raise PlanError(f"--backend {manager.backend}: this version has no engine for it. Use --backend cpu.")

    def device_facts():
        from finetune.torch_engine.device_facts import examine

        return examine(manager.device)

    advice = []
    if overrides.get("recommend"):
        advice = recommend(manager)
    kind = overrides.get("doctor", "false")
    say("\n".join(doctor.report(manager, kind, advice, device_facts)), in_words=kind != "json")
    return TrainState(status="examined")


@callers_process()
def main(argv: list[str] | None = None) -> int:
    env = rank_env(os.environ)
    if env and env.launcher == "spawned":
        from finetune.torch_engine.parallel.rank_process import run_spawned

        return run_spawned(run, env)
    lines: list[str] = []
    return follow(parse_overrides(argv, build_parser(), lines.append), lines).exit_code


if __name__ == "__main__":
    process.exit_with(main)
