"""Activations and temporary memory of one microbatch, traced from the model's own classes. This is a separate program,
asked by the plan over pipes (estimate/traced.py), because it imports torch.

The model is built on meta as a run loads it, wrapped as a run wraps it, and runs one forward and backward on tensors
without values. One decoder layer of each kind takes part, and the first one, whose input may need no gradient; the
others pass their input on. Live bytes before and after each layer are counted, not computed by a formula.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from finetune.config import TrainConfig
from finetune.engine import IGNORE_INDEX, Batch
from finetune.errors import MODEL_ERRORS, first_line, is_out_of_memory
from finetune.parts.parts import Parts
from finetune.parts.quantization import Quantization
from finetune.quantizers import packing
from finetune.system import child
from finetune.torch_engine import loss
from finetune.torch_engine.attention import per_document
from finetune.torch_engine.device import DTYPES, set_onednn
from finetune.torch_engine.experts import fused
from finetune.torch_engine.forward import Layout, ModelForward
from finetune.torch_engine.llama_pro import layer_stacks
from finetune.torch_engine.lora.flat import in_step
from finetune.torch_engine.lora.targets import linear_names
from finetune.torch_engine.parallel.parallelize import parallelize
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.simulated import Simulated, WithoutValues, register
from finetune.torch_engine.weights import load
from quantization_wrapper import FIRST_METHOD, settings_of

NUMBERS_OF_LAYERS = ("idx", "index", "layer_id", "number")  # parts of names of what differs in equal layers
STATE = ("A_log", "dt_bias", "time_decay")  # parameters of layers that carry a state along a row
MASKED = "masked_kernel"  # the attention that torch runs on a GPU under a mask: its memory-efficient kernel


# ---- the model


def meta_model(folder: str, plan: Parts):
    """The model as a run loads it, on meta: quantized, with adapters. Whatever the method, it is quantized by one:
    autograd saves what is stored, which is a weight, not an activation.
    """
    model = tied(load.build_on_meta(folder, plan.precision, plan.parallel))
    layers = load.layers_of(model, folder, plan.trains)
    if plan.quantization is not None:
        method = settings_of(FIRST_METHOD) | dict(group_size=64)
        quantization = Quantization.of(plan.with_settings(**method).settings)
        assert quantization is not None, method
        config = quantization.config
        with packing.one_block_on_meta():
            for name in layers.linears:
                linear: Any = model.get_submodule(name)
                made = load.quantization_wrapper.quantized_linear(
                    _as_rows(linear), linear.bias, config, not isinstance(linear, nn.Linear)
                )
                model.set_submodule(name, made)
            fused.quantize(model, config, layers.experts, torch.device("meta"))
    load.make_trainable(model, layers, plan, torch.device("meta"), None, WithoutValues())
    return model


def tied(model: PreTrainedModel):
    """The model with its tied weights one parameter, as they are once they are loaded."""
    model.tie_weights(missing_keys=set(model.all_tied_weights_keys), recompute_mapping=False)
    return model


def _as_rows(linear: Any) -> torch.Tensor:
    weight = linear.weight.detach()
    if isinstance(linear, nn.Linear):
        return weight
    return weight.t()


def described(folder: str) -> dict:
    """Sizes of the model's tensors, as ModelShape has them, its layout of rows, and its number of layers."""
    plan = Parts(TrainConfig(train_type="full", precision="fp32"))
    model = tied(load.build_on_meta(folder, plan.precision, plan.parallel))
    names = set(linear_names(model))
    experts = fused.parameter_names(model)
    linears = []
    others = []
    of_experts = []
    for name, p in model.named_parameters():
        module = name.removesuffix(".weight")
        if module in names:
            rows, columns = _as_rows(model.get_submodule(module)).shape
            linears.append((module, rows, columns))
        elif name in experts:
            count, rows, columns = p.shape
            of_experts.append((count * rows, columns))
        else:
            others.append((p.shape[0] if p.ndim else 1, p.numel() // max(1, p.shape[0] if p.ndim else 1)))
    config = model.config.get_text_config()
    stacks = layer_stacks(model)
    return {
        "linears": linears,
        "others": others,
        "experts": of_experts,
        "num_weights": sum(p.numel() for p in model.parameters()),
        "num_layers": len(model.get_submodule(stacks[0])) if stacks else 0,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "layout": layout_of(model),
        "masks_images": masks_images(model),
    }


def layout_of(model: PreTrainedModel) -> str:
    """The layout that the checks on the loaded model are expected to choose: a layer that carries a state along its
    row, or has no attention that we replace, cannot keep packed documents apart.
    """
    carries = any(isinstance(m, nn.Conv1d) or any(hasattr(m, name) for name in STATE) for m in model.modules())
    return "padded" if carries or not model._supports_attention_backend else "padding_free"


def masks_images(model: PreTrainedModel) -> bool:
    """True if the class has masks of its own, as those have whose images attend to all of themselves: rows that show
    some are then expected to be padded.
    """
    return hasattr(model, "create_masks_for_generate")


# ---- one layer of each kind


@dataclass
class Counts:
    """Live bytes at the borders of the layers that take part, and the most between them."""

    device: Simulated
    entered: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    inside: dict[int, int] = field(default_factory=dict)  # most within a layer's forward
    began: dict[int, int] = field(default_factory=dict)  # at the start of a layer's backward
    backward: dict[int, int] = field(default_factory=dict)  # most within it
    head: int = 0  # most between the last layer's forward and the first backward
    at: int | None = None

    def clear(self) -> None:
        for found in (self.entered, self.left, self.inside, self.began, self.backward):
            found.clear()
        self.head = 0
        self.at = None

    def backward_begins(self, number: int) -> None:
        if self.at is None:
            self.head = self.device.peak
        else:
            self.backward[self.at] = self.device.peak
        self.at = number
        self.began[number] = self.device.peak = self.device.live

    def end(self) -> None:
        if self.at is not None:
            self.backward[self.at] = self.device.peak


class Measured(nn.Module):
    """A layer that takes part."""

    def __init__(self, layer: Any, number: int, counts: Counts):
        super().__init__()
        self.layer = layer
        self.number = number
        self.counts = counts
        self.more: int | None = None

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any):
        counts = self.counts
        device = self.counts.device
        counts.entered[self.number] = device.peak = device.live
        out = self.layer(*args, **kwargs)
        counts.left[self.number], counts.inside[self.number] = device.live, device.peak
        device.peak = device.live
        if torch.is_tensor(out):
            hidden = out
            self.more = None
        else:
            hidden = out[0]
            self.more = len(out) - 1
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: counts.backward_begins(self.number))
        return out


class Skipped(nn.Module):
    """A layer like one before it: gives its input on, in the form of what a layer that took part gave."""

    def __init__(self, layer: Any, like: Measured):
        super().__init__()
        self.layer = [layer]
        self.like = [like]

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"][0], name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
        more = self.like[0].more
        if more is None:
            return hidden_states
        return (hidden_states, *[None] * more)


def signature(layer: Any) -> tuple:
    """Signature that is equal for layers of one kind: classes, settings other than layer numbers, parameter shapes."""
    found = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, bool, type(None)))}
        plain = {k: v for k, v in plain.items() if not any(word in k for word in NUMBERS_OF_LAYERS)}
        shapes = [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters(recurse=False)]
        found.append((name, type(module), tuple(sorted(plain.items())), tuple(shapes)))
    return tuple(found)


def keep_one_of_each_kind(model: PreTrainedModel, counts: Counts) -> list[int]:
    """Index of the layer that represents each layer. Replaces the others and drops their parameters."""
    stacks = layer_stacks(model)
    outer = [n for n in stacks if not any(n.startswith(other + ".") for other in stacks)]
    if len(outer) != 1:
        raise ValueError(f"{type(model).__name__} has {len(outer)} stacks of layers")
    stack: Any = model.get_submodule(outer[0])
    of_kind: dict[tuple, int] = {}
    order = []
    for number, layer in enumerate(list(stack)):
        kind = (number == 0, *signature(layer))
        if kind not in of_kind:
            of_kind[kind] = number
            stack[number] = Measured(layer, number, counts)
        else:
            stack[number] = Skipped(layer, stack[of_kind[kind]])
        order.append(of_kind[kind])
    return order


# ---- a microbatch


def batch_of(lengths: list[int], layout: str) -> Batch:
    """A microbatch of documents of these lengths, whose tokens are all targets."""
    if layout == "padding_free":
        shape = (1, sum(lengths))
        real = np.ones((1, sum(lengths)), bool)
        positions = np.concatenate([np.arange(n) for n in lengths])[None]
        documents = np.repeat(np.arange(len(lengths)), lengths)[None]
    else:
        shape = len(lengths), max(lengths)
        columns = np.broadcast_to(np.arange(shape[1]), shape)
        real = columns < np.array(lengths)[:, None]
        positions = np.where(real, columns, 0)
        documents = np.where(real, np.arange(len(lengths))[:, None], -1)
    labels = np.where(real, 1, IGNORE_INDEX)
    return Batch(np.ones(shape, np.int64), labels, positions, documents, tuple(range(len(lengths))))


class Session:
    """A wrapped model without values, and its microbatches. `settings`: those of TrainConfig that are not its defaults;
    `device`: "cpu", or any other for one with kernels.
    """

    def __init__(self, folder: str, settings: dict, device: str, layout: str):
        plan = Parts(TrainConfig(**settings))
        set_onednn(plan.precision.onednn)
        if device != "cpu":
            self.at = register()
        else:
            self.at = torch.device("cpu")
        self.layout = layout
        self.model = meta_model(folder, plan)
        self.simulated = Simulated(self.at)
        self.simulated.place(self.model)
        forward = parallelize(self.model, plan, ProcessGroups(device=self.at)).forward
        assert isinstance(forward, ModelForward)
        self.forward = forward
        per_document.register()
        self.forward.use(Layout(layout == "padding_free", "", chunked_head=loss.Head.of(self.model) is not None))
        if layout == "padded" and device != "cpu" and per_document.own_implementation(self.model) == "sdpa":
            transformers.AttentionInterface.register(MASKED, masked_attention)
            self.model.set_attn_implementation(MASKED)
        self.counts = Counts(self.simulated)
        self.order = keep_one_of_each_kind(self.model, self.counts)
        if device == "cpu":
            self.dtype = None
        else:
            self.dtype = DTYPES[plan.precision.compute]
        self.model.train()
        self.simulated.add([*self.model.parameters(), *self.model.buffers()])
        adapters = self.model.flat_adapters
        if adapters is not None:  # counted beside the activations, as what is trained and its gradients
            self.simulated.add([adapters.weights, adapters.gradients])

    def traced(self, lengths: list[int]) -> dict:
        """Bytes of one microbatch of documents of these lengths: {"order", "outside", "after", "head", "calls",
        "layers": {number: {"kept", "forward", "backward"}}}.

        `order`: for each layer the number of the one that stands for it. `outside`: kept by what comes before the
        layers, `after`: by what follows them; `head`: most that what follows them has at a time. Of a layer: what it
        keeps; the most that its forward, and its backward, has beside what was live before. `calls`: operations.
        """
        counts = self.counts
        simulated = self.simulated
        batch = batch_of(lengths, self.layout)
        counts.clear()
        with simulated, in_step(self.model, self.dtype):
            before = simulated.live
            calls = simulated.calls
            # Its cache of cast weights ends with the forward: what autograd does not save of it is not kept.
            torch.set_autocast_cache_enabled(False)
            nll = self.forward.nll(batch)
            (nll / batch.num_targets).backward()
            torch.set_autocast_cache_enabled(True)
            counts.end()
        del nll
        for parameter in self.model.parameters():
            parameter.grad = None
        first = min(counts.entered)
        last = max(counts.entered)
        layers = {}
        for number in counts.entered:
            began = counts.began.get(number)
            layers[number] = {
                "kept": counts.left[number] - counts.entered[number],
                "forward": counts.inside[number] - counts.entered[number],
                "backward": counts.backward[number] - began if began is not None else 0,
            }
        return {
            "order": self.order,
            "outside": counts.entered[first] - before,
            "after": counts.began[max(counts.began)] - counts.left[last] if counts.began else 0,
            "head": counts.head - counts.left[last],
            "calls": simulated.calls - calls,
            "layers": layers,
        }


def masked_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
):
    """transformers' attention interface, by torch's memory-efficient kernel, which takes as many keys as queries."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out = kernel(query, key, value, None, True, scale=scaling)[0]
    return out.transpose(1, 2).contiguous(), None


# ---- the program


@lru_cache(maxsize=4)
def session(text: str) -> Session:
    return Session(**json.loads(text))


def answer(request: dict) -> dict:
    """Reply to a request, or {"error"} with the reason that it cannot be traced."""
    lengths = request.pop("lengths", None)
    try:
        if lengths is None:
            return described(**request)
        return session(json.dumps(request, sort_keys=True)).traced(lengths)
    except MODEL_ERRORS as error:
        said = {"error": f"{type(error).__name__}: {first_line(error)}"}
        return said | ({"memory_refused": True} if is_out_of_memory(error) else {})


def handler(messages: Iterator[list[bytes]]):
    torch.set_num_threads(1)
    register()  # before the first backward: autograd counts devices then
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    next(messages)  # what starts a child
    for (text,) in messages:
        yield (json.dumps(answer(json.loads(text))).encode(),)


if __name__ == "__main__":
    child.serve(handler)
