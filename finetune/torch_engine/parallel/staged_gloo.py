# mypy: disable-error-code="override,assignment"
# The stubs of ProcessGroup name and overload the collectives as no version of torch calls them.
"""`staged_gloo`, a process group for devices without collectives: it copies to host memory, calls Gloo, copies back.

torch.distributed has no collectives for MPS tensors (pytorch#160732). On Apple silicon host and device share one
memory, so the copies cost bandwidth only. Before each collective the ranks exchange what they are about to do, since
Gloo ends the process, or returns wrong numbers, where shapes differ.
"""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from finetune.torch_engine.parallel.staging import Receiving, Staged, StagedWork, StagingBuffers

NAME = "staged_gloo"
CHUNK_BYTES = 8 * 2**20  # a larger tensor is copied while its first chunks are already on the network
DIAGNOSIS_S = 5.0  # how long a failed rank waits for the others to say what they were doing
DTYPES = sorted({str(t) for t in vars(torch).values() if isinstance(t, torch.dtype)})
OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "send",
)
HEADER_NUMBERS = 6
# in place of a header's number of elements
OF_SPLITS = -1
WRONG_SIZE = -2


class CollectiveError(dist.DistBackendError):
    """A collective that failed: what each rank was doing, and which ranks do not answer."""


def register(*device_types: str, copies_cpu: bool = False) -> None:
    """Makes `dist.init_process_group("staged_gloo")` and `dist.new_group(backend="staged_gloo")` work.

    The group serves these devices and the CPU, whose tensors go to Gloo as they are. `copies_cpu`: CPU tensors are
    staged too, to measure the cost of staging.
    """
    devices = [*dict.fromkeys([*device_types, "cpu"])]

    def create(options: Any, _: object):
        store = options.store
        rank = options.group_rank
        size = options.group_size
        group = StagedGloo(store, rank, size, options.timeout, devices, list(options.global_ranks_in_group))
        group.buffers.copies_cpu = copies_cpu
        return group

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices)


def is_staged(group: object) -> bool:
    """True for a group whose collectives are staged."""
    return isinstance(group, StagedGloo)


class StagedGloo(dist.ProcessGroup):
    """The process group. Method names and arguments are those that torch.distributed calls, old and new."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, devices: list, global_ranks: list):
        super().__init__(rank, size)  # type: ignore[call-arg]  # a second constructor, which the stubs lack
        self.store = store
        self.timeout = timeout
        self.devices = devices
        self.global_ranks = global_ranks or list(range(size))
        # Gloo's threads end with the group, on request, or before the interpreter does, which would abort otherwise.
        self.held = [dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)]
        weakref.finalize(self, self.held.clear)
        self.buffers = StagingBuffers()
        self.num_operations = 0
        self.last_receive: dict[tuple[int, int], Receiving] = {}  # {(source, tag): the Receiving asked for last}
        self.names = {"name": "", "description": ""}

    def getBackendName(self) -> str:
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    # torch keeps a group's name and description in its backends, and this group registers none.
    def setGroupName(self, name: str) -> None:
        self.names["name"] = name

    def getGroupName(self) -> str:
        return self.names["name"]

    def setGroupDesc(self, description: str) -> None:
        self.names["description"] = description

    def getGroupDesc(self) -> str:
        return self.names["description"]

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _get_backend(self, device: torch.device):
        return self.gloo

    @property
    def _device_types(self) -> list:
        return [torch.device(device) for device in self.devices]

    # torch collects the operations of a coalescing block itself and then calls one of the coalesced ones.
    def _start_coalescing(self, device: torch.device) -> None: ...

    def _end_coalescing(self, device: torch.device) -> StagedWork:
        return StagedWork(self.diagnosed, "nothing", [], [])

    @property
    def gloo(self):
        return self.held[0]

    def shutdown(self) -> None:
        """Ends Gloo's threads now; device meshes keep this object."""
        self.held.clear()

    abort = shutdown

    # ---- agreement and diagnosis

    def _agree(
        self,
        operation: str,
        tensors: list,
        others: Sequence = (),
        how: int = 0,
        root: int = -1,
        splits: Sequence[int] = (),
    ) -> str:
        """Exchanges what this rank is about to do with every other; the operation in words. Collective.

        `others`: (tensor, elements it must have). `splits`: elements sent to each rank, then those expected of each.
        Raises CollectiveError on every rank.
        """
        self.num_operations += 1
        if not splits:
            num_elements = sum(t.numel() for t in tensors)
        else:
            num_elements = OF_SPLITS
        wrong = [(t, n) for t, n in others if t.numel() != n]
        if wrong:
            num_elements = WRONG_SIZE
        dtype = 0
        if tensors:
            dtype = DTYPES.index(str(tensors[0].dtype))
        mine = np.zeros(HEADER_NUMBERS + 2 * self.size(), np.int64)
        mine[:HEADER_NUMBERS] = OPERATIONS.index(operation), self.num_operations, num_elements, dtype, how, root
        mine[HEADER_NUMBERS : HEADER_NUMBERS + len(splits)] = splits
        what = describe(mine)
        headers = torch.empty(self.size() * len(mine), dtype=torch.int64)
        try:
            self.gloo._allgather_base(headers, torch.from_numpy(mine)).wait()
        except RuntimeError as error:
            raise self.diagnosed(what, error) from None
        headers = headers.view(self.size(), -1).numpy()
        sent, expected = np.split(headers[:, HEADER_NUMBERS:], 2, 1)
        differ = (headers[:, :HEADER_NUMBERS] != headers[0, :HEADER_NUMBERS]).any()
        if differ or wrong or (sent != expected.T).any():
            said = "; ".join(f"rank {self.global_ranks[r]}: {describe(h)}" for r, h in enumerate(headers))
            raise CollectiveError(f"the ranks are not in the same collective: {said}. Every rank must call the same.")
        return what

    def diagnosed(self, what: str, error: RuntimeError) -> CollectiveError:
        """The error with what the other ranks were doing: those that failed too say so through the store."""
        told = []
        try:
            self.store.set(f"failed/{self.rank()}", what)
            if isinstance(error, CollectiveError):
                return error
            for rank in (r for r in range(self.size()) if r != self.rank()):
                told.append(f"rank {self.global_ranks[rank]} {self._fate_of(rank)}")
        except dist.DistError:
            told.append("the rank that hosts the store is gone")
        line = str(error).splitlines()[0].rpartition("] ")[2][:160]
        return CollectiveError(f"{what} failed on rank {self.global_ranks[self.rank()]} ({line}); " + "; ".join(told))

    def _fate_of(self, rank: int) -> str:
        try:
            self.store.wait([f"failed/{rank}"], timedelta(seconds=DIAGNOSIS_S))
        except RuntimeError:  # a FileStore raises no DistStoreError
            return f"does not answer: it ended, or did not call this collective within {self.timeout}"
        return f"failed in {self.store.get(f'failed/{rank}').decode()}"

    # ---- staging

    def _stage(self, tensors: list, copy_in: bool) -> list:
        return [Staged(self.buffers, t, copy_in) for t in tensors]

    def _post(self, call: Callable, inputs: list, outputs: list) -> tuple:
        """One Gloo operation over staged tensors: `call(host inputs, host outputs)`."""
        hosts = [[s.host for s in staged] for staged in (inputs, outputs)]
        assert all(t.device.type == "cpu" for part in hosts for t in part), "Gloo reads host memory only"
        return call(*hosts), inputs, outputs

    def _one(self, what: str, call: Callable, inputs: list, outputs: list) -> StagedWork:
        """An operation that reads `inputs` and writes `outputs`; tensors in both are updated in place."""
        staged_in = self._stage(inputs, True)
        by_tensor = {id(t): s for t, s in zip(inputs, staged_in, strict=True)}
        staged_out = [by_tensor.get(id(t)) or Staged(self.buffers, t, False) for t in outputs]
        return StagedWork(self.diagnosed, what, [self._post(call, staged_in, staged_out)], outputs)

    def _in_chunks(self, what: str, call: Callable, inputs: list, outputs: list, rows: list) -> StagedWork:
        """Collective as in `_one`, by column chunks of tensors viewed as matrices of `rows` rows each (1 or the size).
        Copying in a chunk overlaps with the transfer of earlier ones.
        """
        tensors = [*inputs, *(t for t in outputs if all(t is not i for i in inputs))]
        total = sum(t.nbytes for t in tensors)
        if total <= CHUNK_BYTES or not all(t.is_contiguous() for t in tensors):
            return self._one(what, call, inputs, outputs)
        if not any(self.buffers.stages(t) for t in tensors):
            return self._one(what, call, inputs, outputs)
        matrices = {id(t): t.detach().view(n, -1) for t, n in zip((*inputs, *outputs), rows, strict=True)}
        width = next(iter(matrices.values())).shape[1]
        step = max(1, width * CHUNK_BYTES // total)
        pieces = []
        for start in range(0, width, step):
            chunk = {key: m[:, start : start + step] for key, m in matrices.items()}
            staged_in = {id(t): Staged(self.buffers, chunk[id(t)], True) for t in inputs}
            staged_out = [staged_in.get(id(t)) or Staged(self.buffers, chunk[id(t)], False) for t in outputs]
            pieces.append(self._post(call, list(staged_in.values()), staged_out))
        return StagedWork(self.diagnosed, what, pieces, outputs)

    # ---- collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None, timeout: Any = None):
        opts = _reduce_options(dist.AllreduceOptions, opts)
        what = self._agree("all_reduce", tensors, how=_code(opts.reduceOp))
        return self._in_chunks(what, lambda i, _: self.gloo.allreduce([_flat(i[0])], opts), tensors, tensors, [1, 1])

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None):
        reduce = dist.AllreduceOptions()
        if opts:
            reduce.reduceOp = opts.reduceOp
        else:
            reduce.reduceOp = dist.ReduceOp.SUM
        return self._together([self.allreduce([t], reduce) for t in tensors])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None, timeout: Any = None):
        opts = _rooted(dist.BroadcastOptions, opts)
        what = self._agree("broadcast", tensors, root=opts.rootRank)
        return self._in_chunks(what, lambda i, _: self.gloo.broadcast([_flat(i[0])], opts), tensors, tensors, [1, 1])

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None, *_: object):
        opts = _rooted(dist.ReduceOptions, opts)
        what = self._agree("reduce", tensors, how=_code(opts.reduceOp), root=opts.rootRank)
        outputs = []
        if self.rank() == opts.rootRank:
            outputs = tensors
        return self._one(what, lambda i, _: self.gloo.reduce(i, opts), tensors, outputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None):
        what = self._agree("all_gather", [tensor], [(output, self.size() * tensor.numel())])

        def call(i: list[torch.Tensor], o: list[torch.Tensor]):
            return self.gloo._allgather_base(_flat(o[0]), _flat(i[0]))

        return self._in_chunks(what, call, [tensor], [output], [1, self.size()])

    def allgather(
        self, output_lists: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None, *_: object
    ):
        what = self._agree("all_gather", tensors, [(t, tensors[0].numel()) for t in output_lists[0]])
        return self._one(what, lambda i, o: self.gloo.allgather([o], i), tensors, output_lists[0])

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ):
        by_tensor = list(zip(*output_lists, strict=True))
        return self._together([self.allgather([list(o)], [t]) for o, t in zip(by_tensor, tensors, strict=True)])

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None):
        return self._together([self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)])

    def gather(self, output_lists: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None, *_: object):
        opts = _rooted(dist.GatherOptions, opts)
        outputs = []
        if output_lists:
            outputs = output_lists[0]
        what = self._agree("gather", tensors, [(t, tensors[0].numel()) for t in outputs], root=opts.rootRank)
        return self._one(what, lambda i, o: self.gloo.gather([o] if o else [], i, opts), tensors, outputs)

    def scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any = None, *_: object):
        opts = _rooted(dist.ScatterOptions, opts)
        inputs = []
        if input_lists:
            inputs = input_lists[0]
        what = self._agree("scatter", outputs, [(t, outputs[0].numel()) for t in inputs], root=opts.rootRank)
        return self._one(what, lambda i, o: self.gloo.scatter(o, [i] if i else [], opts), inputs, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None):
        opts = _reduce_options(dist.ReduceScatterOptions, opts)
        sizes = [(tensor, self.size() * output.numel())]
        what = self._agree("reduce_scatter", [output], sizes, how=_code(opts.reduceOp))

        def call(i: list[torch.Tensor], o: list[torch.Tensor]):
            return self.gloo._reduce_scatter_base(_flat(o[0]), _flat(i[0]), opts)

        return self._in_chunks(what, call, [tensor], [output], [self.size(), 1])

    def reduce_scatter(
        self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any = None, *_: object
    ):
        opts = _reduce_options(dist.ReduceScatterOptions, opts)
        sizes = [(t, outputs[0].numel()) for t in input_lists[0]]
        what = self._agree("reduce_scatter", outputs, sizes, how=_code(opts.reduceOp))
        return self._one(what, lambda i, o: self.gloo.reduce_scatter(o, [i], opts), input_lists[0], outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ):
        pairs = zip(outputs, inputs, strict=True)
        return self._together([self.reduce_scatter_single(o, i, opts) for o, i in pairs])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ):
        """Splits are in rows; none: equal ones."""
        sent, expected = (
            [n * max(1, t[:1].numel()) for n in splits] if splits else [t.numel() // self.size()] * self.size()
            for t, splits in ((tensor, input_splits), (output, output_splits))
        )
        what = self._agree("all_to_all", [tensor], splits=(*sent, *expected))

        def call(i: list[torch.Tensor], o: list[torch.Tensor]):
            return self.gloo.alltoall_base(o[0], i[0], list(output_splits), list(input_splits))

        return self._one(what, call, [tensor], [output])

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None):
        """One tensor for each rank, one from each."""
        flat = torch.cat([t.detach().reshape(-1) for t in inputs])
        received = flat.new_empty(sum(t.numel() for t in outputs))
        splits = [t.numel() for t in outputs]
        work = self.all_to_all_single(received, flat, splits, [t.numel() for t in inputs])
        work.wait()
        for output, part in zip(outputs, received.split(splits), strict=True):
            output.detach().copy_(part.view(output.shape))
        return work

    def barrier(self, opts: Any = None, timeout: Any = None):
        return StagedWork(self.diagnosed, self._agree("barrier", []), [], [])

    def _together(self, works: list) -> StagedWork:
        pieces = [piece for work in works for piece in work.pieces]
        return StagedWork(
            self.diagnosed, works[0].what if works else "nothing", pieces, [t for w in works for t in w.outputs]
        )

    # ---- point to point: the header travels as a message of its own, before the tensor

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0):
        header = self._message(tensors[0])
        header_work = self.gloo.send([header], to, 2 * tag)
        what = f"send of {describe_tensor(header)} to rank {self.global_ranks[to]}"
        work = self._one(what, lambda i, _: self.gloo.send(i, to, 2 * tag + 1), tensors, [])
        work.pieces.insert(0, (header_work, [], []))
        return work

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0):
        mine = self._message(tensors[0])
        theirs = torch.empty(2, dtype=torch.int64)
        header = self.gloo.recv([theirs], source, 2 * tag)
        what = f"recv of {describe_tensor(mine)} from rank {self.global_ranks[source]}"

        def receive(_: object, outputs: list[torch.Tensor]):
            def check():
                header.wait()
                if not torch.equal(mine, theirs):
                    raise CollectiveError(f"{what}: it sent {describe_tensor(theirs)}. Send what is received.")

            def post():
                return self.gloo.recv(outputs, source, 2 * tag + 1)

            last = self.last_receive.get((source, tag))
            self.last_receive[source, tag] = receiving = Receiving(check, post, last)
            return receiving

        return self._one(what, receive, [], tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0):
        raise CollectiveError(f"recv from any rank: {NAME} does not support it. Name the source.")

    @staticmethod
    def _message(tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor([tensor.numel(), DTYPES.index(str(tensor.dtype))])

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def describe(header: np.ndarray) -> str:
    """An exchanged header in words."""
    operation, number, num_elements, dtype, how, root = header[:HEADER_NUMBERS].tolist()
    words = f"{OPERATIONS[operation]} number {number}"
    if OPERATIONS[operation] in ("all_reduce", "reduce", "reduce_scatter"):
        words += f" ({REDUCTIONS[how]})"
    if num_elements >= 0:
        words += f" of {num_elements} {DTYPES[dtype].removeprefix('torch.')}"
    elif num_elements == WRONG_SIZE:
        words += " with inputs and outputs of sizes that do not belong together"
    else:
        half = (len(header) - HEADER_NUMBERS) // 2
        sent = header[HEADER_NUMBERS:][:half]
        expected = header[HEADER_NUMBERS + half :]
        words += f" sending {sent.tolist()}, expecting {expected.tolist()}"
    return words + (f" with root {root}" if root >= 0 else "")


def describe_tensor(message: torch.Tensor) -> str:
    num_elements, dtype = message.tolist()
    return f"{num_elements} {DTYPES[dtype].removeprefix('torch.')}"


REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "UNUSED")


def _code(reduction: Any) -> int:
    names = [name for name in REDUCTIONS if reduction == getattr(dist.ReduceOp, name, None)]
    if names:
        return REDUCTIONS.index(names[0])
    return len(REDUCTIONS) - 1


def _reduce_options(kind: type, opts: Any):
    """Options of a reduction, given as such, as a ReduceOp, or not at all (SUM)."""
    return _options(kind, opts, "reduceOp", dist.ReduceOp.SUM)


def _rooted(kind: type, opts: Any):
    """Options of an operation with a root, given as such, as the root, or not at all (rank 0)."""
    return _options(kind, opts, "rootRank", 0)


def _options(kind: type, opts: Any, name: str, default):
    if isinstance(opts, kind):
        return opts
    options = kind()
    setattr(options, name, default if opts is None else opts)
    return options


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)
