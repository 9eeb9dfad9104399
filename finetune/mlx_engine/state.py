"""The engine's state in and out, under the torch engine's names and in its shapes: runs move between them."""

import json
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from finetune import safetensors_io
from finetune.adapters.config import adapter_config, base_record, shortest_targets
from finetune.adapters.formats import EXPERTS
from finetune.adapters.patterns import PREFIX
from finetune.adapters.targets import PEFT_EXPERT_NAMES
from finetune.checkpoint.store import replace_text
from finetune.eight_bit import by_name, of_one_shard
from finetune.errors import CheckpointDamagedError
from finetune.mlx_engine import saved_modules
from finetune.mlx_engine.layers import as_bits
from finetune.mlx_engine.model import MLXModel, left_in_files
from finetune.mlx_engine.names import adapted_experts, adapted_names, adapter_names, weight_names
from finetune.model_files.files import PROCESSOR_FILES, dtype_in
from finetune.model_files.rope_names import with_older_names
from finetune.optimizer_state import check_known, check_moments, check_trainable
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.trains import AllWeights, Trains
from finetune.system.files import replace

RNG = "mlx"


def trainable_paths(loaded: MLXModel, trains: Trains) -> dict[str, str]:
    """{name on disk: path} of what trains. PlanError if some weight has no name of its own on disk."""
    if isinstance(trains, AllWeights):
        return weight_names(loaded, trains)
    saved = saved_modules.paths_of(loaded, loaded.saved)
    return {**adapter_names(loaded), **{PREFIX + name: path for name, path in saved.items()}}


def tied_names(engine: Any) -> dict[str, str]:
    """{PEFT's key of a weight that is tied to a trained one: the trained one's}: PEFT keeps a copy of each module."""
    if engine.plan.all_weights:
        return {}
    trained = [name.removeprefix(PREFIX) for name in engine.params]
    found = saved_modules.tied_names(engine.loaded, trained)
    return {PREFIX + name: PREFIX + same for name, same in found.items()}


# ---- out


def values(engine: Any) -> dict:
    """The JSON values of the optimizer's state."""
    degrees = list(ParallelDims(dp_replicate=engine.ranks.size).mesh_shape)
    return {"counts": dict(engine.optimizer.counts), **engine.scaler.values(), "degrees": degrees}


def rng(engine: Any) -> dict[str, np.ndarray]:
    """Every rank's key, and the state of the framework that the run came from, which a move back takes up again."""
    keys = engine.ranks.gather(np.array(engine.key))
    if engine.rank:
        return {}
    names = [RNG if rank == 0 else f"rank{rank}.{RNG}" for rank in range(len(keys))]
    return {**engine.foreign_rng, **dict(zip(names, keys, strict=True))}


def describe(engine: Any, base_name: str, base_digest: str) -> dict[str, dict]:
    """{file: JSON} beside the weights."""
    if engine.plan.all_weights:
        return {"config.json": with_older_names(engine.base_config)}
    modules = {name.rpartition(".")[0] for name in engine.loaded.names.values()}
    parameters = adapted_experts(engine.loaded)
    owners = {name.rpartition(".")[0] for name in parameters}
    linears = [n for n in adapted_names(adapter_names(engine.loaded)) if n.removesuffix(".base_layer") not in owners]
    adapter = engine.plan.trains
    # PEFT takes such names for experts: by their .weight it does not.
    if engine.loaded.model.model_type in EXPERTS and not adapter.dora:
        shared = [name for name in linears if name.rpartition(".")[2] in PEFT_EXPERT_NAMES]
        linears = [name for name in linears if name not in shared]
        parameters += [f"{name}.weight" for name in shared]
    targets = shortest_targets(linears, modules)
    base = base_record(base_name, base_digest)
    changes: dict = {}
    if parameters:  # PEFT rejects dropout with target_parameters
        changes |= {"target_parameters": parameters, "lora_dropout": 0.0, **adapter.patterns(weights=True)}
    if adapter.trains_modules:
        changes["modules_to_save"] = saved_modules.words(engine.loaded, adapter)
    config = adapter_config(adapter, base_name, engine.plan.settings.revision, targets, **changes)
    return {"adapter_config.json": config, "base_model.json": base}


def write_model(engine: Any, folder: Path) -> None:
    """config.json and model.safetensors in the base's dtype, as transformers loads them; each renamed when complete.

    Tensors of the base's files that do not train, or that mlx-lm does not load, are copied.
    """
    if engine.rank:
        return
    config = engine.base_config
    word = dtype_in(config) or "float32"
    dtype, code = {"bfloat16": (mx.bfloat16, "BF16"), "float16": (mx.float16, "F16")}.get(word, (mx.float32, "F32"))
    tensors = [
        safetensors_io.TensorShard(name, code, tuple(p.shape), partial(_stored_bits, p, dtype))
        for name, p in engine.params.items()
    ]
    left = left_in_files(engine.loaded)
    tensors += left_in_files(engine.loaded, engine.params).values()
    with replace(folder / "model.safetensors") as file:
        safetensors_io.write_file(Path(file.name), tensors)
    replace_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    for name in PROCESSOR_FILES if left else ():
        if (engine.loaded.folder / name).is_file():
            replace_text(folder / name, (engine.loaded.folder / name).read_text(encoding="utf-8"))


def _stored_bits(array: mx.array, dtype: mx.Dtype) -> np.ndarray:
    return as_bits(array.astype(dtype))


# ---- in


def load(engine: Any, trainable: Mapping, optimizer: Mapping, numbers: dict, saved_rng: Mapping) -> None:
    """Loads a checkpoint of either engine. Raises PlanError if it does not match what trains here.

    Without a key of this engine, dropout is seeded from the other framework's state, and `reseeded` is set.
    """
    load_trainable(engine, trainable)
    shapes = {name: tuple(p.shape) for name, p in engine.params.items()}
    counts = numbers["counts"]
    check_known((*optimizer, *counts), shapes)
    check_moments(optimizer, counts, shapes, engine.plan.steps.optimizer, may_be_empty=numbers["scale"] is not None)
    moments = {key: np.asarray(value[...]) for key, value in optimizer.items()}
    for name, of_name in by_name(moments).items():
        moments = {key: array for key, array in moments.items() if key.rpartition(".")[0] != name}
        moments |= {f"{name}.{moment}": array for moment, array in of_one_shard(of_name).items()}
    engine.optimizer.load({key: mx.array(array) for key, array in moments.items()}, counts)
    engine.scaler.load(numbers)
    _load_rng(engine, {name: np.asarray(a) for name, a in saved_rng.items()})


def _load_rng(engine: Any, saved: dict) -> None:
    own = {name: a for name, a in saved.items() if name.rpartition(".")[2] == RNG}
    engine.foreign_rng = {name: a for name, a in saved.items() if name not in own}
    prefix = ""
    if engine.rank:
        prefix = f"rank{engine.rank}."
    engine.reseeded = len(own) != engine.ranks.size
    if not own and not engine.foreign_rng:
        raise CheckpointDamagedError("rng.safetensors: is empty")
    if engine.reseeded:
        first = next(iter(own.values()), None)
        if first is None:
            first = next(iter(engine.foreign_rng.values()))
        engine.seed(zlib.crc32(first.tobytes()))
        return
    key = own.get(prefix + RNG)
    if key is None or key.dtype != np.uint32 or key.shape != (2,):
        raise CheckpointDamagedError(f"rng.safetensors: {prefix}{RNG} is not a key of two uint32")
    engine.key = mx.array(key)


def load_trainable(engine: Any, trainable: Mapping) -> None:
    """Puts these weights into the model. Raises PlanError for other names or shapes than it trains."""
    tied = tied_names(engine)
    trainable = {name: array for name, array in trainable.items() if name not in tied}
    check_trainable({name: tuple(own.shape) for name, own in engine.params.items()}, trainable)
    engine.params = {name: mx.array(np.array(trainable[name][...], np.float32)) for name in engine.params}
    engine._put(engine.params)
