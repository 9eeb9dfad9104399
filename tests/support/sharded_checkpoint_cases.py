"""What each rank does in tests of sharded checkpoints: trains, saves, restores, compares with gathered tensors."""

import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from finetune.checkpoint import output_dir
from finetune.checkpoint.store import verify_checkpoint
from finetune.checkpoint.writer import CheckpointWriter
from finetune.config import TrainConfig
from finetune.distributed.env import RankEnv
from finetune.engine import Engine
from finetune.errors import CheckpointDamagedError, PlanError, StorageError
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.train_state import TrainState
from finetune.plan.run_plan import RunPlan, SavedRun
from finetune.torch_engine import memory_stats
from finetune.torch_engine.memory_stats import trim_heap
from finetune.torch_engine.parallel import process_groups
from tests.support import cases, engine_access, tiny
from tests.support.build import torch_engine


def groups_of(rank: int, size: int, layout: str) -> process_groups.ProcessGroups:
    dims = ParallelDims() if layout == "alone" else cases.LAYOUTS[layout]
    return process_groups.ProcessGroups.of(RankEnv(rank, size if layout != "alone" else 1), dims, cases.DEVICE)


def full_engine(rank: int, size: int, layout: str, architecture: str = "llama") -> Engine:
    """An engine of full fine-tuning on this layout."""
    return cases.build(cases.CASES["full"], groups_of(rank, size, layout), architecture)


def directory(engine, folder: Path, configs: dict) -> CheckpointWriter:
    """The checkpoints of a run that resumes from itself; `configs` are the files next to its weights."""
    settings = dataclasses.replace(engine.plan.settings, output_dir=str(folder), keep_last=3)
    dims, resumed = engine_access.process_groups(engine).dims, SavedRun(folder, {}, None)
    facts = dict(requested={}, adjustments=(), notices=(), backend="cpu", engine="torch")
    plan = RunPlan(settings=settings, dims=dims, resume_from=resumed, **facts)
    run = CheckpointWriter(plan, engine.rank)
    run.identity, run.configs = {"base model": "a", "dataset": "b"}, configs
    return run


def steps(engine, number: int, first: int = 0) -> list[float]:
    """Losses of this many steps; each rank takes its rows."""
    losses = []
    for step in range(first, first + number):
        result = engine.train_step(cases.rank_batches(engine, cases.rows_of_step(step)), 1e-3)
        losses.append(result.nll / result.num_targets)
    return losses


def gathered(engine) -> dict:
    """Full weights and moments, on the first rank."""
    weights, (moments, _) = engine.trainable_state(), engine.optimizer_state()
    return {k: np.array(v) for k, v in (weights | moments).items()}


def save(engine, folder: Path, step: int = 2) -> list[str]:
    """Saves the engine's state; returns the notes on where shards are written."""
    run = directory(engine, folder, {"config.json": {}})
    try:
        notes = run.check_shared_filesystem(engine)
        run.save_step(engine, TrainState(step=step, total_steps=9), 0)
    finally:
        if run.files:
            run.files.lock.release()
    return notes


def restore(engine, folder: Path) -> None:
    run = directory(engine, folder, {})
    saved, _ = run.find_checkpoint(None)
    state, _ = run.restore(engine, saved)
    assert state.step == 2
    if run.files:
        run.files.lock.release()


def saved_as(rank: int, size: int, layouts: list, folder: str, architecture: str = "llama") -> list[dict]:
    """Trains two steps on each layout and saves; with it the gathered tensors and the loss of the next step."""
    found = []
    for layout in layouts:
        engine = full_engine(rank, size, layout, architecture)
        steps(engine, 2)
        place = Path(folder) / layout
        notes, full = save(engine, place), gathered(engine)
        if rank == 0:
            save_file(full, place / "gathered.safetensors")
        after = steps(engine, 1, 2)
        last = gathered(engine)
        if rank == 0:
            save_file(last, place / "after.safetensors")
        found.append({"layout": layout, "notes": notes, "loss": after[0]})
    return found


def resumed_as(rank: int, size: int, pairs: list, folder: str, architecture: str = "llama") -> list[dict]:
    """For each (saved on, resumed on): whether all tensors are bitwise those saved, and the next step's."""
    found = []
    for saved_on, layout in pairs:
        if layout == "alone" and rank:
            continue
        place = Path(folder) / saved_on
        engine = full_engine(rank, size, layout, architecture)
        restore(engine, place)
        full = gathered(engine)
        entry = {"pair": [saved_on, layout]}
        if rank == 0:
            entry["same"] = equal(full, load_file(place / "gathered.safetensors"))
        entry["loss"] = steps(engine, 1, 2)[0]
        last = gathered(engine)
        if rank == 0 and (place / "after.safetensors").is_file():
            entry["same_after"] = equal(last, load_file(place / "after.safetensors"))
        found.append(entry)
    return found


def both(rank: int, size: int, layouts: list, pairs: list, folder: str, architecture: str = "llama") -> list:
    return [saved_as(rank, size, layouts, folder, architecture), resumed_as(rank, size, pairs, folder, architecture)]


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def faults(rank: int, size: int, folder: str) -> dict:
    """A rank whose writes fail: what all ranks raise. Then one that does not see the folder: notes and files."""
    engine = full_engine(rank, size, "FSDP2 2")
    steps(engine, 1)
    root = Path(folder) / "full"
    save(engine, root, step=1)
    found, limits = {}, resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # the kernel refuses bytes past this, as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        save(engine, root, step=2)
    except StorageError as error:
        found["error"], found["code"] = str(error), error.exit_code
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["left"] = sorted(p.name for p in (root / "checkpoints").iterdir())
    save(engine, root, step=3)
    elsewhere = Path(folder) / ("host 0" if rank == 0 else "host 1")
    found["notes"] = save(engine, elsewhere, step=1)
    full = gathered(engine)
    if rank == 0:
        step = verify_checkpoint(elsewhere / "checkpoints" / "step-1")
        found["files"] = sorted(step.manifest["files"])
        found["same"] = equal(full, step.tensors(output_dir.FULL) | step.tensors(output_dir.MOMENTS))
    return found


def beside_steps(rank: int, size: int, folder: str) -> dict:
    """Saves of threads while a step is taken: whether they are what was held before it. Then a rank whose thread cannot
    write: what all ranks raise.
    """
    found = {}
    for layout in ("FSDP2 2", "TP 2", "PP 2", "DDP 2"):
        engine = full_engine(rank, size, layout)
        steps(engine, 2)
        root, full = Path(folder) / layout, gathered(engine)
        run = directory(engine, root, {})
        run.check_shared_filesystem(engine)
        run.begin_save(engine, TrainState(step=2, total_steps=9), 0)
        loss = steps(engine, 1, 2)
        ended = run.end_save(engine, wait=True)
        found[layout] = {"loss": loss, "ended": [None if run.end_save(engine, wait=False) is None else 1, ended[0]]}
        if rank == 0:
            step = verify_checkpoint(ended[1])
            found[layout]["same"] = equal(full, step.tensors(output_dir.FULL) | step.tensors(output_dir.MOMENTS))
    engine = full_engine(rank, size, "FSDP2 2")
    steps(engine, 1)
    limits, run = resource.getrlimit(resource.RLIMIT_FSIZE), directory(engine, Path(folder) / "FSDP2 2", {})
    run.check_shared_filesystem(engine)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    run.begin_save(engine, TrainState(step=3, total_steps=9), 0)
    try:
        while run.end_save(engine, wait=False) is None:
            steps(engine, 1, 1)
    except StorageError as error:
        found["error"], found["code"] = str(error), error.exit_code
    found["left"] = sorted(p.name for p in (Path(folder) / "FSDP2 2" / "checkpoints").iterdir())
    return found


def hashed_shares(rank: int, size: int, folder: str) -> dict:
    """What each rank reads to resume from a checkpoint, and what all say of one whose files are damaged in turn. Then
    each rank has a copy of its own, of which rank 1's newest is damaged.
    """
    engine, root = full_engine(rank, size, "FSDP2 2"), Path(folder) / "shared"
    steps(engine, 1)
    for step in (1, 2):
        save(engine, root, step)
    newest = root / "checkpoints" / "step-2"
    found = {"bytes": sum(f.stat().st_size for f in newest.iterdir()), "said": {}}
    before = bytes_read()
    found["whole"] = resumable(engine, root)
    found["read"] = bytes_read() - before
    for file in sorted(f.name for f in newest.iterdir()):
        with damaged(engine, newest / file):
            found["said"][file] = resumable(engine, root)
    own = Path(folder) / f"host {rank}"
    shutil.copytree(root, own)
    with damaged(engine, own / "checkpoints/step-2/optimizer-rank00000.safetensors", by=1):
        found["own"] = resumable(engine, own)
    return found


def bytes_read() -> int:
    """By this process so far, from the page cache too."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@contextlib.contextmanager
def damaged(engine, file: Path, by: int = 0):
    """One bit of a file is another while the block runs on all ranks; rank `by` sees to it."""
    engine.all_gather_object(None)
    data = file.read_bytes()
    engine.all_gather_object(None)
    if engine.rank == by:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    engine.all_gather_object(None)
    yield
    engine.all_gather_object(None)
    if engine.rank == by:
        file.write_bytes(data)


def resumable(engine, folder: Path) -> list:
    """[step, *lines] that a resumed run finds; the error that it ends with."""
    run, lines = directory(engine, folder, {}), []
    try:
        saved = run._checkpoint_of_all_ranks(engine, run.plan.resume_from, lines.append)
    except (CheckpointDamagedError, PlanError) as error:
        return [error.exit_code, str(error)]
    finally:
        if run.files:
            run.files.lock.release()
    return [saved and saved.step, *lines]


def killed_while_saving(rank: int, size: int, folder: str) -> None:
    """Rank 1 is killed when its first file of the second checkpoint is written and not yet on disk."""
    engine = full_engine(rank, size, "FSDP2 2")
    steps(engine, 2)
    save(engine, Path(folder), step=2)
    full = gathered(engine)
    if rank == 0:
        save_file(full, Path(folder) / "gathered.safetensors")
    steps(engine, 1, 2)
    if rank == 1:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    save(engine, Path(folder), step=3)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


class Peak(threading.Thread):
    """The most anonymous memory of this process while the block runs, above what it was before."""

    def __enter__(self):
        self.before = self.most = anonymous_bytes()
        self.ending = threading.Event()
        self.start()
        return self

    def run(self):
        while not self.ending.wait(0.0005):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_):
        self.ending.set()
        self.join()
        self.above = self.most - self.before


def memory(rank: int, size: int, layout: str, folder: str) -> dict:
    """Bytes that saving takes on this rank above what it holds: sharded, gathered, and for the published model."""
    model = tiny.build(
        vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8
    )
    settings = dataclasses.replace(TrainConfig(), precision="fp32", train_type="full", lr=1e-3)
    engine = torch_engine(model, settings, cases.DEVICE, ranks=groups_of(rank, size, layout))
    engine.verify("auto")
    steps(engine, 1)
    # Blocks of 1 MiB and more go back to the system when they are freed.
    memory_stats.map_blocks_from(2**20)
    trim_heap()
    full_bytes = {
        n: int(np.prod(engine_access.full_shape(engine, n))) * 4 for n in engine_access.trainable_names(engine)
    }
    run = directory(engine, Path(folder) / layout, {})
    run.check_shared_filesystem(engine)
    found = {"model": sum(full_bytes.values()), "largest": max(full_bytes.values())}
    found["own"] = 3 * sum(p.nbytes for p in engine_access.local_params(engine).values() if p is not None)
    state = TrainState(step=1, total_steps=2)
    for how in ("sharded", "gathered"):
        run.in_parts = how == "sharded"
        trim_heap()
        with Peak() as peak:
            run.save_step(engine, state, 0)
        found[how] = peak.above
    trim_heap()
    with Peak() as peak:
        run.publish(engine, 1)
    found["published"] = peak.above
    run.in_parts = True
    run.save_step(engine, state, 0)
    engine_access.process_groups(engine).all_gather_scalars([0])
    engine_access.optimizer(engine).state.clear()  # as before the first step
    trim_heap()
    with Peak() as peak:
        run.restore(engine, run.find_checkpoint(None)[0])
    moments = [m for state in engine_access.optimizer(engine).state.values() for m in state.values() if m.ndim]
    found["restored"] = peak.above - sum(m.nbytes for m in moments)
    return found
