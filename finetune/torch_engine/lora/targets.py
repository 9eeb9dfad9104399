"""Target layers of adapters: --lora_target_modules resolved against the loaded model."""

import contextlib
import copy
import inspect
import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import quantization_wrapper
from finetune.adapters.targets import PEFT_EXPERT_NAMES, ROUTERS, default_targets, named_targets, without_dora
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine import transformers_internals
from finetune.torch_engine.experts import fused
from finetune.torch_engine.lora.layers import LoRAEmbedding, LoRALinear, features
from finetune.torch_engine.weights.modalities import language_prefix, vision_prefixes

WRAPPERS = (LoRALinear, LoRAEmbedding, fused.Experts)


def is_linear(module: nn.Module) -> bool:
    """True for what a pair of matrices adapts: a linear layer, dense or quantized, or transformers' Conv1D."""
    return isinstance(module, (nn.Linear, QuantizedLinear)) or quantization_wrapper.is_conv1d(module)


def linear_names(model: PreTrainedModel, sees: bool = False) -> list[str]:
    """Names of the linears that qlora quantizes and adapters are for: of the language model, and if the run `sees` of
    towers too.

    All but the head, routers, one-output gates, and layers that are more than a linear: see `read_by_code`,
    `computes_a_product`.
    """
    head = model.get_output_embeddings()
    routed = fused.has_experts(model)
    parts = {id(part) for part in fused.quantized_parts(model)}
    read = read_by_code(model)
    prefixes: tuple[str, ...] = (language_prefix(model),)
    if sees:
        prefixes += vision_prefixes(model)
    plain = {}
    names = []
    for name, module in model.named_modules():
        if not is_linear(module) or module is head or id(module) in parts:
            continue
        if name in read or not name.startswith(prefixes):
            continue
        router = routed and ROUTERS & set(name.split(".")[-2:])
        kind = type(module)
        if kind not in plain:
            plain[kind] = kind.forward is nn.Linear.forward or not issubclass(kind, nn.Linear)
            plain[kind] = plain[kind] or computes_a_product(module)
        if not router and plain[kind] and features(module)[1] > 1:
            names.append(name)
    return names


def read_by_code(model: PreTrainedModel) -> dict[str, str]:
    """{linear: the class whose code computes with its weight itself, not through the layer}.

    An adapter or quantized codes of such a layer would be passed over: state-space kernels get out_proj's weight, for
    example. The source of the model's classes is read; reading dtype, device or shape is no computation.
    """
    found = {}
    leaves = {}
    for owner, module in model.named_modules():
        kind = type(module)
        if kind not in leaves:
            leaves[kind] = _weights_read_in(kind)
        for path in leaves[kind]:
            if owner:
                name = f"{owner}.{path}"
            else:
                name = path
            try:
                target = model.get_submodule(name)
            except AttributeError:
                continue
            if isinstance(target, nn.Linear) or quantization_wrapper.is_conv1d(target):
                found[name] = kind.__name__
    return found


# A slice, `.weight[:, a:b]`, is the layer's own product in pieces (BLOOM's pretraining_tp).
_READS_WEIGHT = re.compile(r"\bself\.([\w.]+)\.weight\b(?!\[|\.(?:dtype|device|shape|size|ndim)\b)")


def _weights_read_in(kind: type) -> set[str]:
    """Paths below an instance whose `.weight` the methods of its class compute with; initialization does not count."""
    found = set()
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and name not in ("__init__", "_init_weights", "init_mamba_weights"):
            with contextlib.suppress(OSError):  # a class without source
                found |= set(_READS_WEIGHT.findall(inspect.getsource(inspect.unwrap(method))))
    return found


@torch.no_grad()
def computes_a_product(module: nn.Linear) -> bool:
    """True if a subclass of nn.Linear with its own forward still computes x W^T + b, tried on a small copy."""
    twin = copy.copy(module)
    rows = min(module.out_features, 64)
    columns = module.in_features
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*n, generator=generator) for n in ((rows, columns), (rows,), (2, columns)))
    twin._parameters = dict(module._parameters, weight=nn.Parameter(weight))
    if module.bias is not None:
        twin._parameters["bias"] = nn.Parameter(bias)
    try:
        out = twin(x)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
        return False
    expected = x @ weight.t() + (0 if module.bias is None else bias)
    return isinstance(out, torch.Tensor) and out.shape == expected.shape and torch.allclose(out, expected, atol=1e-3)


def outer_names(model: PreTrainedModel) -> list[str]:
    """Names of the head and the embeddings, which get an adapter only if named explicitly."""
    head = model.get_output_embeddings()
    return [n for n, m in model.named_modules() if isinstance(m, nn.Embedding) or (m is head and head is not None)]


def target_names(model: PreTrainedModel, targets: str, use_dora: bool = False, sees: bool = False) -> list[str]:
    """Names of the layers that get an adapter. `sees`: those of towers for images may.

    `targets`: all, default, comma-separated names or suffixes, or a regex on full names. Fused experts are named by
    their parameter, such as ...mlp.experts.down_proj; PEFT has no DoRA for them.
    """
    names = linear_names(model, sees)
    three_d = fused.parameter_names(model)
    refused = []
    if use_dora:
        refused = three_d + [n for n in names if peft_takes_for_experts(model, n)]
    if targets == "all":
        return without_dora(names + three_d, refused, targets)
    if targets == "default":
        return default_targets(names)
    read = read_by_code(model)
    unknown = "no adaptable layer of this model has that name"
    if wanted := [n for n in read if any(n.endswith(e.strip()) for e in targets.split(",") if e.strip())]:
        unknown = f"{read[wanted[0]]} computes with the weight of {wanted[0]} itself, so an adapter would not be used"
    chosen = named_targets(names + three_d + outer_names(model), targets, unknown)
    return without_dora(chosen, refused, targets)


def peft_takes_for_experts(model: PreTrainedModel, name: str) -> bool:
    """True if PEFT takes the linear's name in target_modules for experts of transformers 4."""
    converted = transformers_internals.converts_experts(model.config.get_text_config().model_type)
    return converted and name.rpartition(".")[2] in PEFT_EXPERT_NAMES


def tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def original_names(model: PreTrainedModel) -> list[str]:
    """Module names of the original transformers model: wrappers have the name of the module they wrap."""
    ours = [n + "." for n, m in model.named_modules() if isinstance(m, WRAPPERS)]
    towers = getattr(model, "left_out", ())
    skeletons: list[Any] = [(name, model.get_submodule(name)) for name in towers]
    left_out = [f"{name}.{inner}" for name, skeleton in skeletons for inner in skeleton.inner]
    names = [n for n, _ in model.named_modules() if not any(n.startswith(prefix) for prefix in ours)]
    return names + left_out


def tied_bases(model: PreTrainedModel) -> bool:
    """True for tied embeddings, even if one of the two has an adapter."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    one, two = (m.base if isinstance(m, WRAPPERS) else m for m in ends)
    return two is not None and one.weight is two.weight
