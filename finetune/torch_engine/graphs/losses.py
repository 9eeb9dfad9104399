"""Losses of microbatches in a bucket's buffers, from tensors alone: nothing of a batch is a number of the host.

A row of LOSSES is an objective whose microbatches CUDA graphs replay.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.engine import Batch
from finetune.objectives import NextToken
from finetune.preference import REFERENCE, check_pairs
from finetune.torch_engine.forward import ModelForward, base_model
from finetune.torch_engine.graphs.buckets import Fixed
from finetune.torch_engine.loss import Head
from finetune.torch_engine.preference import DPO, dpo

IS_REAL = "is_real"  # 1 of documents of the batch, 0 of padding


@dataclass(frozen=True)
class FixedLoss:
    """`loss(objective, forward, fixed)`: the summed loss and what is observed, as Objective.loss gives them. `values`:
    {name: a number of each document} of a batch, of which `names` are the names. `observed_of`: how many columns of
    what is observed are of the batch.
    """

    loss: Callable[[Any, ModelForward, Fixed], tuple[torch.Tensor, torch.Tensor | None]]
    names: tuple[str, ...]
    values: Callable[[Batch], Mapping[str, Any]]
    observed_of: Callable[[Batch], int]


def _no_values(batch: Batch) -> Mapping[str, Any]:
    return {}


def _nothing(batch: Batch) -> int:
    return 0


def _next_token(objective: NextToken, forward: ModelForward, fixed: Fixed) -> tuple[torch.Tensor, None]:
    smoothing = 0.0
    if forward.model.training:
        smoothing = forward.label_smoothing
    with forward.autocast():
        hidden_TH = _hidden_at_targets(forward, fixed)
        return _head(forward).nll(hidden_TH, fixed.labels_T, smoothing=smoothing, has_padding=True), None


def _dpo(objective: DPO, forward: ModelForward, fixed: Fixed) -> tuple[torch.Tensor, torch.Tensor]:
    with forward.autocast():
        hidden_TH = _hidden_at_targets(forward, fixed)
        log_probs_T = _head(forward).log_probs(hidden_TH, fixed.labels_T, forward.temperature, has_padding=True)
    # Without `unsafe` torch looks at the lengths, and the host waits for them.
    log_probs_D = torch.segment_reduce(log_probs_T, "sum", lengths=fixed.counts_D, unsafe=True)
    reference_D = fixed.values[REFERENCE].to(log_probs_D.dtype)
    chosen = slice(0, None, 2)
    rejected = slice(1, None, 2)
    pairs = dpo(log_probs_D[chosen], log_probs_D[rejected], reference_D[chosen], reference_D[rejected], objective.beta)
    return (pairs.loss_P * fixed.values[IS_REAL][chosen]).sum(), pairs.observed()


def _of_pairs(batch: Batch) -> Mapping[str, Any]:
    check_pairs(batch)
    return {REFERENCE: batch.arrays[REFERENCE].values[: len(batch.rows)], IS_REAL: np.ones(len(batch.rows))}


def _pairs(batch: Batch) -> int:
    return len(batch.rows) // 2


def _head(forward: ModelForward) -> Head:
    assert forward.head is not None, "a model's own logits are not captured"
    return forward.head


def _hidden_at_targets(forward: ModelForward, fixed: Fixed) -> torch.Tensor:
    documents = fixed.documents(forward.attention)
    inputs = {"input_ids": fixed.ids_BS, "position_ids": fixed.positions_BS, "documents": documents}
    hidden = base_model(forward.model)(**inputs, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, fixed.at_T)


LOSSES: dict[type, FixedLoss] = {
    NextToken: FixedLoss(_next_token, names=(), values=_no_values, observed_of=_nothing),
    DPO: FixedLoss(_dpo, names=(REFERENCE, IS_REAL), values=_of_pairs, observed_of=_pairs),
}
