"""This process's rank as its launcher's environment states it, and the network interface between hosts."""

import contextlib
import os
import re
import socket
import struct
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from finetune.errors import PlanError

FOLDER = "FINETUNE_RANKS_FOLDER"  # set for ranks that we started: plan.json, port, what each has to say at its end


@dataclass(frozen=True)
class RankEnv:
    """This process's place among the ranks of the job. `launcher` None: there is one rank, this process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    port: int = 0
    launcher: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of ranks that the first process started; None under a launcher."""
        return Path(os.environ[FOLDER]) if self.launcher == "spawned" else None


def rank_env(environment, host: str = "localhost", port: int = 12355) -> RankEnv | None:
    """This process's place as a launcher's environment says; None where there is no launcher. Raises PlanError.

    `host`, `port`: where rank 0 listens, for environments without MASTER_ADDR and MASTER_PORT.
    """
    e = environment
    if "RANK" in e or int(e.get("WORLD_SIZE") or 1) > 1:
        world = _of_variables(e, host, port)
    elif int(e.get("SLURM_STEP_NUM_TASKS") or e.get("SLURM_NTASKS") or 1) > 1 and "SLURM_PROCID" in e:
        world = _of_slurm(e, host, port)
    else:
        return None
    if not 0 <= world.rank < world.size:
        raise PlanError(f"RANK={world.rank}: WORLD_SIZE is {world.size}. Number the ranks from 0.")
    return world


def _of_variables(e, host, port) -> RankEnv:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in e:
            raise PlanError(f"{other}={e[other]}: {name} is not set. Set both, or use torchrun or --world_size.")
    rank, size = _number(e, "RANK"), _number(e, "WORLD_SIZE")
    local_size = _number(e, "LOCAL_WORLD_SIZE", size)
    launcher = "spawned" if FOLDER in e else "torchrun" if "TORCHELASTIC_RUN_ID" in e else "RANK and WORLD_SIZE"
    return RankEnv(
        rank,
        size,
        _number(e, "LOCAL_RANK", rank % local_size),
        local_size,
        e.get("MASTER_ADDR", host),
        _number(e, "MASTER_PORT", port),
        launcher,
    )


def _of_slurm(e, host, port) -> RankEnv:
    rank = _number(e, "SLURM_PROCID")
    size = _number(e, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in e else "SLURM_NTASKS")
    tasks = e.get("SLURM_STEP_TASKS_PER_NODE") or e.get("SLURM_TASKS_PER_NODE") or str(size)
    local_size = int(re.match(r"\d+", tasks)[0])
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


def _number(e, name, default=None) -> int:
    try:
        return int(e[name]) if name in e else default
    except ValueError:
        raise PlanError(f"{name}={e[name]}: is no number.") from None


# ---- the network between hosts


def network_interface(world: RankEnv, store, timeout_s: float) -> str | None:
    """The network interface through which this rank and those of other hosts reach each other; None where none is found.

    `store`: has set, wait and get, as torch's. Collective. A host's own name may stand for an address that only itself can reach
    (Debian's 127.0.1.1), so the first host looks towards another rank.
    """
    mine = _address_towards(os.environ.get("MASTER_ADDR", world.host))
    store.set(f"address-{world.rank}", mine)
    if mine.startswith("127."):
        keys = [f"address-{rank}" for rank in range(world.size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        others = (store.get(key).decode() for key in keys)
        far = next((address for address in others if not address.startswith("127.")), None)
        mine = _address_towards(far) if far else mine
    return _interface_with(mine)


def _address_towards(host: str) -> str:
    """This host's address on the way to another, IPv4. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:  # no such name or no way there in IPv4
            return "127.0.0.1"
        return probe.getsockname()[0]


def _interface_with(address: str) -> str | None:
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
