"""metrics.jsonl: events, and a log truncated or resumed."""

import fcntl
import json
import os
import struct
import termios

import pytest

from finetune.errors import PlanError
from finetune.parts.train_state import TrainState
from finetune.run.metrics import Metrics
from tests.support.commands import command, finish
from tests.support.plans import plan_of
from tests.support.runs import RUN, read_events


def test_events_hold_what_programs_rely_on(chat_model, rows_file, tmp_path):
    """In a process of its own: memory above that of the imports is 0 once earlier tests have grown the heap."""
    folder = tmp_path / "out"
    files = dict(dataset=rows_file, validation_dataset=rows_file, score_dataset=rows_file)
    argv = command(
        RUN, "--score_samples 4 --eval_every 6 --save_every 5", files, model_name=chat_model, output_dir=folder
    )
    code, _, err = finish(argv)
    assert code == 0, err
    events = read_events(folder)
    assert events[0]["event"] == "start" and events[-1]["event"] == "end"
    assert {"plan", "versions", "machine", "predicted_memory_bytes"} <= events[0].keys()
    assert [e["step"] for e in events if e["event"] == "eval"] == [0, 6, 12]
    assert [e["step"] for e in events if e["event"] == "save"] == [5, 10, 12]
    for e in read_events(folder, "eval"):
        assert 0 <= e["exact_match"] <= 1 and e["num_targets"] > 0
    step = read_events(folder, "step")[0]
    assert {"loss", "lr", "grad_norm", "num_tokens", "num_targets", "tokens_per_s", "memory_bytes"} <= step.keys()
    assert isinstance(step["memory_bytes"]["total"], int) and step["memory_bytes"]["items"]["base"] > 0
    assert events[-1] | {"status": "finished", "exit_code": 0, "step": 12} == events[-1]
    assert events[-1]["peak_memory_bytes"]["total"] > 0
    assert (folder / "best" / "adapter_model.safetensors").is_file()
    assert (folder / "chat_template.jinja").is_file() and (folder / "tokenizer.json").is_file()


def test_a_log_shorter_than_its_checkpoint_says_is_not_filled_with_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "start"}\n')
    with Metrics(plan_of(log_to="stdout")) as log:
        log.open(tmp_path, TrainState(), offset=500)
        log.state = None  # no end event
    assert read_events(tmp_path) == [{"event": "start"}]


ALIKE = dict(rows=9, distinct_rows=9, distinct_answers=2, answers_of_one_token=True, entropy_per_target=0.7)


@pytest.mark.parametrize(
    "odd",
    [
        dict(event="step", step=7, loss="2.5"),
        dict(event="step", step="7", loss=2.5),
        dict(event="step", step=7, loss=2.5, num_rows=[3]),
        dict(event="step", step=7, loss=2.5, num_targets={}),
        dict(event="step", loss=2.5),
        dict(event="eval", step=7, loss=[1.0]),
        dict(event="start", facts=[]),
        dict(event="start", facts=dict(alike=ALIKE | dict(entropy_per_target="0.7"))),
        dict(event="start", facts=dict(held_out=dict(of="validation", rows="9", in_training=9))),
        dict(event=["step"], step=7),
    ],
)
def test_an_event_that_holds_other_types_is_a_damaged_line(tmp_path, odd):
    """Which a resumed run drops, and judges itself by the others."""
    steps = [dict(event="step", step=n, loss=2.0, grad_norm=1.0, num_targets=9) for n in range(1, 40)]
    good = [
        dict(event="start", facts=dict(alike=ALIKE)),
        *steps,
        *(dict(event="eval", step=n, loss=2.0) for n in (1, 2)),
    ]
    lines = [json.dumps(event) + "\n" for event in (*good[:9], odd, *good[9:])]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with Metrics(plan_of(log_to="stdout")) as log:
        log.open(tmp_path, TrainState(step=39), offset=len("".join(lines)))
        log.diagnose()
        log.state = None  # no end event
    assert read_events(tmp_path) == good
    assert [finding.kind for finding in log.summary.findings] == ["answers of one token"]


def test_a_number_that_is_not_finite_is_null_in_the_log(tmp_path):
    log = Metrics(plan_of(log_to="stdout"))
    log.open(tmp_path, TrainState())
    log.event("step", step=1, grad_norm=float("inf"))
    assert read_events(tmp_path)[0]["grad_norm"] is None


@pytest.mark.parametrize(
    ("columns", "shown"), [(40, "18,576 tok/s"), (52, "18,576 tok/s | loss 15.6091"), (500, "mem 0.12 GiB")]
)
def test_the_live_line_ends_with_a_whole_field(monkeypatch, columns, shown):
    """A loss of 15.6 that is cut reads as one of 1."""
    log = Metrics(plan_of(log_to="stdout"))
    log.state = TrainState(step=6, total_steps=60)
    log.last = ["18,576 tok/s", "loss 15.6091", "lr 1.00e-03", "grad 1.00", "mem 0.12 GiB"]
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.delenv("COLUMNS", raising=False)
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", terminal)
        text = log.live_text()
    os.close(ours)
    assert text.endswith(shown) and len(text) < columns


def test_a_failure_while_the_log_is_opened_is_the_one_that_is_raised(tmp_path):
    with pytest.raises(PlanError, match="is a file, or is inside one"), Metrics(plan_of(log_to="stdout")) as log:
        (tmp_path / "file").touch()
        log.open(tmp_path / "file", TrainState())


@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError("no room"), 71), (RuntimeError("CUDA out of memory"), 71), (KeyboardInterrupt(), 130)],
    ids=["python's", "a library's", "Ctrl-C"],
)
def test_the_end_event_has_the_exit_code_of_the_process(plain_run, tmp_path, error, code):
    def on_step(event):
        raise error

    with pytest.raises(type(error)):
        plain_run(max_steps=2, on_step=on_step)
    (end,) = read_events(tmp_path / "out", "end")
    assert (end["status"], end["exit_code"], end["step"]) == ("failed", code, 1)
