"""Layers of an MLX model that get an adapter, and adding them. Names, shapes and starts are the torch engine's."""

from collections.abc import Sequence

import mlx.core as mx

from finetune.adapters import start
from finetune.adapters.modules import inside
from finetune.adapters.patterns import scaling_of
from finetune.adapters.targets import (
    PEFT_EXPERT_NAMES,
    default_targets,
    in_layers,
    named_targets,
    one_for_experts,
    without_dora,
)
from finetune.errors import PlanError
from finetune.mlx_engine.experts import AdaptedExperts
from finetune.mlx_engine.layers import recompute
from finetune.mlx_engine.lora import DropoutKeys, LoRALinear
from finetune.mlx_engine.model import MLXModel
from finetune.parts.trains import Adapter


def target_names(linears: Sequence[str], experts: Sequence[str], targets: str) -> list[str]:
    """Names of the linears and fused weights of experts that get an adapter: all, default, comma-separated endings, or
    a regex on full names.
    """
    names = [*linears, *experts]
    if targets == "all":
        return names
    if targets == "default":
        return default_targets(list(linears))
    return named_targets(names, targets, "the MLX engine adapts no layer of that name in this model")


def add_adapters(loaded: MLXModel, adapter: Adapter) -> DropoutKeys:
    """Adds an adapter to each targeted linear and to targeted experts; the keys of their dropout. Raises PlanError."""
    linears = loaded.linears()
    experts = loaded.experts()
    chosen = target_names(list(linears), list(experts), adapter.targets)
    if adapter.dora:
        taken = [name for name in linears if experts and name.rpartition(".")[2] in PEFT_EXPERT_NAMES]
        chosen = without_dora(chosen, [*experts, *taken], adapter.targets)
    names = in_layers(chosen, [*linears, *experts], adapter.last_layers, adapter.layers)
    names = [name for name in names if not inside(name, loaded.saved)]
    if not names:
        raise PlanError(
            f"--model_name: mlx-lm rebuilds every linear of {loaded.model.model_type} while loading, so none can be "
            "adapted under its own name. Use --backend cpu."
        )
    adapter.check_names(names)
    keys = DropoutKeys(len(names))
    for number, name in enumerate(names):
        if name in linears:
            _adapt_linear(loaded, name, linears[name], adapter.at(name), keys, number)
    by_path: dict[str, list[str]] = {}
    for name in names:
        if name in experts:
            by_path.setdefault(experts[name], []).append(name)
    for path, weights in by_path.items():
        _adapt_experts(loaded, path, weights, adapter, keys)
    return keys


def _adapt_linear(loaded: MLXModel, name: str, path: str, adapter: Adapter, keys: DropoutKeys, number: int) -> None:
    init = adapter.init
    scaling = scaling_of(adapter.rank, adapter.alpha, adapter.rslora)
    layer = LoRALinear(loaded.module(path), adapter.rank, scaling, adapter.dropout, keys, number)
    in_features = layer.lora_A.shape[1]
    layer.lora_A = mx.array(start.initial_a(name, adapter.rank, in_features, init.facts.is_gaussian, init.seed))
    if adapter.dora:
        layer.start_magnitude()
    layer.freeze()
    layer.unfreeze(recurse=False)
    loaded.replace(path, layer)


def _adapt_experts(loaded: MLXModel, path: str, names: list[str], adapter: Adapter, keys: DropoutKeys) -> None:
    owner = names[0].rpartition(".")[0]
    own = one_for_experts(adapter, owner, [name.rpartition(".")[2] for name in names])
    scaling = scaling_of(own.rank, own.alpha, own.rslora)
    module = AdaptedExperts(loaded.module(path), {name.rpartition(".")[2]: own.rank for name in names}, scaling, keys)
    module.freeze()
    init = own.init
    for weight, pair in module.pairs().items():
        columns = pair.lora_A.shape[1]
        count = len(pair.lora_A) // own.rank
        name = f"{owner}.{weight}"
        pair.lora_A = mx.array(
            start.initial_a(name, own.rank, columns, init.facts.is_gaussian, init.seed, num_experts=count)
        )
        pair.unfreeze()
    loaded.replace(path, module)


def set_recomputation(loaded: MLXModel) -> None:
    """Every block recomputes its activations in backward."""
    for layer in loaded.layers:
        recompute(layer)
