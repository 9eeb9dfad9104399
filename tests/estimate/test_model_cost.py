"""Documents grouped by the estimate as by attention."""

import torch

from finetune.estimate.model_cost import MicrobatchShape
from finetune.torch_engine.attention import per_document
from tests.support.engines import CPU


def test_documents_are_grouped_as_attention_groups_them():
    lengths = (96, 60, 33, 90, 20, 90)
    positions = torch.cat([torch.arange(n) for n in lengths])
    real = [(g.num_documents, g.length) for g in per_document.documents_of(positions, CPU).groups]
    assert MicrobatchShape(lengths, 10).groups() == real
