"""torch.compile of each decoder layer: one graph forward and one backward, whatever the lengths of documents.

All layers share one compiled function, so that equal layers share its graphs; sizes and numbers of the layout are
symbols in them from the first compilation on. It is looked up when it runs: FSDP2 gives a layer another class, whose
forward recomputes activations. Evaluation and generation stay as they are.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from finetune.torch_engine.lora.flat import reach
from finetune.torch_engine.parallel.fsdp import decoder_layers

# What compiling a layer takes at least, and the most of a microbatch's time that it saves: an H100 took 11 s, and saved
# half of what its host took.
COMPILING_S = 10.0
SAVED = 0.6


def compile_layers(model: PreTrainedModel, backend: str = "inductor", fullgraph: bool = False) -> None:
    """Compiles the layers' forward, and with it their backward; hooks stay around it."""
    # Scaling factors and epsilons of layers are constants: as symbols, they would only lengthen the tracing.
    torch._dynamo.config.specialize_float = True
    options: dict[str, Any] = {"guard_filter_fn": _of_the_call}
    if backend == "inductor":
        options |= {"size_asserts": False, "alignment_asserts": False}
    compiled = torch.compile(_forward, backend=backend, fullgraph=fullgraph, dynamic=True, options=options)
    for layer in decoder_layers(model):
        layer.forward = partial(_in_training, compiled, layer)


def _of_the_call(guards: Sequence[Any]) -> list[bool]:
    """True for each guard of tensors, layouts and layers; not of functions and classes of the program, which nothing
    changes: each layer's call would look at some hundred of them.
    """
    return [not guard.is_global for guard in guards]


def stop_compiling(model: PreTrainedModel) -> None:
    for layer in decoder_layers(model):
        layer.__dict__.pop("forward", None)


def _forward(layer: Any, *args: Any, **kwargs: Any):
    return type(layer).forward(layer, *args, **kwargs)


def _in_training(compiled: Callable, layer: Any, *args: Any, **kwargs: Any):
    if not (layer.training and torch.is_grad_enabled()):
        return _forward(layer, *args, **kwargs)
    reach(layer)
    if args and not args[0].requires_grad:
        entered = _Entry.apply(args[0], torch.ones((), requires_grad=True))
        return compiled(layer, entered, *args[1:], **kwargs)
    return compiled(layer, *args, **kwargs)


class _Entry(torch.autograd.Function):
    """Hidden states that require a gradient, which is dropped: behind frozen embeddings the first layer would else be a
    graph of its own.
    """

    @staticmethod
    def forward(ctx: Any, hidden_BSD: torch.Tensor, anchor: torch.Tensor):
        return hidden_BSD.detach()  # a view to nobody: dynamo guards on what is one

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return None, None


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
