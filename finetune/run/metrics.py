"""All output of a run: console lines, progress, metrics.jsonl, trackers.
The only module that prints during training; silent on every rank but 0.
"""

import bisect
import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from backend_manager import BackendManager, versions
from finetune.backend.doctor import aligned
from finetune.checkpoint.store import replace_bytes, storage
from finetune.data.facts import facts_of
from finetune.distributed.watchdog import Watchdog
from finetune.engine import BaseReads, MemoryStats, StepResult
from finetune.errors import EXPECTED, OutOfMemoryError, PlanError, RankLostError, StorageError, is_out_of_memory
from finetune.estimate.budget import GIB
from finetune.estimate.memory import peak_of
from finetune.estimate.step_time import StepTime
from finetune.parts.log_to import names_of
from finetune.parts.plan_base import PlanBase
from finetune.parts.run_data import RunData
from finetune.parts.train_state import TrainState
from finetune.run import diagnostics, samples
from finetune.run.machine_load import MachineLoad
from finetune.run.notebook import NotebookCurve, in_notebook
from finetune.run.trackers import Trackers
from finetune.system.files import open_file
from finetune.system.json_files import OPTIONAL_NUMBER, JsonFileError, check
from finetune.system.progress import Progress, duration
from finetune.system.terminal import columns_of, say

INTERRUPTED = 130  # the exit code of a process that SIGINT ends
STEPS_AVERAGED = 20  # of the time left
MOST_COUNTED = 1_000_000  # steps ahead whose evaluations and checkpoints count in the time left
# What the line of a step shows of rewards, with its labels; metrics.jsonl has all.
OF_REWARDS = {
    "reward_best": "best",
    "frac_reward_zero_std": "alike",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "cut",
    "entropy": "entropy",
    "kl": "kl",
}
# The same of answers that a teacher judges.
OF_SAMPLED = {name: OF_REWARDS[name] for name in ("completions/mean_length", "completions/clipped_ratio")}
OF_SAMPLED["own_answers"] = "own"
COUNTS = ("num_targets", "num_rows", "num_scored")  # what an eval event's line leaves out


@dataclass
class Summary:
    """Facts of the closing report, gathered while the run goes on. Bytes and seconds.

    `before`, `after`: values of the first and the last evaluation. `sample_before`, `sample_after`: answers to the
    first scored example; `scored_answer`: that of the last scoring. `dense`: scores on the dense base, of an
    adapter trained on a quantized one, or why there are none. `best`: the evaluation with the lowest validation loss,
    of which `best_folder` has the weights. `findings`: what went wrong, see diagnostics. `peak`, `predicted`: {"total":
    bytes, "items": {name: bytes}}.
    """

    seconds: dict = field(default_factory=dict)
    before: dict | None = None
    after: dict | None = None
    dense: dict | str | None = None
    sample_before: str | None = None
    sample_after: str | None = None
    scored_answer: str | None = None
    peak: dict | None = None
    predicted: dict | None = None
    predicted_step: StepTime | None = None
    predicted_for: Callable[[float, float], StepTime | None] | None = None
    sampled: list[tuple[float, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    # Runnable ones on this machine besides this rank, at some steps.
    other_processes: list[float] = field(default_factory=list)
    findings: list = field(default_factory=list)
    best: dict | None = None
    best_folder: str | None = None
    loading_bytes: int = 0
    evaluating_bytes: int = 0
    tokens_before: int = 0
    base_reads: BaseReads | None = None

    def measured(self) -> dict:
        """Peak memory for the end event: the training phase's, with loading and evaluation beside its total."""
        peak = self.peak or {"total": 0, "items": {}}
        if self.loading_bytes:
            peak["items"]["loading"] = self.loading_bytes
        if self.evaluating_bytes:
            peak["items"]["evaluating"] = self.evaluating_bytes
        return peak


def numbers_of(metrics: dict) -> dict[str, float]:
    """The metrics that are numbers."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


class TimeLeft:
    """The time until the last evaluation: of the steps that are left, and of the evaluations and checkpoints between.

    `took(what, seconds)`: a step, or a phase of this name, has ended.
    """

    PHASES = ("scoring", "saving")

    def __init__(self, plan: PlanBase):
        self.plan = plan
        self.steps = deque[float](maxlen=STEPS_AVERAGED)
        self.phases: dict[str, list[float]] = {name: [] for name in self.PHASES}
        self.due: dict[str, list[int]] = {name: [] for name in self.PHASES}  # the steps after which each begins
        self.since = time.monotonic()

    def begin(self, state: TrainState) -> None:
        """Finds what is due in the rest of the run."""
        at = replace(state)
        self.since = time.monotonic()
        if state.total_steps - state.step > MOST_COUNTED:
            return
        for at.step in range(state.step + 1, state.total_steps + 1):
            if self.plan.eval_due(at) or at.step == state.total_steps:
                self.due["scoring"].append(at.step)
            if self.plan.save_due(at, False):
                self.due["saving"].append(at.step)

    def took(self, what: str, seconds: float) -> None:
        if what == "step":
            self.steps.append(seconds)
        elif what in self.phases:
            self.phases[what].append(seconds)
        self.since = time.monotonic()

    def waiting(self) -> float:
        """Seconds since the last of them ended."""
        return time.monotonic() - self.since

    def seconds(self, state: TrainState) -> float:
        """Seconds left after this state."""
        left = (state.total_steps - state.step) * sum(self.steps) / max(1, len(self.steps))
        for name, taken in self.phases.items():
            if taken:
                steps = self.due[name]
                left += (len(steps) - bisect.bisect_right(steps, state.step)) * sum(taken) / len(taken)
        return left


class Metrics:
    """The log of one run, as a context: the `end` event is written however the run ends, with its exit code.

    Prints from the beginning; `open` must be called before the first event. `quiet`: neither writes nor prints; rank 0
    does. `watchdog`: ends this process if another rank is lost, and writes the `end` event first.
    """

    file: Path  # from `open` on

    def __init__(self, plan: PlanBase, quiet: bool = False, watchdog: Watchdog | None = None):
        self.plan = plan
        self.quiet = quiet
        self.watchdog = watchdog
        self.every = plan.logs.every
        Progress.lines_only = "stdout" in names_of(plan.logs.log_to)
        self.summary = Summary()
        self.began = time.perf_counter()
        self.steps = Progress("training", describe=lambda: self.live_text(), quiet=quiet, pinned=True)
        self.whole = Progress("loading data and model", quiet=quiet)  # speaks where nothing within it does
        self.left = TimeLeft(plan)
        self.curve: NotebookCurve | None = None
        if not quiet and not Progress.lines_only and in_notebook():
            self.curve = NotebookCurve()
        self.load = MachineLoad()
        self.at_end: Callable[[], None] = lambda: None
        self.watch = diagnostics.DivergenceWatch()
        self.reward_watch = diagnostics.RewardWatch()
        self.last: list[str] = []  # what the live line shows of the last step, most important first
        self.listener: Callable[[dict], object] | None = None
        self.trackers: Trackers | None = None
        self.handle: IO[str] | None = None
        self.state: TrainState | None = None

    @property
    def progress(self) -> TrainState:
        """`state`, which is there from `open` on."""
        assert self.state is not None, "open comes before the first event"
        return self.state

    def __enter__(self) -> "Metrics":
        self.whole.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.whole.__exit__(kind, error, traceback)
        if self.state is not None:
            if error is None:
                self._end(self.state.status, self.state.exit_code)
            else:
                self._end("failed", self._exit_code(error))
            with contextlib.suppress(*((StorageError, PlanError, OSError) if error else ())):  # which is the one to say
                self.at_end()

    def _exit_code(self, error: BaseException) -> int:
        if isinstance(error, EXPECTED):
            return error.exit_code
        if self.watchdog and isinstance(error, RuntimeError) and self.watchdog.caused_by_peer(error):
            return RankLostError.exit_code
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        if is_out_of_memory(error):  # as a library says it; the process ends with this code
            return OutOfMemoryError.exit_code
        return 1

    def open(
        self, output_dir: Path, state: TrainState, offset: int | None = None, run_id: str = "", other_rows: bool = False
    ) -> None:
        """Opens metrics.jsonl. `offset`: the byte at which a resumed run continues; what follows it is dropped, but for
        an evaluation of the present step on `other_rows`.
        """
        self.file = output_dir / "metrics.jsonl"
        if not self.quiet:
            self._open_file(state, offset, run_id, other_rows)
        self.state = state
        self.left.begin(state)
        if self.watchdog:
            self.watchdog.on_exit = self.failed

    def _open_file(self, state: TrainState, offset: int | None, run_id: str, other_rows: bool) -> None:
        with storage(self.file):
            if offset is not None:
                self._repair(state, offset, run_id, other_rows)
            else:
                samples.keep_evaluated(self.file.parent, set(), run_id)
            mode = "w+" if offset is None else "a+"
            self.handle = open_file(self.file, mode, encoding="utf-8")
        if offset is None:
            past = []
        else:
            past = events_in(self.file.parent)
        self.trackers = Trackers(self.plan, self.file.parent, state.step, run_id, past, self.say)

    def _repair(self, state: TrainState, offset: int, run_id: str, other_rows: bool) -> None:
        """Cuts the file to its first `offset` bytes and to complete lines, and says which steps it has lost, and if the
        run before said no end.
        """
        data = b""
        with contextlib.suppress(FileNotFoundError), open_file(self.file, "rb") as file:
            data = file.read()
        kinds = [event["event"] for event in map(_event_of, data.splitlines(keepends=True)) if event]
        if next((kind for kind in reversed(kinds) if kind in ("start", "end")), "end") == "start":
            self.say(
                "  note: the log of the resumed run has no end: it was killed, or code that it called ended its process"
            )
        before = b""
        after = data[offset:].splitlines(keepends=True)
        data = data[:offset]
        if other_rows:  # the rows of now are evaluated anew, and these are not again
            own = itertools.takewhile(lambda line: b'"event": "start"' not in line, after)
            before = b"".join(line for line in own if _is_evaluation(_event_of(line), state.step))
        lines = []
        steps = set()
        evaluated: set[tuple[int, int | None]] = set()
        for line in data.splitlines(keepends=True):
            event = _event_of(line)
            if event is not None and not _is_after(event, state.step):
                lines.append(line)
                steps |= {event["step"]} if event["event"] == "step" else set()
                evaluated |= {(event["step"], event.get("of_step"))} if event["event"] == "eval" else set()
                if event["event"] == "step" and isinstance(event.get("loss"), float):
                    self.watch.add(event["loss"])
                    self.reward_watch.line(event)
        replace_bytes(self.file, b"".join(lines) + before, run_id)
        samples.keep_evaluated(self.file.parent, evaluated, run_id)
        lost = [step for step in range(1, state.step + 1) if step not in steps]
        if lost:
            if len(lost) == 1:
                shown = f"step {lost[0]}"
            else:
                shown = f"{len(lost)} steps from {lost[0]} to {lost[-1]}"
            self.say(f"  note: {self.file} no longer holds {shown}: it was deleted or damaged")

    def event(self, kind: str, tracked: dict | None = None, **values: Any) -> None:
        """Appends one JSON line and flushes it, so that a crash truncates at most the last.
        `tracked`: numbers for Weights & Biases alone.
        """
        if self.quiet:
            return
        with storage(self.file):
            values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            assert self.handle is not None, kind
            event = {"event": kind, "time": time.time(), **values}
            self._put_back()
            self.handle.write(json.dumps(event, allow_nan=False) + "\n")
            self.handle.flush()
        if self.trackers:
            self.trackers.log(event, tracked)
        if self.listener:
            watched: AbstractContextManager = contextlib.nullcontext()
            if self.watchdog:
                watched = self.watchdog.in_callers(f"fine_tune(on_{kind}=...)")
            with watched:
                self.listener(event)

    def offset(self) -> int:
        """Bytes of metrics.jsonl on disk so far."""
        if self.quiet:
            return 0
        assert self.handle is not None, "open comes before the first event"
        with storage(self.file):
            self._put_back()
            self.handle.flush()
            os.fsync(self.handle.fileno())
        return self.handle.tell()

    def _put_back(self) -> None:
        """Writes the file anew, with all that it held, where somebody has removed or replaced it; a folder that is gone
        is for the next checkpoint to say.
        """
        assert self.handle is not None, "a file was opened"
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.file), os.fstat(self.handle.fileno())):
                return
        if not self.file.parent.is_dir():
            return
        self.handle.flush()
        self.handle.seek(0)
        held = self.handle.read()
        self.handle.close()
        self.file.unlink(missing_ok=True)
        self.handle = open_file(self.file, "a+", encoding="utf-8")
        self.handle.write(held)
        self.say(f"  note: {self.file} was removed or replaced while the run went on; it is written again, as it was")

    @contextlib.contextmanager
    def phase(self, name: str):
        """Adds the seconds spent inside to a phase of the closing report, and says what goes on if it takes long."""
        began = time.perf_counter()
        with Progress(name, quiet=self.quiet):
            yield
        seconds = time.perf_counter() - began
        self.left.took(name, seconds)
        self.summary.seconds[name] = self.summary.seconds.get(name, 0) + seconds

    @contextlib.contextmanager
    def training(self):
        """The live line of the steps inside."""
        self.steps.total = self.progress.total_steps
        self.steps.done = self.progress.step
        with self.steps:
            yield
        if self.curve:
            self.curve.draw()
        if (self.steps.live or self.curve) and self.last:
            self.say(self.step_line())

    def start(self, data: RunData, predicted: dict) -> None:
        """The `start` event. `predicted`: bytes, see report.memory_table."""
        time = self.summary.predicted_step
        self.whole.name = "working"
        self.summary.predicted = predicted
        self.summary.tokens_before = self.progress.num_tokens
        if self.quiet:
            facts = {}
        else:
            facts = facts_of(data)
        self.event(
            "start",
            plan=self.plan.digest(),
            step=self.progress.step,
            total_steps=self.progress.total_steps,
            versions=versions(),
            machine=BackendManager(self.plan.backend, False).describe()["cpu"],
            predicted_memory_bytes=predicted,
            predicted_seconds_per_step=time and {"total": time.total, "items": time.items, "hidden": time.hidden},
            data=data.train.counts | {"sha256": data.train.digest()},
            facts=facts,
        )
        for finding in diagnostics.data_findings(facts):
            self.say(f"  note: {finding.text}")

    def step(self, result: StepResult, lr: float, seconds: float, memory: MemoryStats) -> None:
        """The `step` event and line. `result`: engine.StepResult; `memory`: engine.MemoryStats since the last step."""
        state = self.progress
        used = asdict(memory)
        peak = self.summary.peak = peak_of(self.summary.peak, used)
        self.summary.seconds["training"] = self.summary.seconds.get("training", 0) + seconds
        self.left.took("step", seconds)
        self.summary.step_seconds.append(seconds)
        if "completions/mean_length" in result.metrics:
            self.summary.sampled.append((result.metrics["completions/mean_length"], float(result.num_rows or 0)))
        self.watch.add(result.loss)
        tokens_per_s = result.num_tokens / seconds
        self.event(
            "step",
            tracked=_older_keys(state.loss, lr, self.summary.seconds["training"], peak, used),
            step=state.step,
            loss=state.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            num_tokens=result.num_tokens,
            num_targets=result.num_targets,
            tokens_per_s=tokens_per_s,
            memory_bytes=used,
            **({} if result.aux_loss is None else {"aux_loss": result.aux_loss}),
            **({} if result.num_rows is None else {"num_rows": result.num_rows}),
            **result.metrics,
            **({"skipped": True} if result.skipped else {}),
        )
        if result.aux_loss is None:
            aux = ""
        else:
            aux = f" | aux {result.aux_loss:.4f}"
        if self.quiet:
            load = None
        else:
            load = self.load.read()
        if load:
            self.event("system", step=state.step, **load)
            self.summary.other_processes.append(load["load_average"] - load["cores_busy"])
        loss = f"loss {state.loss:.4f}{aux}"
        shown = {OF_SAMPLED.get(name, name): value for name, value in numbers_of(result.metrics).items()}
        if "reward" in shown:  # whose loss says nothing
            loss = f"reward {shown['reward']:.4f}"
            shown = {label: shown[name] for name, label in OF_REWARDS.items() if name in shown}
            self._note(self.reward_watch.line(result.metrics))
            if "sampler_difference" in result.metrics:
                apart = f"{result.metrics['sampler_difference']:.1e}"
                self._note(f"log-probabilities of sampled tokens are the trainer's, to {apart}")
        rate = f"{tokens_per_s:,.0f} tok/s"
        others = [f"lr {lr:.2e}", f"grad {result.grad_norm:.2f}"]
        beside = [f"mem {memory.total / GIB:.2f} GiB", *(f"{name} {value:.4f}" for name, value in shown.items())]
        beside += ["skipped: fp16 gradient overflowed"] if result.skipped else []
        self.last = [rate, loss, *others, *beside]
        self.steps.done = state.step
        if self.curve:
            self.curve.step(state.step, state.loss, self.live_text())
        elif self.steps.live:
            self.steps.drawn()
        elif not self.quiet and (state.step % self.every == 0 or state.step == state.total_steps):
            self.say(self.step_line())

    def _note(self, line: str | None) -> None:
        if line:
            self.say(f"  note: {line}")

    def step_line(self) -> str:
        """The line of the last step, where lines follow one another."""
        state, (rate, loss, lr, grad, *beside) = self.progress, self.last
        left = f"{duration(self.left.seconds(state))} left"
        return " | ".join([f"step {state.step:>5}/{state.total_steps}", left, loss, lr, grad, rate, *beside])

    def live_text(self) -> str:
        """The time left and the step first, then what matters of the last step, as many fields as the terminal is wide:
        a number that is cut is another number.
        """
        state = self.progress
        if not self.last:
            return f"step {state.step + 1}/{state.total_steps}, the first: {duration(self.left.waiting())}"
        left = max(0.0, self.left.seconds(state) - self.left.waiting())
        text = f"{duration(left)} left {state.step}/{state.total_steps}"
        columns = columns_of(sys.stdout)
        for number, part in enumerate(self.last):
            longer = f"{text} | {part}" if number else f"{text} {part}"
            if columns is not None and len(longer) >= columns:
                break
            text = longer
        return text

    def evaluation(
        self, values: dict, right: dict[str, list[int]], *, num_scored: int = 0, of_step: int | None = None
    ) -> None:
        """The `eval` event and line. `right`, `num_scored`: see evaluation.Evaluation; `of_step`: the step of the
        weights, if it is not the present one.
        """
        state = self.progress
        summary = self.summary
        more: dict = {}
        weights = ""
        if of_step is not None:
            more["of_step"] = of_step
            weights = f", weights of step {of_step}"
        if num_scored:
            more["num_scored"] = num_scored
        if right:
            more["right"] = right
        self.event("eval", step=state.step, **values, **more)
        shown = " | ".join(f"{name} {value:.4f}" for name, value in numbers_of(values).items() if name not in COUNTS)
        self.say(f"eval  step {state.step}{weights} | {shown}")
        if state.step == 0:
            state.before = values
        summary.before = state.before
        summary.after = values
        if self.curve and of_step is None:
            self.curve.evaluated(state.step, values.get("loss"))

    def sampled(self, lines: list[dict]) -> None:
        """Keeps the answers of an evaluation."""
        if not self.quiet:
            samples.append(self.file.parent, lines)

    def diagnose(self) -> None:
        """Adds faults so far and the best evaluation to the closing report."""
        if self.quiet:
            return
        root = self.file.parent
        state = self.progress
        self.offset()  # which puts the file back where it was removed
        with storage(self.file):
            events = events_in(root)
        evaluations = [e for e in events if e["event"] == "eval" and e["step"] == state.best_step]
        if evaluations:
            self.summary.best = {**evaluations[-1]}
        else:
            self.summary.best = None
        if evaluations and (root / "best").is_dir():
            self.summary.best_folder = str(root / "best")
        settled = self.plan.to_json()["settled"]
        found = diagnostics.findings(events, samples.read(root), settled, self.summary.best_folder)
        self.summary.findings = found

    def saved(self, step: int, path: Path) -> None:
        self.event("save", step=step, path=str(path))

    def say(self, text: str, styled: bool = False) -> None:
        """Prints a line of text, above the live line if there is one. `styled`: see terminal.say."""
        if self.quiet:
            return
        Progress.spoke()
        say(text, styled=styled, in_words=True)

    def failed(self, code: int) -> None:
        """Writes the end of a run whose process ends with this exit code."""
        self._end("failed", code)

    def _end(self, status: str, code: int) -> None:
        wall_s = time.perf_counter() - self.began
        self.event(
            "end",
            status=status,
            exit_code=code,
            step=self.progress.step,
            wall_s=wall_s,
            peak_memory_bytes=self.summary.measured(),
        )
        if self.handle:
            self.handle.close()
        if self.trackers:
            self.trackers.finish(status)


def _older_keys(loss: float | None, lr: float, training_s: float, peak: dict, memory: dict) -> dict:
    """A step under the older scripts' keys: seconds spent on steps so far, memory in bytes.

    allocated is what torch counts of the tensors, reserved this step's peak of the device or process, peak the run's.
    """
    counted = sum(n for name, n in memory["items"].items() if name not in ("workspace", "allocator"))
    return {
        "loss": loss,
        "lr": lr,
        "time_taken": training_s,
        "memory/allocated": min(counted, memory["total"]),
        "memory/reserved": memory["total"],
        "memory/peak": peak["total"],
    }


NUMBERS = ("loss", "lr", "grad_norm", "num_tokens", "num_targets", "num_rows")
# What is computed with, of the events that have it.
EVENT_SCHEMAS: dict = {
    "start": {
        "facts?": {
            "alike?": dict(
                rows=int, distinct_rows=int, distinct_answers=int, answers_of_one_token=bool, entropy_per_target=float
            ),
            "held_out?": dict(of=str, rows=int, in_training=int),
        }
    },
    "step": {"step": int, **{f"{name}?": OPTIONAL_NUMBER for name in NUMBERS}},
    "eval": {"step": int, "of_step?": int, "loss?": OPTIONAL_NUMBER},
}


def _is_after(event: dict, step: int) -> bool:
    """True for what is of a later step: a checkpoint's number of bytes may be of a log that was removed since."""
    return isinstance(event.get("step"), int) and event["step"] > step


def _is_evaluation(event: dict | None, step: int) -> bool:
    """True for an evaluation of a step's own weights."""
    return event is not None and event["event"] == "eval" and event["step"] == step and "of_step" not in event


def _event_of(line: bytes) -> dict | None:
    """The event of a line of metrics.jsonl; None for a damaged line."""
    try:
        event = json.loads(line)
        if not (line.endswith(b"\n") and isinstance(event, dict) and isinstance(event.get("event"), str)):
            return None
        check(event, EVENT_SCHEMAS.get(event["event"], object), "")
    except (ValueError, RecursionError, JsonFileError):
        return None
    return event


def events_in(output_dir: Path) -> list[dict]:
    """Events of a log that may still be written, or be damaged: only complete lines."""
    data = (Path(output_dir) / "metrics.jsonl").read_bytes()
    return [event for line in data.splitlines(keepends=True) if (event := _event_of(line)) is not None]


# Predicted items that are measured only in the total; tables show their sum in one row.
UNCOUNTED = (
    "logits",
    "workspace",
    "overlap",
    "libraries",
    "kernels",
    "allocator",
    "gathered",
    "staged",
    "sampling",
    "teacher",
    "teacher reads",
)


def memory_rows(predicted: dict, measured: dict) -> list[tuple[str, float, float]]:
    """(item, predicted bytes, measured bytes): directly measured items first, then those measured only in the total."""
    one = predicted["items"]
    other = measured["items"]
    beside = ("loading", "evaluating")
    names = [name for name in dict.fromkeys((*one, *other)) if name not in UNCOUNTED + beside]
    rows = [(name, one.get(name, 0), other.get(name, 0)) for name in names]
    rest = [sum(items.get(name, 0) for name in UNCOUNTED) for items in (one, other)]
    rows.append(("workspace", *rest))
    rows.append(("total", predicted["total"], measured["total"]))
    if other.get("loading"):
        rows.append(("loading", one.get("loading", 0), other["loading"]))
    return rows


def table(rows: list[tuple]) -> str:
    """Rows of text in aligned columns, or on a terminal too narrow for them one line per cell; the first row is the
    header.
    """
    lines = aligned(rows)
    columns = columns_of(sys.stdout)
    if columns is not None and max(map(len, lines)) > columns:
        head = rows[0]
        stacked = []
        for row in rows[1:]:
            stacked += [row[0], *(f"  {name}: {cell}" for name, cell in zip(head[1:], row[1:], strict=True) if cell)]
        return "\n".join(stacked)
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
