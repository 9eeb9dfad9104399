"""Real Gloo ranks for tests: processes that meet through a file, and leave nothing behind.

They, and the scripts that tests run to their end, are forks of one process per test worker that has imported what they
import and computed nothing: that takes 4 s of a processor, which most of their own work does not.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEVICE, RANK, STORE = "RANKS_DEVICE", "RANKS_RANK", "RANKS_STORE"


def run(
    size: int, function: Callable, folder: Path, /, timeout_s: float = 600.0, device: str = "cpu", **arguments
) -> list:
    """Calls function(rank, size, **arguments) in every rank; its results, in rank order.

    Arguments and results go through JSON. AssertionError with the ranks' output if one failed. `device`: where the
    ranks compute (`compute_device()`), each of several GPUs on its own; "emulated" shards as on an Apple GPU,
    "emulated+resize" lets storages be resized.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, started = f"{function.__module__}:{function.__name__}", []
    try:
        for rank in range(size):
            place, output = {DEVICE: device, RANK: str(rank)}, folder / f"output-{rank}.txt"
            started.append(Fork("main", [size, name, json.dumps(arguments), folder, rank], place, output))
        end = time.monotonic() + timeout_s
        while any(p.poll() is None for p in started) and not any(p.poll() for p in started):
            assert time.monotonic() < end, f"no end after {timeout_s:.0f} s"
            time.sleep(0.05)
        time.sleep(1.0 if any(p.poll() for p in started) else 0.0)
    finally:
        for process in started:
            kill_session(process)
    said = "\n".join(f"--- rank {r}\n{(folder / f'output-{r}.txt').read_text()[-3000:]}" for r in range(size))
    assert all(p.returncode == 0 for p in started), said
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(size)]


def start(command, environment=None, **options) -> subprocess.Popen:
    """A process in its own session with one compute thread, so that it and its children can be ended together."""
    env = environment_of(environment or {})
    return subprocess.Popen(list(map(str, command)), env=env, start_new_session=True, **options)


def environment_of(more: dict[str, str]) -> dict[str, str]:
    """This process's variables without those of a launcher, one compute thread, and `more`."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return env | {"OMP_NUM_THREADS": "1", **more}


class Fork:
    """A process forked from this worker's `origin`, in its own session; `poll`, `wait`, `pid` as Popen's.

    It calls one of `CALLS` with `argv`. `outputs`: the file of its stdout and, if there is a second, of its stderr.
    """

    def __init__(self, call: str, argv: list, environment: dict[str, str], *outputs: Path):
        request = {"call": call, "argv": list(map(str, argv)), "environment": environment_of(environment)}
        self.pid = ask(request | {"outputs": list(map(str, outputs))})
        self.returncode = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = ask({"poll": self.pid})
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode


@cache
def origin() -> subprocess.Popen:
    """The process that ranks are forked from; it ends with this one."""
    command = [sys.executable, *"-W ignore -m tests.support.ranks".split()]
    return start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def ask(request: dict) -> Any:
    """What `origin` answers."""
    stdin, stdout = origin().stdin, origin().stdout
    stdin.write(json.dumps(request) + "\n")
    stdin.flush()
    return json.loads(stdout.readline())


def kill_session(process: subprocess.Popen | Fork) -> None:
    """Kills every process of the session that this one began."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def members(session: int) -> list[int]:
    """Process ids whose session was begun by `session`, or that came from it with sessions of their own."""
    parents, found = {}, []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(stat.parent.name)] = (int(fields[1]), int(fields[3]))
    for pid, (parent, its_session) in parents.items():
        if its_session == session or parent == session:
            found.append(pid)
    return found


def compute_device():
    """The torch.device on which this rank computes."""
    import torch

    from finetune.torch_engine.device import device_of
    from tests.support import emulated_device

    name, _, option = os.environ.get(DEVICE, "cpu").partition("+")
    if name == emulated_device.NAME:
        emulated_device.load(refuses_resize=option != "resize")
        return torch.device(name)
    return device_of(name, int(os.environ[RANK]) if RANK in os.environ else None)


def serve() -> None:
    """Forks for each request of standard input, or says how a fork ended: its exit status, null while it runs."""
    import pygal  # noqa: F401  and all else that most ranks and runs import
    import transformers.models.llama.modeling_llama  # noqa: F401

    import tests.support.cases  # noqa: F401
    import train  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork() or live(**request)
        print(json.dumps(answer), flush=True)


def live(call: str, argv: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    """The life of a fork; does not return."""
    os.setsid()
    for number, name in enumerate((os.devnull, outputs[0], outputs[-1])):
        with open(name, "a+") as opened:
            os.dup2(opened.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    status = 1
    try:
        CALLS[call](*argv)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def script(file: str, *words: str) -> None:
    """What `python file words` runs."""
    sys.argv = [file, *words]
    runpy.run_path(file, run_name="__main__")


def main(size_word: str, function: str, arguments: str, folder: str, rank_word: str) -> None:
    import torch
    import torch.distributed as dist

    size, rank = int(size_word), int(rank_word)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = compute_device()
    if device.index is not None:
        torch.get_device_module(device).set_device(device)
    os.environ[STORE] = f"{folder}/store"
    join(rank, size)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(rank, size, **json.loads(arguments))
    (Path(folder) / f"result-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def join(rank: int, size: int, number: int = 0) -> None:
    """Makes the process group of all ranks."""
    import torch.distributed as dist

    from finetune.torch_engine.parallel.process_groups import prepare_device

    store = dist.FileStore(f"{os.environ[STORE]}-{number}", size)
    dist.init_process_group(prepare_device(compute_device()), store=store, rank=rank, world_size=size)


def each_in_groups_of_its_own(rank: int, size: int, wanted: list):
    """The elements of `wanted`; the process groups of one, whose threads poll their sockets, end before the next.

    Collective.
    """
    import torch.distributed as dist

    for number, element in enumerate(wanted):
        yield element
        if number + 1 < len(wanted):
            dist.barrier()
            dist.destroy_process_group()
            join(rank, size, number + 1)


CALLS = {"main": main, "script": script}

if __name__ == "__main__":
    serve()
