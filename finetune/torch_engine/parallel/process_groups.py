"""The ranks as torch sees them: rendezvous, process groups, mesh, and the collectives that the engine calls itself."""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from finetune.distributed.env import RankEnv, interface_with, listen_for_ranks, rendezvous_address, wait_for_listener
from finetune.distributed.launcher import GRACE_S, wait_for_port, write_port
from finetune.distributed.watchdog import Watchdog
from finetune.errors import RankLostError
from finetune.parts.degrees import AXES
from finetune.parts.parallel_dims import ParallelDims

# Of a device's collectives. One that is not here has none: its tensors are staged through the CPU.
COMMUNICATION = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "cpu": "gloo"}
# Collectives of one tensor; before torch 2.13 they have other names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LONGEST_WAIT = timedelta(days=1)  # of ranks that the watchdog sees alive: rank 0 may be downloading a model


def create_store(env: RankEnv, timeout_s: float):
    """The rendezvous TCPStore; rank 0 hosts it, or torchrun. Raises PlanError, RankLostError.

    It answers anybody who reaches its port, so it listens on loopback if all ranks are local, else on the address
    that MASTER_ADDR names.
    """
    timeout = timedelta(seconds=timeout_s)
    if env.launcher == "spawned":
        if env.rank == 0:
            store = _listening_store(env, Watchdog.listen("127.0.0.1"), timeout)
            write_port(env, store.port)
            return store
        env = wait_for_port(env, timeout_s)
        return dist.TCPStore("127.0.0.1", env.port, env.size, False, timeout)
    os.environ.setdefault("MASTER_ADDR", env.host)
    os.environ.setdefault("MASTER_PORT", str(env.port))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.TCPStore(env.host, env.port, env.size, False, timeout)
        return dist.PrefixStore(_attempt(env, store, timeout_s), store)
    if env.rank == 0:
        return _listening_store(env, listen_for_ranks(env), timeout)
    address = rendezvous_address(env)
    wait_for_listener(address, env, timeout_s)
    return dist.TCPStore(address, env.port, env.size, False, timeout)


def _attempt(env: RankEnv, store: dist.Store, timeout_s: float) -> str:
    """A name that the ranks of this start have in common, and those of no other.

    torchrun's store outlives a restart, and what earlier ranks wrote must not be read again. Its agents count restarts
    each for itself, so that ranks of a host that came later have another count. Rank 0 makes the name, and tells it to
    whoever arrives, also to processes that have ended since.
    """
    if env.rank:
        own = secrets.token_hex(8)
        store.set(f"arrival-{store.add('arrivals', 1)}", json.dumps([own, env.size]))
        attempt = store.get(f"attempt of {own}").decode()
        store.set(f"{attempt}-{env.rank}", "")
        return attempt
    attempt = f"attempt-{secrets.token_hex(8)}"
    told: set[int] = set()
    waiting = set(range(1, env.size))
    end = time.monotonic() + timeout_s
    while waiting:
        for number in set(range(1, store.add("arrivals", 0) + 1)) - told:
            if store.check([f"arrival-{number}"]):
                told.add(number)
                other, size = json.loads(store.get(f"arrival-{number}"))
                if size == env.size:
                    store.set(f"attempt of {other}", attempt)
        waiting -= {rank for rank in waiting if store.check([f"{attempt}-{rank}"])}
        if time.monotonic() > end:
            raise _not_joined(sorted(waiting), env, timeout_s)
        time.sleep(0.02)
    return attempt


def _not_joined(missing: list[int], env: RankEnv, timeout_s: float) -> RankLostError:
    if len(missing) == 1:
        ranks = f"rank {missing[0]}"
    else:
        ranks = f"ranks {', '.join(map(str, missing))}"
    return RankLostError(
        f"{ranks} of {env.size} did not join within {timeout_s:g} s (--rank_timeout). Rerun with --resume auto."
    )


def _listening_store(env: RankEnv, listener: socket.socket, timeout: timedelta):
    port = listener.getsockname()[1]
    if env.is_local:
        host = "127.0.0.1"
    else:
        host = listener.getsockname()[0]
    return dist.TCPStore(
        host, port, env.size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def wait_for_ranks(env: RankEnv, store: dist.Store, timeout_s: float) -> None:
    """Returns on rank 0 when every rank has joined, on the others at once. RankLostError naming those that have not."""
    store.set(f"joined-{env.rank}", "")
    if env.rank:
        return
    end = time.monotonic() + timeout_s
    while missing := [rank for rank in range(env.size) if not store.check([f"joined-{rank}"])]:
        if time.monotonic() > end:
            raise _not_joined(missing, env, timeout_s)
        time.sleep(0.02)


def start_watchdog(
    env: RankEnv,
    store: dist.Store,
    address: str,
    timeout_s: float,
    stacks: Path | None,
    log_error: Callable[[str], None],
) -> Watchdog:
    """The started thread that notices a rank that is gone; see distributed/watchdog.py. Collective.
    `address`: this host's, see env.network_address. Raises RankLostError if rank 0 does not answer.
    """
    if env.rank == 0:
        listener = Watchdog.listen(address)
        token = secrets.token_hex(32)
        store.set("watch", json.dumps([address, listener.getsockname()[1], token]))
        watchdog = Watchdog(env, timeout_s, stacks, log_error, is_peer_failure, token, listener=listener)
    else:
        host, port, token = json.loads(store.get("watch"))
        watchdog = Watchdog(env, timeout_s, stacks, log_error, is_peer_failure, token, address=(host, port))
    watchdog.start()
    store.set_timeout(LONGEST_WAIT)
    return watchdog


def prepare_device(device: torch.device) -> str:
    """The backend to pass to `dist.init_process_group` for a device.

    One without collectives gets what FSDP2 misses on it and staged collectives. Raises PlanError if this torch's
    FSDP2 is not one that can be completed.
    """
    if device.type in COMMUNICATION:
        return COMMUNICATION[device.type]
    from finetune.torch_engine.parallel import device_shims, staged_gloo  # they import FSDP2, which takes half a second

    device_shims.install(device.type)
    staged_gloo.register(device.type)
    return staged_gloo.NAME


def init_process_group(env: RankEnv, store: dist.Store, address: str, device: torch.device, timeout_s: float) -> None:
    """Joins the default process group over the interface with this host's `address`."""
    if env.is_local:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")
    else:
        interface = interface_with(address)
        if interface:  # gloo alone would take whatever the host's name resolves to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend = prepare_device(device)
    if device.index is not None:
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("ranks", store),
        rank=env.rank,
        world_size=env.size,
        # The watchdog is first: it leaves the stacks.
        timeout=timedelta(seconds=timeout_s + GRACE_S),
    )


def destroy_process_group() -> None:
    dist.barrier()
    dist.destroy_process_group()


def is_peer_failure(error: BaseException) -> bool:
    """True if a collective failed because of another rank: gloo and the store raise plain RuntimeErrors."""
    words = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "gloo", "Broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


# Axes over which the ranks of a group differ.
GROUPS = {
    "data": ("dp_replicate", "dp_shard", "cp"),  # all that hold the same weights, or rows of the same weights
    "shard": ("dp_shard", "cp"),
    "replicate": ("dp_replicate",),
    "cp": ("cp",),
    "tp": ("tp",),
    "ep": ("ep",),
    "expert_shard": ("expert_shard", "cp"),  # all that hold rows of the same experts
    "expert_data": ("dp_replicate", "expert_shard", "cp"),  # and those that hold the same rows of them
    "pp": ("pp",),
    "pp backward": ("pp",),  # gradients travel in a group of their own, so that they never wait behind activations
    "pp wrap": ("pp",),  # interleaved, from the last stage to the first, which may be its neighbour too
    "pp wrap backward": ("pp",),
}
# And "embedding" (Megatron's name): the first and the last stage, which share a tied embedding table; "saving": all
# ranks, for a thread that writes a checkpoint while the steps use the others.
HEADER_SIZE = 10  # integers sent before a tensor whose shape the receiver does not know: dtype and shape
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)


@dataclass(frozen=True)
class ProcessGroups:
    """This rank, its device, and the collectives that the engine calls itself.

    Every method that communicates is collective; in a single process (`mesh` None) each returns what it was given.
    `process_groups`: {name in GROUPS: process group} of those with several members; `expert_mesh`: of FSDP2 beside
    expert parallelism.
    """

    rank: int = 0
    dims: ParallelDims = field(default_factory=ParallelDims)
    device: torch.device = torch.device("cpu")
    mesh: DeviceMesh | None = None
    process_groups: dict = field(default_factory=dict)
    expert_mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, env: RankEnv | None, dims: ParallelDims, device: torch.device, saves: bool = True) -> "ProcessGroups":
        """The groups of a run whose ranks have called init_process_group. Collective.
        `saves`: whether there are checkpoints, whose group speaks Gloo.
        """
        if env is None or env.size == 1:
            return cls(device=device)
        shape = (dims.pp, dims.dp_replicate, dims.shards, dims.tp)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp_replicate", "shard", "tp"))
        expert_mesh = None
        if dims.ep > 1:
            expert_mesh = _expert_mesh(dims, device)
        wanted = {n: axes for n, axes in GROUPS.items() if dims.ep > 1 or not {"ep", "expert_shard"} & {*axes}}
        groups = {name: _group(dims, env.rank, axes) for name, axes in wanted.items()}
        if dims.pp > 1:
            groups["embedding"] = _group(dims, env.rank, ("pp",), ends_only=True)
        if saves and dims.shards * dims.tp * dims.pp > 1:
            groups["saving"] = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
        groups = {name: group for name, group in groups.items() if group}
        return cls(env.rank, dims, device, mesh, groups, expert_mesh)

    @property
    def single_process(self) -> bool:
        return self.mesh is None

    def coordinate(self, axis: str) -> int:
        """This rank's coordinate on an axis of the degrees."""
        return self.dims.coordinates(self.rank)[axis]

    @property
    def data_rank(self) -> int:
        return self.dims.data_rank(self.rank)

    @property
    def is_data_leader(self) -> bool:
        return self.dims.is_data_leader(self.rank)

    @property
    def sharded(self) -> bool:
        return self.dims.shards > 1

    @property
    def divides_weights(self) -> bool:
        """True if no rank holds the full model."""
        return self.sharded or self.dims.tp * self.dims.pp > 1

    # ---- over all ranks

    def all_gather_scalars(self, numbers: list, over: str = "world") -> np.ndarray:
        """[world_size, len(numbers)] float64: every rank's numbers. `over`: a group of all ranks."""
        mine = torch.tensor([numbers], dtype=torch.float64)
        if self.single_process:
            return mine.numpy()
        rows = torch.zeros(self.dims.world_size, len(numbers), dtype=torch.float64)
        rows[self.rank] = mine
        dist.all_reduce(rows, group=self._all_ranks(over))
        return rows.numpy()

    def sum_scalars(self, numbers: list) -> np.ndarray:
        """[len(numbers)] float64: their sums over ranks, in rank order."""
        return self.all_gather_scalars(numbers).sum(0)

    def all_reduce_max(self, number: float) -> float:
        return self.all_gather_scalars([number]).max()

    def broadcast_object(self, value: Any, rank: int = 0):
        """One rank's JSON value, on every rank."""
        if self.single_process:
            return value
        return self.all_gather_object(value if self.rank == rank else None)[rank]

    def all_gather_object(self, value: Any, over: str = "world") -> list:
        """Every rank's JSON value, by rank. `over`: a group of all ranks."""
        if self.single_process:
            return [value]
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = self.all_gather_scalars([len(mine)], over)[:, 0].astype(int)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = torch.from_numpy(mine.copy())
        found = self.all_gather(padded, over)
        return [json.loads(t[:n].numpy().tobytes()) for t, n in zip(found, sizes, strict=True)]

    def broadcast_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Rank 0's arrays by name, on every rank. Those that other ranks give are not read."""
        if self.single_process:
            return arrays
        found = {}
        described = [[name, list(array.shape), str(array.dtype)] for name, array in arrays.items()]
        for name, shape, dtype in self.broadcast_object(described):
            array = np.ascontiguousarray(arrays[name]) if self.rank == 0 else np.empty(shape, dtype)
            dist.broadcast(torch.from_numpy(array), 0)
            found[name] = array
        return found

    def all_gather(self, tensor: torch.Tensor, over: str = "world") -> list[torch.Tensor]:
        """Every rank's tensor of this shape, by rank. `over`: a group of all ranks."""
        if self.single_process:
            return [tensor]
        return _all_gather(tensor, self.dims.world_size, self._all_ranks(over))

    def _all_ranks(self, over: str):
        if over == "world":
            return None
        return self.process_groups[over]

    # ---- within a group

    def all_reduce(self, tensor: torch.Tensor, group: str) -> torch.Tensor:
        """Sums `tensor` in place over a group."""
        if group in self.process_groups:
            dist.all_reduce(tensor, group=self.process_groups[group])
        return tensor

    def place(self, group: str) -> tuple[int, int]:
        """(this rank's index in a group, the group's size)."""
        members = self.dims.group(self.rank, *GROUPS[group])
        return members.index(self.rank), len(members)

    def local_rows(self, num_rows: int, group: str = "shard") -> slice:
        """This rank's rows of `num_rows`: ceil(num_rows / shards), fewer or none on the last ranks, as torch.chunk
        splits.
        """
        index, shards = self.place(group)
        each = -(-num_rows // shards)
        return slice(min(index * each, num_rows), min((index + 1) * each, num_rows))

    def all_gather_rows(self, shard: torch.Tensor, num_rows: int, group: str = "shard") -> torch.Tensor:
        """The full tensor of `num_rows` rows from the shards of this rank's shard group, on the CPU."""
        shard = shard.detach().cpu()
        if group not in self.process_groups:
            return shard
        shards = self.place(group)[1]
        each = -(-num_rows // shards)
        if len(shard) < each:
            shard = torch.cat([shard, shard.new_zeros(each - len(shard), *shard.shape[1:])])
        full = shard.new_empty(each * shards, *shard.shape[1:])
        dist.all_gather(list(full.split(each)), shard.contiguous(), group=self.process_groups[group])
        return full[:num_rows]

    def tp_slice(self, size: int) -> slice:
        """This rank's slice of a dimension of `size` that is sharded over its tensor-parallel group."""
        each = size // self.dims.tp
        return slice(self.coordinate("tp") * each, (self.coordinate("tp") + 1) * each)

    def tp_all_gather(self, shard: torch.Tensor, dim: int) -> torch.Tensor:
        """The full tensor from the shards along `dim` of this rank's tensor-parallel group."""
        return torch.cat(self.all_gather_group(shard, "tp"), dim)

    def all_gather_group(self, tensor: torch.Tensor, group: str) -> list[torch.Tensor]:
        """The tensors of this shape of a group's ranks, in order."""
        if group not in self.process_groups:
            return [tensor]
        return _all_gather(tensor, self.place(group)[1], self.process_groups[group])

    def send_to_rank0(self, tensor: torch.Tensor | None, stage: int) -> torch.Tensor | None:
        """CPU tensor of a pipeline stage's first rank, on rank 0; the other ranks get their own back."""
        source = self.dims.rank_at({axis: 0 for axis in AXES} | {"pp": stage})
        if source == 0 or self.rank not in (0, source):
            return tensor
        if self.rank == source:
            assert tensor is not None, "the rank that owns a parameter has it"
            shape = [*tensor.shape, *[-1] * (HEADER_SIZE - 1 - tensor.ndim)]
            dist.send(torch.tensor([DTYPES.index(tensor.dtype), *shape]), 0)
            dist.send(tensor.contiguous(), 0)
            return tensor
        header = torch.empty(HEADER_SIZE, dtype=torch.int64)
        dist.recv(header, source)
        dtype, *shape = header.tolist()
        received = torch.empty([n for n in shape if n >= 0], dtype=DTYPES[dtype])
        dist.recv(received, source)
        return received


def _all_gather(tensor: torch.Tensor, size: int, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered


def _expert_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """The ranks by the experts that they hold: those of one context-parallel group hold rows of the same ones."""
    ranks = torch.arange(dims.world_size).view(dims.pp, dims.dp_replicate, -1, dims.ep, dims.cp)
    ranks = ranks.transpose(-2, -1).reshape(dims.pp, dims.dp_replicate, dims.expert_shards, dims.ep)
    return DeviceMesh(device.type, ranks, mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep"))


def _group(dims: ParallelDims, rank: int, axes: tuple, ends_only: bool = False):
    """The process group of the ranks that differ from `rank` on `axes` only; None if that is `rank` itself.

    `ends_only`: of these, the first and the last. Every rank creates all groups in the same order, as torch requires.
    """
    mine = None
    for members in sorted({tuple(dims.group(other, *axes)) for other in range(dims.world_size)}):
        if len(members) > 1:
            if ends_only:
                members = (members[0], members[-1])
            group = dist.new_group(members)
            mine = group if rank in members else mine
    return mine


SINGLE_PROCESS = ProcessGroups()
