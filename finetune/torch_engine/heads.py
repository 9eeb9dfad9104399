"""Heads beside a model's own: where they are in the model, and how PEFT names them."""

from torch import nn

from finetune.parts.heads import HEADS, HeadFacts


def heads_of(model: nn.Module) -> list[nn.Module]:
    """The heads beside the model's own: none, or one."""
    return [module for _, module in _found(model)]


def saved_words(model: nn.Module) -> tuple[list[str], str]:
    """(`modules_to_save` of adapter_config.json, PEFT's task type) of a model's heads."""
    for facts, _ in _found(model):
        return [facts.module], facts.task_type
    return [], HEADS["tokens"].task_type


def _found(model: nn.Module) -> list[tuple[HeadFacts, nn.Module]]:
    modules = dict(model.named_children())
    return [(facts, modules[facts.module]) for facts in HEADS.values() if facts.module in modules]
