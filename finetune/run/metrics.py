"""All output of a run: console lines, the live progress line, metrics.jsonl, Weights & Biases.
The only module that prints during training; silent on every rank but 0.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from backend_manager import BackendManager, versions
from finetune.backend.doctor import aligned
from finetune.checkpoint.store import replace_bytes, storage
from finetune.errors import EXPECTED, RankLostError
from finetune.estimate.budget import GIB
from finetune.estimate.memory import peak_of
from finetune.plan.run_plan import TrainState
from finetune.system.files import open_file
from finetune.system.terminal import encodable, say

STEPS_AVERAGED = 20  # of the time left
COUNTS = ("num_targets", "num_rows")  # what an eval event's line leaves out


@dataclass
class Summary:
    """What the closing report shows, gathered while the run goes on. Bytes and seconds.

    `before`, `after`: values of the first and the last evaluation. `sample_before`, `sample_after`: answers to the
    first scored example; `scored_answer`: its answer in the last scoring. `dense`: scores on the dense base, of an
    adapter trained on a quantized one, or why there are none. `peak`, `predicted`: {"total": bytes, "items": {name:
    bytes}}.
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
    loading_bytes: int = 0
    evaluating_bytes: int = 0
    tokens_before: int = 0

    def measured(self) -> dict:
        """Peak memory for the end event: the training phase's, with loading and evaluation beside its total."""
        peak = self.peak or {"total": 0, "items": {}}
        if self.loading_bytes:
            peak["items"]["loading"] = self.loading_bytes
        if self.evaluating_bytes:
            peak["items"]["evaluating"] = self.evaluating_bytes
        return peak


class Metrics:
    """The log of one run, as a context: the `end` event is written however the run ends, with its exit code.

    Prints from the beginning; `open` must be called before the first event. `quiet`: neither writes nor prints; rank 0
    does. `watchdog`: ends this process if another rank is lost, and writes the `end` event first.
    """

    file: Path  # from `open` on

    def __init__(self, plan, quiet: bool = False, watchdog=None):
        s = plan.settings
        self.plan, self.quiet, self.watchdog, self.every = plan, quiet, watchdog, s.log_every_n_steps
        self.live = s.log_to != "stdout" and sys.stdout.isatty() and not quiet
        self.summary, self.live_text, self.began = Summary(), "", time.perf_counter()
        self.step_times: deque[float] = deque(maxlen=STEPS_AVERAGED)
        self.tracker = None
        self.listener: Callable[[dict], object] | None = None
        self.handle: IO[str] | None = None
        self.state: TrainState | None = None

    @property
    def progress(self) -> TrainState:
        """`state`, which is there from `open` on."""
        assert self.state is not None, "open comes before the first event"
        return self.state

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if self.state is not None:
            if error is None:
                self._end(self.state.status, self.state.exit_code)
            else:
                self._end("failed", self._exit_code(error))

    def _exit_code(self, error: BaseException) -> int:
        if isinstance(error, EXPECTED):
            return error.exit_code
        if self.watchdog and isinstance(error, RuntimeError) and self.watchdog.caused_by_peer(error):
            return RankLostError.exit_code
        return 1

    def open(self, output_dir: Path, state, offset: int | None = None, run_id: str = "") -> None:
        """Opens metrics.jsonl. `offset`: the byte at which a resumed run continues; what follows it is dropped."""
        self.file = output_dir / "metrics.jsonl"
        if not self.quiet:
            self._open_file(state, offset, run_id)
        self.state = state
        if self.watchdog:
            self.watchdog.on_exit = lambda code: self._end("failed", code)

    def _open_file(self, state, offset: int | None, run_id: str) -> None:
        self.tracker = wandb_run(self.plan)
        with storage(self.file):
            if offset is not None:
                self._repair(state, offset, run_id)
            mode = "w" if offset is None else "a"
            self.handle = open_file(self.file, mode, encoding="utf-8")

    def _repair(self, state, offset: int, run_id: str) -> None:
        """Cuts the file to its first `offset` bytes and to complete lines, and says which steps it has lost."""
        data = b""
        with contextlib.suppress(FileNotFoundError), open_file(self.file, "rb") as file:
            data = file.read(offset)
        lines, steps = [], set()
        for line in data.splitlines(keepends=True):
            event = _event_of(line)
            if event is not None:
                lines.append(line)
                steps |= {event.get("step")} if event["event"] == "step" else set()
        replace_bytes(self.file, b"".join(lines), run_id)
        lost = [step for step in range(1, state.step + 1) if step not in steps]
        if lost:
            shown = f"step {lost[0]}" if len(lost) == 1 else f"{len(lost)} steps from {lost[0]} to {lost[-1]}"
            self.say(f"  note: {self.file} no longer holds {shown}: it was deleted or damaged")

    def event(self, kind: str, tracked: dict | None = None, **values) -> None:
        """Appends one JSON line and flushes it, so that a crash truncates at most the last.
        `tracked`: numbers for Weights & Biases alone.
        """
        if self.quiet:
            return
        with storage(self.file):
            values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            assert self.handle is not None, kind
            event = {"event": kind, "time": time.time(), **values}
            self.handle.write(json.dumps(event, allow_nan=False) + "\n")
            self.handle.flush()
        if self.tracker and kind in ("step", "eval"):
            numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, (int, float)) and k != "step"}
            self.tracker.log(numbers | (tracked or {}), step=values["step"])
        if self.listener:
            self.listener(event)

    def offset(self) -> int:
        """Bytes of metrics.jsonl on disk so far."""
        if self.quiet:
            return 0
        assert self.handle is not None, "open comes before the first event"
        with storage(self.file):
            self.handle.flush()
            os.fsync(self.handle.fileno())
        return self.handle.tell()

    @contextlib.contextmanager
    def phase(self, name: str):
        """Adds the seconds spent inside to a phase of the closing report."""
        began = time.perf_counter()
        yield
        self.summary.seconds[name] = self.summary.seconds.get(name, 0) + time.perf_counter() - began

    def start(self, data, predicted: dict) -> None:
        """The `start` event. `predicted`: bytes, see report.memory_table."""
        self.summary.predicted, self.summary.tokens_before = predicted, self.progress.num_tokens
        self.event(
            "start",
            plan=self.plan.digest(),
            step=self.progress.step,
            versions=versions(),
            machine=BackendManager(self.plan.backend, False).describe()["cpu"],
            predicted_memory_bytes=predicted,
            data=data.train.counts | {"sha256": data.train.digest()},
        )

    def step(self, result, lr: float, seconds: float, memory) -> None:
        """The `step` event and line. `result`: engine.StepResult; `memory`: engine.MemoryStats since the last step."""
        state, used = self.progress, asdict(memory)
        peak = self.summary.peak = peak_of(self.summary.peak, used)
        self.summary.seconds["training"] = self.summary.seconds.get("training", 0) + seconds
        self.step_times.append(seconds)
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
            **({} if result.num_rows is None else {"num_rows": result.num_rows, **result.metrics}),
            **({"skipped": True} if result.skipped else {}),
        )
        aux = "" if result.aux_loss is None else f" | aux {result.aux_loss:.4f}"
        line = (
            f"step {state.step:>5}/{state.total_steps} | loss {state.loss:.4f}{aux} | lr {lr:.2e} | "
            f"grad {result.grad_norm:.2f} | {tokens_per_s:,.0f} tok/s | mem {memory.total / GIB:.2f} GiB"
        )
        line += "".join(f" | {name} {value:.4f}" for name, value in result.metrics.items())
        line += " | skipped: fp16 gradient overflowed" if result.skipped else ""
        if self.live:
            left = (state.total_steps - state.step) * sum(self.step_times) / len(self.step_times)
            self.live_text = f"{_bar(state.step, state.total_steps)} {line} | {_duration(left)} left"
            self._draw()
        elif not self.quiet and (state.step % self.every == 0 or state.step == state.total_steps):
            say(line)

    def evaluation(self, values: dict, right: dict[str, list[int]]) -> None:
        """The `eval` event and line. `right`: see evaluation.Evaluation."""
        state, summary = self.progress, self.summary
        self.event("eval", step=state.step, **values, **({"right": right} if right else {}))
        shown = " | ".join(f"{name} {value:.4f}" for name, value in values.items() if name not in COUNTS)
        self.say(f"eval  step {state.step} | {shown}")
        if state.step == 0:
            state.before = values
        summary.before, summary.after = state.before or values, values

    def saved(self, path: Path) -> None:
        self.event("save", step=self.progress.step, path=str(path))

    def say(self, text: str, styled: bool = False) -> None:
        """Prints a line of text, above the live line if there is one. `styled`: see terminal.say."""
        if self.quiet:
            return
        if self.live_text:
            sys.stdout.write("\r\033[K")
        say(text, styled=styled)
        self._draw()

    def _draw(self) -> None:
        if self.live_text:
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write("\r\033[K" + encodable(self.live_text[:width], sys.stdout.encoding))
            sys.stdout.flush()

    def end_live(self) -> None:
        """Leaves the live line as it is and goes on below it."""
        if self.live_text:
            self._draw()
            self.live_text = ""
            say()

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
        self.end_live()
        if self.handle:
            self.handle.close()
        if self.tracker:
            self.tracker.finish()


def wandb_run(plan):
    """A Weights & Biases run for --log_to wandb, else None."""
    s = plan.settings
    if s.log_to != "wandb":
        return None
    import wandb

    return wandb.init(
        project=s.project_name or "finetune",
        name=s.name,
        group=s.group,
        entity=s.entity,
        config=plan.to_json()["settled"],
    )


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


def _event_of(line: bytes) -> dict | None:
    """The event of a line of metrics.jsonl; None for a damaged line."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if line.endswith(b"\n") and isinstance(event, dict) and "event" in event else None


def read_events(output_dir, kind: str | None = None) -> list[dict]:
    """Events in a run's metrics.jsonl."""
    lines = (Path(output_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return [e for e in events if kind in (None, e["event"])]


def _bar(done: int, total: int, width: int = 20) -> str:
    full = int(width * done / max(1, total))
    return "━" * full + "─" * (width - full)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def table(rows: list[tuple]) -> str:
    """Rows of text in aligned columns; the first row is the header."""
    lines = aligned(rows)
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
