"""Every tracker of --log_to against its own library: its reader returns the numbers of metrics.jsonl, once each, also
after a kill and a resume; secrets are in none of its files.
"""

import csv
import json
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from backend_manager import package_version
from finetune.errors import PlanError
from finetune.parts.log_to import PACKAGES, names_of
from finetune.run.trackers import Trackers, allowed_name, masked, numbers_of
from tests.support import ranks
from tests.support.commands import ROOT, command, finish, wait_for_steps
from tests.support.plans import plan_of
from tests.support.runs import read_events

SECRET = "hf_secretsecret"
TRAIN = "--batch_size 4 --context_length 64 --backend cpu --train_type lora --lora_rank 4 --eval_every 10"


def installed(name: str) -> bool:
    return not PACKAGES[name] or any(package_version(package) for package in PACKAGES[name])


def environment(folder: Path) -> dict[str, str]:
    """Everything a tracker needs to stay on this machine."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_TOKEN": SECRET,
        "HF_HUB_OFFLINE": "1",
    }


# ---- what each library's own reader says: {(kind/name, step): [values]}


def in_csv(folder: Path, identity: dict) -> dict:
    found: dict = {}
    with (folder / "run" / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name not in ("event", "step", "time") and value:
                    found.setdefault((f"{row['event']}/{name}", int(row["step"])), []).append(float(value))
    return found


def in_tensorboard(folder: Path, identity: dict) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "run" / "tensorboard"), {"scalars": 0})
    accumulator.Reload()
    found: dict = {}
    for tag in accumulator.Tags()["scalars"]:
        for entry in accumulator.Scalars(tag):
            found.setdefault((tag, entry.step), []).append(entry.value)
    return found


def in_mlflow(folder: Path, identity: dict) -> dict:
    from mlflow import MlflowClient

    client, found = MlflowClient(environment(folder)["MLFLOW_TRACKING_URI"]), {}
    run = client.get_run(identity["run_id"])
    assert run.info.status == "FINISHED" and run.data.params["lora_rank"] == "4"
    settled = json.loads((folder / "run" / "run_plan.json").read_text())["settled"]
    assert run.data.params.keys() == {name for name, value in settled.items() if value is not None}
    for name in run.data.metrics:
        for metric in client.get_metric_history(identity["run_id"], name):
            found.setdefault((name, metric.step), []).append(metric.value)
    return found


def in_trackio(folder: Path, identity: dict) -> dict:
    code = (
        "import json, sys, trackio\n"
        f"print('ROWS' + json.dumps(trackio.SQLiteStorage.get_logs({identity['project']!r}, {identity['name']!r})))"
    )
    out = finish([sys.executable, "-c", code], **environment(folder))
    rows = json.loads(out.stdout.partition("ROWS")[2])
    found: dict = {}
    for row in rows:
        for name, value in row.items():
            if "/" in name:
                found.setdefault((name, row["step"]), []).append(value)
    return found


def in_wandb(folder: Path, identity: dict) -> dict:
    """By wandb's own messages; of a step that both of the run's files have, the values must be the same."""
    from wandb.proto import wandb_internal_pb2

    found: dict = {}
    for file in sorted((folder / "wandb").glob(f"offline-run-*{identity['id']}/*.wandb")):
        for data in leveldb_records(file.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                for name, value in items.items():
                    known = found.setdefault((name, items["_step"]), [])
                    if value not in known:
                        known.append(value)
    return found


def leveldb_records(data: bytes):
    """The records of a LevelDB log, which is what a .wandb file is behind its header of seven bytes: blocks of 32 KiB,
    in which each piece has a checksum, a length and a type (whole, first, middle, last).
    """
    at, whole = 0, b""
    while at + 7 <= len(data):
        block_left = 32768 - (at + 7) % 32768
        if block_left < 7:
            at += block_left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


READERS = {"csv": in_csv, "tensorboard": in_tensorboard, "mlflow": in_mlflow, "trackio": in_trackio, "wandb": in_wandb}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_its_own_reader_returns_the_numbers_of_the_log_after_a_kill_and_a_resume(name, tiny_model, rows_file, tmp_path):
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    variables, folder = environment(tmp_path), tmp_path / "run"
    files = dict(model_name=tiny_model, dataset=rows_file, validation_dataset=rows_file, output_dir=folder)
    argv = command(TRAIN, files, log_to=f"stdout,{name}", name=SECRET, group=SECRET)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    process = ranks.start([*argv, "--max_steps", "120", "--save_every", "10"], variables, **pipes)
    try:
        wait_for_steps(folder, 24, process)
        process.send_signal(signal.SIGKILL)
    finally:
        ranks.kill_session(process)
    code, _, err = finish([*argv, "--max_steps", "120", "--resume", "auto"], **variables)
    assert code == 0, err
    identity = json.loads((folder / "trackers.json").read_text())[name]
    found = READERS[name](tmp_path, identity)
    logged = [e for kind in ("step", "eval") for e in read_events(folder, kind)]
    assert len(logged) == 133
    single = name == "tensorboard"  # fp32
    for event in logged:
        for key, value in numbers_of(event).items():
            values = found.get((key, event["step"]))
            assert values is not None, (key, event["step"])
            timed = key.endswith("tokens_per_s") or "memory" in key  # of a step that was taken again, as it was first
            if not timed:
                assert values == ([float(np.float32(value))] if single else [value]), (key, event["step"])
    for file in (
        p for p in tmp_path.rglob("*") if p.is_file() and p.name != "run_plan.json"
    ):  # which says what was asked
        assert SECRET.encode() not in file.read_bytes(), file


def test_a_csv_has_every_column_and_every_digit(plain_run, rows_file, tmp_path):
    plain_run(max_steps=3, log_to="stdout,csv", score_dataset=str(rows_file), score_samples=2)
    with (tmp_path / "out" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["event"] == "step"]
    assert [float(row["loss"]) for row in steps] == [e["loss"] for e in read_events(tmp_path / "out", "step")]
    assert [row["num_tokens"] for row in steps] == [str(e["num_tokens"]) for e in read_events(tmp_path / "out", "step")]
    assert [row["exact_match"] != "" for row in rows if row["event"] == "eval"] == [True, True]
    assert "memory/total" in rows[0]


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("tqdm,nothing", "--log_to nothing: is not one. Use tqdm, stdout, tensorboard, wandb, mlflow, trackio, csv"),
        (",", "--log_to ,: is not one"),
        ("tqdm,stdout", "Use one of them"),
    ],
)
def test_words_that_are_none_are_refused(words, fact):
    with pytest.raises(PlanError) as error:
        names_of(words)
    assert fact in str(error.value)


@pytest.mark.parametrize("name", [n for n in PACKAGES if PACKAGES[n]])
def test_a_tracker_that_is_not_installed_is_refused_in_the_plan(plain_run, tmp_path, name):
    if installed(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(PlanError, match=f"--log_to {name}: {name} is not installed. pip install {PACKAGES[name][0]}"):
        plain_run(log_to=f"stdout,{name}")
    assert not (tmp_path / "out").exists()


class Broken:
    """A tracker that fails."""

    identity: dict = {}

    def __init__(self, error: Exception):
        self.error = error

    def log(self, event, numbers):
        raise self.error

    def finish(self, status):
        raise AssertionError("it was dropped")


@pytest.mark.parametrize(
    ("error", "fact"),
    [
        (ConnectionResetError("the server\nhas gone"), "the server has gone"),
        (PermissionError(13, "Permission denied", "/x"), "[Errno 13] Permission denied: '/x'"),
    ],
)
def test_a_tracker_that_fails_is_one_line_and_the_others_go_on(tmp_path, error, fact):
    said = []
    trackers = Trackers(plan_of(log_to="stdout,csv"), tmp_path, 0, "mark", [], said.append)
    trackers.open = {"wandb": Broken(error), **trackers.open}
    for step in (1, 2):
        trackers.log({"event": "step", "time": 0.0, "step": step, "loss": 1.5})
    trackers.finish("finished")
    assert said == [f"  note: --log_to wandb: it failed ({fact}). It gets no more of this run."]
    assert (tmp_path / "metrics.csv").read_text().count("step,") == 3  # and the head


def test_names_of_files_are_names_in_mlflow():
    """It refuses an event for one of its names: all others of the run were lost with it."""
    names: dict = {}
    for given, expected in (
        ("step/loss", "step/loss"),
        ("eval/loss/v(1).jsonl", "eval/loss/v_1_.jsonl"),
        ("eval/loss/v[1].jsonl", "eval/loss/v_1_.jsonl_2"),
        ("eval/loss/../rows//é&.jsonl", "eval/loss/rows/é_.jsonl"),
        ("eval/loss/v(1).jsonl", "eval/loss/v_1_.jsonl"),
    ):
        assert allowed_name(given, names) == expected
    if installed("mlflow"):
        from mlflow.utils.validation import _validate_metric_name

        for name in names:
            _validate_metric_name(name)


def test_secrets_are_masked_in_names_texts_and_lists(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    value = {"a": SECRET, "b": [f"x{SECRET}", 3, None], SECRET: {"c": f"https://user:{SECRET}@host/"}}
    assert SECRET not in json.dumps(masked(value)) and masked(value)["b"][1:] == [3, None]
