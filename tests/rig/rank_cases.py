"""Ranks killed and stopped: the others end with 69 in time, or torchrun starts them again, and no bit differs."""

import contextlib
import os
import random
import signal
import subprocess
import time

from tests.rig.children import HANG_S, argv_of, start_ranks
from tests.rig.kill_cases import finish, wait_for_first_write
from tests.rig.materials import TWO_RANKS, Place
from tests.rig.oracle import Outcome, check_finished
from tests.support import ranks as processes
from tests.support.commands import ROOT, TORCHRUN, command, free_port, rank_processes
from tests.support.runs import count_steps, read_events

TIMEOUT_S = 3.0  # --rank_timeout of a stopped rank's job
COLD_S = 120.0  # a job with torchrun or spawned ranks imports everything first
KILLED, RANK_LOST = -9, 69


def rank_kill(seed: int, place: Place) -> Outcome:
    """Every fifth under torchrun, every tenth with ranks that train.py spawns, the rest launched by hand."""
    rng = random.Random(f"rank-kills {seed}")
    if seed % 5 == 4:
        return _under_torchrun(rng, place, signal.SIGKILL)
    if seed % 10 == 3:
        return _spawned(rng, place, signal.SIGKILL)
    return _launched(rng, place, signal.SIGKILL)


def rank_stop(seed: int, place: Place) -> Outcome:
    """Every sixth under torchrun or spawned, the rest launched by hand."""
    rng = random.Random(f"rank-stops {seed}")
    if seed % 6 == 5:
        return (_under_torchrun if seed % 12 == 5 else _spawned)(rng, place, signal.SIGSTOP)
    return _launched(rng, place, signal.SIGSTOP)


def _launched(rng: random.Random, place: Place, number: int) -> Outcome:
    folder, variant, outcome = place.empty(), rng.choice(TWO_RANKS), Outcome()
    flags = place.flags(variant, folder / "run") | dict(rank_timeout=TIMEOUT_S)
    children, chosen = start_ranks(flags, folder, place.port()), rng.randrange(2)
    wait_for_first_write(children[0], folder / "run")
    time.sleep(rng.uniform(0, 0.15))
    children[chosen].send(number)
    other = children[1 - chosen].end(HANG_S)
    if number == signal.SIGSTOP and other.code == RANK_LOST and other.seconds > TIMEOUT_S + 15:
        outcome.fail("hang", f"rank {chosen} stopped: the other ended after {other.seconds:.0f} s")
    children[chosen].send(signal.SIGKILL)
    lost = children[chosen].end()
    outcome.judge(other, (RANK_LOST, 0), f"rank {chosen} of {variant} {signal.Signals(number).name}")
    if other.code == RANK_LOST and f"rank {chosen} " not in other.err and "a rank stopped responding" not in other.err:
        outcome.fail("wrong_code", f"the line does not name rank {chosen}: {other.first_line}")
    outcome.judge(lost, (KILLED, 0, RANK_LOST), f"the killed rank {chosen}")
    return finish(outcome, place, variant, flags, ranks=2)


def _spawned(rng: random.Random, place: Place, number: int) -> Outcome:
    """`train.py --world_size 2`: the command ends with 69 and no rank remains; started again, it finishes."""
    folder, outcome = place.empty(), Outcome()
    flags = place.flags("lora-2", folder / "run") | dict(world_size=2, rank_timeout=TIMEOUT_S + 5)
    process = _start(command(flags), folder)
    _disturb(rng, process, folder, number)
    _judge(outcome, process, folder, (RANK_LOST, 0), "spawned ranks")
    again = _start(command(flags), folder)
    _judge(outcome, again, folder, (0,), "restart of spawned ranks")
    if not outcome.failures:
        check_finished(outcome, place, "lora-2", folder / "run")
    return outcome


def _under_torchrun(rng: random.Random, place: Place, number: int) -> Outcome:
    """torchrun --max-restarts: the job itself ends with 0."""
    folder, outcome = place.empty(), Outcome()
    flags = place.flags("lora-2", folder / "run") | dict(rank_timeout=TIMEOUT_S + 5)
    argv = [*TORCHRUN, "--max-restarts=3", "--monitor-interval=0.2", str(ROOT / "train.py"), *argv_of(flags)]
    process = _start(argv, folder)
    _disturb(rng, process, folder, number)
    _judge(outcome, process, folder, (0,), "torchrun --max-restarts 3")
    if not outcome.failures:
        check_finished(outcome, place, "lora-2", folder / "run")
        if read_events(folder / "run", "end")[-1]["exit_code"] != 0:
            outcome.fail("wrong_code", "torchrun ended with 0, the run did not")
    return outcome


def _start(argv: list, folder) -> subprocess.Popen:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "LD_PRELOAD": "", "MASTER_PORT": str(free_port())}
    with open(folder / "job.err", "w") as err, open(folder / "job.out", "w") as out:
        return processes.start(argv, environment, stdout=out, stderr=err, cwd=ROOT)


def _disturb(rng: random.Random, process: subprocess.Popen, folder, number: int) -> None:
    """Sends the signal to one rank once the run has logged its first step."""
    end = time.monotonic() + COLD_S
    while count_steps(folder / "run") < 1 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    found = rank_processes(process.pid)
    time.sleep(rng.uniform(0, 0.1))
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(rng.choice(found), number)


def _judge(outcome: Outcome, process: subprocess.Popen, folder, allowed: tuple, what: str) -> None:
    try:
        code = process.wait(COLD_S)
    except subprocess.TimeoutExpired:
        outcome.fail("hang", f"{what}: no end after {COLD_S:.0f} s")
        return
    finally:
        left = [pid for pid in processes.members(process.pid) if pid != process.pid]
        for pid in (*left, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    err = (folder / "job.err").read_text(errors="replace")
    if left and 0 not in (code,):
        outcome.fail("wrong_code", f"{what}: {len(left)} processes outlived it")
    if code not in allowed:
        outcome.fail("wrong_code", f"{what}: exit {code}: {err[-300:]}")
    elif "Traceback" in err and "torch/distributed/run.py" not in err:
        outcome.fail("traceback", f"{what}: {err[-300:]}")
