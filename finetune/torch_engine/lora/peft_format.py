"""Adapters on disk as PEFT stores them: tensor names, shapes and adapter_config.json."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.adapters.config import adapter_config, shortest_targets
from finetune.parts.trains import Adapter
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.experts import fused
from finetune.torch_engine.heads import saved_words
from finetune.torch_engine.lora import factors, saved_modules
from finetune.torch_engine.lora.layers import LoRAEmbedding, LoRALinear, layers
from finetune.torch_engine.lora.targets import original_names, peft_takes_for_experts, tied
from finetune.torch_engine.weights.vocabulary import ends_of

PREFIX = "base_model.model."


def peft_owner(name: str, names: list[str], modules: Mapping[str, nn.Module]) -> str:
    """Module name under which PEFT stores a target's adapter; of two parameters of one module, the first is nested."""
    if name in modules:
        return name
    owner, _, parameter = name.rpartition(".")
    first, last = fused.weight_names(modules[owner])
    return owner + (".base_layer" if parameter == first and f"{owner}.{last}" in names else "")


def disk_name(name: str) -> str:
    """PEFT's key of a parameter: '...q_proj.lora_A' -> 'base_model.model....q_proj.lora_A.weight'."""
    return PREFIX + name + (".weight" if name.rpartition(".")[2] in ("lora_A", "lora_B") else "")


def tied_names(model: PreTrainedModel, named: dict) -> dict[str, str]:
    """{name of a weight that is tied to a trained one: the trained one's}: PEFT keeps a copy of each module."""
    ends = {f"{name}.weight" for name in ends_of(model)}
    trained = ends & set(named)
    if trained and tied(model):
        return dict.fromkeys(ends - trained, next(iter(trained)))
    return {}


def to_disk(model: PreTrainedModel, named: dict, adapter: Adapter) -> dict[str, torch.Tensor]:
    """{PEFT key: tensor} of the adapters; of twice the rank, for the original base, if the base was changed."""
    out = {disk_name(n): p.detach().float().cpu() for n, p in named.items()}
    out |= {disk_name(n): out[disk_name(same)] for n, same in tied_names(model, named).items()}
    if adapter.init.changes_base:
        for name in named:
            owner, _, leaf = name.rpartition(".")
            layer: Any = model.get_submodule(owner)
            key = disk_name(name)
            if leaf.endswith("_A"):
                if layer.start:
                    start = layer.start[0]
                else:
                    start = torch.zeros_like(out[key])
                out[key] = factors.doubled_a(out[key], start, layer.num_experts)
            elif leaf.endswith("_B"):
                if layer.start:
                    start = layer.start[1]
                else:
                    start = torch.zeros_like(out[key])
                out[key] = factors.doubled_b(out[key], start, layer.num_experts)
    return out


def from_disk(model: PreTrainedModel, named: dict, tensors: dict, adapter: Adapter) -> dict:
    """Inverse of to_disk, for numpy arrays: the trained adapters, without the half of the initial ones."""
    twice = {disk_name(n) for n in tied_names(model, named)}
    out = {name: tensor for name, tensor in tensors.items() if name not in twice}
    if not adapter.init.changes_base:
        return out
    for name in named:
        owner, _, leaf = name.rpartition(".")
        key = disk_name(name)
        if key in out and leaf.endswith(("_A", "_B")):  # not of --modules_to_save
            layer: Any = model.get_submodule(owner)
            count = layer.num_experts
            if leaf.endswith("_A"):
                halves = factors.halves_a
            else:
                halves = factors.halves_b
            out[key] = halves(torch.from_numpy(np.array(out[key])), count)[0].numpy()
    return out


def peft_config(model: PreTrainedModel, adapter: Adapter, base_name: str, revision: str | None = None) -> dict:
    """Content of adapter_config.json in PEFT's format."""
    modules = dict(model.named_modules())
    chosen = sorted(n for n, m in modules.items() if isinstance(m, (LoRALinear, LoRAEmbedding)))
    parameters = [f"{n}.{p}" for n, m in modules.items() if isinstance(m, fused.Experts) for p in m.adapted]
    if not adapter.dora:  # such linears go into target_parameters by their .weight
        as_parameters = [n for n in chosen if peft_takes_for_experts(model, n)]
        chosen = [n for n in chosen if n not in as_parameters]
        parameters += [f"{n}.weight" for n in as_parameters]
    conv = any(
        m.base.fan_in_fan_out if isinstance(m.base, QuantizedLinear) else not isinstance(m.base, nn.Linear)
        for m in layers(model).values()
    )
    changes: dict[str, Any] = {"target_parameters": parameters or None}
    if adapter.init.changes_base:  # of twice the rank; keeps alpha/r, or alpha/sqrt(r), as in training
        more = 2**0.5 if adapter.rslora else 2
        changes |= {"r": adapter.rank * 2, "lora_alpha": adapter.alpha * more}
        changes |= adapter.patterns(2, more, bool(parameters))
    elif parameters:
        changes |= adapter.patterns(weights=True)
    if parameters:  # PEFT rejects dropout with target_parameters
        changes["lora_dropout"] = 0.0
    if adapter.trains_modules:
        changes["modules_to_save"] = saved_modules.words(model, adapter)
    heads, task_type = saved_words(model)
    if heads:
        changes |= {"modules_to_save": [*(changes.get("modules_to_save") or []), *heads], "task_type": task_type}
    targets = shortest_targets(chosen, original_names(model))
    return adapter_config(adapter, base_name, revision, targets, fan_in_fan_out=conv, **changes)
