"""The ranks as torch sees them: how they meet, their mesh of devices, and the few collectives the engine calls itself.

Every collective here is called by all ranks of the run at the same point. With one rank each returns what it was given.
"""

import json
import os
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from finetune.distributed.env import RankEnv, network_interface
from finetune.distributed.launcher import GRACE_S, wait_for_port, write_port
from finetune.distributed.parallel_dims import AXES, ParallelDims
from finetune.distributed.watchdog import Watchdog

COMMUNICATION = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
LONGEST_WAIT = timedelta(days=1)  # for rank 0's plan: it may be downloading a model


def create_store(world: RankEnv):
    """The store through which ranks exchange words before they train. Rank 0 opens it, the others find it."""
    if world.launcher == "spawned":
        if world.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, world.size, True, LONGEST_WAIT, wait_for_workers=False)
            write_port(world, store.port)
            return store
        world = wait_for_port(world)
        return dist.TCPStore("127.0.0.1", world.port, world.size, False, LONGEST_WAIT)
    os.environ.setdefault("MASTER_ADDR", world.host)
    os.environ.setdefault("MASTER_PORT", str(world.port))
    store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=LONGEST_WAIT))
    # torchrun's store outlives a restart: what the ranks before wrote there must not be read again.
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def start_watchdog(world: RankEnv, store, timeout_s: float, stacks, speak) -> Watchdog:
    """The started thread that notices a rank that is gone; see finetune/ranks.py."""
    if world.rank == 0:
        listener = Watchdog.listen()
        host = "127.0.0.1" if world.size == world.local_size else os.environ["MASTER_ADDR"]
        store.set("watch", json.dumps([host, listener.getsockname()[1]]))
        started = Watchdog(world, timeout_s, stacks, speak, peer_is_gone, listener=listener)
    else:
        address = tuple(json.loads(store.get("watch")))
        started = Watchdog(world, timeout_s, stacks, speak, peer_is_gone, address=address)
    started.start()
    return started


def init_process_group(world: RankEnv, store, device: torch.device, timeout_s: float) -> None:
    """Makes this process a member of the group of all ranks. Loopback where all are on this machine."""
    if world.size == world.local_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")
    else:
        interface = network_interface(world, store, timeout_s)
        if interface:  # gloo alone would take whatever the host's name stands for
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if device.type in COMMUNICATION:
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        COMMUNICATION.get(device.type, "gloo"),
        store=dist.PrefixStore("ranks", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s + GRACE_S),  # the watch is first: it leaves the stacks
    )


def destroy_process_group() -> None:
    dist.barrier()
    dist.destroy_process_group()


def peer_is_gone(error: BaseException) -> bool:
    """Whether a collective broke because of another rank: gloo and the store raise plain RuntimeErrors of their own words."""
    words = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "gloo", "Broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


# Which ranks a collective is between, by the axes on which they differ.
GROUPS = {
    "data": ("dp_replicate", "dp_shard", "cp"),  # all that hold the same part of each weight or a row of it
    "shard": ("dp_shard", "cp"),
    "cp": ("cp",),
    "tp": ("tp",),
    "pp": ("pp",),
    "pp back": ("pp",),  # gradients travel in a group of their own, so that they never wait behind activations
}  # and "ends": the first and the last stage, of those that are one of the two
HEADER = 10  # numbers that go before a tensor whose shape the receiver does not know
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
    """This rank among those of the run, with the collectives that the engine needs. `mesh` None: it is alone.

    `groups`: {name in GROUPS: process group} of those with several members.
    """

    rank: int = 0
    dims: ParallelDims = field(default_factory=ParallelDims)
    device: torch.device = torch.device("cpu")
    mesh: DeviceMesh | None = None
    groups: dict = field(default_factory=dict)

    @classmethod
    def of(cls, world: RankEnv | None, dims: ParallelDims, device: torch.device) -> "ProcessGroups":
        """The ranks of a run whose processes have joined. Collective."""
        if world is None or world.size == 1:
            return cls(device=device)
        shape = (dims.pp, dims.dp_replicate, dims.shards, dims.tp)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp_replicate", "shard", "tp"))
        groups = {name: _group(dims, world.rank, axes) for name, axes in GROUPS.items()}
        if dims.pp > 1:
            groups["ends"] = _group(dims, world.rank, ("pp",), ends=True)
        return cls(world.rank, dims, device, mesh, {name: group for name, group in groups.items() if group})

    @property
    def alone(self) -> bool:
        return self.mesh is None

    def coordinate(self, axis: str) -> int:
        """This rank's place on an axis of the degrees."""
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

    def all_reduce(self, tensor: torch.Tensor, over: str) -> torch.Tensor:
        """`tensor`, with the sum over the ranks of a group in it."""
        if over in self.groups:
            dist.all_reduce(tensor, group=self.groups[over])
        return tensor

    def all_gather_scalars(self, numbers: list) -> np.ndarray:
        """Every rank's numbers, a row a rank; float64."""
        mine = torch.tensor([numbers], dtype=torch.float64)
        if self.alone:
            return mine.numpy()
        rows = torch.zeros(self.dims.world_size, len(numbers), dtype=torch.float64)
        rows[self.rank] = mine
        dist.all_reduce(rows)
        return rows.numpy()

    def all_reduce_max(self, number: float) -> float:
        return self.all_gather_scalars([number]).max()

    def broadcast_object(self, value, rank: int = 0):
        """The JSON value of one rank, on every rank."""
        return value if self.alone else self.all_gather_object(value if self.rank == rank else None)[rank]

    def all_gather_object(self, value) -> list:
        """Every rank's JSON value, in their order."""
        if self.alone:
            return [value]
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = self.all_gather_scalars([len(mine)])[:, 0].astype(int)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = torch.from_numpy(mine.copy())
        return [json.loads(t[:n].numpy().tobytes()) for t, n in zip(self.all_gather(padded), sizes, strict=True)]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor of this shape, in their order."""
        if self.alone:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.dims.world_size)]
        dist.all_gather(found, tensor)
        return found

    # ---- parts of weights

    def local_rows(self, rows: int) -> slice:
        """Which of `rows` this rank holds: ceil(rows / shards) each, fewer or none on the last ones, as torch.chunk cuts."""
        each, at = -(-rows // self.dims.shards), self.dims.shard_rank(self.rank)
        return slice(min(at * each, rows), min((at + 1) * each, rows))

    def all_gather_rows(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """The tensor of `rows` rows that the ranks of one shard group hold in parts, on the CPU. Collective."""
        part = part.detach().cpu()
        if not self.sharded:
            return part
        each = -(-rows // self.dims.shards)
        if len(part) < each:
            part = torch.cat([part, part.new_zeros(each - len(part), *part.shape[1:])])
        whole = part.new_empty(each * self.dims.shards, *part.shape[1:])
        dist.all_gather(list(whole.split(each)), part.contiguous(), group=self.groups["shard"])
        return whole[:rows]

    def tp_slice(self, size: int) -> slice:
        """Which part of a dimension this rank of a tensor-parallel group holds."""
        each = size // self.dims.tp
        return slice(self.coordinate("tp") * each, (self.coordinate("tp") + 1) * each)

    def tp_all_gather(self, piece: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensor whose pieces the ranks of one tensor-parallel group hold. Collective."""
        if self.dims.tp == 1:
            return piece
        pieces = [torch.empty_like(piece) for _ in range(self.dims.tp)]
        dist.all_gather(pieces, piece.contiguous(), group=self.groups["tp"])
        return torch.cat(pieces, dim)

    def send_to_rank0(self, tensor: torch.Tensor | None, stage: int) -> torch.Tensor | None:
        """On rank 0 the CPU tensor that the first rank of a pipeline stage has; others give theirs back. Collective."""
        source = self.dims.rank_at({axis: 0 for axis in AXES} | {"pp": stage})
        if source == 0 or self.rank not in (0, source):
            return tensor
        if self.rank == source:
            shape = [*tensor.shape, *[-1] * (HEADER - 1 - tensor.ndim)]
            dist.send(torch.tensor([DTYPES.index(tensor.dtype), *shape]), 0)
            dist.send(tensor.contiguous(), 0)
            return tensor
        header = torch.empty(HEADER, dtype=torch.int64)
        dist.recv(header, source)
        dtype, *shape = header.tolist()
        found = torch.empty([n for n in shape if n >= 0], dtype=DTYPES[dtype])
        dist.recv(found, source)
        return found


def _group(dims: ParallelDims, rank: int, axes: tuple, ends: bool = False):
    """The process group of the ranks that differ from `rank` on `axes` alone; None where that is itself alone.

    `ends`: only the first and the last of them. Every rank makes all such groups, in one order, as torch asks.
    """
    mine = None
    for members in sorted({tuple(dims.group(other, *axes)) for other in range(dims.world_size)}):
        if len(members) > 1:
            members = (members[0], members[-1]) if ends else members
            group = dist.new_group(members)
            mine = group if rank in members else mine
    return mine


SINGLE_PROCESS = ProcessGroups()
