"""The next token from logits, in torch: the one place that applies temperature, top_k and top_p."""

import torch
from transformers import LogitsProcessor

from finetune.generation import Sampling


def restrict(logits_BV: torch.Tensor, how: Sampling) -> torch.Tensor:
    """The logits divided by the temperature, -inf for the tokens that top_k and top_p exclude."""
    logits_BV = logits_BV / how.temperature
    if 0 < how.top_k < logits_BV.shape[-1]:
        least = logits_BV.topk(how.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
    if how.top_p < 1:
        ordered, order = logits_BV.sort(descending=True)
        share = ordered.softmax(-1)
        excluded = share.cumsum(-1) - share >= how.top_p
        excluded[:, 0] = False
        logits_BV = logits_BV.masked_fill(excluded.scatter(1, order, excluded), float("-inf"))
    return logits_BV


def choose(logits_BV: torch.Tensor, how: Sampling) -> torch.Tensor:
    """The next token of each row."""
    if how.temperature <= 0:
        return logits_BV.argmax(-1)
    return torch.multinomial(restrict(logits_BV, how).softmax(-1), 1)[:, 0]


class Restricted(LogitsProcessor):
    """`restrict` for transformers' generate, which draws from what it leaves."""

    def __init__(self, how: Sampling):
        self.how = how

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor):
        return restrict(scores, self.how)
