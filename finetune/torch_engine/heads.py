"""Heads beside a model's own: where they are, how PEFT and transformers name them, and how they are read again."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.adapters.heads import HeadRecord
from finetune.model_files.classes import class_of
from finetune.parts.heads import HEADS, TOKENS, HeadFacts


def heads_of(model: nn.Module) -> list[nn.Module]:
    """The heads beside the model's own: none, or one."""
    return [module for _, module in _found(model)]


def saved_words(model: nn.Module) -> tuple[list[str], str]:
    """(`modules_to_save` of adapter_config.json, PEFT's task type) of a model's heads."""
    for facts, _ in _found(model):
        return [facts.module], facts.task_type
    return [], HEADS[TOKENS].task_type


def _found(model: nn.Module) -> list[tuple[HeadFacts, nn.Module]]:
    modules = dict(model.named_children())
    by_module = {facts.module: facts for facts in HEADS.values() if facts.module}
    return [(facts, modules[name]) for name, facts in by_module.items() if name in modules]


def record_of(model: nn.Module) -> HeadRecord | None:
    """The record of the model's head."""
    found: Any = getattr(model, "head_record", None)
    return found


def set_record(model: nn.Module, record: HeadRecord | None) -> None:
    """Keeps the record of the model's head."""
    holder: Any = model
    holder.head_record = record


def add_empty(model: PreTrainedModel, record: HeadRecord | None, device: torch.device | str = "meta") -> None:
    """Puts the head of a checkpoint beside the model's own, its values still to be read; nothing without a head."""
    set_record(model, record)
    if record is None or not record.facts.module:
        return
    width = model.config.get_text_config().hidden_size
    head = nn.Linear(width, record.outputs, bias=False, dtype=torch.float32, device=device)
    model.add_module(record.facts.module, head.requires_grad_(False))


def without_gradient(model: PreTrainedModel) -> None:
    """Freezes the model's own head, which nothing reads beside another, but for what it shares with the embeddings."""
    embeddings = {id(p) for p in model.get_input_embeddings().parameters()}
    own = model.get_output_embeddings()
    for parameter in own.parameters() if own is not None else ():
        if id(parameter) not in embeddings:
            parameter.requires_grad_(False)


def describe(config: Any, model: nn.Module) -> None:
    """Sets what transformers' class of the model's head reads of a config; nothing without a head."""
    record = record_of(model)
    if record is None or not record.facts.module:
        return
    config.architectures = [class_of(config.model_type)]
    config.id2label = dict(enumerate(record.names))
    config.label2id = {name: number for number, name in enumerate(record.names)}
    config.get_text_config().pad_token_id = config.pad_token_id = record.pad_token_id
    if record.labels:
        config.problem_type = "single_label_classification"
