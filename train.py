"""Fine-tunes any Hugging Face causal language model on your own data.

python train.py                                   the demo: a real model on a small task
python train.py --dataset my.jsonl                your rows, on the demo's model
python train.py --model_name ID --dataset FILE --train_type lora --output_dir out
"""

import sys
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune.cli import Parser, add_flags, parse_overrides, parse_value, with_config
from finetune.system import process


def build_parser() -> Parser:
    """The command line: every field of TrainConfig, grouped."""
    parser = Parser(prog="train.py", description=__doc__)
    add_flags(parser)
    return parser


if __name__ == "__main__":  # --help and an unknown flag are answered before numpy and the rest are imported
    process.parse_or_exit(build_parser())

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from backend_manager import CAPABILITIES
from finetune import doctor
from finetune.checkpoint.output_dir import open_output_dir, with_own_folder
from finetune.checkpoint.saved_run import find_saved_run, finished_run
from finetune.checkpoint.store import storage
from finetune.config import DEFAULTS, NAMES
from finetune.data import preview
from finetune.data.chat_template import ensure_chat_template
from finetune.data.lengths import sampled_lengths
from finetune.data.prepare import eva_batches, load_data, named_sources, needs_chat_template, read_datasets
from finetune.data.reading.sources import check_local
from finetune.distributed.env import RankEnv, rank_env
from finetune.distributed.launcher import spawn_ranks
from finetune.errors import PlanError
from finetune.estimate.budget import predicted_for_batch
from finetune.estimate.model_shape import planned_shape
from finetune.estimate.remedies import report_lines
from finetune.model_files.files import find_model_of
from finetune.model_files.tokenizer import load_tokenizer, pad_id
from finetune.older.other_names import answer
from finetune.plan.backend import ENGINES, check_environment, select_backend, selection
from finetune.plan.draft import Facts
from finetune.plan.finalize import data_changes, finalize
from finetune.plan.resolve import resolve_plan
from finetune.plan.resume import check_resumed, inherited_from_checkpoint, resumed_overrides
from finetune.plan.run_plan import RunPlan, TrainState
from finetune.run import parity, report
from finetune.run.loop import run_steps
from finetune.run.metrics import Metrics
from finetune.run.reference_log_probs import with_reference
from finetune.system.terminal import say


def make_plan(overrides: dict, env: RankEnv | None = None) -> RunPlan:
    """The settled plan, before anything is loaded. A dry run neither probes nor downloads. Raises PlanError.

    `env`: this process's rank if a launcher started it.
    """
    check_environment(overrides)
    prepare, given = not overrides.get("dry_run"), overrides
    saved = find_saved_run(overrides.get("resume"), overrides.get("output_dir"))
    if saved:
        overrides = resumed_overrides(overrides, saved, launched=env is not None)
    manager, skipped = select_backend(overrides.get("backend"))
    files = find_model_of(overrides, fetch=prepare)
    facts = Facts(
        manager.backend,
        manager.capabilities if prepare else manager.documented_or_cached(),
        planned_shape(files, overrides.get("llama_pro_path")) if files else None,
        inherited=inherited_from_checkpoint(saved.saved_plan, str(manager.backend), given) if saved else None,
        probe=manager.probe_quantization if prepare else manager.known_quantization,
        prequantized=files.stored if files else None,
        env=env,
        num_devices=manager.num_devices,
        environment=dict(os.environ),
        lengths=partial(sampled_lengths, model_folder=files.folder, fetch=prepare) if files else None,
    )
    plan = replace(resolve_plan(overrides, facts), files=files, resume_from=saved)
    s = plan.settings
    if files is None:
        notice = f"{s.model_name} is not on this disk yet: limits that depend on it are not checked"
        plan = replace(plan, notices=(*plan.notices, notice))
    elif Path(s.output_dir).resolve() == files.folder.resolve():
        raise PlanError(f"--output_dir {s.output_dir}: is the model's own folder. Give another.")
    if files and plan.engine != "mlx" and any(path.suffix == ".npz" for path in files.weight_files):
        raise PlanError(
            f"--model_name {s.model_name}: holds MLX's .npz. Direct loading not supported, conversion required: "
            "use --backend mlx, or write model.safetensors with mlx.core.save_safetensors."
        )
    selected = selection(overrides.get("backend"), manager, skipped)
    if selected:
        plan = replace(plan, adjustments=(selected, *plan.adjustments))
    for flag in ("dataset", "validation_dataset", "score_dataset"):
        for source in named_sources(s, flag) if getattr(s, flag) else ():
            check_local(source.name, f"--{flag}")
    if s.verbose:
        manager.print_summary()
    return check_resumed(plan, saved.saved_plan) if saved else plan


def load_model(folder, settings, groups, local_shards=None, batches=None, initial_adapter=None, log=say):
    """On meta -> weights streamed in, quantized one by one -> adapters on, base frozen.

    `local_shards`: this rank's rows, if it keeps only those. `batches`: for --init_lora_weights eva; `initial_adapter`:
    a checkpoint's, for inits that change the base. Code in the folder is never run. Raises PlanError, OutOfMemoryError.
    """
    from finetune.torch_engine import load

    device = groups.device
    with load.memory_advice(folder, settings):
        model = load.build_on_meta(folder, settings)
        layers = load.layers_of(model, folder, settings)
        for notice in load.load_and_quantize(model, folder, layers, settings, device, local_shards):
            log(f"  note: {notice}")
        starts = load.init_from_base(model, layers, settings, device, batches, initial_adapter)
        load.make_trainable(model, layers, settings, device, starts, local_shards)
    return model


def wrap_model(model, plan: RunPlan, groups, local_shards, pad_id: int):
    """The model distributed as the plan says: a Parallelism. On Apple GPUs, after known answers were right."""
    if plan.backend == "mps":
        from mps_fsdp_wrapper import MPSFSDPWrapper

        return MPSFSDPWrapper().distribute(model, plan, groups, local_shards, pad_id)
    from finetune.torch_engine.parallel.parallelize import parallelize

    return parallelize(
        model, plan.settings, groups, local_shards, plan.reshard_after_forward, plan.distribution, pad_id
    )


def build_engine(plan: RunPlan, parallel):
    """The engine that takes the plan's steps."""
    from finetune.torch_engine.engine import TorchEngine

    return TorchEngine(parallel, plan.settings, plan.files.config)


class Opened(NamedTuple):
    """How the plan's engine is reached. `load(batches, initial_adapter)`: a model; `build(model, pad_id)`: its engine.

    `baseline`: memory of the process after its imports; `loads_own_shards`: each rank reads only its rows.
    """

    load: Callable
    build: Callable
    baseline: int = 0
    loads_own_shards: bool = False


def open_engine(plan: RunPlan, env: RankEnv) -> Opened:
    """Joins the ranks of the plan's engine. Collective."""
    if plan.engine == "mlx":
        return open_mlx(plan)
    groups, local_shards, baseline = join_groups(plan, env)
    load = partial(load_model, plan.files.folder, plan.settings, groups, local_shards)

    def build(model, pad_id: int):
        return build_engine(plan, wrap_model(model, plan, groups, local_shards, pad_id))

    return Opened(load, build, baseline, local_shards is not None)


def open_mlx(plan: RunPlan) -> Opened:
    """MLX's engine, on one process or on the ranks of mlx.launch; its logits are compared with transformers' first."""
    from finetune.mlx_engine import load as mlx
    from finetune.mlx_engine import logit_check
    from finetune.torch_engine import transformers_logits

    files, s = plan.files, plan.settings

    def load(batches=None, initial_adapter=None):
        logit_check.check(files, s, transformers_logits.logits)
        return mlx.load_model(files.folder, files.config, s)

    def build(model, pad_id: int):
        return mlx.build_engine(*model, s, pad_id, files.config, plan.dims.world_size)

    return Opened(load, build)


def run(plan: RunPlan, env: RankEnv = RankEnv(), watchdog=None) -> TrainState:  # noqa: B008  frozen
    """One rank's life, from an idle device to a saved adapter. The TrainState says how it ended.

    `watchdog`: the thread that watches the other ranks.
    """
    began, stop = time.perf_counter(), process.StopSignal(single_process=env.size == 1)
    with stop.installed(), open_output_dir(plan, env.rank) as output_dir, Metrics(plan, env.rank > 0, watchdog) as log:
        raw_datasets = read_datasets(plan.settings)
        tokenizer = load_tokenizer(plan.files.folder)
        notice = ensure_chat_template(tokenizer, lambda: needs_chat_template(raw_datasets))
        if notice:
            log.say(f"  note: {notice}")
        process.in_background(lambda: plan.files.digest)  # known when the first checkpoint needs it
        opened = open_engine(plan, env)
        # Weights stream in while rows are tokenized, unless adapters start from the data.
        from_data = plan.settings.init_lora_weights == "eva"
        loading = None if from_data else process.in_background(opened.load, None, output_dir.initial_adapter())
        data = load_data(plan.settings, raw_datasets, tokenizer, plan.files, log.say)
        data_changes(plan, data.train.row_lengths)  # too few rows are refused before the wait for the weights
        log.say("\n".join(report.data_lines(data, color=sys.stdout.isatty())), styled=True)
        model = opened.load(eva_batches(data, plan.settings)) if from_data else loading.result()
        engine = opened.build(model, pad_id(tokenizer))
        plan = finalize(plan, data, engine, log.say)
        log.say("\n".join(report.engine_lines(engine)))
        output_dir.describe(engine, plan, data)
        log.summary.loading_bytes = engine.begin_memory(opened.baseline)
        log.summary.seconds["loading"] = time.perf_counter() - began
        with storage(output_dir.root):
            state, offset, resumed_from = output_dir.restore_or_begin(engine, plan, data, log.say)
        if resumed_from and plan.quantizes_again:
            state.eval_pending = True  # what the other base does to the loss is measured at once
        log.open(output_dir.root, state, offset)
        if resumed_from:
            log.saved(resumed_from)
        log.start(data, predicted_for_batch(plan, data, engine.pad_id, opened.loads_own_shards))
        data = with_reference(engine, data, plan, output_dir.root, log.say, stop)
        run_steps(engine, data, plan, state, log, output_dir, stop)
        data.close()
    state.output_dir = str(output_dir.root)
    log.summary.seconds["whole run"] = time.perf_counter() - began
    log.say("\n".join(report.closing_lines(plan, data, state, log.summary, state.exit_code)))
    return state


def join_groups(plan: RunPlan, env: RankEnv):
    """(process groups with this rank's device, its rows if it loads only those, process memory after imports).

    Collective.
    """
    from finetune.torch_engine.device import device_of, set_cpu_matmul, set_num_threads
    from finetune.torch_engine.memory_stats import current_resident_bytes
    from finetune.torch_engine.parallel.process_groups import ProcessGroups
    from finetune.torch_engine.weights.local_shards import LocalShards

    set_num_threads(env.local_size)
    set_cpu_matmul(plan.settings.cpu_matmul)
    baseline = current_resident_bytes()
    groups = ProcessGroups.of(env, plan.dims, device_of(plan.backend, env.local_rank if env.size > 1 else None))
    local_shards = LocalShards.of(groups, plan.settings) if plan.distribution == "ptd" else None
    return groups, local_shards, baseline


def fine_tune(**flags) -> TrainState:
    """Trains with the command line's flags as keyword arguments; the final TrainState. Raises what the CLI prints."""
    process.prepare_environment()
    unknown = sorted(set(flags) - set(NAMES))
    if unknown:
        instead = answer(unknown[0]) or ""
        raise PlanError(f"fine_tune({unknown[0]}=...): no such flag.{instead} See python train.py --help.")
    overrides = with_config({NAMES[k]: parse_value(NAMES[k], v) for k, v in flags.items() if v is not None})
    address = (overrides.get(name, DEFAULTS[name]) for name in ("master_addr", "master_port"))
    env = rank_env(os.environ, *address)
    if overrides.get("doctor", "false") != "false" or overrides.get("recommend"):
        return TrainState(status="examined") if env and env.rank else run_doctor(overrides)
    if overrides.get("parity"):
        return run_parity(overrides)
    if env and env.launcher == "mlx.launch" and not overrides.get("dry_run"):
        from finetune.mlx_engine.launched import run_launched

        return run_launched(run, lambda: announced_plan(overrides, env), env)
    if env and env.size > 1 and not overrides.get("dry_run"):
        from finetune.torch_engine.parallel.rank_process import run_launched

        return run_launched(run, lambda: announced_plan(overrides, env), env)
    if env and env.rank:
        return TrainState(status="planned")
    plan, done = announced_plan(overrides, env)
    if done or plan.dims.world_size == 1:
        return done or run(plan)
    return TrainState(**spawn_ranks(Path(__file__), plan.dims.world_size, plan.serialize()))


def announced_plan(overrides: dict, env: RankEnv | None) -> tuple[RunPlan, TrainState | None]:
    """(the plan, printed; the run's end if there is nothing to train)."""
    plan = with_own_folder(make_plan(overrides, env))
    say("\n".join(report.plan_lines(plan)))
    if not overrides.get("dry_run"):
        done = finished_run(plan)
        if done:
            say(f"already complete: {plan.settings.output_dir} holds all {done.step} steps")
        return plan, done
    lines, fits = report_lines(plan.settings, plan.shape, plan.memory_budget, dims=plan.dims)
    say("\n".join(lines))
    exit_code = 0 if fits else PlanError.exit_code
    if plan.files:
        say("\n".join(preview.lines_of(plan.settings, plan.files)))
    return plan, TrainState(status="planned", output_dir=plan.settings.output_dir, exit_code=exit_code)


def run_parity(overrides: dict) -> TrainState:
    """Takes the same steps on both backends of --parity; prints, writes and returns the verdict."""
    both, tracks = parity.backends(overrides.pop("parity")), []
    for name, alone in (("resume", None), ("world_size", 1)):
        if overrides.get(name) not in (None, alone):
            raise PlanError(f"--{name} {overrides[name]}: --parity starts two runs in one process. Omit it.")
    for backend in both:
        plan = make_plan(parity.overrides_of(overrides, backend, both))
        say("\n".join(report.plan_lines(plan)))
        if overrides.get("dry_run"):
            continue
        tokenizer, raw_datasets = load_tokenizer(plan.files.folder), read_datasets(plan.settings)
        ensure_chat_template(tokenizer)
        data, opened = load_data(plan.settings, raw_datasets, tokenizer, plan.files), open_engine(plan, RankEnv())
        engine = opened.build(opened.load(), pad_id(tokenizer))
        tracks.append(parity.follow(engine, data, finalize(plan, data, engine, say), say))
        del engine
    if overrides.get("dry_run"):
        return TrainState(status="planned", output_dir=plan.settings.output_dir)
    found, folder = parity.compare(*tracks, plan.settings.precision), Path(plan.settings.output_dir)
    parity.write(found, folder)
    say("\n".join([*parity.report(found), f"written: {folder}/parity.json, {folder}/parity.svg"]))
    return TrainState(status="compared", output_dir=str(folder), exit_code=0 if found["same"] else PlanError.exit_code)


def run_doctor(overrides: dict) -> TrainState:
    """Prints what --doctor and --recommend ask for."""
    manager, _ = select_backend(overrides.get("backend"))
    if CAPABILITIES[manager.backend].engine not in ENGINES:
        raise PlanError(f"--backend {manager.backend}: this version has no engine for it. Use --backend cpu.")

    def device_facts():
        from finetune.torch_engine.device_facts import examine

        return examine(manager.device)

    wanted, recommend = overrides.get("doctor", "false"), bool(overrides.get("recommend"))
    say("\n".join(doctor.report(manager, wanted, recommend, device_facts)))
    return TrainState(status="examined")


def main(argv=None) -> int:
    process.prepare_environment()
    env = rank_env(os.environ)
    if env and env.launcher == "spawned":
        from finetune.torch_engine.parallel.rank_process import run_spawned

        return run_spawned(run, env)
    return fine_tune(**parse_overrides(argv, build_parser())).exit_code


if __name__ == "__main__":
    process.exit_with(main)
