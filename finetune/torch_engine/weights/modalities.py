"""The language part of a multimodal model: its towers for images and sound are not loaded, nor lost in what is saved.

Modules keep the names they have in the full model, so adapters are named as PEFT names them there.
"""

from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel


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


def leave_out_towers(model: Any) -> None:
    """Replaces towers (models of their own beside the language model) and records their names in `model.left_out`."""
    model.left_out = ()
    if model.config is text_config(model.config):
        return
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
    for name in names:
        inner = [n for n, _ in model.get_submodule(name).named_modules() if n]
        model.set_submodule(name, LeftOut(inner))
    model.left_out = tuple(names)
    prefixes = tuple(f"{name}." for name in names)
    tied = getattr(model, "all_tied_weights_keys", {})
    for target, source in list(tied.items()):
        if names and (target.startswith(prefixes) or source.startswith(prefixes)):
            tied.pop(target)


def language_prefix(model: PreTrainedModel) -> str:
    """Prefix of the language model's module names in a model with towers; empty in others."""
    language = model.get_decoder()
    if not getattr(model, "left_out", ()) or language is None or language is model:
        return ""
    return next(n for n, m in model.named_modules() if m is language) + "."


def forget_quantization(config: Any) -> None:
    """Removes what a config and its text part say of quantized weights: they are read dense, or by prequantized.py."""
    for part in (config, text_config(config)):
        for name in ("quantization_config", "quantization"):
            if hasattr(part, name):
                delattr(part, name)
