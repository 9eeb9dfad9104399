"""The parts of a multimodal model: runs on text do not load its towers for images and sound, nor lose them in what they
save.

Modules keep the names they have in the full model, so adapters are named as PEFT names them there.
"""

import re
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.parts.engine_limits import PROJECTORS

SOUND = {"audio", "sound", "speech"}


def auto_class(config: Any) -> Any:
    """The auto class of a config: a multimodal one's is that of the full model, whose names its files have."""
    multimodal = config is not text_config(config)
    if multimodal and type(config) in transformers.AutoModelForImageTextToText._model_mapping:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def text_config(config: Any):
    """The part of a config that the language model has; of one with several, the config itself."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


class LeftOut(nn.Module):
    """Takes the place of a tower, whose modules were named `inner`. Text never calls it."""

    def __init__(self, inner: list[str]):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any):
        raise ValueError("this part of the model was left out: training on text does not use it")


def tower_names(model: Any) -> list[str]:
    """Names of a model's towers: models of their own beside the language model."""
    if model.config is text_config(model.config):
        return []
    language = model.get_decoder()
    head = model.get_output_embeddings()
    kept = {id(m) for m in (model, language, head) if m is not None}
    names: list[str] = []
    for name, module in list(model.named_modules()):
        inside_tower = any(name.startswith(other + ".") for other in names)
        holds_language = any(id(m) in kept for m in module.modules())
        if isinstance(module, PreTrainedModel) and not inside_tower and not holds_language:
            if language is None or not any(module is m for m in language.modules()):
                names.append(name)
    return names


def leave_out_towers(model: Any, sees_images: bool = False) -> None:
    """Records the names of a model's towers in `model.towers`, and replaces them, in `model.left_out`, unless the run
    `sees_images`; then those of sound are.
    """
    model.towers = tuple(tower_names(model))
    names = model.towers
    if sees_images:
        names = tuple(name for name in names if SOUND & set(re.split(r"[._]", name)))
    model.left_out = names
    for name in names:
        inner = [n for n, _ in model.get_submodule(name).named_modules() if n]
        model.set_submodule(name, LeftOut(inner))
    prefixes = tuple(f"{name}." for name in names)
    tied = getattr(model, "all_tied_weights_keys", {})
    for target, source in list(tied.items()):
        if names and (target.startswith(prefixes) or source.startswith(prefixes)):
            tied.pop(target)


def language_prefix(model: PreTrainedModel) -> str:
    """Prefix of the language model's module names in a model with towers; empty in others."""
    if not getattr(model, "towers", ()):
        return ""
    language = model.get_decoder()
    if language is None or language is model:
        return ""
    return next(n for n, m in model.named_modules() if m is language) + "."


def projector_names(model: Any) -> list[str]:
    """Names of the modules that join the tower for images and the language model."""
    prefixes = vision_prefixes(model)
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if f"{name}.".startswith(prefixes) and name.endswith(PROJECTORS) and not inside:
            found += [f"{name}.{n}" for n in range(len(module))] if isinstance(module, nn.ModuleList) else [name]
    return found


def vision_names(model: Any, word: str) -> list[str]:
    """Names of the modules that see images and train in full, for a word of --train_vision. Raises PlanError."""
    if word == "projector":
        found = projector_names(model)
        if not found:
            raise PlanError(
                f"--train_vision projector: no module of {type(model).__name__} joins its tower and its language "
                "model. Use full."
            )
        return found
    if word == "full":
        return [prefix.removesuffix(".") for prefix in vision_prefixes(model)]
    return []


def vision_prefixes(model: Any) -> tuple[str, ...]:
    """Prefixes of what sees images beside the language model, in a model that has its towers."""
    towers = seeing_towers(model)
    if not towers:
        return ()
    language = language_prefix(model)
    head = model.get_output_embeddings()
    owner = towers[0].rpartition(".")[0]
    beside = [f"{owner}.{name}".lstrip(".") for name, _ in model.get_submodule(owner).named_children()]
    ends = {id(head)}
    return tuple(
        f"{name}."
        for name in beside
        if not language.startswith(f"{name}.") and id(model.get_submodule(name)) not in ends
    )


def seeing_towers(model: Any) -> list[str]:
    """Names of the towers that the model has, and not left out."""
    return [name for name in getattr(model, "towers", ()) if name not in model.left_out]


def forget_quantization(config: Any) -> None:
    """Removes what a config and its text part say of quantized weights: they are read dense, or by prequantized.py."""
    for part in (config, text_config(config)):
        for name in ("quantization_config", "quantization"):
            if hasattr(part, name):
                delattr(part, name)
