"""Bytes counted by item, and limits of the heap."""

import ctypes

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.data.collate import microbatches
from finetune.torch_engine import memory_stats
from finetune.torch_engine.callers_settings import callers_settings
from tests.support import tiny
from tests.support.engine_access import counted_weights, optimizer, trainable_params
from tests.support.engines import batches, engine, gradients
from tests.support.planned import engine_of, settings_of


def test_memory_is_counted_by_item(device):
    built = engine(train_type="full", optimizer="adamw", device=device)
    built.train_step(batches(), 1e-3)
    items = built.memory().items
    weights = sum(p.numel() for p in built.model.parameters()) * 4
    buffers = sum(b.nbytes for b in built.model.buffers())
    assert items["trainable"] == weights and items["base"] == buffers
    # AdamW holds two moments per weight and a step counter of 4 bytes per tensor: on the device where it is fused.
    counters = sum(state["step"].device.type == device.type for state in optimizer(built).state.values())
    assert items["optimizer"] == 2 * weights + 4 * counters


def test_weights_are_counted_once_and_not_at_every_step(tmp_path):
    engine, layout = engine_of("llama", settings_of("lora"), tmp_path)
    rows = tiny.dataset()
    batches = microbatches(rows, range(4), layout, 4, 4096, 0)
    engine.train_step(batches, 1e-4)
    first, weights = engine.memory().items, counted_weights(engine)
    engine.train_step(batches, 1e-4)
    second = engine.memory().items
    assert counted_weights(engine) is weights
    names = ("base", "trainable", "gradients", "optimizer", "activations")
    assert [first[n] for n in names] == [second[n] for n in names]


@pytest.mark.parametrize("train_type", ["full", "lora", "qlora"])
def test_offload_copies_activations_and_no_weight(train_type, device):
    """Frozen weights were copied to the host and back at each use: 23 of 25 MiB."""
    built = engine(train_type=train_type, device=device)
    (batch,) = batches()
    wanted = gradients(built, [batch])
    weights = {t.untyped_storage().data_ptr() for t in (*built.model.parameters(), *built.model.buffers())}
    saved, copied = set(), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.add(t.untyped_storage().data_ptr()) or t, lambda t: t
    ):
        built.forward.nll(batch)
    assert saved & weights and saved - weights

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                copied.append(args[1].untyped_storage().data_ptr())
            return func(*args, **(kwargs or {}))

    with Copies(), memory_stats.offloaded(built.model, pinned=False):
        loss = built.forward.nll(batch) / batch.num_targets
    assert copied and not weights & set(copied)
    loss.backward()
    found = {n: p.grad for n, p in trainable_params(built).items() if p.grad is not None}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_activations_of_the_largest_microbatch_are_offloaded_too():
    """The hooks that count what a forward keeps hid those of the offload."""
    kept = {}
    for offloads in (False, True):
        built = engine(use_activation_cpu_offload=offloads)
        built.verify("auto")
        built.train_step(batches(), 1e-3)
        kept[offloads] = built.memory().items.get("activations", 0)
    assert kept[False] > 0 and not kept[True]


def test_what_a_forward_gives_back_is_not_kept(device):
    """Tensors that no graph needs any more, and gathered weights, whose storage FSDP2 empties until the backward."""
    built = engine(device=device)
    counter = memory_stats.MemoryCounter(built.model, trainable_params(built), device)
    (batch,) = batches()
    factor = torch.ones(1 << 16, device=device, requires_grad=True)
    gathered, kept = torch.ones(1 << 16, device=device), torch.ones(1 << 10, device=device)
    with counter.kept_by(batch):
        (factor * torch.ones(1 << 16, device=device)).sum()
        graph = (factor * gathered).sum() + (factor[: 1 << 10] * kept).sum()
        gathered.untyped_storage().resize_(0)
    assert counter.activations == kept.nbytes and graph.requires_grad


class MallInfo2(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")
        + ("fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def is_mapped(size: int) -> bool:
    """True if glibc maps a block of this size by itself.

    Free blocks of the heap serve a request before either happens, so blocks are taken until one is mapped or the heap
    itself grows.
    """
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo2
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    before = libc.mallinfo2()
    after = before
    blocks = []
    while after.hblks <= before.hblks and after.arena <= before.arena:
        blocks.append(libc.malloc(ctypes.c_size_t(size)))
        after = libc.mallinfo2()
    for block in blocks:
        libc.free(block)
    return after.hblks > before.hblks


@pytest.mark.skipif(memory_stats.glibc() is None, reason="needs glibc")
def test_a_call_within_a_run_leaves_the_run_s_heap_as_it_was():
    with callers_settings():
        memory_stats.keep_heap(low_memory=True)
        assert is_mapped(2**20)
        with callers_settings():
            memory_stats.keep_heap(low_memory=False)
            assert not is_mapped(2**20)
        assert is_mapped(2**20)
    assert not is_mapped(2**20) and is_mapped(2**26)


@pytest.mark.skipif(memory_stats.glibc() is None, reason="needs glibc")
def test_what_layers_are_gathered_into_is_mapped_where_weights_are_sharded():
    """Activations filled the hole of each gathered layer: a rank's heap grew by half of its memory."""
    with callers_settings():
        memory_stats.keep_heap(low_memory=False, sharded=True)
        assert is_mapped(2**23) and not is_mapped(2**21)
        memory_stats.keep_heap(low_memory=False)
        assert not is_mapped(2**23)
