"""Initializations of adapters: Kaiming or Gaussian, EVA from the data, PiSSA, OLoRA and LoftQ from the base weights."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import quantization_wrapper
from finetune.adapters.patterns import scaling_of
from finetune.adapters.start import seed_of
from finetune.errors import PlanError
from finetune.parts.rows import implementation
from finetune.parts.trains import Adapter
from finetune.torch_engine.device import fp64_device
from finetune.torch_engine.lora import factors
from finetune.torch_engine.lora.layers import features
from finetune.torch_engine.lora.peft_format import PREFIX, peft_owner
from finetune.torch_engine.lora.targets import tied
from finetune.torch_engine.weights.interfaces import GivenValues


def assign(
    local_shards: GivenValues | None, name: str, parameter: nn.Parameter, make: Callable[[], torch.Tensor]
) -> None:
    """Sets a parameter to the full value that `make` returns; of a rank's shards, once its shard is taken."""
    if local_shards is None:
        parameter.copy_(make())
    else:
        local_shards.give(name, parameter, make)


@torch.no_grad()
def initialize(
    layer: Any,
    name: str,
    start: torch.Tensor | tuple | None,
    in_features: int,
    adapter: Adapter,
    local_shards: GivenValues | None = None,
) -> None:
    shape = layer.lora_A.shape
    seed = adapter.init.seed
    if isinstance(start, tuple):
        layer.start = tuple(t.detach().float().cpu().clone() for t in start)
        assign(local_shards, f"{name}.lora_A", layer.lora_A, lambda: layer.start[0])
        assign(local_shards, f"{name}.lora_B", layer.lora_B, lambda: layer.start[1])
    elif start is not None:
        layer.lora_A.copy_(start)
    elif adapter.init.facts.is_gaussian:  # as in PEFT: normal with standard deviation 1/r
        assign(
            local_shards, f"{name}.lora_A", layer.lora_A, lambda: sampled(name, shape, "normal", seed) / adapter.rank
        )
    else:  # as in PEFT: Kaiming uniform with a = sqrt(5), i.e. +-1/sqrt(I)
        root = math.sqrt(in_features)
        assign(local_shards, f"{name}.lora_A", layer.lora_A, lambda: sampled(name, shape, "uniform", seed) / root)


def sampled(name: str, shape: Sequence[int], kind: str, seed: int) -> torch.Tensor:
    """Random values determined by the seed and the layer's name: standard normal, or uniform in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    out = torch.empty(shape)
    if kind == "normal":
        return out.normal_(generator=generator)
    return out.uniform_(-1, 1, generator=generator)


class ResidualInit:
    """Initial adapters by pissa, olora or loftq, whose product is subtracted from full, still dense matrices.

    `names`: the adapted layers of `model`, whose weights come one at a time, in the order of the layers. `config`:
    quantization of the base, or None; `saved`: a checkpoint's tensors, whose initial adapter is reused; `device`: of
    the arithmetic. `starts`: {name: (A_0, B_0)} of those that were subtracted.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        names: list[str],
        adapter: Adapter,
        config: quantization_wrapper.QuantizationConfig | None,
        saved: dict | None,
        device: torch.device,
    ):
        self.model = model
        self.names = names
        self.adapter = adapter
        self.config = config
        self.saved = saved
        self.device = fp64_device(device)
        self.modules = dict(model.named_modules())
        self.starts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        linears = {f"{name}.weight": name for name in names if name in self.modules}
        embeddings = {f"{n}.weight" for n in names if isinstance(self.modules.get(n), nn.Embedding)}
        self.owner = {name: name for name in names if name not in self.modules} | linears
        self.owner = {name: layer for name, layer in self.owner.items() if name not in embeddings}
        self.peft_names = {name: PREFIX + peft_owner(name, names, self.modules) for name in self.owner.values()}

    def changes(self, name: str) -> bool:
        """True if the parameter's matrix becomes a residual."""
        return name in self.owner

    @torch.no_grad()
    def subtract(self, name: str, weight: torch.Tensor) -> None:
        """Subtracts the product from the full `weight` of the parameter, in place."""
        layer = self.owner[name]
        if layer in self.modules:
            turned = not isinstance(self.modules[layer], nn.Linear)
            self.starts[layer] = self._part(layer, weight.t() if turned else weight)
            return
        if self.modules[layer.rpartition(".")[0]].is_transposed:
            weight = weight.transpose(1, 2)
        pairs = [self._part(layer, w, e, len(weight)) for e, w in enumerate(weight)]
        a = torch.cat([a for a, _ in pairs])
        b = torch.stack([b for _, b in pairs], -1)
        self.starts[layer] = (a, b.reshape(b.shape[0], -1))

    def _part(self, name: str, weight: torch.Tensor, number: int = 0, count: int = 1):
        """Subtracts the product from one matrix [O, I], a view of the parameter; returns its factors."""
        device = self.device
        adapter = self.adapter.at(name)
        scaling = scaling_of(adapter.rank, adapter.alpha, adapter.rslora)
        if self.saved is not None:
            key = self.peft_names[name]
            _, a = factors.halves_a(torch.from_numpy(self.saved[key + ".lora_A.weight"]), count)
            _, b = factors.halves_b(torch.from_numpy(self.saved[key + ".lora_B.weight"]), count)
            a = a.view(count, -1, a.shape[1])[number]
            b = b.view(b.shape[0], -1, count)[..., number]
            a = a.to(device)
            b = b.to(device)
        else:
            if count > 1:
                label = f"{name}.{number}"
            else:
                label = name
            assert adapter.init.facts.factors is not None, adapter.init.word
            made = implementation(adapter.init.facts.factors)
            start = factors.Start(adapter.rank, scaling, adapter.init.seed, label)
            a, b = made(weight.to(device).float(), start, self._quantized)
        weight.copy_((weight.to(device).float() - scaling * (b @ a)).to(weight.dtype))
        return a, b

    def _quantized(self, weight: torch.Tensor):
        assert self.config is not None, "only inits of a quantized base ask for it"
        layer = quantization_wrapper.quantized_linear(weight, None, self.config)
        return layer.weight_of(layer.stored(), torch.float32)

    def check_ties(self) -> None:
        """Raises PlanError if the head was to change and is tied to the embedding, once the weights are loaded."""
        head = next((n for n in self.names if self.modules.get(n) is self.model.get_output_embeddings()), None)
        if head is not None and tied(self.model):
            raise PlanError(
                f"--init_lora_weights {self.adapter.init.word}: changes the weights of {head}, which are tied to the "
                "embedding. Remove it from --lora_target_modules, or use --init_lora_weights default."
            )


def residual_init(
    model: PreTrainedModel,
    names: list[str],
    adapter: Adapter,
    config: quantization_wrapper.QuantizationConfig | None,
    saved: dict | None,
    device: torch.device,
) -> dict:
    """{name: (A_0, B_0)} of a loaded, dense model, whose weights become residuals. Arguments as of ResidualInit."""
    residual = ResidualInit(model, names, adapter, config, saved, device)
    parameters = dict(model.named_parameters())
    residual.check_ties()
    for name in residual.owner:
        residual.subtract(name, parameters[name].detach())
    return {name: residual.starts[name] for name in names if name in residual.starts}


def eva_init(
    model: PreTrainedModel, names: list[str], rank: int, batches: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
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
