"""Layers of an MLX model that get an adapter, and adding them. Names, shapes and starts are the torch engine's."""

import mlx.core as mx

from finetune.adapters import start
from finetune.adapters.modules import inside
from finetune.adapters.patterns import scaling_of
from finetune.adapters.targets import default_targets, in_layers, named_targets
from finetune.errors import PlanError
from finetune.mlx_engine.layers import recompute
from finetune.mlx_engine.lora import DropoutKeys, LoRALinear
from finetune.mlx_engine.model import MLXModel
from finetune.parts.trains import Adapter


def target_names(linears: dict[str, str], targets: str) -> list[str]:
    """Names of the linears that get an adapter: all, default, comma-separated endings, or a regex on full names."""
    names = list(linears)
    if targets == "all":
        return names
    if targets == "default":
        return default_targets(names)
    return named_targets(names, targets, "the MLX engine adapts no layer of that name in this model")


def add_adapters(loaded: MLXModel, adapter: Adapter) -> DropoutKeys:
    """Adds an adapter to each targeted linear; the keys of their dropout."""
    linears = loaded.linears()
    init = adapter.init
    names = in_layers(target_names(linears, adapter.targets), list(linears), adapter.last_layers, adapter.layers)
    names = [name for name in names if not inside(name, loaded.saved)]
    if not names:
        raise PlanError(
            f"--model_name: mlx-lm rebuilds every linear of {loaded.model.model_type} while loading, so none can be "
            "adapted under its own name. Use --backend cpu."
        )
    adapter.check_names(names)
    keys = DropoutKeys(len(names))
    for number, name in enumerate(names):
        base = loaded.module(linears[name])
        own = adapter.at(name)
        scaling = scaling_of(own.rank, own.alpha, own.rslora)
        layer = LoRALinear(base, own.rank, scaling, own.dropout, keys, number)
        in_features = layer.lora_A.shape[1]
        layer.lora_A = mx.array(start.initial_a(name, own.rank, in_features, init.facts.is_gaussian, init.seed))
        if adapter.dora:
            layer.start_magnitude()
        layer.freeze()
        layer.unfreeze(recurse=False)
        loaded.replace(linears[name], layer)
    return keys


def set_recomputation(loaded: MLXModel) -> None:
    """Every block recomputes its activations in backward."""
    for layer in loaded.layers:
        recompute(layer)
