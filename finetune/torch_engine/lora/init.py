"""How adapters start: Kaiming or Gaussian, EVA from the data, PiSSA, OLoRA and LoftQ from the base weights."""

import math

import torch
from torch import nn

import quantization_wrapper
from finetune.adapters.start import seed_of
from finetune.errors import PlanError
from finetune.plan.parts import Adapter
from finetune.torch_engine.device import fp64_device
from finetune.torch_engine.lora import factors
from finetune.torch_engine.lora.layers import features, scaling_of
from finetune.torch_engine.lora.peft_format import PREFIX, peft_owner
from finetune.torch_engine.lora.targets import tied


def assign(local_shards, name: str, parameter, value) -> None:
    """Sets a parameter, or this rank's shard of it."""
    if local_shards is None:
        parameter.copy_(value)
    else:
        local_shards.give(name, parameter, value)


@torch.no_grad()
def initialize(layer, name: str, start, in_features: int, adapter: Adapter, local_shards=None) -> None:
    if isinstance(start, tuple):
        layer.start = tuple(t.detach().float().cpu().clone() for t in start)
        layer.lora_A.copy_(start[0])
        layer.lora_B.copy_(start[1])
    elif start is not None:
        layer.lora_A.copy_(start)
    elif adapter.init.is_gaussian:  # as in PEFT: normal with standard deviation 1/r
        drawn = sampled(name, layer.lora_A.shape, "normal", adapter.init.seed)
        assign(local_shards, f"{name}.lora_A", layer.lora_A, drawn / adapter.rank)
    else:  # as in PEFT: Kaiming uniform with a = sqrt(5), i.e. +-1/sqrt(I)
        drawn = sampled(name, layer.lora_A.shape, "uniform", adapter.init.seed)
        assign(local_shards, f"{name}.lora_A", layer.lora_A, drawn / math.sqrt(in_features))


def sampled(name: str, shape, kind: str, seed: int) -> torch.Tensor:
    """Random values determined by the seed and the layer's name: standard normal, or uniform in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    out = torch.empty(shape)
    return out.normal_(generator=generator) if kind == "normal" else out.uniform_(-1, 1, generator=generator)


@torch.no_grad()
def residual_init(model, names: list[str], adapter: Adapter, config, saved: dict | None, device) -> dict:
    """{name: (A_0, B_0)} by pissa, olora or loftq; subtracts their product from the still dense base weights.

    `config`: quantization of the base, or None; `saved`: a checkpoint's tensors, whose initial adapter is reused.
    """
    init, modules, starts = adapter.init, dict(model.named_modules()), {}
    scaling = scaling_of(adapter.rank, adapter.alpha, adapter.rslora)
    device = fp64_device(device)

    def quantized(weight):
        layer = quantization_wrapper.quantized_linear(weight, None, config)
        return layer.weight_of(layer.stored(), torch.float32)

    def part(name, weight, number=0, count=1):
        """Subtracts the product from one weight [O, I], a view of the parameter; returns its factors."""
        if saved is not None:
            key = PREFIX + peft_owner(name, names, modules)
            _, a = factors.halves_a(torch.from_numpy(saved[key + ".lora_A.weight"]), count)
            _, b = factors.halves_b(torch.from_numpy(saved[key + ".lora_B.weight"]), count)
            a, b = a.view(count, -1, a.shape[1])[number], b.view(b.shape[0], -1, count)[..., number]
            a, b = a.to(device), b.to(device)
        else:
            label = f"{name}.{number}" if count > 1 else name
            a, b = factors.factors(weight.to(device), init.word, adapter.rank, scaling, init.seed, label, quantized)
        weight.copy_((weight.to(device).float() - scaling * (b @ a)).to(weight.dtype))
        return a, b

    for name in names:
        if name in modules:
            module = modules[name]
            if isinstance(module, nn.Embedding):
                continue
            if module is model.get_output_embeddings() and tied(model):
                raise PlanError(
                    f"--init_lora_weights {init.word}: changes the weights of {name}, which are tied to the "
                    "embedding. Remove it from --lora_target_modules, or use --init_lora_weights default."
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


def eva_init(model, names: list[str], rank: int, batches) -> dict[str, torch.Tensor]:
    """{layer name: A [R, I]} by peft's EVA (Paischer et al. 2024): leading singular vectors of each layer's inputs.

    `model`: still dense; `batches`: dicts of its inputs. The rank is not redistributed (rho 1), so every layer gets R.
    """
    import peft
    from peft.tuners.lora.eva import get_eva_state_dict

    for name in names:
        most = min(features(model.get_submodule(name)))
        if rank > most:
            raise PlanError(f"--lora_rank {rank}: eva finds at most {most} components in {name}. Use at most {most}.")
    config = peft.LoraConfig(r=rank, target_modules=names, init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0))
    state = get_eva_state_dict(model, batches, config, show_progress_bar=False)
    return {name: state[name] for name in names}
