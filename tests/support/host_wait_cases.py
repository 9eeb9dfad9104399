"""Steps on the device `emulated`, and where each makes the host wait: python -m tests.support.host_wait_cases

A process of its own: autograd must meet the device before its first backward.
"""

import dataclasses
import json

import numpy as np
import torch

from finetune.config import TrainConfig
from finetune.data.collate import microbatches
from finetune.parts.trains import Adapter
from finetune.torch_engine.experts import grouped
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.targets import target_names
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from tests.support import cases, emulated_device, tiny
from tests.support.build import torch_engine
from tests.support.cases import Case
from tests.support.engines import ROWS
from tests.support.host_waits import HostWaits

STEPS = {
    "full": (Case("full"), "llama"),
    "lora": (Case("lora"), "llama"),
    "dora": (Case("lora", use_dora=True), "llama"),
    "qlora": (Case(method="nf4", double_quant=True), "llama"),
    "qlora recomputed": (Case(method="nf4", recomputed=True), "llama"),
    "window": (Case("lora"), "mistral"),
    "softcap and window": (Case("lora"), "gemma2"),
    "sinks, experts with biases": (Case("lora"), "gpt_oss"),
    "experts": (Case("lora"), "qwen3_moe"),
    "experts, quantized": (Case(method="nf4"), "qwen3_moe"),
    "experts, load balancing": (Case("lora", aux=0.3), "mixtral"),
}
PREFERENCES = ("dpo", "orpo")


def waits_of(engine, batches) -> dict:
    engine.train_step(batches[:1], 1e-3)  # makes the tables that are made once
    with HostWaits(emulated_device.NAME) as waits:
        engine.train_step(batches, 1e-3)
    return {"microbatches": len(batches), "reads": waits.reads, "uploads": waits.uploads}


def step(name: str, device: torch.device) -> dict:
    case, architecture = STEPS[name]
    engine = cases.build(case, ProcessGroups(device=device), architecture)
    return waits_of(engine, microbatches(ROWS, np.arange(8), engine.layout, 8, 60, 0))


def step_of_preferences(objective: str, device: torch.device) -> dict:
    """With the reference's log-probabilities computed in the step."""
    settings = dataclasses.replace(TrainConfig(), train_type="lora", precision="fp32", preference=objective, lr=1e-3)
    settings = dataclasses.replace(settings, lora_rank=4, use_gradient_checkpointing="false")
    model = tiny.build("llama").requires_grad_(False)
    add_adapters(model, target_names(model, "all", False), Adapter.of(settings))
    engine = torch_engine(model.to(device), settings, device)
    engine.verify("auto")
    pairs = dataclasses.replace(ROWS, documents_per_row=2)
    return waits_of(engine, microbatches(pairs, np.arange(pairs.num_rows), engine.layout, 4, 60, 0))


if __name__ == "__main__":
    emulated_device.load()
    emulated = torch.device(emulated_device.NAME)
    found = {name: step(name, emulated) for name in STEPS}
    found |= {name: step_of_preferences(name, emulated) for name in PREFERENCES}
    found["groups"] = grouped.works(emulated, torch.float32)
    print(json.dumps(found))
