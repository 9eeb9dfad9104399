"""The interface of LocalShards to the rooms below it: a rank's rows of the weights, before the model is sharded."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn


class HeldShards(Protocol):
    """A rank's own rows of parameters whose full shape stays on meta."""

    magnitudes_are_known: bool
    sizes: Any  # {layer: (out_features, in_features) of the full layer}

    def has(self, parameter: nn.Parameter, /) -> bool: ...
    def give(self, name: str, parameter: nn.Parameter, make: Callable[[], torch.Tensor], /) -> None: ...
    def take(self, parameter: nn.Parameter, /) -> torch.Tensor: ...
    def cast(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype, /) -> None: ...
    def sliced(self, old: nn.Parameter, new: nn.Parameter, cut: Any, /) -> None: ...
