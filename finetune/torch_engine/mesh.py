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

from finetune.parallel import ParallelDims
from finetune.ranks import Watch, World, tell_port, wait_for_port

COMMUNICATION = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
LONGEST_WAIT = timedelta(days=1)  # for rank 0's plan: it may be downloading a model


def meet(world: World):
    """The store through which ranks exchange words before they train. Rank 0 opens it, the others find it."""
    if world.launcher == "ours":
        if world.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, world.size, True, LONGEST_WAIT, wait_for_workers=False)
            tell_port(world, store.port)
            return store
        world = wait_for_port(world)
        return dist.TCPStore("127.0.0.1", world.port, world.size, False, LONGEST_WAIT)
    os.environ.setdefault("MASTER_ADDR", world.host)
    os.environ.setdefault("MASTER_PORT", str(world.port))
    store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=LONGEST_WAIT))
    # torchrun's store outlives a restart: what the ranks before wrote there must not be read again.
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def watch(world: World, store, timeout_s: float, stacks, speak) -> Watch:
    """The started thread that notices a rank that is gone; see finetune/ranks.py."""
    if world.rank == 0:
        listener = Watch.listen()
        host = "127.0.0.1" if world.size == world.local_size else os.environ["MASTER_ADDR"]
        store.set("watch", json.dumps([host, listener.getsockname()[1]]))
        started = Watch(world, timeout_s, stacks, speak, peer_is_gone, listener=listener)
    else:
        address = tuple(json.loads(store.get("watch")))
        started = Watch(world, timeout_s, stacks, speak, peer_is_gone, address=address)
    started.start()
    return started


def join(world: World, store, device: torch.device, timeout_s: float) -> None:
    """Makes this process a member of the group of all ranks. Loopback where all are on this machine."""
    if world.size == world.local_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")
    if device.type in COMMUNICATION:
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        COMMUNICATION.get(device.type, "gloo"), store=dist.PrefixStore("ranks", store), rank=world.rank,
        world_size=world.size, timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def peer_is_gone(error: BaseException) -> bool:
    """Whether a collective broke because of another rank: gloo and the store raise plain RuntimeErrors of their own words."""
    words = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Timed out waiting",
        "gloo",
        "Broken pipe",
    )
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


@dataclass(frozen=True)
class Ranks:
    """This rank among those of the run, with the collectives that the engine needs. `mesh` None: it is alone."""

    rank: int = 0
    dims: ParallelDims = field(default_factory=ParallelDims)
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, world: World | None, dims: ParallelDims, device: torch.device) -> "Ranks":
        """The ranks of a run whose processes have joined."""
        if world is None or world.size == 1:
            return cls()
        shape = (dims.dp_replicate, dims.dp_shard)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        return cls(world.rank, dims, mesh)

    @property
    def alone(self) -> bool:
        return self.mesh is None

    @property
    def data_rank(self) -> int:
        return self.dims.data_rank(self.rank)

    @property
    def sharded(self) -> bool:
        return self.dims.dp_shard > 1

    @property
    def shard_rank(self) -> int:
        return self.dims.coordinates(self.rank)["dp_shard"]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, with the sum over all data ranks in it."""
        if not self.alone:
            dist.all_reduce(tensor)
        return tensor

    def sum_over_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.sharded:
            dist.all_reduce(tensor, group=self.mesh.get_group("dp_shard"))
        return tensor

    def table(self, numbers: list) -> np.ndarray:
        """Every rank's numbers, a row a rank; float64."""
        mine = torch.tensor([numbers], dtype=torch.float64)
        if self.alone:
            return mine.numpy()
        rows = torch.zeros(self.dims.world_size, len(numbers), dtype=torch.float64)
        rows[self.rank] = mine
        dist.all_reduce(rows)
        return rows.numpy()

    def largest(self, number: float) -> float:
        return self.table([number]).max()

    def of_first(self, value):
        """Rank 0's JSON value, on every rank."""
        if self.alone:
            return value
        data = (
            np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
            if self.rank == 0
            else np.zeros(0, np.uint8)
        )
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0)
        content = torch.from_numpy(data) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return json.loads(content.numpy().tobytes())

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor of this shape, in their order."""
        if self.alone:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.dims.world_size)]
        dist.all_gather(found, tensor)
        return found

    # ---- rows of sharded tensors

    def rows_of(self, rows: int, shard_rank: int | None = None) -> slice:
        """Which of `rows` a rank holds: ceil(rows / ranks) each, fewer or none on the last ones, as torch.chunk cuts."""
        each, at = -(-rows // self.dims.dp_shard), self.shard_rank if shard_rank is None else shard_rank
        return slice(min(at * each, rows), min((at + 1) * each, rows))

    def whole(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """The tensor of `rows` rows that the ranks of one shard group hold in parts, on the CPU. Collective."""
        part = part.detach().cpu()
        if not self.sharded:
            return part
        each = -(-rows // self.dims.dp_shard)
        padded = part.new_zeros(each, *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in range(self.dims.dp_shard)]
        dist.all_gather(parts, padded, group=self.mesh.get_group("dp_shard"))
        return torch.cat(parts)[:rows]


ALONE = Ranks()
