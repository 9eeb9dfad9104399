"""Kills at random moments and signals: the next start resumes, and no step differs."""

import contextlib
import faulthandler
import os
import pty
import random
import signal
import subprocess
import threading
import time

import pytest

from finetune.checkpoint.store import newest_checkpoint, steps_of
from tests.support import ranks
from tests.support.commands import PYTHON, command, finish, wait_for_steps
from tests.support.rows import json_lines
from tests.support.runs import WHOLE_STATE, count_steps, read_events, same_files, steps
from train import fine_tune


@pytest.fixture(autouse=True)
def heard():
    """Hangups are heard, under `nohup` too, which ignores them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [*((n, 128 + n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1))]
)
def test_a_signal_reaches_all_ranks_and_saves_once(base, tmp_path, number, code):
    argv = command(base, "--num_epochs 400 --world_size 2 --batch_size 2", output_dir=tmp_path / "out")
    process = ranks.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_steps(tmp_path / "out", 5, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        ranks.kill_session(process)
    assert process.returncode == code and "continue with --resume" in out, err
    saved, events = newest_checkpoint(tmp_path / "out")[0], read_events(tmp_path / "out")
    assert len(steps_of(tmp_path / "out")) == 1
    assert saved.step == events[-1]["step"] and events[-1]["exit_code"] == code


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGHUP, 129),
        (signal.SIGUSR1, 138),
        pytest.param(signal.SIGQUIT, 131, marks=pytest.mark.slow),
        pytest.param(signal.SIGALRM, 142, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, 140, marks=pytest.mark.slow),
        pytest.param(signal.SIGXCPU, 152, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_at_the_next_step_and_the_run_resumes_from_there(run, uninterrupted, tmp_path, number, code):
    folder = tmp_path / "out"

    def send():
        while not (folder / "metrics.jsonl").exists() or len(read_complete(folder)) < 3:
            time.sleep(0.0005)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    state = run()
    thread.join()
    assert state.status == "stopped" and state.exit_code == code and 3 <= state.step < 12
    assert [p.name for p in steps_of(folder)] == [f"step-{state.step}"]
    end = read_events(folder, "end")[-1]
    assert (end["status"], end["exit_code"]) == ("stopped", code)
    fine_tune(resume="auto", output_dir=str(folder))
    assert steps(folder) == steps(uninterrupted)


@pytest.mark.parametrize(
    ("sent", "code"),
    [([signal.SIGUSR1, signal.SIGTERM], 143), ([signal.SIGXCPU] * 3, 152), ([signal.SIGUSR2] * 2, 140)]
    + [([signal.SIGALRM, signal.SIGQUIT], 131)],
)
def test_a_warning_is_no_first_signal_of_two(run, tmp_path, sent, code):
    """SLURM sends --signal=USR1@60, and SIGTERM when time is over; the limit of processor time warns each second."""

    def warns(event):
        if event["step"] == 3:
            for number in sent:
                os.kill(os.getpid(), number)
                time.sleep(0.05)  # the kernel may give it to another thread; of two at once, the lower number is first

    state = run(on_step=warns)
    assert (state.status, state.exit_code, state.step) == ("stopped", code, 3)
    assert [p.name for p in steps_of(tmp_path / "out")] == ["step-3"]


def test_warnings_that_the_caller_hears_stay_the_caller_s(run, tmp_path):
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("ours"))
    with open(tmp_path / "stacks", "w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks)
        try:
            warned = (signal.SIGUSR1, signal.SIGUSR2)
            state = run(on_step=lambda event: [os.kill(os.getpid(), n) for n in warned if event["step"] == 3])
            os.kill(os.getpid(), signal.SIGUSR2)
        finally:
            faulthandler.unregister(signal.SIGUSR2)
            signal.signal(signal.SIGUSR1, before)
    assert (state.status, heard) == ("finished", ["ours"])
    assert (tmp_path / "stacks").read_text().count("Current thread") == 2
    assert signal.getsignal(signal.SIGXCPU) is signal.SIG_DFL


@contextlib.contextmanager
def unread(handle: int):
    """A context with a text file over a handle which does not take what is written to it."""
    file = open(handle, "w")
    yield file
    with contextlib.suppress(OSError):
        file.close()


@pytest.mark.parametrize(("sent", "code"), [([], 141), ([signal.SIGINT], 130), ([signal.SIGHUP] * 2, 129)])
def test_a_run_whose_reader_ends_saves_whether_a_signal_ended_both_or_not(run, tmp_path, monkeypatch, sent, code):
    """Ctrl-C ends `train.py | tee log` in both, and the run found its output closed before it could save."""
    read, write = os.pipe()

    def ends(event):
        if event["step"] == 3:
            os.close(read)
            for number in sent:
                os.kill(os.getpid(), number)

    with unread(write) as output:
        monkeypatch.setattr("sys.stdout", output)
        state = run(on_step=ends)
        monkeypatch.undo()
    assert (state.status, state.exit_code, state.step) == ("stopped", code, 3)
    assert [p.name for p in steps_of(tmp_path / "out")] == ["step-3"]


def test_a_terminal_that_is_gone_ends_no_run(run, monkeypatch):
    ours, theirs = pty.openpty()
    with unread(theirs) as output:
        monkeypatch.setattr("sys.stdout", output)
        state = run(max_steps=3, log_to="tqdm", on_step=lambda event: event["step"] == 1 and os.close(ours))
        monkeypatch.undo()
    assert (state.status, state.step) == ("finished", 3)


def test_a_log_without_room_ends_no_run(run, monkeypatch):
    with unread(os.open("/dev/full", os.O_WRONLY)) as full:
        state = run(max_steps=3, on_step=lambda event: monkeypatch.setattr("sys.stdout", full))
        monkeypatch.undo()
    assert (state.status, state.step) == ("finished", 3)


def read_complete(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and '"event": "step"' in line]


@pytest.fixture(scope="module")
def long_run(tiny_model, tmp_path_factory):
    """Flags of a run of 24 steps with dropout that saves each, and the run itself, undisturbed."""
    folder = tmp_path_factory.mktemp("long")
    rows = [{"prompt": f"{i} and {i}? ", "completion": f"{2 * i}"} for i in range(40)]
    (folder / "rows.jsonl").write_bytes(json_lines(*rows))
    flags = dict(
        model_name=tiny_model,
        dataset=folder / "rows.jsonl",
        backend="cpu",
        train_type="lora",
        lora_rank=4,
        batch_size=4,
        max_steps=24,
        save_every=1,
        lora_dropout=0.1,
        lr="1e-3",
        resume="auto",
    )
    assert finish(command(flags, output_dir=folder / "whole")).returncode == 0
    return flags, folder / "whole"


def test_kills_at_random_moments_fail_no_restart_and_change_no_step(long_run, tmp_path):
    """The same command over and over, killed anywhere in steps and saves. The rig kills more, and at system calls."""
    flags, whole = long_run
    rng = random.Random(2)
    out = tmp_path / "out"
    for _ in range(2):
        process = ranks.Fork("script", command(flags, output_dir=out)[len(PYTHON) :], {}, tmp_path / "said")
        # A start has much to do: wait for one of its next steps, of which a third of the run remains.
        seen = count_steps(out) + rng.randint(1, 8)
        while process.poll() is None and count_steps(out) < seen:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert finish(command(flags, output_dir=out)).returncode == 0
    assert steps(out) == steps(whole)
    same_files(out / "checkpoints/step-24", whole / "checkpoints/step-24", WHOLE_STATE)
