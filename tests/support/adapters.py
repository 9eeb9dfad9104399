"""Tiny models with adapters that change their logits."""

import dataclasses
import json

import peft
import torch
import transformers
from safetensors.torch import save_file

from finetune.config import TrainConfig
from finetune.parts.trains import Adapter
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.layers import adapter_parameters
from finetune.torch_engine.lora.peft_format import peft_config, to_disk
from finetune.torch_engine.lora.targets import target_names
from tests.support import tiny

SETTINGS = dataclasses.replace(TrainConfig(), train_type="lora", precision="fp32", lora_rank=4, lora_alpha=8.0)
KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
IDS = torch.arange(3, 35).view(2, 16)


def adapted(architecture="llama", targets="all", model=None, device=None, **changes):
    """A tiny model with adapters whose B is not zero, so that they matter; `device`: where, by default the model's."""
    settings = dataclasses.replace(SETTINGS, **changes)
    model = (model or tiny.build(architecture)).requires_grad_(False).to(device)
    add_adapters(model, target_names(model, targets, settings.use_dora), Adapter.of(settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if name.endswith(("lora_B", "lora_embedding_A")):
                parameter.copy_(torch.empty(parameter.shape).normal_(std=0.1, generator=generator))
            elif name.endswith("lora_magnitude_vector"):
                parameter.mul_(1.1)
    return model, settings


def with_patterns(base, folder, **options):
    """A PEFT adapter on q_proj and v_proj with random weights, written to `folder`; its model."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    how = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, peft.LoraConfig(**how | options)).eval()
    model.save_pretrained(folder)
    return model


def write(model, settings, folder):
    folder.mkdir(exist_ok=True)
    tensors = to_disk(model, adapter_parameters(model), Adapter.of(settings))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(model, Adapter.of(settings), "base")))
