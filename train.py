"""Fine-tunes any Hugging Face causal LM on this machine: flags -> capabilities -> plan -> model -> loop -> adapter.

python train.py                                   the demo: a real model on a small task
python train.py --dataset my.jsonl                your rows, on the demo's model
python train.py --model_name ID --dataset FILE --train_type lora --output_dir out
"""

from finetune import errors, process
from finetune.checkpoint import output_dir
from finetune.checkpoint.store import storage
from finetune.cli import Parser, add_flags, convert, parse_overrides, with_config
from finetune.config import DEFAULTS, NAMES
from finetune.data.chat_template import ensure_chat_template
from finetune.data.collate import largest_microbatch, microbatches
from finetune.data.formats import detect_format
from finetune.data.sampler import Cursor, rank_rows, split_validation, step_rows, total_steps
from finetune.data.sources import check_local, read_rows
from finetune.data.tokenize import TokenizedDataset, generation_examples, render_sample, tokenize
from finetune.distributed.env import RankEnv, rank_env
from finetune.distributed.launcher import run_ranks, write_failure, write_result
from finetune.distributed.parallel_dims import FLAGS
from finetune.estimate import budget, memory
from finetune.estimate.model_cost import MicrobatchShape
from finetune.estimate.model_shape import ModelShape, shape_of_files
from finetune.model_files import llama_pro as llama_pro_files
from finetune.model_files.demo_model import DEMO_MODEL
from finetune.model_files.files import ModelFiles, find_model
from finetune.model_files.tokenizer import end_ids, load_tokenizer, pad_id
from finetune.plan.resolve import resolve_plan
from finetune.plan.resume import check_resumed, inherited_from_checkpoint, merge_saved, same_length
from finetune.plan.run_plan import Adjustment, RunPlan, TrainState, finalize


def build_parser() -> Parser:
    parser = Parser(prog="train.py", description=__doc__)
    add_flags(parser)
    return parser


if __name__ == "__main__":  # --help and a wrong flag are answered before numpy and the rest are imported
    process.parse_or_exit(build_parser())

import json
import math
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from backend_manager import CAPABILITIES, Backend, BackendManager, environment_error, package_version, versions
from finetune import doctor, report
from finetune.errors import NonFiniteError, OutOfMemoryError, PlanError, RankLostError
from finetune.metrics import Metrics, tracker
from finetune.schedule import Schedule, warmup_steps

ENGINES = ("torch",)
EVA_ROWS = 256  # rows whose activations --init_lora_weights eva looks at


@dataclass
class Run:
    """What one run holds together: decided things, open things, and the clock of each phase."""

    plan: RunPlan
    files: ModelFiles
    engine: object = None
    tokenizer: object = None
    directory: output_dir.OutputDir = None
    metrics: Metrics = None
    state: TrainState = None
    configs: dict = field(default_factory=dict)
    identity: dict = field(default_factory=dict)
    train_set: TokenizedDataset = None
    validation: TokenizedDataset | None = None
    questions: list = field(default_factory=list)
    seconds: dict = field(default_factory=dict)
    results: dict = field(default_factory=dict)
    stop: process.StopSignal = None
    world: RankEnv = RankEnv()
    ranks: object = None  # this rank among those of the run, as the engine sees them
    share: object = None  # what this rank keeps of the model, where it loads no more
    ends: set = field(default_factory=set)  # ids that end an answer
    resumed: bool = False

    def stopping(self) -> bool:
        return self.stop.signal is not None

    @property
    def data_rank(self) -> int:
        return self.plan.dims.data_rank(self.world.rank)


def make_plan(
    overrides: dict, prepare: bool = True, world: RankEnv | None = None
) -> tuple[RunPlan, ModelFiles | None, output_dir.SavedRun | None]:
    """(plan, the model's files, the run to resume). `prepare` False neither probes nor fetches. Raises PlanError.

    `world`: this process among the ranks that a launcher started.
    """
    problem = environment_error()
    if problem:
        raise PlanError(problem)
    if overrides.get("log_to") == "wandb" and package_version("wandb") is None:
        raise PlanError("--log_to wandb: wandb is not installed. pip install wandb, or use --log_to stdout.")
    found, given = output_dir.find_saved_run(overrides.get("resume"), overrides.get("output_dir")), overrides
    if found:
        if overrides.get("output_dir") and Path(overrides["output_dir"]).resolve() != found.output_dir.resolve():
            raise PlanError(
                f"--output_dir {overrides['output_dir']}: a resumed run goes on in {found.output_dir}. Leave it out."
            )
        overrides = merge_saved({k: v for k, v in overrides.items() if k != "output_dir"}, found.saved_plan)
        overrides["output_dir"] = str(found.output_dir)
        placing = ("world_size", "sharding_strategy", *FLAGS.values())
        if any(name in given for name in placing) or world:  # over other ranks, degrees are said anew
            overrides = {k: v for k, v in overrides.items() if k not in placing or k in given}
    manager, skipped = manager_of(overrides)
    known = manager.capabilities if prepare else manager.documented_or_cached()
    if overrides.get("llama_pro_path"):
        files = find_model(overrides["llama_pro_path"], fetch=prepare, flag="--llama_pro_path", weights=prepare)
    else:
        name = overrides.get("model_name") or DEMO_MODEL
        files = find_model(name, overrides.get("revision"), fetch=prepare, weights=prepare)
    sizes = files and sizes_of(files, overrides.get("llama_pro_path"))
    kept = inherited_from_checkpoint(found.saved_plan, str(manager.backend), given) if found else None
    probe = manager.probe_quantization if prepare else manager.known_quantization
    settled = resolve_plan(
        overrides,
        manager.backend,
        known,
        sizes,
        kept=kept,
        probe=probe,
        stored=files and files.stored,
        world=world,
        num_devices=manager.num_devices,
        environment=dict(os.environ),
    )
    if files and Path(settled.settings.output_dir).resolve() == files.folder.resolve():
        raise PlanError(f"--output_dir {settled.settings.output_dir}: is the model's own folder. Give another.")
    if skipped:
        why = f"auto found {skipped}, and this version trains through torch only"
        settled = replace(
            settled, adjustments=(Adjustment("backend", "auto", settled.backend, why), *settled.adjustments)
        )
    if files is None:
        settled = replace(
            settled,
            notices=(
                *settled.notices,
                f"{settled.settings.model_name} is not on this disk yet: limits that depend on it are not checked",
            ),
        )
    for flag in ("dataset", "validation_dataset", "score_dataset"):
        check_local(getattr(settled.settings, flag), f"--{flag}")
    if found:
        settled = check_resumed(settled, found.saved_plan)
    if settled.settings.verbose:
        manager.print_summary()
    return settled, files, found


def sizes_of(files: ModelFiles, llama_pro_path: str | None) -> ModelShape:
    """The model's sizes, and how many of its layers are new where a run trains those."""
    sizes = shape_of_files(files)
    if not llama_pro_path:
        return sizes
    record = llama_pro_files.read_record(files.folder, f"--llama_pro_path {llama_pro_path}")
    return replace(sizes, new_layers=len(record["new_layers"]))


def manager_of(overrides: dict) -> tuple[BackendManager, Backend | None]:
    """The backend that is asked for, else FSDP_BACKEND's, else detected; and one that detection passed over for its engine."""
    named = overrides.get("backend") or os.environ.get("FSDP_BACKEND") or None
    try:
        manager = BackendManager(named, verbose=False)
        if manager.requested is None and CAPABILITIES[manager.backend].engine not in ENGINES:
            rest = [b for b in manager.available if CAPABILITIES[b].engine in ENGINES]
            return BackendManager(rest[0], verbose=False), manager.backend
    except ValueError as error:
        raise PlanError(f"--backend {named}: {error}") from None
    return manager, None


# ---- data and model


def read_data(run: Run) -> dict:
    """Raw rows of every dataset the plan names, with their format; every broken row is found here, before weights load."""
    s, raws = run.plan.settings, {}
    for use, name, samples in (
        ("train", s.dataset, s.dataset_samples),
        ("validation", s.validation_dataset, -1),
        ("score", s.score_dataset, s.score_samples),
    ):
        if name:
            flag = "--dataset" if use == "train" else f"--{use}_dataset"
            split = {"train": "train", "validation": "validation", "score": "test"}[use]
            raw = read_rows(name, samples=samples, skip_bad_rows=s.skip_bad_rows, split=split, flag=flag)
            wished = s.dataset_format
            raws[use] = (raw, detect_format(raw.columns, flag) if wished == "auto" else wished)
    return raws


def prepare_data(run: Run, raws: dict) -> None:
    """Tokenizes what was read and says what it is, with one row shown as the model will see it."""
    s = run.plan.settings

    def tokenized(use):
        raw, form = raws[use]
        on_prompt = s.train_on_prompt and use == "train"
        return tokenize(raw, form, run.tokenizer, s.context_length, on_prompt, vocab_size=run.identity["vocab_size"])

    run.train_set = tokenized("train")
    if "validation" in raws:
        run.validation = tokenized("validation")
    elif s.validation_split:
        train, held = split_validation(len(run.train_set), s.validation_split, s.seed)
        run.train_set, run.validation = run.train_set.take(train), run.train_set.take(held)
    if "score" in raws:
        run.questions = generation_examples(*raws["score"], run.tokenizer)
        run.validation = run.validation or tokenized("score")
    settle_rows(run)
    settle_pipeline(run)
    batches = s.gradient_accumulation_steps * run.plan.data_ranks
    if len(run.train_set) < run.plan.rows_per_step:
        raise PlanError(
            f"--dataset {s.dataset}: {len(run.train_set)} rows are fewer than the {run.plan.rows_per_step} of one step. "
            f"Use --batch_size {max(1, len(run.train_set) // batches)} or more rows."
        )
    for line in run.train_set.skipped[:10]:
        print(f"  skipped: {line}")
    print(f"data: {run.train_set.describe()}")
    raw, form = raws.get("score") or raws["train"]
    shown = run.questions[0][2] if run.questions else run.train_set.sources[0]
    row = raw.rows[raw.sources.index(shown)] if shown in raw.sources else {}
    run.results["command"] = report.ask_command(s.output_dir, form, row)
    print(render_sample(run.train_set, 0, run.tokenizer, color=sys.stdout.isatty()))


def settle_rows(run: Run) -> None:
    """Where rows were left to the plan, no more than the data has use for."""
    s = run.plan.settings
    if run.plan.requested.get("batch_size") != "auto" or run.resumed:
        return
    batches = s.gradient_accumulation_steps * run.plan.data_ranks
    rows, why = budget.rows_for_data(s.batch_size, len(run.train_set) // batches)
    if why:
        fewer_rows(run, rows, why)


def settle_pipeline(run: Run) -> None:
    """Where it was left to the plan, microbatches small enough that a pipeline has two for each of its stages."""
    s, stages = run.plan.settings, run.plan.dims.pp
    if stages == 1 or "microbatch_tokens" in run.plan.requested:
        return
    parts = max(1, 2 * stages // s.gradient_accumulation_steps)
    tokens = math.ceil(s.batch_size * run.train_set.lengths.mean() / parts)
    if tokens < s.microbatch_tokens:
        why = f"about {2 * stages} microbatches a step keep {stages} stages busy"
        run.plan = finalize(run.plan, {"microbatch_tokens": (tokens, why)})
        print(f"microbatch_tokens: {tokens} ({why})")


def fewer_rows(run: Run, rows: int, why: str) -> None:
    """The plan with a smaller batch_size, and with it the forward that was to take the whole batch."""
    s, proofs = run.plan.settings, {"batch_size": (rows, why)}
    if "microbatch_tokens" not in run.plan.requested:
        proofs["microbatch_tokens"] = (rows * s.context_length, "one forward takes the whole batch")
    run.plan = finalize(run.plan, proofs)
    print(f"batch_size: {rows} ({why})")


class Loading(threading.Thread):
    """Weights load here while the main thread prepares data; `model()` waits, and raises what loading raised."""

    def __init__(self, load):
        super().__init__(daemon=True)
        self.load, self.result, self.error = load, None, None

    def run(self):
        try:
            self.result = self.load()
        except BaseException as error:  # noqa: BLE001  raised again in the main thread
            self.error = error

    def model(self):
        self.join()
        if self.error:
            raise self.error
        return self.result


def load_model(run: Run, found: output_dir.SavedRun | None) -> Loading:
    """Loads, quantizes and adapts the model as the plan says, in a thread: a started Loading."""
    from finetune.torch_engine.load import load_model
    from finetune.torch_engine.local_shards import LocalShards
    from finetune.torch_engine.parallel.process_groups import ProcessGroups

    s, batches = run.plan.settings, None
    run.ranks = ProcessGroups.of(run.world, run.plan.dims, device(run))
    if run.plan.distribution == "ptd":
        run.share = LocalShards.of(run.ranks, s, device(run))
    if s.init_lora_weights == "eva":
        rows, _ = step_rows(len(run.train_set), min(len(run.train_set), EVA_ROWS), s.seed, Cursor())
        batches = microbatches(run.train_set, rows, "padded", 16, s.microbatch_tokens, pad_id(run.tokenizer))
    saved = run.directory.saved_start(found) if found else None
    loading = Loading(lambda: load_model(run.files.folder, s, device(run), batches, saved, share=run.share))
    loading.start()
    return loading


def device(run: Run):
    """The device this rank trains on."""
    from finetune.torch_engine.engine import device_of

    return device_of(run.plan.backend, run.world.local_rank if run.world.size > 1 else None)


def build_engine(run: Run, model) -> None:
    """The engine on the loaded model, and the plan settled by what was proved on it."""
    from finetune.torch_engine.engine import TorchEngine

    run.engine = TorchEngine(
        model,
        run.plan.settings,
        device(run),
        pad_id(run.tokenizer),
        run.files.config,
        run.ranks,
        run.plan.reshard_after_forward,
        run.share,
        run.plan.distribution,
    )
    proofs = run.engine.settle_layout(run.plan.settings.batch_layout)
    run.plan = finalize(run.plan, proofs)
    run.configs = run.engine.describe_weights(run.files.name, run.files.digest)
    for setting, (used, reason) in proofs.items():
        print(f"{setting}: {used} ({reason})")
    for notice in run.engine.notices():
        print(f"  note: {notice}")
    if run.plan.requested.get("batch_size") == "auto" and not run.resumed and run.world.size == 1:
        try_rows(run)
    trainable, total = run.engine.parameter_counts()
    print(f"trainable parameters: {trainable:,} of {total:,} ({trainable / total:.2%})")


def try_rows(run: Run) -> None:
    """One step on the run's largest microbatch, undone after; half the rows where memory runs out."""
    while True:
        s = run.plan.settings
        try:
            run.engine.try_step(run_largest_microbatch(run), several=s.gradient_accumulation_steps > 1)
            return
        except OutOfMemoryError:
            if s.batch_size == 1:
                raise
            fewer_rows(run, s.batch_size // 2, f"memory ran out on a step of --batch_size {s.batch_size}")


def run_largest_microbatch(run: Run):
    """The largest microbatch of the run's first epochs, as the loop will cut it."""
    s = run.plan.settings
    return largest_microbatch(
        run.train_set,
        run.plan.rows_per_step,
        s.seed,
        s.batch_layout,
        s.batch_size,
        s.microbatch_tokens,
        run.engine.pad_id,
        total_steps(len(run.train_set), run.plan.rows_per_step, s.num_epochs, s.max_steps),
    )


# ---- the run


def evaluate(run: Run) -> None:
    """Loss on the validation rows, exact match on the scored ones, at the present step; keeps the best weights."""
    if run.validation is None:
        return
    from score import exact_match

    s, started = run.plan.settings, time.perf_counter()
    batches = microbatches(
        run.validation,
        range(len(run.validation)),
        s.batch_layout,
        len(run.validation),
        s.microbatch_tokens,
        run.engine.pad_id,
    )
    nll, num_targets = run.engine.evaluate(batches, run.stopping)
    if run.stopping():
        return
    values = {"loss": nll / num_targets, "num_targets": num_targets}
    if not math.isfinite(nll):
        raise NonFiniteError(f"step {run.state.step}: the evaluation's loss is {nll}. Lower --lr {s.lr}.")
    if run.questions:
        mine, part, answers = run.engine.share_of(run.questions), 0.0, [None]
        with run.engine.full_weights():
            if mine:
                part, answers = exact_match(
                    run.engine, run.tokenizer, mine, s.score_max_new_tokens, run.ends, stop=run.stopping
                )
        if run.stopping():
            return
        values["exact_match"] = round(run.engine.all_reduce_sum(part * len(mine))) / len(run.questions)
        run.results["first answer"] = run.engine.broadcast_object(answers[0])
    run.metrics.event("eval", step=run.state.step, **values)
    shown = " | ".join(f"{k} {v:.4f}" for k, v in values.items() if k != "num_targets")
    run.metrics.say(f"eval  step {run.state.step} | {shown}")
    if run.state.step == 0:
        run.state.before = values
    run.results["before"] = run.state.before or values
    run.results["after"] = values
    if run.state.step and (run.state.best_loss is None or values["loss"] < run.state.best_loss):
        run.state.best_loss, run.state.best_step = values["loss"], run.state.step
        if s.save_model and (s.validation_dataset or s.validation_split):
            run.directory.publish(run.engine, run.configs, run.directory.root / "best")
    run.seconds["scoring"] = run.seconds.get("scoring", 0) + time.perf_counter() - started
    run.results["evaluating"] = max(run.results.get("evaluating", 0), run.engine.reset_memory())


def train(run: Run, stop: process.StopSignal) -> None:
    """Steps until the plan's last, a signal, or a number that is not finite. Saves and evaluates where the plan says."""
    s, state = run.plan.settings, run.state
    warmup = warmup_steps(state.total_steps, s.warmup_steps, s.warmup_ratio)
    schedule = Schedule(s.lr_scheduler, s.lr, state.total_steps, warmup, s.cosine_min_lr_ratio)
    traces = []
    with run.engine.profiler(traces) as profile_step:
        while state.step < state.total_steps and not stop.signal:
            started = time.perf_counter()
            cursor = Cursor(state.epoch, state.index)
            rows, after = step_rows(len(run.train_set), run.plan.rows_per_step, s.seed, cursor)
            mine = rank_rows(rows, run.data_rank, run.plan.data_ranks)
            batches = microbatches(
                run.train_set, mine, s.batch_layout, s.batch_size, s.microbatch_tokens, run.engine.pad_id
            )
            lr = schedule.lr_at(state.step + 1)
            try:
                result = run.engine.train_step(batches, lr)
            except NonFiniteError as error:
                sources = [run.train_set.sources[r] for r in rows]
                raise NonFiniteError(
                    report.not_finite(error, state.step + 1, sources, run.directory.root, s.lr)
                ) from None
            stop.sync(run.engine.all_reduce_max)
            state.step, state.epoch, state.index = state.step + 1, after.epoch, after.index
            state.num_tokens += result.num_tokens
            state.loss = result.nll / result.num_targets
            profile_step()
            seconds = time.perf_counter() - started
            run.seconds["training"] = run.seconds.get("training", 0) + seconds
            used = asdict(run.engine.memory())
            run.results["peak"] = memory.peak_of(run.results.get("peak"), used)
            run.metrics.step(
                state.step,
                state.total_steps,
                state.loss,
                lr,
                result.grad_norm,
                result.num_tokens,
                result.num_targets,
                seconds,
                used,
                result.skipped,
            )
            last = state.step == state.total_steps
            if s.eval_every and state.step % s.eval_every == 0 and not last:
                evaluate(run)
            if s.save_model and (last or stop.signal or (s.save_every and state.step % s.save_every == 0)):
                save(run)
    run.metrics.end_live()
    if traces:
        run.metrics.say(f"profile: {len(traces)} files in {s.profiling_output}")


def save(run: Run) -> None:
    offset = run.metrics.offset()
    path = run.directory.save_step(run.engine, run.state, run.identity, run.configs, offset)
    run.metrics.event("save", step=run.state.step, path=str(path))


def start(run: Run, found: output_dir.SavedRun | None) -> None:
    """Takes up the checkpoint if there is one, then writes the plan: from here on the output_dir is this run's."""
    s = run.plan.settings
    steps = total_steps(len(run.train_set), run.plan.rows_per_step, s.num_epochs, s.max_steps)
    run.state = TrainState(total_steps=steps, output_dir=s.output_dir)
    run.identity |= {"base model": run.files.digest, "dataset": run.train_set.digest()}
    offset = None
    saved = None
    if found:
        saved, lines = run.directory.find_checkpoint(found.step_folder)
        for line in lines:
            print(f"  {line}")
        steps_found = run.engine.all_gather_object(saved.step if saved else None)
        if len(set(steps_found)) > 1:
            raise PlanError(
                f"--resume: ranks find different checkpoints in {run.directory.root} (steps {steps_found}). Give an --output_dir "
                "that all hosts share, or copy it to each."
            )
        if saved:
            run.state, offset = run.directory.restore(run.engine, saved, run.identity)
            print(f"resumed from {saved.folder} at step {run.state.step} of {steps}")
            if run.engine.reseeded:
                print(
                    "  saved by another number of ranks: each draws dropout anew from the first's random state and its own number"
                )
            if run.state.total_steps != steps:
                print(f"  total steps: {run.state.total_steps} -> {steps}; the schedule is that of the new total")
            if run.state.step > steps:
                raise PlanError(
                    f"--max_steps {s.max_steps}: {saved.folder} is at step {run.state.step} already. Use a larger one."
                )
            run.state.total_steps, run.state.status = steps, "running"
    dropped = run.directory.begin(run.state.step if found else None)
    if dropped:
        print(f"  dropped {', '.join(dropped)}: this run goes on from step {run.state.step}")
    for line in run.directory.settle_parts(run.engine):
        print(f"  note: {line}")
    run.results["tokens before"] = run.state.num_tokens
    run.directory.save_plan(run.plan)
    run.directory.save_tokenizer(run.tokenizer)
    quiet = run.world.rank > 0
    run.metrics = Metrics(
        run.directory.root, s.log_to, s.log_every_n_steps, offset, quiet, tracker=tracker(s, run.plan.to_json(), quiet)
    )
    if offset is not None:
        run.metrics.event("save", step=run.state.step, path=str(saved.folder))
    run.results["predicted"] = predicted_memory(run)
    run.metrics.event(
        "start",
        plan=run.plan.digest(),
        step=run.state.step,
        versions=versions(),
        machine=BackendManager(run.plan.backend, False).describe()["cpu"],
        predicted_memory_bytes=run.results["predicted"],
        data=run.train_set.counts,
    )


def predicted_memory(run: Run) -> dict:
    """memory.estimate for the run's largest microbatch, with loading beside the total."""
    s, sizes = run.plan.settings, sizes_of(run.files, run.plan.settings.llama_pro_path)
    batch = run_largest_microbatch(run)
    lengths = tuple(int(n) for n in run.train_set.lengths[list(batch.rows)])
    several = run.plan.rows_per_step > len(batch.rows)
    load = MicrobatchShape(lengths, batch.num_targets, s.batch_layout, several)
    room = budget.MemoryBudget(0, run.plan.backend, run.plan.dims.shards, run.plan.dims)
    predicted = budget.predicted(s, sizes, room, load)
    if predicted["total"]:
        predicted["items"]["loading"] = memory.loading_bytes(s, sizes, room.ranks if run.share else 1)
    return predicted


def complete(settled: RunPlan, found: output_dir.SavedRun | None) -> TrainState | None:
    """The end of the run that was to be resumed, where it has nothing left to do."""
    done = output_dir.finished_state(found.output_dir) if found and not found.step_folder else None
    if done and done.step == done.total_steps and same_length(settled, found.saved_plan):
        print(f"already complete: {settled.settings.output_dir} holds all {done.step} steps")
        return done
    return None


def run_plan(
    settled: RunPlan, files: ModelFiles, found: output_dir.SavedRun | None, world=None, watch=None
) -> TrainState:
    """The whole run in this process, one rank of it. Its TrainState says how it ended; status `stopped` names a signal in
    exit_code. `world`, `watch`: of several ranks, this one's place and the thread that watches the others.
    """
    world = world or RankEnv()
    run, began = Run(settled, files, resumed=found is not None, world=world), time.perf_counter()
    owner = output_dir.NonMasterOutputDir if world.rank else output_dir.OutputDir
    run.directory = owner(settled, resumed=found is not None)
    stop = run.stop = process.StopSignal(alone=world.size == 1)
    code, status = 1, "failed"
    with stop.installed():
        try:
            raws = read_data(run)
            run.tokenizer = load_tokenizer(files.folder)
            notice = ensure_chat_template(run.tokenizer) if raws["train"][1] == "chat" else None
            if notice:
                print(f"  note: {notice}")
            run.ends = end_ids(run.tokenizer, files.folder)
            baseline = _import_framework(world.local_size)
            run.identity["vocab_size"] = ModelShape.from_config(files.config).vocab_size
            starts_from_data = settled.settings.init_lora_weights == "eva"
            loading = None if starts_from_data else load_model(run, found)
            prepare_data(run, raws)
            loading = loading or load_model(run, found)
            build_engine(run, loading.model())
            run.results["loading"] = run.engine.begin_memory(baseline)
            run.seconds["loading"] = time.perf_counter() - began
            with storage(run.directory.root):
                start(run, found)
            if watch:
                watch.on_exit = lambda code: end_event(run, "failed", code, time.perf_counter() - began)
            stop.sync(run.engine.all_reduce_max)
            if run.state.step == 0 and not stop.signal:
                evaluate(run)
                stop.sync(run.engine.all_reduce_max)
                if not stop.signal:
                    show_sample(run, "before")
            train(run, stop)
            if not stop.signal:
                if settled.settings.save_model:
                    run.directory.publish(run.engine, run.configs)
                evaluate(run)
            if not stop.signal:
                show_sample(run, "after")
            code, status = (stop.exit_code, "stopped") if stop.signal else (0, "finished")
            run.state.status, run.state.exit_code = status, code
            run.state.scores = {k: run.results.get(k) for k in ("before", "after")}
            if status == "finished":
                run.directory.finish(run.state)
        except errors.EXPECTED as error:
            code = error.exit_code
            raise
        except RuntimeError as error:
            if watch and watch.caused_by_peer(error):
                code = RankLostError.exit_code
            raise
        finally:
            if run.metrics:
                end_event(run, status, code, time.perf_counter() - began)
            run.directory.close()
    run.state.output_dir = str(run.directory.root)
    run.seconds["whole run"] = time.perf_counter() - began
    print("\n".join(report.closing_lines(run, code)))
    return run.state


def end_event(run: Run, status: str, code: int, wall_s: float) -> None:
    """The last line of metrics.jsonl."""
    peak = run.results.get("peak", {"total": 0, "items": {}})
    for beside in ("loading", "evaluating"):  # beside the total, not in it
        peak["items"] |= {beside: run.results[beside]} if run.results.get(beside) else {}
    run.metrics.event("end", status=status, exit_code=code, step=run.state.step, wall_s=wall_s, peak_memory_bytes=peak)
    run.metrics.end_live()
    run.metrics.close()


def _import_framework(ranks_here: int = 1) -> int:
    """Imports what trains, and returns this process's memory after that: what memory figures are counted above."""
    from finetune.torch_engine.engine import settle_threads
    from finetune.torch_engine.memory_stats import current_resident_bytes

    settle_threads(ranks_here)
    return current_resident_bytes()


def show_sample(run: Run, when: str) -> None:
    """What the model answers to the first scored row, kept for the closing table."""
    if run.questions:
        prompt, wanted, _ = run.questions[0]
        answer = run.results.pop("first answer", None)
        if answer is None or answer.strip() != wanted.strip():  # scoring ends an answer where it goes wrong
            new = run.engine.generate(
                [prompt], run.plan.settings.score_max_new_tokens, run.ends, lambda row, ids: run.stopping()
            )
            answer = run.tokenizer.decode(new[0], skip_special_tokens=True)
        run.results[f"sample {when}"] = " ".join(answer.split())[:300]
        run.results["sample"] = (run.tokenizer.decode(prompt), wanted, run.questions[0][2])


def examine(overrides: dict) -> None:
    """What --doctor and --recommend print."""
    manager, _ = manager_of(overrides)
    if CAPABILITIES[manager.backend].engine not in ENGINES:
        raise PlanError(f"--backend {manager.backend}: this version has no engine for it. Use --backend cpu.")
    advice = doctor.recommend(manager) if overrides.get("recommend") else []
    if overrides.get("doctor", "false") == "false":
        print("\n".join(advice))
        return
    found = doctor.examine(manager)
    if overrides["doctor"] == "json":
        print(doctor.as_json(found | ({"recommend": advice} if advice else {})))
    else:
        print("\n".join([*doctor.lines(manager, found), *advice]))


def fine_tune(**flags) -> TrainState:
    """Trains with the flags of the command line as keyword arguments; the TrainState at the end. Raises what the CLI prints."""
    process.prepare_environment()
    unknown = sorted(set(flags) - set(NAMES))
    if unknown:
        raise PlanError(f"fine_tune({unknown[0]}=...): no such flag. See python train.py --help.")
    overrides = with_config({NAMES[k]: convert(NAMES[k], v) for k, v in flags.items() if v is not None})
    if overrides.get("doctor", "false") != "false" or overrides.get("recommend"):
        examine(overrides)
        return TrainState(status="examined")
    world = rank_env(os.environ, *(overrides.get(n, DEFAULTS[n]) for n in ("master_addr", "master_port")))
    if world and world.size > 1 and not overrides.get("dry_run"):
        return run_launched(overrides, world)
    if world and world.rank:
        return TrainState(status="planned")
    settled, files, found = make_plan(overrides, prepare=not overrides.get("dry_run"), world=world)
    print("\n".join(report.plan_lines(settled)))
    if overrides.get("dry_run"):
        lines, fits = budget.report_lines(settled.settings, settled.shape, settled.room, dims=settled.dims)
        print("\n".join(lines))
        return TrainState(
            status="planned", output_dir=settled.settings.output_dir, exit_code=0 if fits else PlanError.exit_code
        )
    done = complete(settled, found)
    if done:
        return done
    if settled.dims.world_size > 1:
        return start_ranks(settled, found)
    return run_plan(settled, files, found)


# ---- several ranks


def to_wire(settled: RunPlan, found: output_dir.SavedRun | None) -> str:
    """What a rank needs to begin."""
    return json.dumps({"plan": settled.to_wire(), "found": found and asdict(found)}, default=str)


def start_ranks(settled: RunPlan, found: output_dir.SavedRun | None) -> TrainState:
    """Starts the plan's ranks as processes of this program and waits for them."""
    stop = process.StopSignal()
    sys.stdout.flush()
    try:
        result = run_ranks(Path(__file__), settled.dims.world_size, to_wire(settled, found), stop.forwarding)
    except RuntimeError as error:
        if stop.received is None or isinstance(error, errors.EXPECTED):
            raise
        return TrainState(status="stopped", exit_code=128 + stop.received)  # left at once, by a second signal
    return TrainState(**result)


def run_launched(overrides: dict, world: RankEnv) -> TrainState:
    """One rank that a launcher started. The first makes the plan for all."""
    process.mute_nonzero_ranks(world.rank)
    from finetune.torch_engine.parallel import process_groups

    store = process_groups.create_store(world)
    if world.rank:
        wire = json.loads(store.get("plan"))
        if "code" in wire:  # the first has said why
            return TrainState(status="ended", exit_code=wire["code"])
        return run_rank(world, store, wire)
    try:
        settled, _, found = make_plan(overrides, world=world)
    except errors.EXPECTED as error:
        store.set("plan", json.dumps({"code": error.exit_code}))
        raise
    print("\n".join(report.plan_lines(settled)), flush=True)
    done = complete(settled, found)
    wire = json.dumps({"code": 0}) if done else to_wire(settled, found)
    store.set("plan", wire)
    return done or run_rank(world, store, json.loads(wire))


def run_rank(world: RankEnv, store, wire: dict) -> TrainState:
    """The run as one of several ranks, from the plan that all have. Never leaves another waiting."""
    from finetune.torch_engine.engine import device_of
    from finetune.torch_engine.parallel import process_groups

    settled, found = RunPlan.from_wire(wire["plan"]), wire["found"]
    if found:
        step = found["step_folder"]
        found = output_dir.SavedRun(Path(found["output_dir"]), found["saved_plan"], Path(step) if step else None)
    s = settled.settings
    flag = "--llama_pro_path" if s.llama_pro_path else "--model_name"
    files = find_model(s.llama_pro_path or s.model_name, None if s.llama_pro_path else s.revision, flag=flag)
    stacks = Path(s.output_dir) / "stacks"
    watch = process_groups.start_watchdog(world, store, s.rank_timeout, stacks, process.log_error)
    try:
        process_groups.init_process_group(world, store, device_of(settled.backend, world.local_rank), s.rank_timeout)
        state = run_plan(settled, files, found, world, watch)
        process_groups.destroy_process_group()
        watch.close()
        if world.folder and world.rank == 0:
            write_result(world, asdict(state))
        return state
    except errors.EXPECTED as error:
        watch.announce_failure(error.exit_code, str(error))
        if world.folder:
            write_failure(world, error.exit_code, str(error))
        if world.folder or world.rank:  # told by the process that started us, or by the first rank
            return TrainState(status="failed", exit_code=error.exit_code)
        raise
    except RuntimeError as error:
        if not watch.caused_by_peer(error):
            raise
        raise RankLostError(f"a rank does not answer ({str(error).splitlines()[0]}). Start it again.") from error


def main(argv=None) -> int:
    process.prepare_environment()
    world = rank_env(os.environ)
    if world and world.launcher == "spawned":
        return main_of_rank(world)
    return fine_tune(**parse_overrides(argv, build_parser())).exit_code


def main_of_rank(world: RankEnv) -> int:
    """A rank that start_ranks started: 0 where it handed over how the run ended, a signal included."""
    process.mute_nonzero_ranks(world.rank)
    from finetune.torch_engine.parallel import process_groups

    wire = json.loads((world.folder / "plan.json").read_text())
    state = run_rank(world, process_groups.create_store(world), wire)
    return state.exit_code if state.status == "failed" else 0


if __name__ == "__main__":
    process.exit_with(main)
