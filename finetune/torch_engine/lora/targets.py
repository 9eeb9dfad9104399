"""Which layers get an adapter: --lora_target_modules resolved against the loaded model."""

from torch import nn

import quantization_wrapper
from finetune.errors import PlanError
from finetune.lora_targets import default_targets, named_targets
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine import experts
from finetune.torch_engine.lora.layers import LoRAEmbedding, LoRALinear, features

WRAPPERS = (LoRALinear, LoRAEmbedding, experts.Experts)


def linear_names(model) -> list[str]:
    """Names of all linears but head, routers and one-output gates: qlora quantizes these, and fused experts."""
    head = model.get_output_embeddings()
    routed = experts.has_experts(model)
    parts = {id(part) for part in experts.quantized_parts(model)}
    names = []
    for name, module in model.named_modules():
        linear = isinstance(module, (nn.Linear, QuantizedLinear)) or quantization_wrapper.is_conv1d(module)
        if not linear or module is head or id(module) in parts:
            continue
        router = routed and {"gate", "router"} & set(name.split(".")[-2:])
        if not router and features(module)[1] > 1:
            names.append(name)
    return names


def outer_names(model) -> list[str]:
    """Names of the head and the embeddings, which get an adapter only if named explicitly."""
    head = model.get_output_embeddings()
    return [n for n, m in model.named_modules() if isinstance(m, nn.Embedding) or (m is head and head is not None)]


def target_names(model, targets: str, use_dora: bool = False) -> list[str]:
    """Names of the layers that get an adapter.

    `targets`: all, default, comma-separated names or suffixes, or a regex on full names. Fused experts are named by
    their parameter, such as ...mlp.experts.down_proj; PEFT has no DoRA for them.
    """
    names, three_d = linear_names(model), experts.parameter_names(model)
    if targets == "all":
        return names if use_dora else names + three_d
    if targets == "default":
        return default_targets(names)
    unknown = "no adaptable layer of this model has that name"
    chosen = named_targets(names + three_d + outer_names(model), targets, unknown)
    if use_dora and set(chosen) & set(three_d):
        first = next(n for n in chosen if n in three_d)
        raise PlanError(
            f"--use_dora true: PEFT has no DoRA for fused experts, such as {first}. "
            "Name other layers in --lora_target_modules, or omit --use_dora."
        )
    return chosen


def tied(model) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def original_names(model) -> list[str]:
    """Module names of the original transformers model: wrappers have the name of the module they wrap."""
    ours = [n + "." for n, m in model.named_modules() if isinstance(m, WRAPPERS)]
    return [n for n, _ in model.named_modules() if not any(n.startswith(prefix) for prefix in ours)]


def tied_bases(model) -> bool:
    """True for tied embeddings, even if one of the two has an adapter."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    one, two = (m.base if isinstance(m, WRAPPERS) else m for m in ends)
    return two is not None and one.weight is two.weight
