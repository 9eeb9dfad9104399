"""One cell of simulate.py in a process of its own: python -m benchmarks.simulated_rank CELL CONFIG, both JSON."""

import contextlib
import gc
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._tools import fake_collectives  # noqa: F401  registers the collectives of fake tensors
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.simulate import Cell, dims_of, settings_of  # noqa: E402
from finetune.distributed.env import RankEnv  # noqa: E402
from finetune.objectives import Totals  # noqa: E402
from finetune.parts.parts import Parts  # noqa: E402
from finetune.quantizers import packing  # noqa: E402
from finetune.torch_engine.attention import per_document  # noqa: E402
from finetune.torch_engine.device import DTYPES, SIMULATED  # noqa: E402
from finetune.torch_engine.engine import TorchEngine  # noqa: E402
from finetune.torch_engine.experts import fused  # noqa: E402
from finetune.torch_engine.forward import Layout  # noqa: E402
from finetune.torch_engine.parallel import context, device_shims  # noqa: E402
from finetune.torch_engine.parallel.parallelize import parallelize  # noqa: E402
from finetune.torch_engine.parallel.process_groups import ProcessGroups  # noqa: E402
from finetune.torch_engine.simulated import Simulated, WithoutValues, register  # noqa: E402
from finetune.torch_engine.trace import batch_of, layout_of, tied  # noqa: E402
from finetune.torch_engine.weights import load  # noqa: E402
from finetune.torch_engine.weights.local_shards import LocalShards  # noqa: E402
from finetune.torch_engine.weights.stream import WeightLoader, assign_tensors  # noqa: E402

META = torch.device("meta")
# Collectives by the names of estimate.communication; the index of the argument that a rank passes.
COLLECTIVES = {
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
}
NO_LAUNCH = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "set_", "_unsafe_view")


class Counting(Simulated):
    """Also counts what a step launches, waits for and sends, and follows storages that FSDP2 resizes."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.peak, self.launches, self.waits, self.collectives = self.live, 0, 0, Counter()

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resize_(storage, size: int):
            out = resize(storage, size)
            if storage in self.known:
                self.resized(storage)
            return out

        self.undo = contextlib.ExitStack()
        self.undo.callback(setattr, torch.UntypedStorage, "resize_", resize)
        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *args):
        self.undo.close()
        return super().__exit__(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name in COLLECTIVES:
            kind, at = COLLECTIVES[name]
            tensors = [args[at]] if torch.is_tensor(args[at]) else torch.utils._pytree.tree_leaves(args[at])
            on_device = [t for t in tensors if t.device.type == SIMULATED]
            self.collectives[kind] += sum(t.nbytes for t in on_device)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        found = torch.utils._pytree.tree_leaves(out)
        given = [a for a in args if torch.is_tensor(a)]
        if name == "_to_copy" and given[0].device.type == SIMULATED and found[0].device.type == "cpu":
            self.waits += 1
        returns = func._schema.returns
        view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        there = any(torch.is_tensor(t) and t.device.type == SIMULATED for t in (*found, *given))
        self.launches += there and not view and name not in NO_LAUNCH and func.namespace != "c10d"
        return out


class MetaWeights:
    """The weight files of a model that has none: tensors on meta, by the names that the model has."""

    quantization, decoded, cut = {}, {}, {}

    def __init__(self, model):
        self.tensors = dict(model.state_dict())
        self.file_of = dict.fromkeys(self.tensors, Path("meta"))

    def shape(self, name: str) -> tuple:
        return tuple(self.tensors[name].shape)

    def kind(self, name: str) -> str:
        return "BF16"

    def read(self, name: str, index=None) -> torch.Tensor:
        tensor = self.tensors[name].to("meta")
        return (tensor if index is None else tensor[index]).contiguous()


class Shards(LocalShards):
    """This rank's part of every tensor, without values."""

    def __init__(self, groups: ProcessGroups, simulated: Simulated):
        super().__init__(groups, META)
        self.simulated = simulated

    def give(self, name: str, parameter, make) -> None:
        shape, dtype = parameter.shape, parameter.dtype
        super().give(name, parameter, lambda: torch.empty(shape, dtype=dtype, device="meta"))

    def take(self, parameter) -> torch.Tensor:
        return self.simulated.empty(super().take(parameter))

    def _to_meta(self, name: str, module, num_rows: int | None) -> None:
        for inner, part in module.named_modules(prefix=name):
            for leaf, old in part._parameters.items():
                full = tuple(old.shape) if num_rows is None else (num_rows, *old.shape[1:])
                new = torch.nn.Parameter(torch.empty(full, dtype=old.dtype, device="meta"), requires_grad=False)
                keep = self._keep_rows if num_rows is None else self._keep_first
                keep(f"{inner}.{leaf}", new, old.detach(), full[0])
                part._parameters[leaf] = new


def loaded(folder: Path, plan: Parts, groups: ProcessGroups, simulated: Simulated):
    """(the model as a rank loads it, its local shards; None in a single process)."""
    model = load.build_on_meta(folder, plan.precision, plan.parallel)
    layers = load.layers_of(model, folder, plan.trains)
    shards = Shards(groups, simulated) if groups.divides_weights else None
    dtype = DTYPES[plan.precision.weights]
    if shards is not None:
        shards.prepare(model)
        shards.source = (folder, None)
    weights = MetaWeights(model)
    tasks, _ = assign_tensors(model, weights, model.state_dict())
    quantized = load.quantized_weights(model, layers, plan)
    place = WeightLoader(model, weights, dtype, META, quantized, fused.hold, str(folder), shards)
    with packing.one_block_on_meta():
        for task in tasks:
            if place.wants(task):
                place(task)
    tied(model)
    for name in layers.experts if plan.quantization else ():
        fused.wrapped(model, name)
    with simulated.fake:
        for module in model.modules():
            module._buffers |= {
                n: b if b is None else torch.empty(b.shape, dtype=b.dtype, device=simulated.device)
                for n, b in module._buffers.items()
            }
    load.make_trainable(model, layers, plan, META, None, shards or WithoutValues())
    if shards is None:
        simulated.place(model)
    return model, shards


def local_bytes(tensors) -> int:
    """Of this rank's parts, shared ones once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if torch.is_tensor(t)]
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local if not t.is_meta}
    return sum(held.values())


def simulate(cell: Cell, folder: Path) -> dict:
    """{"peak", "items", "collectives", "launches", "waits", "seconds"} of rank 0's second step.

    "seconds": of one core, in all.
    """
    began, device = time.process_time(), register()
    torch.set_num_threads(1)
    plan, dims = Parts(settings_of(cell), dims_of(cell)), dims_of(cell)
    simulated, groups = Counting(device), ProcessGroups(device=device)
    if cell.ranks > 1:
        dist.init_process_group(f"cpu:fake,{SIMULATED}:fake", store=FakeStore(), rank=0, world_size=cell.ranks)
        groups = ProcessGroups.of(RankEnv(0, cell.ranks, 0, min(8, cell.ranks)), dims, device, saves=False)
    items = {}
    with simulated:
        if cell.ranks > 1:
            device_shims.install(SIMULATED)
        model, shards = loaded(folder, plan, groups, simulated)
        layout = layout_of(model)
        parallel = parallelize(model, plan, groups, shards)
        per_document.register()
        context.register()
        parallel.forward.shards_sequences = dims.cp > 1
        parallel.forward.use(Layout(layout == "padding_free", "", chunked_head=True))
        engine = TorchEngine(parallel, plan)
        batch = batch_of([cell.length] * cell.rows, layout)
        for _ in range(2):
            gc.collect()
            simulated.begin()
            model.train()
            engine._accumulate([batch], Totals((batch.num_targets,), None))
            parameters = parallel.reduce_gradients()
            items["gradients"] = local_bytes(p.grad for p in parameters.values())
            del parameters
            parallel.step()
            parallel.drop_gradients()
        states = engine.optimizer.state.values()
        items["optimizer"] = local_bytes(t for s in states for t in s.values() if torch.is_tensor(t) and t.ndim)
        items["trainable"] = local_bytes(p for p in model.parameters() if p.requires_grad)
        items["base"] = local_bytes(p for p in model.parameters() if not p.requires_grad)
    return {
        "peak": simulated.peak,
        "items": items,
        "collectives": dict(simulated.collectives),
        "launches": simulated.launches,
        "waits": simulated.waits,
        "seconds": time.process_time() - began,
    }


if __name__ == "__main__":
    cell = Cell(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(sys.argv[2])
        print(json.dumps(simulate(cell, Path(folder))))
