"""Names of weights: on disk those of transformers and PEFT; a path is the place of a weight in the MLX model.

A weight that mlx-lm rebuilds while loading has a path and no name.
"""

import re
from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from finetune.adapters.formats import PREFIX
from finetune.adapters.targets import in_layers, is_in_layers, layer_of
from finetune.errors import PlanError
from finetune.mlx_engine.experts import AdaptedExperts, owner_of, peft_names
from finetune.mlx_engine.layers import leaves
from finetune.mlx_engine.lora import LoRALinear
from finetune.parts.trains import AllWeights


def names_on_disk(read: dict[str, mx.array], sanitized: dict[str, mx.array]) -> dict[str, str]:
    """{path: name on disk} of the arrays that mlx-lm's `sanitize` left as they were read."""
    names = {id(array): name for name, array in read.items()}
    return {path: names[id(array)] for path, array in sanitized.items() if id(array) in names}


def check_names(model: Any, weights: dict, said: str) -> None:
    """Raises PlanError if the weights are not those of the model."""
    wanted = {path: tuple(a.shape) for path, a in leaves(model.parameters())}
    found = {path: tuple(a.shape) for path, a in weights.items()}
    odd = sorted(wanted.items() ^ found.items())
    if odd:
        path = odd[0][0]
        if path not in wanted:
            fact = "in the files, and the model has none"
        elif path not in found:
            fact = f"{wanted[path]} in the model, and not in the files"
        else:
            fact = f"{found[path]} in the files, {wanted[path]} in the model"
        raise PlanError(
            f"{said}: {len({p for p, _ in odd})} weights do not fit mlx-lm's {model.model_type}, such as {path}: "
            f"{fact}. Use --backend cpu."
        )


def weight_names(loaded: Any, trains: AllWeights) -> dict[str, str]:
    """{name on disk: path} of the weights of an MLXModel that train. PlanError if one has no name of its own on disk,
    or none is in the chosen layers.
    """
    count = len(loaded.layers)

    def is_trained(name: str) -> bool:
        return is_in_layers(name, count, trains.last_layers, trains.layers)

    paths = [path for path, _ in leaves(loaded.model.parameters())]
    renamed = sorted(path for path in paths if path not in loaded.names and is_trained(path))
    if renamed:
        raise PlanError(
            f"--train_type full: mlx-lm rebuilds {len(renamed)} weights of {loaded.model.model_type} while loading, "
            f"such as {renamed[0]}, so a checkpoint could not name them. Use --train_type lora, or --backend cpu."
        )
    names = in_layers(list(loaded.names.values()), list(loaded.names.values()), trains.last_layers, trains.layers)
    found = {name: path for path, name in loaded.names.items()}
    return {name: found[name] for name in names}


def adapter_names(loaded: Any) -> dict[str, str]:
    """{PEFT's key: path} of every adapter parameter of an MLXModel."""
    by_path = {}
    found = {}
    for path, name in loaded.names.items():
        by_path[path.removesuffix(".weight")] = name.removesuffix(".weight")
    for path, module in loaded.model.named_modules():
        if isinstance(module, LoRALinear):
            for leaf in ("lora_A", "lora_B", "lora_magnitude_vector"):
                if leaf in module:
                    suffix = ".weight" if leaf[-2] == "_" else ""
                    found[f"{PREFIX}{by_path[path]}.{leaf}{suffix}"] = f"{path}.{leaf}"
        elif isinstance(module, AdaptedExperts):
            names = peft_names(path, module, owner_of(path, loaded.model.model_type))
            found |= {PREFIX + name: own for name, own in names.items()}
    return found


def adapted_experts(loaded: Any) -> list[str]:
    """Names of the fused weights of experts that have an adapter, in the order of the layers."""
    modules = dict(loaded.model.named_modules())
    adapted = {path: module for path, module in modules.items() if isinstance(module, AdaptedExperts)}
    owners = {path: owner_of(path, loaded.model.model_type) for path in adapted}
    paths = sorted(adapted, key=lambda path: layer_of(owners[path]) or 0)
    return [f"{owners[path]}.{weight}" for path in paths for weight in adapted[path].pairs()]


def adapted_names(adapter_keys: Iterable[str]) -> list[str]:
    """Names of the linears that these adapter parameters, under PEFT's keys, belong to."""
    return sorted({re.sub(r"\.lora_\w+(\.weight)?$", "", key.removeprefix(PREFIX)) for key in adapter_keys})
