"""LoRA, rsLoRA and DoRA on any linear layer, dense or quantized, with PEFT's names, shapes and config on disk.

R rank, I in_features, O out_features. Adapter weights are fp32; products run in the input's dtype.
"""

import math
import re
import zlib

import torch
import torch.nn.functional as F
from torch import nn

from finetune.errors import PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.settings import Settings

# What "default" means where a model does not call its projections q_proj and v_proj.
DEFAULT_TARGETS = (
    ("q_proj", "v_proj"),
    ("query_key_value",),
    ("qkv_proj",),
    ("c_attn",),
    ("Wqkv",),
    ("q", "v"),
)
PREFIX = "base_model.model."


class LoRAProduct(torch.autograd.Function):
    """z = x W^T + b + s (x A^T) B^T with W frozen: keeps x once, no gradient for W, no product in fp32 by accident."""

    @staticmethod
    def forward(ctx, x, lora_a_RI, lora_b_OR, bias, keep, scaling, weight_of, *stored):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            x_low = x.to(dtype)
            rows = x_low.reshape(-1, x.shape[-1])
            keep = None if keep is None else keep.to(dtype)
            dropped = rows if keep is None else rows * keep
            low_R = dropped @ lora_a_RI.to(dtype).t()
            # The product keeps x's shape: a returned view could not be changed in place by the model's code.
            out = F.linear(x_low, weight_of(stored, dtype), None if bias is None else bias.to(dtype))
            out.view(len(rows), -1).addmm_(low_R, lora_b_OR.to(dtype).t(), alpha=scaling)
        ctx.weight_of, ctx.scaling, ctx.x_shape, ctx.x_dtype, ctx.dtype = (
            weight_of,
            scaling,
            x.shape,
            x.dtype,
            dtype,
        )
        ctx.save_for_backward(rows, low_R, lora_a_RI, lora_b_OR, keep, *stored)
        return out

    @staticmethod
    def backward(ctx, grad):
        rows, low_R, lora_a_RI, lora_b_OR, keep, *stored = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).to(ctx.dtype)
        dropped = rows if keep is None else rows * keep
        grad_low_R = (grad @ lora_b_OR.to(ctx.dtype)) * ctx.scaling
        grad_a = (grad_low_R.t() @ dropped).to(lora_a_RI.dtype)
        grad_b = (grad.t() @ low_R).to(lora_b_OR.dtype) * ctx.scaling
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.weight_of(stored, ctx.dtype)
            if keep is None:
                grad_x.addmm_(grad_low_R, lora_a_RI.to(ctx.dtype))
            else:
                grad_x += (grad_low_R @ lora_a_RI.to(ctx.dtype)) * keep
            grad_x = grad_x.to(ctx.x_dtype).view(ctx.x_shape)
        return grad_x, grad_a, grad_b, None, None, None, None, *(None for _ in stored)


class LoRALinear(nn.Module):
    """A frozen linear with an adapter. `base` is nn.Linear, transformers' Conv1D or QuantizedLinear."""

    def __init__(self, base, rank, alpha, dropout, use_rslora, use_dora):
        super().__init__()
        self.base = base
        self.in_features, self.out_features = features(base)
        device = next(base.parameters()).device
        self.lora_A = nn.Parameter(torch.zeros(rank, self.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, dtype=torch.float32, device=device))
        self.scaling = alpha / math.sqrt(rank) if use_rslora else alpha / rank
        self.dropout = dropout
        self.lora_magnitude_vector = None
        self.row_square_O = None  # |w|^2 of each row of the frozen weight, made once
        self.merged = None  # base and adapter as one dense weight while many small forwards run
        if use_dora:
            self.lora_magnitude_vector = nn.Parameter(self.weight_norm().detach().clone())

    def stored(self) -> tuple:
        return self.base.stored() if isinstance(self.base, QuantizedLinear) else (self.base.weight,)

    def weight_of(self, stored, dtype) -> torch.Tensor:
        """The frozen weight [O, I] in `dtype`."""
        if isinstance(self.base, QuantizedLinear):
            return self.base.weight_of(stored, dtype)
        weight = stored[0].to(dtype)
        return weight if isinstance(self.base, nn.Linear) else weight.t()

    def exact_weight(self) -> torch.Tensor:
        """The frozen weight in fp32 from what is stored, not from a copy kept in 16 bits."""
        if isinstance(self.base, QuantizedLinear) and self.base.cached is not None:
            if self.base.cached.dtype != torch.float32:
                return self.base.dequantize(
                    dict(zip(self.base.names, self.base.stored(), strict=True)), torch.float32
                )
        return self.weight_of(self.stored(), torch.float32)

    @torch.no_grad()
    def weight_norm(self) -> torch.Tensor:
        """|w + s B A| of each row [O], fp32. DoRA (Liu et al. 2024, eq. 6) holds it constant in backward (section 4.3).

        Expanded as |w|^2 + 2 s b.(A w) + s^2 |b A|^2, so that no matrix of the weight's size is made twice.
        """
        a, b, s = self.lora_A.float(), self.lora_B.float(), self.scaling
        weight_OI = self.exact_weight()
        if self.row_square_O is None:
            self.row_square_O = weight_OI.square().sum(1)
        cross = ((weight_OI @ a.t()) * b).sum(1)
        return (
            (self.row_square_O + 2 * s * cross + s * s * ((b @ (a @ a.t())) * b).sum(1)).clamp_min(0).sqrt()
        )

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """Base and adapter as one weight [O, I], fp32."""
        weight_OI = torch.addmm(
            self.exact_weight(),
            self.lora_B.float(),
            self.lora_A.float(),
            alpha=self.scaling,
        )
        if self.lora_magnitude_vector is not None:
            weight_OI *= (self.lora_magnitude_vector / self.weight_norm()).unsqueeze(1)
        return weight_OI

    def forward(self, x):
        if self.merged is not None:
            return F.linear(x, self.merged, self.base.bias)
        keep = None
        if self.dropout and self.training:
            keep = torch.empty(x.numel() // x.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device)
            keep.bernoulli_(1 - self.dropout).div_(1 - self.dropout)
        bias = self.base.bias
        if self.lora_magnitude_vector is None:
            return LoRAProduct.apply(
                x, self.lora_A, self.lora_B, bias, keep, self.scaling, self.weight_of, *self.stored()
            )
        gain_O = self.lora_magnitude_vector / self.weight_norm()
        if keep is None:
            both = LoRAProduct.apply(
                x, self.lora_A, self.lora_B, None, None, self.scaling, self.weight_of, *self.stored()
            )
            out = both * gain_O.to(both.dtype)
        else:  # PEFT drops the adapter's input only: base(x) + (gain - 1) W drop(x) + gain s B A drop(x)
            x_kept = x * keep.view(x.shape)
            both = LoRAProduct.apply(
                x_kept, self.lora_A, self.lora_B, None, None, self.scaling, self.weight_of, *self.stored()
            )
            plain, kept = (F.linear(t, self.weight_of(self.stored(), t.dtype)) for t in (x, x_kept))
            out = plain - kept + both * gain_O.to(both.dtype)
        return out if bias is None else out + bias.to(out.dtype)


def features(base) -> tuple[int, int]:
    """(in_features, out_features), Conv1D's stored the other way round."""
    if isinstance(base, (nn.Linear, QuantizedLinear)):
        return base.in_features, base.out_features
    return tuple(base.weight.shape)


def linear_names(model) -> list[str]:
    """Every linear but the head, routers, one-output gates and experts: what 'all' means, and what qlora quantizes."""
    head = model.get_output_embeddings()
    experts = _has_experts(model)
    names = []
    for name, module in model.named_modules():
        if (
            not (isinstance(module, (nn.Linear, QuantizedLinear)) or type(module).__name__ == "Conv1D")
            or module is head
        ):
            continue
        leaf = name.rpartition(".")[2]
        routed = ".experts." in name or (experts and leaf in ("gate", "router"))
        if not routed and features(module)[1] > 1:
            names.append(name)
    return names


def _has_experts(model) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, k, None) for k in ("num_local_experts", "num_experts", "n_routed_experts"))


def target_names(model, wish: str) -> list[str]:
    """The layers that get an adapter. `wish`: all, default, a comma list of names or endings, or a regex on whole names."""
    names = linear_names(model)
    if wish == "all":
        return names
    if wish == "default":
        for leaves in DEFAULT_TARGETS:
            found = [n for n in names if n.rpartition(".")[2] in leaves]
            if found:
                return found
        raise PlanError(
            "--lora_target_modules default: this model has no query and value projections known by name. Use all."
        )
    if re.fullmatch(r"[\w.,\s]+", wish):
        endings = [e.strip() for e in wish.split(",") if e.strip()]
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
            f"--lora_target_modules {missing[0]}: no linear layer of this model has that name. It has {leaves}."
        )
    return chosen


def add(model, names: list[str], settings: Settings, starts: dict | None = None) -> None:
    """Puts an adapter on each named layer. A is drawn from `seed` and the layer's name alone, on the CPU; or is `starts`'."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        base = model.get_submodule(name)
        layer = LoRALinear(
            base,
            settings.lora_rank,
            settings.lora_alpha,
            settings.lora_dropout,
            settings.use_rslora,
            settings.use_dora,
        )
        generator = torch.Generator().manual_seed(
            (settings.seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63
        )
        start = torch.empty(layer.lora_A.shape)
        if starts is not None:
            start = starts[name]
        elif settings.init_lora_weights == "gaussian":  # PEFT's: normal with deviation 1/r
            start.normal_(std=1 / settings.lora_rank, generator=generator)
        else:  # PEFT's: Kaiming uniform with a = sqrt(5), that is +-1/sqrt(I)
            bound = 1 / math.sqrt(layer.in_features)
            start.uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            layer.lora_A.copy_(start)
        setattr(model.get_submodule(parent), leaf, layer)


def eva_start(model, names: list[str], settings: Settings, batches) -> dict[str, torch.Tensor]:
    """{layer name: A [R, I]} from the data, by peft's EVA (Paischer et al. 2024): leading directions of each layer's inputs.

    `model` still dense; `batches` are dicts of its inputs. Ranks stay as asked for (rho 1), so that every layer has one.
    """
    import peft
    from peft.tuners.lora.eva import get_eva_state_dict

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


def disk_name(name: str) -> str:
    """PEFT's key of one of our parameters: '...q_proj.lora_A' -> 'base_model.model....q_proj.lora_A.weight'."""
    return PREFIX + name + ("" if name.endswith("lora_magnitude_vector") else ".weight")


def peft_config(model, settings: Settings, base_name: str) -> dict:
    """adapter_config.json as PEFT reads it."""
    chosen = sorted(layers(model))
    leaves = sorted({n.rpartition(".")[2] for n in chosen})
    linear = {
        n
        for n, m in model.named_modules()
        if isinstance(m, (nn.Linear, QuantizedLinear)) or type(m).__name__ == "Conv1D"
    }
    linear = {n.removesuffix(".base") for n in linear}
    by_leaf = {n for n in linear if n.rpartition(".")[2] in leaves}
    conv = any(
        m.base.fan_in_fan_out if isinstance(m.base, QuantizedLinear) else not isinstance(m.base, nn.Linear)
        for m in layers(model).values()
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": settings.lora_rank,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        "target_modules": leaves if by_leaf == set(chosen) else chosen,
        "use_dora": settings.use_dora,
        "use_rslora": settings.use_rslora,
        "init_lora_weights": True if settings.init_lora_weights == "default" else settings.init_lora_weights,
        "fan_in_fan_out": conv,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
        "revision": settings.revision,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


@torch.no_grad()
def merge(model) -> None:
    """Adds each adapter into its dense base weight, in fp32, and takes the adapter away."""
    for name, layer in layers(model).items():
        merged = layer.merged_weight()
        base = layer.base
        base.weight.copy_((merged if isinstance(base, nn.Linear) else merged.t()).to(base.weight.dtype))
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, base)


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
        "target_parameters": (None, []),
    }  # fmt: skip
    for key, fine in plain.items():
        if key in config and config[key] not in fine:
            raise PlanError(
                f"{file}: {key} {config[key]} is not read by this version. Merge it with peft first."
            )
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    names = sorted(
        {
            re.sub(r"\.lora_(A|B)\.weight$", "", k.removeprefix(PREFIX))
            for k in tensors
            if k.endswith(".weight")
        }
    )
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise PlanError(
                f"{file}: adapts {name}, which this base has not. Give the base it was trained on."
            )
    settings = replace(
        Settings(), lora_rank=config["r"], lora_alpha=config["lora_alpha"], use_dora=bool(config.get("use_dora")),
        use_rslora=bool(config.get("use_rslora")), lora_dropout=0.0,
    )  # fmt: skip
    add(model, names, settings)
    ours = {disk_name(n): p for n, p in model.named_parameters() if "lora_" in n.rpartition(".")[2]}
    if set(ours) != set(tensors):
        raise PlanError(f"{file}: does not fit its weights, such as {sorted(set(ours) ^ set(tensors))[0]}.")
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(tensors[name])
    for layer in layers(model).values():
        for parameter in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
            if parameter is not None:
                parameter.requires_grad_(False)
