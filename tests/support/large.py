"""Models of real sizes with random weights, made where they train: for figures of time and memory, not of losses."""

from collections.abc import Callable

import torch
import transformers

import quantization_wrapper
from finetune.parts.parts import Parts
from finetune.torch_engine.device import DTYPES
from finetune.torch_engine.experts import fused
from finetune.torch_engine.lora import frozen_fp8
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.targets import linear_names, target_names

LLAMA_8B = dict(
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)
LLAMA_70B = LLAMA_8B | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
LLAMA_1B = LLAMA_8B | dict(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True, head_dim=64
)


def model(config: dict, settings, device: torch.device, packed: Callable = lambda model: None):
    """A model of these dimensions on `device`, quantized and with adapters as the settings say. `packed(model)`: called
    between the two.
    """
    plan = Parts(settings)
    values = {k: v for k, v in config.items() if k != "model_type"}
    of_type = transformers.AutoConfig.for_model(config["model_type"], **values)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(of_type, dtype=DTYPES[plan.precision.weights])
    made.requires_grad_(plan.all_weights)
    if plan.all_weights:
        return made
    if plan.quantization:
        quantization_wrapper.quantize_model(made, plan.quantization.config, linear_names(made), device)
        fused.quantize(made, plan.quantization.config, list(fused.reachable(made)))
    packed(made)
    adapter = plan.trains
    add_adapters(made, target_names(made, adapter.targets, adapter.dora), adapter)
    if plan.precision.in_fp8:
        frozen_fp8.use(made)
    return made.to(device)
