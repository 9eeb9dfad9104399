"""8-bit moments of real ranks: saved over one layout, loaded over the same and over others."""

import json
from pathlib import Path

import numpy as np
import torch

from finetune.config import TrainConfig
from finetune.distributed.env import RankEnv
from finetune.eight_bit import BLOCK, MAPS, by_name, dequantized, saved_shards
from finetune.estimate.memory import optimizer_bytes, part_of
from finetune.estimate.model_cost import ModelCost
from finetune.estimate.model_shape import ModelShape
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.torch_engine import optim
from finetune.torch_engine.parallel import process_groups
from tests.support import cases, engine_access

KIND = "full adamw_8bit"


def built(rank: int, size: int, layout: str):
    dims = cases.LAYOUTS[layout] if layout else ParallelDims()
    groups = process_groups.SINGLE_PROCESS
    if size > 1:
        groups = process_groups.ProcessGroups.of(RankEnv(rank, size), dims, cases.DEVICE)
    return cases.build(cases.CASES[KIND], groups, stages=4)


def local_state(engine) -> dict[str, np.ndarray]:
    params = engine_access.local_params(engine)
    return {key: t.numpy().copy() for key, t in optim.moments(engine_access.optimizer(engine), params)}


def save(rank: int, size: int, layout: str, folder: str) -> dict:
    """Two steps over a layout, saved to `folder` and loaded again: {"bitwise": whether each rank's moments are those it
    had, and a further step is the same; "held", "predicted": bytes of moments}.
    """
    first = built(rank, size, layout)
    for step in range(2):
        first.train_step(cases.rank_batches(first, cases.rows_of_step(step)), 1e-3)
    tensors, values = first.optimizer_state()
    trainable, rng = first.trainable_state(), first.rng_state()
    if rank == 0:
        np.savez(Path(folder) / "moments.npz", **tensors)
        np.savez(Path(folder) / "weights.npz", **trainable)
        np.savez(Path(folder) / "rng.npz", **rng)
        (Path(folder) / "values.json").write_text(json.dumps(values))
    if size > 1:
        torch.distributed.barrier()
    second = built(rank, size, layout)
    load(second, folder)
    held, again = local_state(first), local_state(second)
    same = held.keys() == again.keys() and all(np.array_equal(held[key], again[key]) for key in held)
    batches = cases.rank_batches(first, cases.rows_of_step(2))
    results = [engine.train_step(batches, 1e-3) for engine in (first, second)]
    dims = first.groups.dims
    shape = ModelShape.from_config(first.model.config.to_dict()).known
    shape = shape if dims.tp == 1 else part_of(shape, dims.tp, 1)
    m = ModelCost(shape, Parts(TrainConfig(train_type="full", optimizer="adamw_8bit", precision="fp32")))
    held_bytes = sum(array.nbytes for key, array in held.items() if key.rpartition(".")[2] not in MAPS)
    return {
        "bitwise": same,
        "next": results[0] == results[1],
        "held": held_bytes,
        "predicted": optimizer_bytes(m, dims.shards),
        "sharded_names": sum(key.endswith(".pieces") for key in tensors),
    }


def load(engine, folder: str) -> None:
    saved = [dict(np.load(Path(folder) / f"{name}.npz")) for name in ("weights", "moments", "rng")]
    values = json.loads((Path(folder) / "values.json").read_text())
    engine.load_state(saved[0], saved[1], values, saved[2])


def loaded(rank: int, size: int, layout: str, folder: str) -> dict:
    """What was saved by another layout, loaded: {"worst": largest difference of a moment from the saved one, over the
    stated bound of its block; "moved": whether any differs; "weights": number of weights with 8-bit moments}.
    """
    engine = built(rank, size, layout)
    load(engine, folder)
    saved, place = dict(np.load(Path(folder) / "moments.npz")), engine.parallel.placement
    of_names, here = by_name(saved), local_state(engine)
    worst, moved, weights = 0.0, False, 0
    for name in (key.removesuffix(".absmax1") for key in here if key.endswith(".absmax1")):
        weights += 1
        of_name = of_names[engine.state.checkpoint_key(name)]
        for number in "12":
            levels = of_name[f"qmap{number}"]
            full = dequantized(of_name, number, saved_shards(of_name), levels)
            expected = place.take_local(name, full).reshape(-1)
            scales = np.repeat(here[f"{name}.absmax{number}"], BLOCK)[: expected.size]
            found = levels[here[f"{name}.state{number}"].reshape(-1)] * scales
            # Half of the largest distance of two codes, and what the lowest one lacks to -1.
            bound = max(np.diff(levels).max() / 2, 1 - abs(levels[0]) if levels[0] < 0 else 0.0) * scales
            off = np.abs(found - expected)
            worst = max(worst, float((off / np.maximum(bound, 1e-30)).max()))
            moved = moved or bool(off.max() > 0)
    finite = np.isfinite(engine.train_step(cases.rank_batches(engine, cases.rows_of_step(2)), 1e-3).nll)
    return {"worst": worst, "moved": moved, "weights": weights, "finite": bool(finite)}
