"""What each rank does in the tests of checkpoints in parts: trains, saves, takes up, and compares with gathered tensors."""

import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from finetune import checkpoint, parts, rundir
from finetune.errors import StorageError
from finetune.parallel import ParallelDims
from finetune.plan import RunPlan, TrainState
from finetune.ranks import World
from finetune.torch_engine import mesh
from tests import cells

IDENTITY = {"base model": "a", "dataset": "b"}


def ranks_of(rank: int, size: int, layout: str) -> mesh.Ranks:
    dims = ParallelDims() if layout == "alone" else cells.LAYOUTS[layout]
    return mesh.Ranks.of(World(rank, size if layout != "alone" else 1), dims, cells.CPU)


def directory(engine, folder: Path, resumed: bool = False) -> rundir.RunDir:
    settings = dataclasses.replace(engine.settings, output_dir=str(folder), keep_last=3)
    plan = RunPlan(settings, {}, (), (), "cpu", "torch", engine.ranks.dims)
    kind = rundir.OnlookerDir if engine.rank else rundir.RunDir
    return kind(plan, resumed)


def steps(engine, number: int, first: int = 0) -> list[float]:
    """Losses of so many steps; each rank takes its rows."""
    losses = []
    for step in range(first, first + number):
        rows = np.arange(step * cells.ROWS_A_STEP, (step + 1) * cells.ROWS_A_STEP)
        mine = cells.rank_rows(rows, engine.ranks.data_rank, engine.ranks.dims.data_ranks)
        batches = cells.microbatches(cells.DATA, mine, engine.layout, 8, 60, 0)
        result = engine.train_step(batches, 1e-3)
        losses.append(result.nll / result.num_targets)
    return losses


def gathered(engine) -> dict:
    """Weights and moments, whole, on the first rank."""
    weights, (moments, _) = engine.trainable_state(), engine.optimizer_state()
    return {k: np.array(v) for k, v in (weights | moments).items()}


def save(engine, folder: Path, step: int = 2) -> list[str]:
    """Saves the engine's present state; lines that were told."""
    run = directory(engine, folder)
    told = run.settle_parts(engine)
    run.save_step(engine, TrainState(step=step, total_steps=9), IDENTITY, {"config.json": {}}, 0)
    if engine.rank == 0:
        run.lock.release()
    return told


def take_up(engine, folder: Path) -> None:
    run = directory(engine, folder, resumed=True)
    saved, _ = run.find_checkpoint(None)
    state, _ = run.restore(engine, saved, IDENTITY)
    assert state.step == 2
    if engine.rank == 0:
        run.lock.release()


def saved_as(rank: int, size: int, layouts: list, folder: str, architecture: str = "llama") -> list[dict]:
    """Trains two steps on each layout and saves; beside it the gathered tensors and the loss of the step after."""
    found = []
    for layout in layouts:
        engine = cells.build("full", ranks_of(rank, size, layout), architecture)
        steps(engine, 2)
        place = Path(folder) / layout
        told, whole = save(engine, place), gathered(engine)
        if rank == 0:
            save_file(whole, place / "gathered.safetensors")
        after = steps(engine, 1, 2)
        last = gathered(engine)
        if rank == 0:
            save_file(last, place / "after.safetensors")
        found.append({"layout": layout, "told": told, "loss": after[0]})
    return found


def taken_up_as(rank: int, size: int, pairs: list, folder: str, architecture: str = "llama") -> list[dict]:
    """For each (saved on, taken up on): whether all tensors are bitwise those saved, and the next step's loss and tensors."""
    found = []
    for saved_on, layout in pairs:
        if layout == "alone" and rank:
            continue
        place = Path(folder) / saved_on
        engine = cells.build("full", ranks_of(rank, size, layout), architecture)
        take_up(engine, place)
        whole = gathered(engine)
        entry = {"pair": [saved_on, layout]}
        if rank == 0:
            entry["same"] = equal(whole, load_file(place / "gathered.safetensors"))
        entry["loss"] = steps(engine, 1, 2)[0]
        last = gathered(engine)
        if rank == 0:
            entry["same after"] = equal(last, load_file(place / "after.safetensors"))
        found.append(entry)
    return found


def both(rank: int, size: int, layouts: list, pairs: list, folder: str, architecture: str = "llama") -> list:
    return [
        saved_as(rank, size, layouts, folder, architecture),
        taken_up_as(rank, size, pairs, folder, architecture),
    ]


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)
