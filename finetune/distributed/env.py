"""This process's rank as its launcher's environment states it, and the network interface between hosts."""

import contextlib
import json
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from finetune.errors import PlanError, RankLostError, first_line

MAX_RANKS = 2**20
FOLDER = "FINETUNE_RANKS_FOLDER"  # set for ranks spawned here; the folder holds plan.json, port, results and failures


@dataclass(frozen=True)
class RankEnv:
    """Rank, world size and rendezvous address of this process. `launcher` None: a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    port: int = 0
    launcher: str | None = None

    @property
    def is_local(self) -> bool:
        """True if all ranks are on this host."""
        return self.size == self.local_size

    @property
    def folder(self) -> Path | None:
        """Folder shared with the process that spawned the ranks; None under a launcher."""
        if self.launcher == "spawned":
            return Path(os.environ[FOLDER])
        return None


def rank_env(environment: Mapping[str, str], host: str = "localhost", port: int = 12355) -> RankEnv | None:
    """Rank and world size from a launcher's environment variables; None without a launcher. Raises PlanError.
    `host`, `port`: the rendezvous address of rank 0 if MASTER_ADDR and MASTER_PORT are unset.
    """
    e = environment
    slurm_tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in e else "SLURM_NTASKS"
    if "RANK" in e or _number(e, "WORLD_SIZE", 1) > 1:
        env = _of_variables(e, host, port)
    elif "SLURM_PROCID" in e and _number(e, slurm_tasks, 1) > 1:
        env = _of_slurm(e, slurm_tasks, host, port)
    elif "MLX_RANK" in e:
        env = _of_mlx_launch(e)
        if env.size == 1:
            return None
    else:
        return None
    for name, number, low, high in (
        ("the world size", env.size, 1, MAX_RANKS),
        ("MASTER_PORT", env.port, 0 if env.launcher == "spawned" else 1, 65535),
    ):
        if not low <= number <= high:
            raise PlanError(f"{name} is {number} in this process's environment: must be from {low} to {high}.")
    if not 0 <= env.rank < env.size:
        raise PlanError(f"RANK={env.rank}: WORLD_SIZE is {env.size}. Number the ranks from 0.")
    if not 0 <= env.local_rank < env.local_size <= env.size:
        raise PlanError(
            f"LOCAL_RANK={env.local_rank}: LOCAL_WORLD_SIZE is {env.local_size} and WORLD_SIZE {env.size}. "
            "Number the ranks of a host from 0."
        )
    return env


def local_ranks(ranks: int, env: RankEnv | None) -> int:
    """Number of ranks on this host."""
    if env and env.size > 1:
        return env.local_size
    return ranks


def check_devices(ranks: int, env: RankEnv | None, devices: int, environment: Mapping[str, str]) -> None:
    """Raises PlanError if this host has fewer CUDA devices than ranks. A launcher may show each rank one of its own."""
    launcher = None
    if env:
        launcher = env.launcher
    local = local_ranks(ranks, env)
    apart = launcher not in (None, "spawned") and (launcher != "torchrun" or "CUDA_VISIBLE_DEVICES" in environment)
    if local <= devices or (devices == 1 and apart):
        return
    flag, used = {
        "torchrun": (f"--nproc_per_node {local}", f"Use --nproc_per_node {devices}."),
        "srun": (f"srun: {ranks} ranks", f"Use --ntasks-per-node {devices}."),
        "RANK and WORLD_SIZE": (f"WORLD_SIZE={ranks}", f"Start {devices} on a host and set LOCAL_WORLD_SIZE to that."),
    }.get(launcher or "", (f"--world_size {ranks}", f"Use --world_size {devices}, or --backend cpu."))
    raise PlanError(f"{flag}: this machine has {devices} device{'s' * (devices > 1)} for {local} ranks. {used}")


def _of_variables(e: Mapping[str, str], host: str, port: int) -> RankEnv:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in e:
            if other == "WORLD_SIZE" and "SLURM_PROCID" in e:
                raise PlanError(_one_task_per_node(e))
            raise PlanError(f"{other}={e[other]}: {name} is not set. Set both, or use torchrun or --world_size.")
    rank = _number(e, "RANK")
    size = _number(e, "WORLD_SIZE")
    local_size = _number(e, "LOCAL_WORLD_SIZE", size)
    if FOLDER in e and not Path(e[FOLDER], "plan.json").is_file():
        raise PlanError(f"{FOLDER}={e[FOLDER]}: is set by train.py for the ranks it starts. Unset it.")
    launcher = "spawned" if FOLDER in e else "torchrun" if "TORCHELASTIC_RUN_ID" in e else "RANK and WORLD_SIZE"
    return RankEnv(
        rank,
        size,
        _number(e, "LOCAL_RANK", rank % max(1, local_size)),
        local_size,
        e.get("MASTER_ADDR", host),
        _number(e, "MASTER_PORT", port),
        launcher,
    )


def _of_mlx_launch(e: Mapping[str, str]) -> RankEnv:
    """A rank of mlx.launch: ring and jaccl name their hosts in a file, the other backends their number."""
    rank = _number(e, "MLX_RANK")
    hosts = []
    for name in ("MLX_HOSTFILE", "MLX_IBV_DEVICES"):
        path = Path(e.get(name) or "/dev/null")
        if path.is_file():
            try:
                hosts = json.loads(path.read_text(encoding="utf-8") or "[]")
            except (OSError, ValueError) as error:
                raise PlanError(f"{name}={path}: is not a JSON list of hosts ({first_line(error)}).") from None
    size = _number(e, "MLX_WORLD_SIZE", len(hosts) or 1)
    addresses = [str(host[0]).partition(":")[0] for host in hosts if isinstance(host, list) and host]
    own = None
    if rank < len(addresses) and "MLX_HOSTFILE" in e:
        own = addresses[rank]
    if own:
        local = [r for r, address in enumerate(addresses) if address == own]
    else:
        local = [rank]
    return RankEnv(rank, size, local.index(rank), len(local), "localhost", 1, "mlx.launch")


def _one_task_per_node(e: Mapping[str, str]) -> str:
    """The line for the older scripts' form: WORLD_SIZE exported, one task per node that starts the node's ranks."""
    tasks, nodes = (e.get(f"SLURM_{name}") or "1" for name in ("NTASKS", "NNODES"))
    size = _number(e, "WORLD_SIZE")
    number = 1
    if nodes.isdecimal() and int(nodes):
        number = int(nodes)
    each = max(1, -(-size // number))
    return (
        f"WORLD_SIZE={size}: SLURM started {tasks} tasks on {nodes} nodes, and each task is one rank. Unset WORLD_SIZE "
        f"and start one task per rank: srun --ntasks-per-node={each} python train.py ... (see runs/slurm.sh)."
    )


def _of_slurm(e: Mapping[str, str], num_tasks: str, host: str, port: int) -> RankEnv:
    rank = _number(e, "SLURM_PROCID")
    size = _number(e, num_tasks)
    tasks = e.get("SLURM_STEP_TASKS_PER_NODE") or e.get("SLURM_TASKS_PER_NODE") or str(size)
    on_first_node = re.match(r"[1-9]\d*", tasks)
    if on_first_node is None:
        raise PlanError(f"SLURM_TASKS_PER_NODE={tasks}: not a number of tasks. Start the ranks with srun.")
    local_size = int(on_first_node[0])
    nodes = e.get("SLURM_STEP_NODELIST") or e.get("SLURM_JOB_NODELIST") or host
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes.split(",")[0] if "[" not in nodes else nodes.split("]")[0] + "]")
    first = "localhost" if local_size == size else first
    return RankEnv(
        rank,
        size,
        _number(e, "SLURM_LOCALID", rank % local_size),
        local_size,
        e.get("MASTER_ADDR", first),
        _number(e, "MASTER_PORT", port),
        "srun",
    )


def _number(e: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable as an integer; `default`, if there is one, if it is unset or empty."""
    try:
        if e.get(name) or default is None:
            return int(e[name])
        return default
    except ValueError:
        raise PlanError(f"{name}={e[name]}: not a number. Set it to an integer, or unset it.") from None


# ---- the network between hosts


class Store(Protocol):
    """The interface of a torch Store that ranks find each other by."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...


def network_address(env: RankEnv, store: Store, timeout_s: float) -> str:
    """This host's IPv4 address on the network to the other ranks; loopback if all are local. Collective.

    `store`: a torch Store (set, wait, get). A host's own name may resolve to a loopback address
    (Debian's 127.0.1.1), so the first host uses the route to another rank instead.
    """
    if env.is_local:
        return "127.0.0.1"
    mine = _address_towards(os.environ.get("MASTER_ADDR", env.host))
    store.set(f"address-{env.rank}", mine)
    if mine.startswith("127."):
        keys = [f"address-{rank}" for rank in range(env.size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        others = (store.get(key).decode() for key in keys)
        far = next((address for address in others if not address.startswith("127.")), None)
        if far:
            mine = _address_towards(far)
    return mine


def rendezvous_address(env: RankEnv, patience_s: float = 30.0) -> str:
    """IPv4 address at which rank 0 is reached: loopback if all ranks are local. Raises PlanError.

    A name that does not resolve yet is tried again for `patience_s`: clusters start hosts before their names exist.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            address = str(socket.getaddrinfo(env.host, env.port, socket.AF_INET)[0][4][0])
            break
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                raise PlanError(
                    f"MASTER_ADDR={env.host}: cannot be resolved ({getattr(error, 'strerror', None) or error}). "
                    "Set it to the host or IPv4 address of rank 0."
                ) from None
            time.sleep(0.5)
    if not env.is_local:
        return address
    if not _is_of_this_host(address):
        raise PlanError(
            f"MASTER_ADDR={env.host}: is another host, but all {env.size} ranks are said to be on this one. "
            "Set LOCAL_WORLD_SIZE to the number of ranks per host."
        )
    return "127.0.0.1"


def wait_for_listener(address: str, env: RankEnv, timeout_s: float) -> None:
    """Returns when something listens at the rendezvous. RankLostError."""
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection((address, env.port), timeout=5.0):
            return
        if time.monotonic() > end:
            raise RankLostError(
                f"rank 0 of {env.size} does not listen at {address}:{env.port} after {timeout_s:g} s (--rank_timeout). "
                "Rerun with --resume auto."
            )
        time.sleep(0.1)


def listen_for_ranks(env: RankEnv) -> socket.socket:
    """Rank 0's listening socket on MASTER_PORT, on loopback if all ranks are local. Raises PlanError."""
    address = rendezvous_address(env)
    if not env.is_local and (address.startswith("127.") or not _is_of_this_host(address)):
        address = ""  # the other hosts reach this one by an address that it cannot tell: listen on all of its own
    try:
        return socket.create_server((address, env.port), backlog=min(4096, max(128, env.size)))
    except OSError as error:
        raise PlanError(f"MASTER_PORT={env.port}: {error.strerror or error}. Set another port on all ranks.") from None


def _is_of_this_host(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _address_towards(host: str) -> str:
    """This host's IPv4 source address on the route to `host`. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:  # unknown host, or no IPv4 route to it
            return "127.0.0.1"
        return probe.getsockname()[0]


def interface_with(address: str) -> str | None:
    """Name of the network interface with an IPv4 address; None if there is none, or off Linux."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                found = fcntl.ioctl(asked, get_address, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
