"""Frozen products of a model's adapted linears in fp8: which are, and how far they are from the weights' own."""

import torch
from torch import nn

from finetune.torch_engine.kernels.fp8 import FrozenFp8, Switch, takes
from finetune.torch_engine.lora.layers import layers

LOSS = 0.05  # most that the loss may be off by, divided by it
GRADIENT = 1 / 3  # and the gradients of all adapters together, by their norm: rounding is as often up as down


def use(model: nn.Module) -> None:
    """Has each linear with an adapter multiply in fp8 while it trains, if its sizes are of fp8's multiple."""
    switch = Switch()
    for layer in layers(model).values():
        if takes((layer.out_features, layer.in_features)):
            layer.fp8 = FrozenFp8(switch)


def switch_of(model: nn.Module) -> Switch | None:
    """The switch of all of them; None: there are none."""
    for layer in layers(model).values():
        if layer.fp8 is not None:
            return layer.fp8.switch
    return None


def turn_off(model: nn.Module) -> None:
    """Has all of them multiply by their weights as they are, from here on."""
    switch = switch_of(model)
    if switch is not None:
        switch.on = False


def compared(
    exact: tuple[torch.Tensor, list[torch.Tensor]], found: tuple[torch.Tensor, list[torch.Tensor]]
) -> tuple[float, float]:
    """(difference of the loss divided by it, of all gradients by their norm) of (loss, gradients) found twice."""
    loss, gradients = exact
    of_loss = ((found[0] - loss).abs() / loss.abs().clamp_min(1e-12)).item()
    apart = torch.stack([(mine - right).float().norm() for mine, right in zip(found[1], gradients, strict=True)])
    norms = torch.stack([right.float().norm() for right in gradients])
    return of_loss, (apart.norm() / norms.norm().clamp_min(1e-30)).item()
