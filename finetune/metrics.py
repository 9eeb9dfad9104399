"""All output of a run: console lines, the live progress line, metrics.jsonl, Weights & Biases.

The only module that prints during training; every rank but 0 builds it with `quiet`.
"""

import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

from finetune.checkpoint.store import storage

GIB = 2**30


class Metrics:
    """Writes events to `output_dir`/metrics.jsonl and prints them. `offset`: the byte at which a resumed run continues.

    `quiet`: neither writes nor prints; rank 0 does.
    """

    def __init__(
        self,
        output_dir: Path,
        log_to: str = "tqdm",
        every: int = 1,
        offset: int | None = None,
        quiet=False,
        tracker=None,
    ):
        self.file = output_dir / "metrics.jsonl"
        self.every, self.quiet, self.tracker = every, quiet, tracker
        self.live = log_to != "stdout" and sys.stdout.isatty() and not quiet
        self.started, self.live_text = time.perf_counter(), ""
        self.times = []
        self.handle = None
        if quiet:
            return
        if self.file.exists():
            with open(self.file, "r+b") as file:
                file.truncate(0 if offset is None else min(offset, self.file.stat().st_size))
        self.handle = open(self.file, "a", encoding="utf-8")  # noqa: SIM115  open as long as the run

    def event(self, kind: str, **values) -> None:
        """Appends one JSON line and flushes it, so that a crash truncates at most the last."""
        if self.quiet:
            return
        with storage(self.file):
            values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            line = json.dumps({"event": kind, "time": time.time(), **values}, allow_nan=False)
            self.handle.write(line + "\n")
            self.handle.flush()
        if self.tracker and kind in ("step", "eval"):
            numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, (int, float)) and k != "step"}
            self.tracker.log(numbers, step=values["step"])

    def offset(self) -> int:
        """Bytes of metrics.jsonl on disk so far."""
        if self.quiet:
            return 0
        with storage(self.file):
            self.handle.flush()
            os.fsync(self.handle.fileno())
        return self.handle.tell()

    def step(
        self, step: int, total: int, loss, lr, grad_norm, num_tokens, num_targets, seconds, memory, skipped=False
    ) -> None:
        rate = num_tokens / seconds
        self.times.append(seconds)
        self.event(
            "step",
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            num_tokens=num_tokens,
            num_targets=num_targets,
            tokens_per_s=rate,
            memory_bytes=memory,
            **({"skipped": True} if skipped else {}),
        )
        if self.quiet:
            return
        line = (
            f"step {step:>5}/{total} | loss {loss:.4f} | lr {lr:.2e} | grad {grad_norm:.2f} | "
            f"{rate:,.0f} tok/s | mem {memory['total'] / GIB:.2f} GiB"
        )
        line += " | skipped: fp16 gradient overflow" if skipped else ""
        if self.live:
            recent = self.times[-20:]
            left = (total - step) * sum(recent) / len(recent)
            self.live_text = f"{_bar(step, total)} {line} | {_duration(left)} left"
            self._draw()
        elif step % self.every == 0 or step == total:
            print(line, flush=True)

    def say(self, text: str) -> None:
        """Prints a line of text, above the live line if there is one."""
        if self.quiet:
            return
        if self.live_text:
            sys.stdout.write("\r\033[K")
        print(text, flush=True)
        self._draw()

    def _draw(self) -> None:
        if self.live_text:
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write("\r\033[K" + self.live_text[:width])
            sys.stdout.flush()

    def end_live(self) -> None:
        if self.live_text:
            self._draw()
            self.live_text = ""
            print(flush=True)

    def close(self) -> None:
        if self.handle:
            self.handle.close()
        if self.tracker:
            self.tracker.finish()


def tracker(settings, plan_json, quiet=False):
    """A Weights & Biases run if --log_to is wandb, else None."""
    if settings.log_to != "wandb" or quiet:
        return None
    import wandb

    return wandb.init(
        project=settings.project_name or "finetune",
        name=settings.name,
        group=settings.group,
        entity=settings.entity,
        config=plan_json["settled"],
    )


def read_events(output_dir, kind: str | None = None) -> list[dict]:
    """Events in a run's metrics.jsonl."""
    lines = (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
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
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
