"""Spawns the ranks of a job as local processes, hands each the plan through a temporary folder, and waits for them.

Under a launcher (torchrun, accelerate, SLURM) a process already is a rank and spawns nothing. No framework here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from finetune import errors
from finetune.distributed import collectives
from finetune.distributed.env import FOLDER, RankEnv
from finetune.errors import EXPECTED, RankLostError
from finetune.parts.train_state import TrainState
from finetune.system import files
from finetune.system.process import StopSignal

GRACE_S = 10.0  # after one rank has ended, the others get this long to exit before they are killed
ERRORS_BY_CODE = {kind.exit_code: kind for kind in errors.EXPECTED}


# ---- starting ranks


def spawn_ranks(program: Path, world_size: int, plan: str, keeps_stdin: bool = False) -> dict:
    """Runs the ranks of a serialized plan as processes of `program` and waits for them; rank 0's final state.
    `keeps_stdin`: rank 0 reads this process's.
    """
    stop = StopSignal()
    sys.stdout.flush()
    try:
        return run_ranks(program, world_size, plan, stop.forwarding, keeps_stdin)
    except RuntimeError as error:
        if stop.received is None or isinstance(error, errors.EXPECTED):
            raise
        return {"status": "stopped", "exit_code": 128 + stop.received}  # a second signal: exited at once


def run_ranks(
    program: Path,
    world_size: int,
    plan: str,
    forwarding: Callable[[Callable[[int], None]], contextlib.AbstractContextManager],
    keeps_stdin: bool = False,
) -> dict:
    """Spawns `world_size` ranks of `program` with the serialized `plan`, waits, and returns the result of rank 0.

    Raises the failure of a rank, or RankLostError naming the one that was killed. No rank survives this call.
    `forwarding`: a context manager that forwards signals to its argument (process.StopSignal.forwarding).
    """
    with tempfile.TemporaryDirectory(prefix="finetune-ranks-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(plan)
        children: list[subprocess.Popen] = []
        codes: list[int] = []

        def send_to_all(signal_number: int) -> None:
            for child in children:
                _send(child, signal_number)

        try:
            with forwarding(send_to_all):
                for rank in range(world_size):
                    if keeps_stdin and rank == 0:
                        stdin = None
                    else:
                        stdin = subprocess.DEVNULL
                    children.append(_start(program, folder, rank, world_size, stdin))
                codes = _wait(children)
        finally:
            for child in children:
                _send(child, signal.SIGKILL, group=True)
                child.wait()
        failure = _failure(folder, codes)
        if failure:
            raise failure
        return json.loads((folder / "result.json").read_text())


def send_plan(announced_plan: Callable[[], tuple], send: Callable[[dict], object]) -> tuple:
    """Rank 0's (plan, end if there is nothing to train) of a launched run, sent to the other ranks, as a failure is.
    `send(message)`: gives every rank the JSON value that `received_end` reads.
    """
    code: int | None = 1  # of an error that is not expected
    try:
        plan, done = announced_plan()
        code = None
        if done:
            code = done.exit_code
    except EXPECTED as error:
        code = error.exit_code
        raise
    finally:
        send({"plan": plan.serialize()} if code is None else {"exit_code": code})
    return plan, done


def received_end(message: dict) -> TrainState | None:
    """Final state of the run on a rank that received rank 0's exit code; None if the message is a plan."""
    if "exit_code" in message:
        return TrainState(status="ended", exit_code=message["exit_code"])
    return None


def _start(program: Path, folder: Path, rank: int, world_size: int, stdin: int | None):
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        FOLDER: str(folder),
    }
    warnings = [f"-W{option}" for option in sys.warnoptions]
    # A new session: Ctrl-C reaches only the launcher process, which forwards it once.
    return subprocess.Popen(
        [sys.executable, *warnings, str(program)], env=environment, stdin=stdin, start_new_session=True
    )


def _wait(children: list[subprocess.Popen]) -> list:
    """Exit codes of all ranks; None for those still running GRACE_S after the first failure."""
    failed_at = None
    while any(child.poll() is None for child in children):
        if failed_at is None and any(child.poll() for child in children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            break
        time.sleep(0.02)
    return [child.poll() for child in children]


def _send(child: subprocess.Popen, number: int, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(child.pid, number)
        elif child.poll() is None:
            child.send_signal(number)


def _failure(folder: Path, codes: list):
    """The exception that explains how the ranks failed, or None. The root cause takes precedence over RankLostError."""
    failures = [json.loads(file.read_text()) for file in folder.glob("failed-*.json")]
    failures.sort(key=lambda t: (t["code"] == RankLostError.exit_code, t["time"]))
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    silent = _without_a_file(codes, {t["rank"] for t in failures})
    if failures and failures[0]["code"] != RankLostError.exit_code:
        return ERRORS_BY_CODE[failures[0]["code"]](failures[0]["text"])
    if silent and codes[silent[0]] != RankLostError.exit_code:
        return ERRORS_BY_CODE[codes[silent[0]]](
            f"rank {silent[0]} of {len(codes)} exited with code {codes[silent[0]]}; see its output above"
        )
    broken = [rank for rank, code in enumerate(codes) if code is not None and code > 0 and code not in ERRORS_BY_CODE]
    if broken and not (folder / "result.json").exists():
        rank = broken[0]
        return RuntimeError(f"rank {rank} of {len(codes)} exited with code {codes[rank]}; see its output above")
    doing = {t["rank"]: t["doing"] for t in failures if t.get("doing")}
    if killed:
        name = signal.Signals(-codes[killed[0]]).name
        aborted = {rank: found for rank in killed if (found := collectives.of_dump(_stack(folder, rank)))}
        return RankLostError(
            f"rank {killed[0]} of {len(codes)} was killed by {name}; the others were stopped. Rerun with --resume auto."
            f"{' ' + _collectives_of(doing | aborted) if aborted else ''}"
        )
    if failures:
        differ = len(set(doing.values())) > 1
        return RankLostError(failures[0]["text"] + (f" {_collectives_of(doing)}" if differ else ""))
    if silent:
        return RankLostError(f"rank {silent[0]} of {len(codes)} lost another rank. Rerun with --resume auto.")
    assert (folder / "result.json").exists(), codes
    return None


def _collectives_of(doing: dict[int, str]) -> str:
    """A sentence on ranks that were in different collectives, or in one with different sizes."""
    each = ", ".join(f"rank {rank} was in {found}" for rank, found in sorted(doing.items()))
    return f"Collectives did not match: {each}."


def stack_file(folder: Path, rank: int) -> Path:
    """File for the stacks of a spawned rank if it ends by a fatal signal."""
    return folder / f"stacks-{rank}.txt"


def _stack(folder: Path, rank: int) -> str:
    file = stack_file(folder, rank)
    if file.exists():
        return file.read_text(errors="replace")
    return ""


def _without_a_file(codes: list, reported: set) -> list[int]:
    """Ranks that exited with a failure's code but wrote no error file; ranks that only lost another rank come last."""
    found = [rank for rank, code in enumerate(codes) if code in ERRORS_BY_CODE and rank not in reported]
    return sorted(found, key=lambda rank: (codes[rank] == RankLostError.exit_code, rank))


def write_failure(env: RankEnv, code: int, text: str, doing: str | None = None) -> None:
    """Writes this rank's failure for the process that spawned it. `doing`: the collective it was in."""
    content = {"rank": env.rank, "code": code, "text": text, "time": time.time(), "doing": doing}
    _write(_folder_of(env) / f"failed-{env.rank}.json", json.dumps(content))


def write_result(env: RankEnv, result: dict) -> None:
    _write(_folder_of(env) / "result.json", json.dumps(result))


def write_port(env: RankEnv, port: int) -> None:
    _write(_folder_of(env) / "port", str(port))


def _folder_of(env: RankEnv) -> Path:
    """The folder of messages that a rank shares with the process that spawned it."""
    assert env.folder is not None, env
    return env.folder


def wait_for_port(env: RankEnv, timeout_s: float = 300.0) -> RankEnv:
    """`env` with the rendezvous port that rank 0 opened."""
    file = _folder_of(env) / "port"
    end = time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > end:
            raise RankLostError(
                f"rank 0 of {env.size} did not open a port within {timeout_s:.0f} s. Rerun with --resume auto."
            )
        time.sleep(0.02)
    return replace(env, port=int(file.read_text()))


def _write(path: Path, text: str) -> None:
    with files.replace(path) as file:
        file.write(text.encode())
