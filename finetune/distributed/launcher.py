"""The ranks of one job: who started them, starting them here, and noticing when one of them dies or falls silent.

Under a launcher (torchrun, accelerate, SLURM, RANK and WORLD_SIZE set by hand) a process is a rank already and starts nothing.
Otherwise the first process starts the ranks, hands each the settled plan in a folder of theirs, and waits. No framework here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from finetune import errors
from finetune.distributed.env import FOLDER, RankEnv
from finetune.errors import RankLostError

GRACE_S = 10.0  # ranks end by themselves within this after one of them has; then they are ended
ERRORS_BY_CODE = {kind.exit_code: kind for kind in errors.EXPECTED}


# ---- starting ranks


def run_ranks(program: Path, number: int, wire: str, listening) -> dict:
    """Starts `number` ranks of `program` here with the plan `wire` and waits; what rank 0 left as its result.

    Raises what a rank failed with; RankLostError, naming it, where one was killed. Afterwards no rank is left. `listening`: a
    context in which signals call its function (launch.Stop's).
    """
    with tempfile.TemporaryDirectory(prefix="finetune-ranks-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(wire)
        children, codes = [], []
        try:
            with listening(lambda number: [_send(child, number) for child in children]):
                for rank in range(number):
                    children.append(_start(program, folder, rank, number))
                codes = _wait(children)
        finally:
            for child in children:
                _send(child, signal.SIGKILL, group=True)
                child.wait()
        failure = _failure(folder, codes)
        if failure:
            raise failure
        return json.loads((folder / "result.json").read_text())


def _start(program: Path, folder: Path, rank: int, number: int):
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(number),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        FOLDER: str(folder),
    }
    warnings = [f"-W{option}" for option in sys.warnoptions]
    # A session of its own: Ctrl-C reaches the first process alone, which passes it on once.
    return subprocess.Popen(
        [sys.executable, *warnings, str(program)], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )


def _wait(children) -> list:
    """The codes that all ended with; None for those that had not ended GRACE_S after the first that failed."""
    failed_at = None
    while any(child.poll() is None for child in children):
        if failed_at is None and any(child.poll() for child in children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            break
        time.sleep(0.02)
    return [child.poll() for child in children]


def _send(child, number: int, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(child.pid, number)
        elif child.poll() is None:
            child.send_signal(number)


def _failure(folder: Path, codes: list):
    """The exception that tells how the ranks failed, None where they did not. What all others fail of comes first."""
    told = [json.loads(file.read_text()) for file in folder.glob("failed-*.json")]
    told.sort(key=lambda t: (t["code"] == RankLostError.exit_code, t["time"]))
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if told and told[0]["code"] != RankLostError.exit_code:
        return ERRORS_BY_CODE[told[0]["code"]](told[0]["text"])
    broken = [rank for rank, code in enumerate(codes) if code is not None and code > 0 and code not in ERRORS_BY_CODE]
    if broken and not (folder / "result.json").exists():
        rank = broken[0]
        return RuntimeError(f"rank {rank} of {len(codes)} ended with code {codes[rank]}; what it wrote is above")
    if killed:
        name = signal.Signals(-codes[killed[0]]).name
        return RankLostError(
            f"rank {killed[0]} of {len(codes)} was killed by {name}; the others were ended. Start it again."
        )
    if told:
        return RankLostError(told[0]["text"])
    assert (folder / "result.json").exists(), codes
    return None


def write_failure(world: RankEnv, code: int, text: str) -> None:
    """Leaves a failure where the first process finds it."""
    content = {"rank": world.rank, "code": code, "text": text, "time": time.time()}
    _write(world.folder / f"failed-{world.rank}.json", json.dumps(content))


def write_result(world: RankEnv, result: dict) -> None:
    _write(world.folder / "result.json", json.dumps(result))


def write_port(world: RankEnv, port: int) -> None:
    _write(world.folder / "port", str(port))


def wait_for_port(world: RankEnv, timeout_s: float = 300.0) -> RankEnv:
    """The world with the port that rank 0 found free."""
    file, end = world.folder / "port", time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > end:
            raise RankLostError(f"rank 0 of {world.size} did not open a port within {timeout_s:.0f} s. Start it again.")
        time.sleep(0.02)
    return replace(world, port=int(file.read_text()))


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    beside.rename(path)
