"""Engines of tiny models, their microbatches and gradients."""

import dataclasses

import torch

import quantization_wrapper
from finetune.config import TrainConfig
from finetune.data.collate import microbatches
from finetune.parts.trains import Adapter
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.layers import layers
from finetune.torch_engine.lora.targets import linear_names, target_names
from tests.support import devices, tiny
from tests.support.build import torch_engine
from tests.support.engine_access import optimizer, trainable_params

CPU = torch.device("cpu")
ROWS = tiny.dataset()


def engine(architecture="llama", layout="auto", train_type="lora", model=None, device=CPU, **changes):
    settings = dataclasses.replace(TrainConfig(), precision="fp32", lr=1e-2, train_type=train_type, **changes)
    model = model or tiny.build(architecture)
    if train_type == "full":
        model.requires_grad_(True)
    else:
        model.requires_grad_(False)
        if train_type == "qlora":
            config = quantization_wrapper.config_for("nf4")
            quantization_wrapper.quantize_model(model, config, linear_names(model), device)
        add_adapters(model.to(device), target_names(model, "all"), Adapter.of(settings))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in layers(model).values():
                layer.lora_B.copy_(torch.empty(layer.lora_B.shape).normal_(std=0.05, generator=generator))
    built = torch_engine(model.to(device), settings, device)
    built.verify(layout)
    return built


def batches(layout="padding_free", batch_size=8, tokens=10**6, rows=range(8)):
    return microbatches(ROWS, rows, layout, batch_size, tokens, pad_id=0)


def gradients(built, parts):
    """{name: gradient} of one step's loss, by the engine's own loop but without the optimizer."""
    targets = sum(b.num_targets for b in parts)
    for batch in parts:
        (built.forward.nll(batch) / targets).backward()
    found = {n: p.grad.clone() for n, p in trainable_params(built).items() if p.grad is not None}
    optimizer(built).zero_grad()
    return found


def assert_same(mine, theirs, tolerance=1e-6):
    """`tolerance`: of a CPU's sums; those of a GPU have more orders, see devices.tolerance."""
    assert mine.keys() == theirs.keys()
    for name in mine:
        tolerance_here = devices.tolerance(mine[name].device, tolerance)
        size = theirs[name].abs().max()
        assert (mine[name] - theirs[name]).abs().max() <= tolerance_here * max(size, 1e-3), name
