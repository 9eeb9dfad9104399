"""What ranks run to compare staged collectives with Gloo's own: see tests/torch_engine/parallel/test_staged_gloo.py."""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from finetune.torch_engine.parallel import staged_gloo
from tests.support import emulated_device

REDUCTIONS = ("SUM", "MIN", "MAX", "PRODUCT")
REDUCED = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
COPIED = (*REDUCED, torch.bool, torch.int8)


def staged_group(device: str = "emulated", timeout_s: float = 60.0):
    if device == emulated_device.NAME:
        emulated_device.load()
    staged_gloo.register(device)
    return dist.new_group(backend=staged_gloo.NAME, timeout=timedelta(seconds=timeout_s))


def random_operations(rank: int, size: int, count: int, seed: int) -> dict:
    """Each operation twice, with the same values: staged on the device, and by Gloo on the CPU. {operation: times}."""
    staged, plain, seen = staged_group(), dist.group.WORLD, {}
    same, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1000 * seed + rank)
    for number in range(count):
        name = list(OPERATIONS)[number % len(OPERATIONS)]
        pick = lambda n: int(torch.randint(n, (), generator=same))  # noqa: E731  the same on every rank
        dtypes = REDUCED if "reduce" in name else COPIED
        dtype = dtypes[pick(len(dtypes))]
        shape = [[pick(5) + 1, pick(40) + 1], [pick(3000) + 1], [], [0, 3]][pick(4)]
        if name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):
            shape = shape or [pick(7) + 1]
        values = torch.randint(0, 4, [size, *shape], generator=own).to(dtype)
        if dtype.is_floating_point:
            values += torch.rand(values.shape, generator=own).to(dtype)
        arguments = {"op": getattr(dist.ReduceOp, REDUCTIONS[pick(4)]), "root": pick(size), "shape": shape}
        arguments["noncontiguous"] = len(shape) == 2 and pick(3) == 0
        results = []
        for group, device in ((staged, emulated_device.NAME), (plain, "cpu")):
            results.append([t.cpu() for t in OPERATIONS[name](values.to(device), group, rank, size, arguments)])
        for mine, oracle in zip(*results, strict=True):
            assert torch.equal(mine, oracle), (name, dtype, shape, arguments, mine, oracle)
        seen[name] = seen.get(name, 0) + 1
    return seen


def _tensor(values, arguments):
    return values[0].t().contiguous().t() if arguments["noncontiguous"] and values.device.type != "cpu" else values[0]


def all_reduce(values, group, rank, size, a):
    tensor = _tensor(values, a).clone(memory_format=torch.preserve_format)
    work = dist.all_reduce(tensor, a["op"], group, async_op=True)
    work.wait()
    return [tensor]


def broadcast(values, group, rank, size, a):
    tensor = _tensor(values, a).clone(memory_format=torch.preserve_format)
    dist.broadcast(tensor, a["root"], group)
    return [tensor]


def reduce(values, group, rank, size, a):
    tensor = values[0].clone()
    dist.reduce(tensor, a["root"], a["op"], group)
    return [tensor] if rank == a["root"] else []


def all_gather(values, group, rank, size, a):
    outputs = [torch.empty_like(values[0]) for _ in range(size)]
    dist.all_gather(outputs, values[0], group)
    return outputs


def all_gather_single(values, group, rank, size, a):
    output = torch.empty_like(values).flatten(0, 1)
    dist.all_gather_into_tensor(output, values[0], group)
    return [output]


def gather(values, group, rank, size, a):
    outputs = [torch.empty_like(values[0]) for _ in range(size)] if rank == a["root"] else None
    dist.gather(values[0], outputs, a["root"], group)
    return outputs or []


def scatter(values, group, rank, size, a):
    output = torch.empty_like(values[0])
    dist.scatter(output, list(values) if rank == a["root"] else None, a["root"], group)
    return [output]


def reduce_scatter(values, group, rank, size, a):
    output = torch.empty_like(values[0])
    dist.reduce_scatter(output, list(values), a["op"], group)
    return [output]


def reduce_scatter_single(values, group, rank, size, a):
    output = torch.empty_like(values[0])
    dist.reduce_scatter_tensor(output, values.flatten(0, 1), a["op"], group)
    return [output]


def all_to_all_single(values, group, rank, size, a):
    """Rank r sends r + s + 1 rows to rank s, as far as it has so many."""
    rows = [values[0].reshape(-1)[:1].expand(rank + s + 1) for s in range(size)] if values[0].numel() else None
    if rows is None:
        return []
    tensor = torch.cat(rows)
    output = tensor.new_empty(sum(rank + s + 1 for s in range(size)))
    splits = [rank + s + 1 for s in range(size)]
    dist.all_to_all_single(output, tensor, splits, splits, group)
    return [output]


def send_and_receive(values, group, rank, size, a):
    """Each rank sends to the next and receives from the one before, all posted at once."""
    received = torch.empty_like(values[0])
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, values[0], (rank + 1) % size, group),
            dist.P2POp(dist.irecv, received, (rank - 1) % size, group),
        ]
    )
    for work in works:
        work.wait()
    return [received]


def objects(values, group, rank, size, a):
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank, "shape": list(values.shape)}, group)
    told = [values.tolist() if rank == a["root"] else None]
    dist.broadcast_object_list(told, a["root"], group)
    assert [f["rank"] for f in found] == list(range(size))
    return [torch.tensor(told[0])]


OPERATIONS = {
    function.__name__: function
    for function in (
        all_reduce,
        broadcast,
        reduce,
        all_gather,
        all_gather_single,
        gather,
        scatter,
        reduce_scatter,
        reduce_scatter_single,
        all_to_all_single,
        send_and_receive,
        objects,
    )
}


def large_tensors(rank: int, size: int) -> list[int]:
    """Tensors of several chunks through every operation that has them; the number of staging buffers afterwards."""
    group = staged_group()
    staged_gloo.CHUNK_BYTES = 2**16
    own = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randint(0, 100, [size, 50_001], generator=own).to(dtype)
        for name in ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single"):
            arguments = {"op": dist.ReduceOp.SUM, "root": 1, "noncontiguous": False}
            mine, oracle = (
                OPERATIONS[name](values.to(device), g, rank, size, arguments)[0].cpu()
                for g, device in ((group, emulated_device.NAME), (dist.group.WORLD, "cpu"))
            )
            assert torch.equal(mine, oracle), name
    assert group.buffers.free_bytes == sum(b.numel() for free in group.buffers.free.values() for b in free) <= 2**26
    return [len(free) for free in group.buffers.free.values()]


def failing(rank: int, size: int, case: str, folder: str) -> dict:
    """What a rank raises, and after how long, if rank 1 does something else than the others."""
    timeout_s = 4.0 if case == "late" else 60.0
    group, began, odd = staged_group(timeout_s=timeout_s), time.monotonic(), rank == 1
    x = torch.ones(12 if odd and case == "shape" else 10, device=emulated_device.NAME)
    try:
        if case == "shape":
            dist.all_reduce(x, group=group)
        elif case == "dtype":
            dist.all_reduce(x.half() if odd else x, group=group)
        elif case == "reduction":
            dist.all_reduce(x, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group)
        elif case == "operation":
            dist.broadcast(x, 0, group=group) if odd else dist.all_reduce(x, group=group)
        elif case == "output":
            dist.all_gather_into_tensor(x.new_empty(size * 10 + odd), x, group=group)
        elif case == "message":
            dist.send(x, 1, group) if rank == 0 else dist.recv(x[:5], 0, group) if odd else None
        elif case == "splits":
            dist.all_to_all_single(x.new_empty(10), x, [3, 7], [7, 3], group=group)
        elif case == "late":
            time.sleep(6.0 if odd else 0.0)
            dist.all_reduce(x, group=group)
        elif case == "dead":
            if odd:  # leaves without a word
                leave(folder, rank, {"error": None})
            dist.all_reduce(x, group=group)
    except RuntimeError as error:
        found = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
        if case in ("dead", "message", "late"):
            time.sleep(0.5)  # the others read what this rank said
            leave(folder, rank, found)
        return found
    return {"error": None}


def disagreeing(rank: int, size: int, cases: list, folder: str) -> dict:
    """What a rank raises in each case, each in a group of its own."""
    return {case: failing(rank, size, case, folder) for case in cases}


def messages_of_one_tag(rank: int, size: int, rounds: int, count: int) -> int:
    """Rank 0 sends `count` messages of one shape and tag, rank 1 posts all receives first; messages out of order."""
    group, swapped = staged_group(), 0
    for _ in range(rounds):
        tensors = [torch.full((5,), float(n), device=emulated_device.NAME) for n in range(count)]
        received = [torch.empty_like(t) for t in tensors]
        if rank == 0:
            works = [dist.isend(t, 1, group) for t in tensors]
        else:
            works = [dist.irecv(t, 0, group) for t in received]
        for work in works:
            work.wait()
        swapped += rank * sum(not torch.equal(a.cpu(), b.cpu()) for a, b in zip(received, tensors, strict=True))
    return swapped


def leave(folder: str, rank: int, result: dict) -> None:
    """Ends this rank with its result, without a word to the others."""
    Path(folder, f"result-{rank}.json").write_text(json.dumps(result))
    os._exit(0)


def plain_gloo(rank: int, size: int) -> str | None:
    """What Gloo raises for a tensor of the device."""
    emulated_device.load()
    try:
        dist.all_reduce(torch.ones(2, device=emulated_device.NAME))
    except RuntimeError as error:
        return type(error).__name__
