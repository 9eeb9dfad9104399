"""Real Gloo ranks for tests: processes of this interpreter that meet through a file, and leave nothing behind."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEVICE, RANK = "RANKS_DEVICE", "RANKS_RANK"


def run(
    size: int, function: Callable, folder: Path, /, timeout_s: float = 600.0, device: str = "cpu", **arguments
) -> list:
    """Calls function(rank, size, **arguments) in every rank; its results, in rank order.

    Arguments and results go through JSON. AssertionError with the ranks' output if one failed. `device`: where the
    ranks compute (`compute_device()`), each of several GPUs on its own; "emulated" shards as on an Apple GPU,
    "emulated+resize" lets storages be resized.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{function.__module__}:{function.__name__}"
    command = [sys.executable, *"-W ignore -m tests.support.ranks".split(), size, name, json.dumps(arguments), folder]
    started = []
    try:
        for rank in range(size):
            with open(folder / f"output-{rank}.txt", "w") as output:
                options = dict(stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
                started.append(start([*command, str(rank)], {DEVICE: device, RANK: str(rank)}, **options))
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
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    env |= {"OMP_NUM_THREADS": "1", **(environment or {})}
    return subprocess.Popen(list(map(str, command)), env=env, start_new_session=True, **options)


def kill_session(process: subprocess.Popen) -> None:
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


def main() -> None:
    import torch
    import torch.distributed as dist

    from finetune.torch_engine.parallel.process_groups import prepare_device

    size, function, arguments, folder, rank = sys.argv[1:]
    size, rank = int(size), int(rank)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = compute_device()
    if device.index is not None:
        torch.get_device_module(device).set_device(device)
    backend = prepare_device(device)
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(rank, size, **json.loads(arguments))
    (Path(folder) / f"result-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
