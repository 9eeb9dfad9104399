"""Which layers get an adapter, how adapters start, and PEFT's names, shapes and config for them on disk."""

import math
import re

import numpy as np
import torch
from torch import nn

import quantization_wrapper
from finetune.errors import PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.settings import CHANGES_BASE, Settings
from finetune.torch_engine import experts, lora_init
from finetune.torch_engine.lora import LoRAEmbedding, LoRALinear, features, scaling_of

# What "default" means where a model does not call its projections q_proj and v_proj.
DEFAULT_TARGETS = (
    ("q_proj", "v_proj"),
    ("query_key_value",),
    ("qkv_proj",),
    ("c_attn",),
    ("Wqkv",),
    ("q", "v"),
)
# Of a mixture, PEFT reads these in target_modules as its experts of transformers 4; by their weight they are what they are.
PEFT_TAKES_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")
PREFIX = "base_model.model."
WRAPPERS = (LoRALinear, LoRAEmbedding, experts.Experts)


def linear_names(model) -> list[str]:
    """Every linear but the head, routers and one-output gates: what qlora quantizes, beside experts held as one parameter."""
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
    """What an adapter is put on only when it is named: the head and embeddings."""
    head = model.get_output_embeddings()
    return [
        n for n, m in model.named_modules() if isinstance(m, nn.Embedding) or (m is head and head is not None)
    ]


def target_names(model, wish: str, use_dora: bool = False) -> list[str]:
    """The layers that get an adapter. `wish`: all, default, a comma list of names or endings, or a regex on whole names.

    Experts held as one parameter are named by it, such as ...mlp.experts.down_proj; PEFT has no DoRA for them.
    """
    names, three_d = linear_names(model), experts.parameter_names(model)
    if wish == "all":
        return names if use_dora else names + three_d
    if wish == "default":
        for leaves in DEFAULT_TARGETS:
            found = [n for n in names if n.rpartition(".")[2] in leaves]
            if found:
                return found
        raise PlanError(
            "--lora_target_modules default: this model has no query and value projections known by name. Use all."
        )
    names = names + three_d + outer_names(model)
    if re.fullmatch(r"[\w.,\s]+", wish):
        endings = [e.strip() for e in wish.split(",") if e.strip()]
        if not endings:
            raise PlanError(f"--lora_target_modules {wish!r}: names nothing. Name layers, or use all.")
        chosen = [n for n in names if any(n == e or n.endswith("." + e) for e in endings)]
        missing = [e for e in endings if not any(n == e or n.endswith("." + e) for n in names)]
    else:
        try:
            chosen = [n for n in names if re.fullmatch(wish, n)]
        except re.error as error:
            raise PlanError(
                f"--lora_target_modules {wish}: is no regex ({error}). Give names, or a regex."
            ) from None
        missing = [] if chosen else [wish]
    if missing:
        leaves = ", ".join(sorted({n.rpartition(".")[2] for n in names}))
        raise PlanError(
            f"--lora_target_modules {missing[0]}: no layer of this model that can be adapted has that name. Name some of "
            f"{leaves}, or use all."
        )
    if use_dora and set(chosen) & set(three_d):
        first = next(n for n in chosen if n in three_d)
        raise PlanError(f"--use_dora true: PEFT has no DoRA for experts held as one parameter, such as {first}. "
                        "Name other layers in --lora_target_modules, or leave --use_dora out.")  # fmt: skip
    return chosen


def add(model, names: list[str], settings: Settings, starts: dict | None = None, share=None) -> None:
    """Puts an adapter on each named layer. A is drawn from `seed` and the layer's name alone, on the CPU; or is `starts`'.

    `starts`: {name: A}, or {name: (A, B)} where their product was taken out of the base (see change_base). `share`: what this
    rank keeps, where the model is on meta; then DoRA's magnitudes are not yet made.
    """
    starts, modules = starts or {}, dict(model.named_modules())
    s = settings
    scaling = scaling_of(s.lora_rank, s.lora_alpha, s.use_rslora)
    inside = {}
    for name in names:
        if name not in modules:
            owner, _, parameter = name.rpartition(".")
            inside.setdefault(owner, []).append(parameter)
            continue
        base = modules[name]
        if isinstance(base, nn.Embedding):
            layer = LoRAEmbedding(base, s.lora_rank, s.lora_alpha, s.use_rslora, s.use_dora)
            with torch.no_grad():  # PEFT's: A zero, B normal
                drawn = _drawn(name, layer.lora_embedding_B.shape, "normal", s)
                _give(share, f"{name}.lora_embedding_B", layer.lora_embedding_B, drawn)
        else:
            layer = LoRALinear(base, s.lora_rank, s.lora_alpha, s.lora_dropout, s.use_rslora, s.use_dora)
            _set_start(layer, name, starts.get(name), layer.in_features, s, share)
            if s.use_dora and layer.start is not None:  # the magnitude of what the base was
                with torch.no_grad():
                    layer.lora_magnitude_vector.copy_(layer.weight_norm())
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
    for owner, parameters in inside.items():
        module = experts.wrapped(model, owner)
        module.adapt(parameters, s.lora_rank, scaling)
        for parameter, pair in module.pairs().items():
            name = f"{owner}.{parameter}"
            _set_start(pair, name, starts.get(name), pair.lora_A.shape[1], s, share)
    for name, parameter in adapter_parameters(model).items() if share is not None else ():
        if not share.has(parameter):
            share.give(name, parameter, torch.zeros(parameter.shape))


def _give(share, name: str, parameter, value) -> None:
    """Sets a parameter, or keeps this rank's rows of its value."""
    if share is None:
        parameter.copy_(value)
    else:
        share.give(name, parameter, value)


@torch.no_grad()
def _set_start(layer, name: str, start, in_features: int, settings: Settings, share=None) -> None:
    if isinstance(start, tuple):
        layer.start = tuple(t.detach().float().cpu().clone() for t in start)
        layer.lora_A.copy_(start[0])
        layer.lora_B.copy_(start[1])
    elif start is not None:
        layer.lora_A.copy_(start)
    elif settings.init_lora_weights == "gaussian":  # PEFT's: normal with deviation 1/r
        drawn = _drawn(name, layer.lora_A.shape, "normal", settings)
        _give(share, f"{name}.lora_A", layer.lora_A, drawn / settings.lora_rank)
    else:  # PEFT's: Kaiming uniform with a = sqrt(5), that is +-1/sqrt(I)
        drawn = _drawn(name, layer.lora_A.shape, "uniform", settings)
        _give(share, f"{name}.lora_A", layer.lora_A, drawn / math.sqrt(in_features))


def _drawn(name: str, shape, kind: str, settings: Settings) -> torch.Tensor:
    """Numbers that the seed and the layer's name alone decide: standard normal, or uniform in [-1, 1]."""
    generator = torch.Generator().manual_seed(lora_init.seed_of(settings.seed, name))
    out = torch.empty(shape)
    return out.normal_(generator=generator) if kind == "normal" else out.uniform_(-1, 1, generator=generator)


@torch.no_grad()
def change_base(model, names: list[str], settings: Settings, config, saved: dict | None, device) -> dict:
    """{name: (A_0, B_0)} of pissa, olora or loftq, their product taken out of the still dense weights.

    `config`: how the base will be quantized, None where it will not; `saved`: a checkpoint's tensors, whose start is used again.
    """
    s, modules, starts = settings, dict(model.named_modules()), {}
    scaling = scaling_of(s.lora_rank, s.lora_alpha, s.use_rslora)
    device = device if device.type == "cuda" else torch.device("cpu")

    def quantized(weight):
        layer = quantization_wrapper.quantized_linear(weight, None, config)
        return layer.weight_of(layer.stored(), torch.float32)

    def part(name, weight, number=0, count=1):
        """Takes the product out of one weight [O, I], a view of the parameter, and gives its factors."""
        if saved is not None:
            key = PREFIX + _peft_owner(name, names, modules)
            _, a = lora_init.halves_a(torch.from_numpy(saved[key + ".lora_A.weight"]), count)
            _, b = lora_init.halves_b(torch.from_numpy(saved[key + ".lora_B.weight"]), count)
            a, b = a.view(count, -1, a.shape[1])[number], b.view(b.shape[0], -1, count)[..., number]
            a, b = a.to(device), b.to(device)
        else:
            label = f"{name}.{number}" if count > 1 else name
            a, b = lora_init.factors(
                weight.to(device), s.init_lora_weights, s.lora_rank, scaling, s.seed, label, quantized
            )
        weight.copy_((weight.to(device).float() - scaling * (b @ a)).to(weight.dtype))
        return a, b

    for name in names:
        if name in modules:
            module = modules[name]
            if isinstance(module, nn.Embedding):
                continue
            if module is model.get_output_embeddings() and tied(model):
                raise PlanError(
                    f"--init_lora_weights {s.init_lora_weights}: changes the weights of {name}, which are those of the "
                    "embedding too. Leave it out of --lora_target_modules, or use --init_lora_weights default."
                )
            weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
            starts[name] = part(name, weight.detach())
        else:
            owner, _, parameter = name.rpartition(".")
            module = modules[owner]
            weight = getattr(module, parameter).detach()
            weight = weight.transpose(1, 2) if module.is_transposed else weight
            pairs = [part(name, w, e, len(weight)) for e, w in enumerate(weight)]
            a = torch.cat([a for a, _ in pairs])
            b = torch.stack([b for _, b in pairs], -1)
            starts[name] = (a, b.reshape(b.shape[0], -1))
    return starts


def _peft_owner(name: str, names: list[str], modules) -> str:
    """The module under which PEFT keeps a target's adapter; of two parameters of one module the first is nested."""
    if name in modules:
        return name
    owner, _, parameter = name.rpartition(".")
    first, last = experts.weight_names(modules[owner])
    return owner + (".base_layer" if parameter == first and f"{owner}.{last}" in names else "")


def tied(model) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def eva_start(model, names: list[str], settings: Settings, batches) -> dict[str, torch.Tensor]:
    """{layer name: A [R, I]} from the data, by peft's EVA (Paischer et al. 2024): leading directions of each layer's inputs.

    `model` still dense; `batches` are dicts of its inputs. Ranks stay as asked for (rho 1), so that every layer has one.
    """
    import peft
    from peft.tuners.lora.eva import get_eva_state_dict

    for name in names:
        most = min(features(model.get_submodule(name)))
        if settings.lora_rank > most:
            raise PlanError(
                f"--lora_rank {settings.lora_rank}: eva finds at most {most} directions in {name}. Use at most {most}."
            )
    config = peft.LoraConfig(
        r=settings.lora_rank,
        target_modules=names,
        init_lora_weights="eva",
        eva_config=peft.EvaConfig(rho=1.0),
    )
    state = get_eva_state_dict(model, batches, config, show_progress_bar=False)
    return {name: state[name] for name in names}


def layers(model) -> dict[str, LoRALinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def adapter_parameters(model) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if n.rpartition(".")[2].startswith("lora_")}


def disk_name(name: str) -> str:
    """PEFT's key of one of our parameters: '...q_proj.lora_A' -> 'base_model.model....q_proj.lora_A.weight'."""
    return PREFIX + name + (".weight" if name.rpartition(".")[2] in ("lora_A", "lora_B") else "")


def to_disk(model, named: dict, settings: Settings) -> dict[str, torch.Tensor]:
    """{PEFT's key: tensor} of the adapters: of twice the rank, on the unchanged base, where the start changed the base."""
    out = {disk_name(n): p.detach().float().cpu() for n, p in named.items()}
    if settings.init_lora_weights in CHANGES_BASE:
        for name in named:
            owner, _, leaf = name.rpartition(".")
            layer, key = model.get_submodule(owner), disk_name(name)
            if leaf.endswith("_A"):
                start = layer.start[0] if layer.start else torch.zeros_like(out[key])
                out[key] = lora_init.doubled_a(out[key], start, layer.num_experts)
            elif leaf.endswith("_B"):
                start = layer.start[1] if layer.start else torch.zeros_like(out[key])
                out[key] = lora_init.doubled_b(out[key], start, layer.num_experts)
    return out


def from_disk(model, named: dict, tensors: dict, settings: Settings) -> dict:
    """The contrary of to_disk, for numpy arrays: what trains here, without the start's half."""
    if settings.init_lora_weights not in CHANGES_BASE:
        return tensors
    out = dict(tensors)
    for name in named:
        owner, _, leaf = name.rpartition(".")
        key, count = disk_name(name), model.get_submodule(owner).num_experts
        if key in out and leaf.endswith(("_A", "_B")):
            halves = lora_init.halves_a if leaf.endswith("_A") else lora_init.halves_b
            out[key] = halves(torch.from_numpy(np.array(out[key])), count)[0].numpy()
    return out


def original_names(model) -> list[str]:
    """Names of the modules as transformers made them: ours count under the name of what they stand around."""
    ours = [n + "." for n, m in model.named_modules() if isinstance(m, WRAPPERS)]
    return [n for n, _ in model.named_modules() if not any(n.startswith(prefix) for prefix in ours)]


def peft_config(model, settings: Settings, base_name: str) -> dict:
    """adapter_config.json as PEFT reads it."""
    modules = dict(model.named_modules())
    chosen = sorted(n for n, m in modules.items() if isinstance(m, (LoRALinear, LoRAEmbedding)))
    parameters = [f"{n}.{p}" for n, m in modules.items() if isinstance(m, experts.Experts) for p in m.adapted]
    if experts.has_experts(model) and not settings.use_dora:
        as_parameters = [n for n in chosen if n.rpartition(".")[2] in PEFT_TAKES_FOR_EXPERTS]
        chosen = [n for n in chosen if n not in as_parameters]
        parameters += [f"{n}.weight" for n in as_parameters]
    leaves = sorted({n.rpartition(".")[2] for n in chosen})
    by_leaf = {n for n in original_names(model) if n.rpartition(".")[2] in leaves}
    conv = any(
        m.base.fan_in_fan_out if isinstance(m.base, QuantizedLinear) else not isinstance(m.base, nn.Linear)
        for m in layers(model).values()
    )
    s, twice = settings, settings.init_lora_weights in CHANGES_BASE
    plain = twice or s.init_lora_weights == "default"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": s.lora_rank * 2 if twice else s.lora_rank,
        # alpha/r, or alpha/sqrt(r), stays what it was in training
        "lora_alpha": s.lora_alpha * (2**0.5 if s.use_rslora else 2) if twice else s.lora_alpha,
        "lora_dropout": 0.0 if parameters else s.lora_dropout,  # PEFT refuses any beside target_parameters
        "target_modules": leaves if by_leaf == set(chosen) else chosen,
        "target_parameters": parameters or None,
        "use_dora": s.use_dora,
        "use_rslora": s.use_rslora,
        "init_lora_weights": True if plain else s.init_lora_weights,
        "fan_in_fan_out": conv,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
        "revision": s.revision,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


@torch.no_grad()
def merge(model) -> None:
    """Adds each adapter into its dense base weight, in fp32, and takes the adapter away. Adapted tied weights are untied."""
    outer = [
        m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if isinstance(m, WRAPPERS)
    ]
    if outer and tied_bases(model):
        head = model.get_output_embeddings()
        head = head.base if isinstance(head, WRAPPERS) else head
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, (LoRALinear, LoRAEmbedding)):
            continue
        merged, base = layer.merged_weight(), layer.base
        turned = not isinstance(base, (nn.Linear, nn.Embedding))
        base.weight.copy_((merged.t() if turned else merged).to(base.weight.dtype))
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, base)
    experts.merge(model)


def tied_bases(model) -> bool:
    """tied(model), where one of the two may have an adapter."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    one, two = (m.base if isinstance(m, WRAPPERS) else m for m in ends)
    return two is not None and one.weight is two.weight


def attach(model, folder) -> None:
    """Puts a saved PEFT LoRA adapter (ours or anyone's) on a dense model. PlanError for what this version does not read."""
    import json
    from dataclasses import replace
    from pathlib import Path

    from safetensors.torch import load_file

    file = Path(folder) / "adapter_config.json"
    config = json.loads(file.read_text())
    plain = {
        "peft_type": ("LORA",), "bias": ("none", None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
        "modules_to_save": (None, []), "layer_replication": (None,), "trainable_token_indices": (None,),
    }  # fmt: skip
    for key, fine in plain.items():
        if key in config and config[key] not in fine:
            raise PlanError(
                f"{file}: {key} {config[key]} is not read by this version. Merge it with peft first."
            )
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    _copy_outer_weights(model, tensors, file)
    modules = dict(model.named_modules())
    names = {
        re.sub(r"\.lora_((A|B)\.weight|embedding_(A|B)|magnitude_vector)$", "", k.removeprefix(PREFIX))
        for k in tensors
    }
    wished = config.get("target_parameters") or []
    three_d = [
        n for n in experts.parameter_names(model) if any(n == w or n.endswith("." + w) for w in wished)
    ]
    owners = {n.rpartition(".")[0] for n in three_d}
    names = sorted(n for n in names if n.removesuffix(".base_layer") not in owners)
    for name in names:
        if name not in modules:
            raise PlanError(
                f"{file}: adapts {name}, which this base has not. Give the base it was trained on."
            )
    settings = replace(
        Settings(), lora_rank=config["r"], lora_alpha=config["lora_alpha"], use_dora=bool(config.get("use_dora")),
        use_rslora=bool(config.get("use_rslora")), lora_dropout=0.0,
    )  # fmt: skip
    add(model, names + three_d, settings)
    ours = {disk_name(n): p for n, p in adapter_parameters(model).items()}
    if set(ours) != set(tensors):
        raise PlanError(f"{file}: does not fit its weights, such as {sorted(set(ours) ^ set(tensors))[0]}.")
    with torch.no_grad():
        for name, parameter in ours.items():
            if parameter.shape != tensors[name].shape:
                raise PlanError(
                    f"{file}: {name} is {list(tensors[name].shape)}, {list(parameter.shape)} fits this base."
                )
            parameter.copy_(tensors[name])
            parameter.requires_grad_(False)


@torch.no_grad()
def _copy_outer_weights(model, tensors: dict, file) -> None:
    """PEFT saves an adapted embedding's or head's own weight beside the adapter: takes it from `tensors` into the base."""
    for key in [k for k in tensors if k.endswith(".base_layer.weight")]:
        name = key.removeprefix(PREFIX).removesuffix(".base_layer.weight")
        saved, modules = tensors.pop(key), dict(model.named_modules())
        weight = modules[name].weight if name in modules else None
        if weight is None or weight.shape != saved.shape:
            raise PlanError(
                f"{file}: holds {name} {list(saved.shape)}, which this base has not. Merge it with peft first."
            )
        weight.copy_(saved)
