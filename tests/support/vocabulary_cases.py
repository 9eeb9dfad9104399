"""The loss and the embedding of ranks that each have some rows of the vocabulary, against one process; called in every
rank.
"""

import torch
from torch import nn

from finetune.distributed.env import RankEnv
from finetune.parts.parallel_dims import ParallelDims
from finetune.torch_engine.lora.layers import LoRALinear
from finetune.torch_engine.loss import Head, VocabularyShard
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.slices import LayerSlices, Slice
from finetune.torch_engine.parallel.vocabulary import embedding_over_ranks
from tests.support.cases import DEVICE

HIDDEN, POSITIONS = 16, 300  # a CPU computes them in two chunks or more if there are 60,000 words


def _head(vocab: int, bias: bool, adapted: bool):
    torch.manual_seed(0)
    linear = nn.Linear(HIDDEN, vocab, bias=bias)
    if not adapted:
        return linear, None
    adapter = LoRALinear(linear, 4, 8, 0.0, False, False)
    nn.init.normal_(adapter.lora_A)
    nn.init.normal_(adapter.lora_B, std=0.1)
    return linear, adapter


def _of_rank(cut: Slice, groups, linear, adapter) -> None:
    """This rank's rows of a head."""
    pieces = LayerSlices()
    pieces.keep(linear, "weight", cut, groups, "head")
    pieces.keep(linear, "bias", cut, groups, "head")
    if adapter is not None:
        pieces.keep(adapter, "lora_B", cut, groups, "head")


def _results(head: Head, what: str, smoothing: float) -> dict[str, torch.Tensor]:
    """The loss and all gradients."""
    torch.manual_seed(1)
    hidden_TH = (3 * torch.randn(POSITIONS, HIDDEN)).requires_grad_()
    size = head.shard.size if head.shard else len(head.linear.weight)
    labels_T = torch.randint(0, size, (POSITIONS,))
    if what == "nll":
        out = head.nll(hidden_TH, labels_T, smoothing=smoothing)
    else:
        out = (head.log_probs(hidden_TH, labels_T) * torch.linspace(-1, 1, POSITIONS)).sum()
    out.backward()
    found = {"loss": out.detach(), "hidden": hidden_TH.grad, "weight": head.linear.weight.grad}
    if head.linear.bias is not None:
        found["bias"] = head.linear.bias.grad
    if head.adapter is not None:
        found |= {"lora_A": head.adapter.lora_A.grad, "lora_B": head.adapter.lora_B.grad}
    return found


def heads(rank: int, size: int, wanted: list[dict]) -> list[float]:
    """Of each case the largest difference from one process, relative to the largest number of its tensor."""
    groups = ProcessGroups.of(RankEnv(rank, size), ParallelDims(tp=size), DEVICE)
    return [_off(groups, **case) for case in wanted]


def _off(groups, vocab: int, what="nll", scale=1.0, softcap=None, bias=False, adapted=False, smoothing=0.0) -> float:
    linear, adapter = _head(vocab, bias, adapted)
    expected = _results(Head(linear, scale, softcap, adapter), what, smoothing)
    linear, adapter = _head(vocab, bias, adapted)
    cut = Slice(0, size=vocab)
    _of_rank(cut, groups, linear, adapter)
    (rows,) = cut.slices(vocab, groups)
    shard = VocabularyShard(rows.start, rows.stop, vocab, -(-vocab // groups.dims.tp), groups)
    found = _results(Head(linear, scale, softcap, adapter, shard), what, smoothing)
    for name in ("hidden", "lora_A"):  # partial sums
        if name in found:
            groups.all_reduce(found[name], "tp")
    for name in {"weight", "bias", "lora_B"} & set(found):
        found[name] = cut.all_gather(found[name], groups)
    return max(((found[n] - e).abs().max() / e.abs().max()).item() for n, e in expected.items())


def embeddings(rank: int, size: int) -> float:
    """How far the rows' gradients are from one process's: of a padding id none."""
    groups = ProcessGroups.of(RankEnv(rank, size), ParallelDims(tp=size), DEVICE)
    torch.manual_seed(0)
    full, own = nn.Embedding(11, 4, padding_idx=7), nn.Embedding(11, 4, padding_idx=7)
    own.load_state_dict(full.state_dict())
    embedding_over_ranks("embedding", own, groups, LayerSlices())
    ids, weight = torch.arange(22).view(2, 11) % 11, torch.randn(2, 11, 4)
    out = [module(ids) for module in (full, own)]
    for x in out:
        (x * weight).sum().backward()
    grad = Slice(0, size=11).all_gather(own.weight.grad, groups)
    assert not grad[7].any()
    return max((out[0] - out[1]).abs().max().item(), (full.weight.grad - grad).abs().max().item())
