"""torch.compile of each decoder layer: one graph forward and one backward, whatever the lengths of documents.

All layers share one compiled function, so that equal layers share its graphs. It is looked up when it runs: FSDP2 gives
a layer another class, whose forward recomputes activations. Evaluation and generation stay as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from finetune.torch_engine.parallel.fsdp import decoder_layers

# What compiling a layer takes at least, and the most of a microbatch's time that it saves: an H200 took 32 s, and saved
# half of it at best.
COMPILING_S = 10.0
SAVED = 0.6


def compile_layers(model: PreTrainedModel, backend: str = "inductor", fullgraph: bool = False) -> None:
    """Compiles the layers' forward, and with it their backward; hooks stay around it."""
    compiled = torch.compile(_forward, backend=backend, fullgraph=fullgraph)
    for layer in decoder_layers(model):
        layer.forward = partial(_in_training, compiled, layer)


def stop_compiling(model: PreTrainedModel) -> None:
    for layer in decoder_layers(model):
        layer.__dict__.pop("forward", None)


def _forward(layer: Any, *args: Any, **kwargs: Any):
    return type(layer).forward(layer, *args, **kwargs)


def _in_training(compiled: Callable, layer: Any, *args: Any, **kwargs: Any):
    run = compiled if layer.training and torch.is_grad_enabled() else _forward
    return run(layer, *args, **kwargs)


def cannot_pay(eager_s: float, microbatches: int) -> str | None:
    """Reason that compiling cannot pay off, from seconds of one microbatch; None if it has to be tried."""
    saved_s = SAVED * eager_s * microbatches
    if saved_s > COMPILING_S:
        return None
    return f"{eager_s:.3g} s per microbatch, measured: {microbatches:,} of them are over before compiling pays"


def choose(eager_s: float, compiled_s: float, compiling_s: float, microbatches: int) -> tuple[str, str]:
    """(word of --compile, why), from seconds of one microbatch and of the first compiled ones."""
    saved_s = (eager_s - compiled_s) * microbatches
    fact = f"{eager_s:.3g} s per microbatch, {compiled_s:.3g} s compiled, {compiling_s:.0f} s to compile, measured"
    if saved_s <= compiling_s:
        return "false", f"{fact}: would not pay in {microbatches:,} of them"
    return "true", f"{fact}: pays in {microbatches:,} of them"
