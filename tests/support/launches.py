"""What a GPU would be given: operations that are no views, counted on meta tensors."""

import dataclasses
from collections import Counter

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import quantization_wrapper
from benchmarks.host_time import nodes_of
from finetune.config import TrainConfig
from finetune.parts.attention import AttentionPlan
from finetune.parts.trains import Adapter
from finetune.torch_engine import checks
from finetune.torch_engine.attention import per_document
from finetune.torch_engine.attention.varlen import Attention
from finetune.torch_engine.kernels import fuse
from finetune.torch_engine.lora import flat
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.targets import linear_names, target_names
from finetune.torch_engine.parallel.parallelize import checkpoint_activations

META = torch.device("meta")
WITHOUT_LAUNCH = {f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided", "detach")}
WITHOUT_LAUNCH |= {"aten::_unsafe_view", "aten::lift_fresh", "aten::new_empty_strided"}


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        name = func.overloadpacket._qualified_op_name
        if not is_view and name not in WITHOUT_LAUNCH:
            self.counts[name] += 1
        return out


def llama(num_layers: int, quantized: bool, recomputed: bool, **changes):
    """A Llama in bf16 with adapters on all linears, on meta, as a run has it."""
    sizes = dict(vocab_size=256, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(num_hidden_layers=num_layers, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).requires_grad_(False)
    if quantized:
        quantization_wrapper.quantize_model(model, quantization_wrapper.config_for("nf4"), linear_names(model))
    settings = dataclasses.replace(TrainConfig(), lora_rank=8, **changes)
    add_adapters(model, target_names(model, "all", settings.use_dora), Adapter.of(settings))
    model.to(META).train()
    if recomputed:
        checkpoint_activations(model, False)
    per_document.register()
    model.set_attn_implementation(per_document.NAME)
    return model


def per_layer(quantized: bool, recomputed: bool, fused: bool = True) -> tuple[Counter, Counter, Counter]:
    """(launches of a layer's forward, of its backward with what it computes again, its autograd nodes)."""
    found = []
    for num_layers in (1, 2, 3):  # the first pays for what is tried once
        model = llama(num_layers, quantized, recomputed)
        if fused:
            fuse.replace(model)
            flat.flatten(model)
        attention = Attention(AttentionPlan("auto", ("varlen",)))
        inputs = checks.packed_inputs([torch.arange(40), torch.arange(17)], META, attention=attention)
        with flat.in_step(model, torch.bfloat16 if fused else None):
            with Launches() as forward:
                out = model.model(**inputs).last_hidden_state
            nodes = nodes_of(out)
            with Launches() as backward:
                out.sum().backward()
        found.append((forward.counts, backward.counts, nodes))
    return tuple(more - less for less, more in zip(*found[1:], strict=True))
