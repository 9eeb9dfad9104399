"""Interfaces of LocalShards and WeightFiles to the rooms below them."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.model_files.vocabulary import Vocabulary
from finetune.quantizers.linear import QuantizedLinear
from quantization_wrapper import QuantizationConfig


class GivenValues(Protocol):
    """Destination of the values of parameters on meta."""

    magnitudes_are_known: bool

    def has(self, parameter: nn.Parameter, /) -> bool: ...
    def give(self, name: str, parameter: nn.Parameter, make: Callable[[], torch.Tensor], /) -> None: ...
    def cast(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype, /) -> None: ...


class HeldShards(GivenValues, Protocol):
    """A rank's own rows of parameters whose full shape stays on meta."""

    sizes: Any  # {layer: (out_features, in_features) of the full layer}

    def take(self, parameter: nn.Parameter, /) -> torch.Tensor: ...
    def sliced(self, old: nn.Parameter, new: nn.Parameter, cut: Any, /) -> None: ...


class LoadedShards(HeldShards, Protocol):
    """The same while weights stream in: which rows of a tensor are read, and where they are kept."""

    def is_here(self, name: str, /) -> bool: ...
    def index(self, name: str, shape: tuple, /) -> list[tuple[slice, ...]]: ...
    def reads_part(self, name: str, shape: tuple, config: QuantizationConfig | None, /) -> bool: ...
    def num_rows(self, name: str, full: int, part: bool, /) -> int: ...
    def parameter(self, name: str, tensor: torch.Tensor, shape: tuple | None, /) -> nn.Parameter: ...
    def linear(self, name: str, layer: QuantizedLinear, num_rows: int | None, /) -> None: ...
    def hold_experts(
        self, name: str, module: Any, leaf: str, weight: torch.Tensor, config: QuantizationConfig, hold: Any, /
    ) -> None: ...
    def forget_all_but(self, parameters: Iterable[nn.Parameter], /) -> None: ...


class PackedLayers(Protocol):
    """The packed base beside the model's files: what it has of the layers, and which it wants to keep. `outer`: {role:
    name} of an embedding and a head that it keeps too.
    """

    outer: Mapping[str, str]

    def loading(
        self, model: PreTrainedModel, device: torch.device, /
    ) -> AbstractContextManager[tuple[set[str], list[str]]]: ...
    def take(self, prefix: str, /) -> None: ...


class StoredTensors(Protocol):
    """A checkpoint's tensors by name: see WeightFiles."""

    file_of: dict
    decoded: dict

    def read(self, name: str, /) -> torch.Tensor: ...
    def mlx_format(self, layer: str, /) -> tuple[int, int]: ...
    def grow(self, name: str, num_rows: int, vocabulary: Vocabulary, /) -> None: ...
