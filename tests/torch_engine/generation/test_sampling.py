"""Sampling against transformers' own rules, and at their boundary."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from finetune.generation import Sampling
from finetune.torch_engine.generation.sampling import choose, restrict


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (20, 0.7), (1, 0.01), (0, 0.0)])
def test_the_tokens_that_are_kept_are_transformers(top_k, top_p):
    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(0.8)(None, logits)
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    assert torch.equal(restrict(logits, Sampling(0.8, top_k, top_p)), expected)


def test_a_token_is_excluded_once_the_likelier_ones_have_all_of_top_p():
    """Shares of 1/2, 1/4 and 1/4, exact in binary: the first alone has all of top_p 0.5."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    kept = [torch.isfinite(restrict(logits, Sampling(1.0, 0, top_p)))[0].sum().item() for top_p in (0.0, 0.5, 0.51)]
    assert kept[:2] == [1, 1] and kept[2] >= 2


def test_sampling_keeps_to_its_limits():
    logits = torch.tensor([[3.0, 2.0, 1.0, -4.0]]).repeat(200, 1)
    torch.manual_seed(0)
    assert set(choose(logits, Sampling(0.0, 50, 0.9)).tolist()) == {0}
    assert set(choose(logits, Sampling(1.0, 2)).tolist()) == {0, 1}
    assert set(choose(logits, Sampling(1.0, 0, 0.5)).tolist()) == {0}
    assert set(choose(logits, Sampling(1.0, 10_000)).tolist()) >= {0, 1, 2}
