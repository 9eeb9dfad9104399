"""Embeddings and head with rows for new tokens: the model is built with them, and its files are read as if they had.

A new row is the mean of the rows of the tokens before it. transformers' `mean_resizing` draws from a normal
distribution around that mean, of 1e-9 times the rows' covariance; the mean itself is the same on every rank.

V rows of a tensor in the files.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.model_files.vocabulary import Vocabulary
from finetune.torch_engine.lora.layers import LoRAEmbedding
from finetune.torch_engine.weights import prequantized
from finetune.torch_engine.weights.interfaces import StoredTensors

AT_ONCE = 2**22  # numbers read at a time for the mean


class GrownTensor:
    """A tensor [V, ...] with more rows than the files have. `stored(index)`: what these hold."""

    def __init__(self, stored: Callable[[tuple], torch.Tensor], shape: tuple, num_rows: int, vocabulary: Vocabulary):
        self.stored = stored
        self.shape = (num_rows, *shape[1:])
        self.kept = vocabulary.kept(shape[0])
        self.old = self.kept[0].stop
        self._mean: torch.Tensor | None = None

    def mean(self) -> torch.Tensor:
        """Mean of the old tokens' rows, summed in fp64 and rounded once."""
        if self._mean is None:
            step = max(1, AT_ONCE // max(1, prod(self.shape[1:])))
            blocks = (self.stored((slice(at, min(at + step, self.old)),)) for at in range(0, self.old, step))
            sums = [(block.double().sum(0), block.dtype) for block in blocks]
            self._mean = (sum(total for total, _ in sums) / self.old).to(sums[0][1])
        return self._mean

    def read(self, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The tensor, or what `index` is of it."""
        rows, *others = index or (slice(None),)
        start, stop, _ = rows.indices(self.shape[0])
        mean = self.mean()[tuple(others)]
        out = mean.expand(max(0, stop - start), *mean.shape).clone()
        for kept in self.kept:
            low = max(kept.start, start)
            high = min(kept.stop, stop)
            if low < high:
                out[low - start : high - start] = self.stored((slice(low, high), *others))
        return out


def set_vocabulary(config: Any, vocabulary: Vocabulary | None) -> None:
    """A model's config with as many rows as it needs: spare ones are used first."""
    text = config.get_text_config()
    if vocabulary is not None and vocabulary.size > (text.vocab_size or 0):
        for one in {id(c): c for c in (config, text)}.values():
            if getattr(one, "vocab_size", None) is not None:
                one.vocab_size = vocabulary.size


def ends_of(model: PreTrainedModel) -> list[str]:
    """Names of the modules with a row per token: input embeddings, and the head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is end for end in ends if end is not None)]


def rows_of(model: PreTrainedModel) -> int:
    """Rows of the full input embeddings, of which a rank may have some."""
    base: Any = model.get_input_embeddings()
    if isinstance(base, LoRAEmbedding):
        base = base.base
    if isinstance(base, nn.Embedding):
        return base.num_embeddings
    return len(base.weight)


def grow(model: Any, checkpoint: StoredTensors, tasks: list) -> None:
    """Lets `checkpoint` give the tensors of embeddings and head with the rows that `model` was built with.
    Raises PlanError if they are not stored as they are.
    """
    if model.vocabulary is None:
        return
    wanted = {f"{name}.{leaf}" for name in ends_of(model) for leaf in ("weight", "bias")}
    state = model.state_dict()
    for task in (task for task in tasks if task.target in wanted):
        name = task.names[0]
        if task.mapping is not None or prequantized.parts(name, checkpoint) or name in checkpoint.decoded:
            raise PlanError(
                f"--new_tokens: {name} of {model.name_or_path} is not stored as a plain tensor, so it cannot get rows. "
                "Give the unquantized model it was made from."
            )
        checkpoint.grow(name, state[task.target].shape[0], model.vocabulary)
