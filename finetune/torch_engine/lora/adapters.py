"""Adds adapters to a model, merges them, and attaches saved ones."""

import contextlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.adapters.modules import own_weights
from finetune.adapters.patterns import scaling_of
from finetune.adapters.saved import CONFIG, read_adapter
from finetune.adapters.targets import one_for_experts
from finetune.errors import PlanError
from finetune.parts.trains import Adapter
from finetune.torch_engine.experts import fused
from finetune.torch_engine.lora import saved_modules
from finetune.torch_engine.lora.init import assign, initialize, sampled
from finetune.torch_engine.lora.layers import LoRAEmbedding, LoRALinear, adapter_parameters
from finetune.torch_engine.lora.peft_format import PREFIX, disk_name
from finetune.torch_engine.lora.targets import WRAPPERS, is_linear, tied, tied_bases
from finetune.torch_engine.weights.interfaces import GivenValues
from finetune.torch_engine.weights.vocabulary import ends_of

LORA = re.compile(r"\.lora_((A|B)\.weight|embedding_(A|B)|magnitude_vector)$")


def add_adapters(
    model: PreTrainedModel,
    names: list[str],
    adapter: Adapter,
    starts: dict | None = None,
    local_shards: GivenValues | None = None,
    present: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
) -> None:
    """Adds an adapter to each named layer.

    A is sampled on the CPU from `seed` and the layer's name, or given by `starts`.

    `starts`: {name: A}, or {name: (A, B)} if their product was subtracted from the base (see init.residual_init).
    `local_shards`: this rank's local shards, if the model is on meta; DoRA's magnitudes are then computed later.
    `present(name)`: a context in which a layer's weights are there.
    """
    starts = starts or {}
    modules = dict(model.named_modules())
    inside: dict[str, list[str]] = {}
    for name in names:
        if name not in modules:
            owner, _, parameter = name.rpartition(".")
            inside.setdefault(owner, []).append(parameter)
            continue
        base = modules[name]
        own = adapter.at(name)
        layer: Any
        if isinstance(base, nn.Embedding):
            layer = LoRAEmbedding(base, own.rank, own.alpha, own.rslora, own.dora)
            with torch.no_grad():  # as in PEFT: A zero, B normal
                drawn = partial(sampled, name, layer.lora_embedding_B.shape, "normal", own.init.seed)
                assign(local_shards, f"{name}.lora_embedding_B", layer.lora_embedding_B, drawn)
        else:
            with present(name):
                layer = LoRALinear(base, own.rank, own.alpha, own.dropout, own.rslora, own.dora)
            initialize(layer, name, starts.get(name), layer.in_features, own, local_shards)
            if own.dora and layer.start is not None and local_shards is None:  # the magnitude of the original base
                with torch.no_grad():
                    layer.lora_magnitude_vector.copy_(layer.weight_norm())
        model.set_submodule(name, layer)
    for owner, weights in inside.items():
        module = fused.wrapped(model, owner)
        own = one_for_experts(adapter, owner, weights)
        module.adapt(weights, own.rank, scaling_of(own.rank, own.alpha, own.rslora))
        for weight, pair in module.pairs().items():
            name = f"{owner}.{weight}"
            initialize(pair, name, starts.get(name), pair.lora_A.shape[1], own, local_shards)
    if local_shards is None:
        return
    local_shards.magnitudes_are_known = not adapter.dora
    for name, trained in adapter_parameters(model).items():
        if not local_shards.has(trained):
            local_shards.give(name, trained, partial(torch.zeros, trained.shape))


@contextlib.contextmanager
def adapters_off(model: PreTrainedModel):
    """The model as it was before training, without dropout: only its base computes.
    Not of adapters whose start was subtracted from the base.
    """
    training = model.training
    layers = [m for m in model.modules() if isinstance(m, LoRALinear | LoRAEmbedding)]
    held = [m for m in model.modules() if isinstance(m, fused.Experts)]
    scalings = [module.scaling for module in held]
    assert all(layer.start is None for layer in layers), "the base is not the model that training started from"
    model.eval()
    try:
        for layer in layers:
            layer.off = True
        for module in held:
            module.scaling = 0.0
        yield
    finally:
        model.train(training)
        for layer in layers:
            layer.off = False
        for module, scaling in zip(held, scalings, strict=True):
            module.scaling = scaling


def remove_adapters(model: PreTrainedModel) -> None:
    """The model as transformers has it: its base alone, with tied embeddings untied if one of them was adapted."""
    _untie_adapted(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, WRAPPERS):
            model.set_submodule(name, layer.base)


def _untie_adapted(model: PreTrainedModel) -> None:
    outer = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if isinstance(m, WRAPPERS)]
    if outer and tied_bases(model):
        _untie(model)


def _untie(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    if isinstance(head, WRAPPERS):
        head = head.base
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def attach_adapter(
    model: PreTrainedModel,
    folder: Path | str,
    local_shards: GivenValues | None = None,
    as_trained: bool = False,
    present: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
) -> None:
    """Attaches a saved PEFT LoRA adapter to a dense model. PlanError for unsupported PEFT options.
    `as_trained`: modules saved with it stay in fp32; `present`: see add_adapters.
    """
    config, arrays = read_adapter(Path(folder))
    tensors = {n: torch.from_numpy(array) for n, array in arrays.items()}
    attach_tensors(model, config, tensors, Path(folder) / CONFIG, local_shards, as_trained, present)


def attach_tensors(
    model: PreTrainedModel,
    config: dict,
    tensors: dict[str, torch.Tensor],
    file: Path,
    local_shards: GivenValues | None = None,
    as_trained: bool = False,
    present: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
) -> None:
    """Attaches an adapter of these tensors, on meta like the model if only the layers are of interest.
    `file`: the adapter's config, for messages. `local_shards`: this rank's rows of a model on meta. `as_trained`: see
    attach_adapter; `present`: see add_adapters.
    """
    _copy_own_weights(model, config, tensors, file, local_shards, as_trained)
    modules = dict(model.named_modules())
    adapted = {LORA.sub("", k.removeprefix(PREFIX)) for k in tensors}
    wished = config.get("target_parameters") or []
    three_d = [n for n in fused.parameter_names(model) if any(n == w or n.endswith("." + w) for w in wished)]
    owners = {n.rpartition(".")[0] for n in three_d}
    names = sorted(n for n in adapted if n.removesuffix(".base_layer") not in owners)
    for name in names:
        if name not in modules and re.search(r"\.experts\.\d+\.\w+$", name):
            fact = "which this base has not, whose experts are held as one"
            raise PlanError(f"{file}: adapts {name}, {fact}. Load it with peft, which converts it, and save it again.")
        if name not in modules:
            raise PlanError(f"{file}: adapts {name}, which this base does not have. Give the base it was trained on.")
        if not (is_linear(modules[name]) or isinstance(modules[name], nn.Embedding)):
            kind = type(modules[name]).__name__
            raise PlanError(f"{file}: adapts {name}, a {kind}, which is not supported. Merge it with peft first.")
    dora = bool(config.get("use_dora"))
    adapter = Adapter(config["r"], config["lora_alpha"], dora=dora, rslora=bool(config.get("use_rslora")))
    add_adapters(model, names + three_d, adapter, None, local_shards, present)
    named = adapter_parameters(model)
    ours = {disk_name(n) for n in named}
    if ours != set(tensors):
        raise PlanError(f"{file}: does not match its weights, such as {sorted(ours ^ set(tensors))[0]}.")
    with torch.no_grad():
        for own_name, parameter in named.items():
            name = disk_name(own_name)
            if parameter.shape != tensors[name].shape:
                raise PlanError(
                    f"{file}: {name} is {list(tensors[name].shape)}, this base needs {list(parameter.shape)}."
                )
            assign(local_shards, own_name, parameter, partial(tensors.__getitem__, name))
            parameter.requires_grad_(False)
    if local_shards is not None:
        local_shards.magnitudes_are_known = True


@torch.no_grad()
def _copy_own_weights(
    model: PreTrainedModel, config: dict, tensors: dict, file: Path, local_shards: GivenValues | None, as_trained: bool
) -> None:
    """Takes weights of the base itself out of `tensors` into the model: those of --modules_to_save, and of adapted
    embeddings or head, which PEFT saves with the adapter.
    """
    own = own_weights(tensors)
    saved_modules.check_saved(model, config.get("modules_to_save"), own, file)
    for key in [key for key in tensors if not LORA.search(key)]:
        del tensors[key]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in own.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise PlanError(
                f"{file}: contains {name} {list(tensor.shape)}, which this base does not have. Merge it with peft "
                "first."
            )
    untie_if_different(model, own)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if as_trained:
        dtype = next((p.dtype for p in parameters.values() if p.is_floating_point()), torch.float32)
        saved_modules.keep_in_fp32(model, {name.rpartition(".")[0] for name in own}, dtype, local_shards)
    for name in own:
        assign(local_shards, name, parameters[name], partial(own.__getitem__, name))


def untie_if_different(model: PreTrainedModel, own: dict) -> None:
    """Unties embeddings and head if an adapter's `own` weights of them differ, as PEFT trains each alone."""
    ends = [f"{name}.weight" for name in ends_of(model)]
    given = [own[name] for name in ends if name in own]
    if len(ends) < 2 or not given or not tied(model):
        return
    if len(given) == 1 or not (given[0].is_meta or torch.equal(*given)):
        _untie(model)
