"""Trackers of --log_to: the numbers of metrics.jsonl, as they are written, to TensorBoard, W&B, MLflow, Trackio or CSV.

Each is its library's own client, so that none needs a framework. trackers.json in the run's folder names the run there,
and a resumed run goes on with it: what it computes again is not logged twice. Only numbers, and settings with secrets
masked, leave the process.
"""

import csv
import json
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from finetune.checkpoint.store import replace_bytes, storage
from finetune.errors import PlanError
from finetune.parts.log_to import tracking
from finetune.parts.plan_base import PlanBase
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.terminal import clean
from finetune.system.untrusted import untrusted

FILE = "trackers.json"
TABLE = "metrics.csv"
EVENTS = "tensorboard"
SENT = ("step", "eval", "system")  # the events whose numbers are logged
NOT_IN_MLFLOW = re.compile(r"[^\w. :/-]")  # characters of a name
MOST_PARAMETERS = 100  # that MLflow takes at once
FLUSH_S = 10  # of TensorBoard's files
FIRST_COLUMNS = ("event", "step", "time", "loss", "lr", "grad_norm", "num_tokens", "num_targets", "tokens_per_s")


class Tracker(Protocol):
    """Interface of a tracker. `identity`: JSON that finds its run again."""

    identity: dict

    def log(self, event: dict, numbers: dict[str, float]) -> None:
        """The numbers of an event of metrics.jsonl, by `kind/name`."""

    def finish(self, status: str) -> None:
        """The run has ended: finished, stopped or failed."""


class Trackers:
    """All trackers of a run. `say` is called with a line if one fails: the run goes on without it."""

    def __init__(self, plan: PlanBase, root: Path, step: int, mark: str, past: list[dict], say: Callable[[str], None]):
        logs = plan.logs
        self.say = say
        self.open: dict[str, Tracker] = {}
        names = tracking(logs.log_to)
        if not names:
            return
        known = _known(root)
        config = masked(plan.to_json()["settled"])
        given = dict(project=logs.project_name or "finetune", name=logs.name or root.resolve().name)
        words = masked(given | dict(group=logs.group, entity=logs.entity))
        for tracker in names:
            old = {}
            if step:
                old = known.get(tracker, {})
            remedy = "Fix what the message names, or omit it."
            with untrusted(f"--log_to {tracker}: it cannot be opened", remedy, reads=False):
                self.open[tracker] = OPEN[tracker](root, words, config, old)
        for event in past:  # what a kill kept from it, or all of it if it is new
            self.log(event)
        with storage(root / FILE):
            content = {name: tracker.identity for name, tracker in self.open.items()}
            replace_bytes(root / FILE, (json.dumps(known | content, indent=1) + "\n").encode(), mark)

    def log(self, event: dict, more: dict[str, float] | None = None) -> None:
        """Sends an event's numbers to each. `more`: numbers under names of their own, for Weights & Biases."""
        if event["event"] not in SENT:
            return
        for name in list(self.open):
            extra = {}
            if name == "wandb" and more:
                extra = more
            with self._surviving(name):
                self.open[name].log(event, numbers_of(event) | extra)

    def finish(self, status: str) -> None:
        for name in list(self.open):
            with self._surviving(name):
                self.open[name].finish(status)

    def _surviving(self, name: str) -> "_Surviving":
        return _Surviving(self, name)


class _Surviving:
    """A context in which a tracker's failure is a line, and its end."""

    def __init__(self, trackers: Trackers, name: str):
        self.trackers = trackers
        self.name = name

    def __enter__(self):
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            with untrusted(f"--log_to {self.name}: it failed", "It gets no more of this run.", reads=False):
                if error is not None:
                    raise error
        except PlanError as told:
            self.trackers.open.pop(self.name, None)
            self.trackers.say(f"  note: {told}")
        return True


def numbers_of(event: dict) -> dict[str, float]:
    """{kind/name: number} of an event; of memory the total and each item."""
    kind = event["event"]
    found = {}
    for name, value in event.items():
        if name in ("event", "step", "time"):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{kind}/{name}"] = float(value)
        elif name == "memory_bytes":
            found[f"{kind}/memory/total"] = float(value["total"])
            found |= {f"{kind}/memory/{item}": float(n) for item, n in value["items"].items()}
    return found


def masked(value: Any):
    """JSON with secrets masked in every text, and in every name."""
    if isinstance(value, dict):
        return {clean(str(name)): masked(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [masked(one) for one in value]
    if isinstance(value, str):
        return clean(value)
    return value


def _known(root: Path) -> dict:
    try:
        found: dict = read_json(root / FILE, {str: {str: str}})
        return found
    except (FileNotFoundError, JsonFileError):
        return {}


# ---- one class each


class TensorBoard:
    """Event files in OUT/tensorboard, read by `tensorboard --logdir`."""

    identity: dict = {}

    def __init__(self, root: Path, words: dict, config: dict, known: dict):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event = Event
        self.summary = Summary
        (root / EVENTS).mkdir(exist_ok=True)
        self.writer = EventFileWriter(str(root / EVENTS), flush_secs=FLUSH_S)
        self.writer.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # A session's start makes readers forget what the files before it hold from its step on: the log says it again.
        self.writer.add_event(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))

    def log(self, event: dict, numbers: dict[str, float]) -> None:
        values = [self.summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        about = dict(wall_time=event["time"], step=event["step"])
        self.writer.add_event(self.event(**about, summary=self.summary(value=values)))

    def finish(self, status: str) -> None:
        self.writer.close()


class WandB:
    """A Weights & Biases run, on its server or, with WANDB_MODE=offline, in files."""

    def __init__(self, root: Path, words: dict, config: dict, known: dict):
        import wandb

        self.identity = {"id": known.get("id") or secrets.token_hex(4)}
        names = {name: words[name] for name in ("project", "name", "group", "entity")}
        # By itself it sends the command line, the git remote and all output too, which may hold secrets.
        settings = wandb.Settings(x_disable_meta=True, disable_git=True, disable_code=True, console="off")
        self.run: Any = wandb.init(**names, id=self.identity["id"], resume="allow", config=config, settings=settings)

    def log(self, event: dict, numbers: dict[str, float]) -> None:
        if event["step"] >= self.run.starting_step:  # its server has the others
            self.run.log(numbers, step=event["step"])

    def finish(self, status: str) -> None:
        self.run.finish(exit_code=int(status == "failed"))


class MLflow:
    """A run on the server of MLFLOW_TRACKING_URI, or in MLflow's own local store."""

    def __init__(self, root: Path, words: dict, config: dict, known: dict):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.metric = Metric
        self.client = MlflowClient()
        self.run_id = known.get("run_id")
        if self.run_id is None:
            found = self.client.get_experiment_by_name(words["project"])
            if found:
                experiment = found.experiment_id
            else:
                experiment = self.client.create_experiment(words["project"])
            self.run_id = self.client.create_run(experiment, run_name=words["name"]).info.run_id
            parameters = [Param(name, str(value)[:500]) for name, value in config.items() if value is not None]
            for start in range(0, len(parameters), MOST_PARAMETERS):
                self.client.log_batch(self.run_id, params=parameters[start : start + MOST_PARAMETERS])
        else:
            self.client.update_run(self.run_id, status="RUNNING")
        self.identity = {"run_id": self.run_id}
        self.have: dict[str, dict[int, float]] = {}  # {number: {step: value}} that are there, of a resumed run
        self.resumed = bool(known)
        self.names: dict[str, str] = {}  # {name there: name here}

    def log(self, event: dict, numbers: dict[str, float]) -> None:
        numbers = {allowed_name(name, self.names): value for name, value in numbers.items()}
        at = int(event["time"] * 1000)
        new = [self.metric(n, v, at, event["step"]) for n, v in numbers.items() if not self._has(n, event["step"], v)]
        if new:
            self.client.log_batch(self.run_id, metrics=new)

    def _has(self, name: str, step: int, value: float) -> bool:
        if not self.resumed:
            return False
        if name not in self.have:
            history = self.client.get_metric_history(self.run_id, name)
            self.have[name] = {metric.step: metric.value for metric in history}
        return self.have[name].get(step) == value

    def finish(self, status: str) -> None:
        words = {"finished": "FINISHED", "failed": "FAILED"}
        self.client.set_terminated(self.run_id, words.get(status, "KILLED"))


def allowed_name(name: str, names: dict[str, str]) -> str:
    """The name that a number has in MLflow, which refuses some characters and parts of paths, and then the whole event.
    `names`: {name there: name here}, which keeps it; no two numbers have one name.
    """
    parts = (part for part in NOT_IN_MLFLOW.sub("_", name).split("/") if part not in ("", ".", ".."))
    plain = "/".join(parts)
    found = plain
    number = 2
    while names.setdefault(found, name) != name:
        found = f"{plain}_{number}"
        number += 1
    return found


class Trackio:
    """A run of Trackio, in its local database."""

    def __init__(self, root: Path, words: dict, config: dict, known: dict):
        import trackio

        name = known.get("name") or f"{words['name']}-{secrets.token_hex(3)}"
        self.identity = {"name": name, "project": known.get("project") or words["project"]}
        quiet = dict(embed=False, auto_log_gpu=False, auto_log_cpu=False)
        self.trackio = trackio
        self.run: Any = trackio.init(
            self.identity["project"], name, group=words["group"], config=config, resume="allow", **quiet
        )
        rows = []
        if known:
            rows = trackio.SQLiteStorage.get_logs(self.identity["project"], name)
        self.have = {(key, row.get("step")): value for row in rows for key, value in row.items() if "/" in key}

    def log(self, event: dict, numbers: dict[str, float]) -> None:
        new = {name: value for name, value in numbers.items() if self.have.get((name, event["step"])) != value}
        if new:
            self.run.log(new, step=event["step"])

    def finish(self, status: str) -> None:
        self.run.finish()


class Table:
    """OUT/metrics.csv: a row per event, made again from the log when a new column appears or a run resumes."""

    identity: dict = {}

    def __init__(self, root: Path, words: dict, config: dict, known: dict):
        self.file = root / TABLE
        self.rows = list[dict]()
        self.columns = list(FIRST_COLUMNS)
        self._write_all()

    def log(self, event: dict, numbers: dict[str, float]) -> None:
        row = row_of(event)
        self.rows.append(row)
        if not row.keys() <= set(self.columns):
            self._write_all()
            return
        with storage(self.file), self.file.open("a", encoding="utf-8", newline="") as out:
            csv.DictWriter(out, self.columns).writerow(row)

    def _write_all(self) -> None:
        self.columns = list(dict.fromkeys([*self.columns, *(name for row in self.rows for name in row)]))
        with storage(self.file), self.file.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def finish(self, status: str) -> None:
        """Every row is on disk already."""


def row_of(event: dict) -> dict:
    """A row of the table: numbers with all their digits, by their names in the log."""
    names = {name.partition("/")[2]: value for name, value in numbers_of(event).items()}
    whole = {name: event[name] for name in names if isinstance(event.get(name), int)}
    return {"event": event["event"], "step": event["step"], "time": event["time"], **names, **whole}


OPEN: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
    "csv": Table,
}
