"""Answers that share a prompt: outputs and gradients are those of separate documents, for windows, soft caps, sinks and
long segments; whole steps are those of prompts that are repeated.
"""

import dataclasses

import numpy as np
import pytest
import torch

from finetune.data.collate import _flat, share_prompts
from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts
from finetune.torch_engine.attention import shared
from finetune.torch_engine.attention.blocks import Scoring
from finetune.torch_engine.attention.per_document import documents_of, grouped_attention
from tests.support.cells import but_slow
from tests.support.engine_access import trainable_params
from tests.support.engines import assert_same, engine

CASES = {
    "plain": Scoring(0.3, 0.0, None, None, None),
    "window": Scoring(0.3, 0.0, 6, None, None),
    "softcap": Scoring(0.3, 0.0, None, 2.0, None),
    "sinks": Scoring(0.3, 0.0, None, None, torch.tensor([0.1, -0.2, 0.5, 0.3])),
    "all": Scoring(0.3, 0.0, 5, 1.5, torch.tensor([0.1, -0.2, 0.5, 0.3])),
}
# Documents with their branches: (tokens, shared tokens of each branch with its own).
ROWS = [(13, [(7, 5), (7, 9), (7, 1)]), (4, []), (20, [(12, 3), (12, 4)])]


def whole_and_shared():
    """(positions of the shared row, of each segment the tokens that it sees, in the shared row)."""
    positions = []
    seen = []
    for length, branches in ROWS:
        root = len(positions)
        seen.append(list(range(root, root + length)))
        positions += range(length)
        for after, own in branches:
            start = len(positions)
            seen.append([*range(root, root + after), *range(start, start + own)])
            positions += range(after, after + own)
    return positions, seen


@pytest.mark.parametrize("how", ["plain", "merged", "tiles"])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_separate_documents(name, how, monkeypatch):
    if how == "plain":  # two segments at a time
        monkeypatch.setattr(shared, "SCORES_BYTES", 2 * 4 * 9 * 16 * 4)
    else:
        monkeypatch.setattr(shared, "MOST_PLAIN_BYTES", 0)
    if how == "tiles":
        monkeypatch.setattr(shared, "LONG", 3)
        monkeypatch.setattr(shared, "tile_size", lambda device: 4)
    scoring = CASES[name]
    sinks = None if scoring.sinks_H is None else scoring.sinks_H.clone().requires_grad_()
    positions, seen = whole_and_shared()
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, heads, len(positions), 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    out = grouped_attention(*inputs, documents_of(np.array(positions), "cpu"), scoring._replace(sinks_H=sinks))
    weights = torch.randn(out.shape, generator=generator)
    mine = torch.autograd.grad((out * weights).sum(), [*inputs, *([] if sinks is None else [sinks])])
    total = 0.0
    for tokens in seen:
        own = [t for t in tokens if t not in set(tokens[: positions[tokens[-1]] + 1 - _own(tokens, positions)])]
        parts = [x[:, :, tokens] for x in inputs]
        alone = grouped_attention(*parts, documents_of(np.arange(len(tokens)), "cpu"), scoring._replace(sinks_H=sinks))
        at = len(tokens) - len(own)
        assert torch.allclose(alone[:, at:], out[:, own], atol=2e-6)
        total = total + (alone[:, at:] * weights[:, own]).sum()
    theirs = torch.autograd.grad(total, [*inputs, *([] if sinks is None else [sinks])])
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, other, atol=5e-6)


def _own(tokens, positions):
    """Tokens of the segment itself: the run at the end."""
    run = 1
    while run < len(tokens) and tokens[-run - 1] == tokens[-run] - 1 and positions[tokens[-run]] != 0:
        run += 1
    return run


def answers(groups=((11, (3, 5, 4)), (2, (6, 2)), (1, (4, 4)), (16, (7,)))):
    """A dataset of answers to the same prompts: (prompt tokens, tokens of each answer)."""
    rng = np.random.default_rng(2)
    parts = []
    for length, lengths in groups:
        prompt = rng.integers(3, 128, length)
        for own in lengths:
            ids = np.r_[prompt, rng.integers(3, 128, own)]
            parts.append((ids, np.arange(len(ids)) >= length))
    return TokenizedDataset(**joined_parts(parts), sources=("",) * len(parts), counts={})


def in_order(dataset):
    """A flat batch whose documents are in the dataset's order."""
    return _flat(dataset, list(range(len(dataset))))


def test_prompts_are_in_the_row_once():
    dataset = answers()
    batch = in_order(dataset)
    found = share_prompts(batch)
    # Every answer but a group's first leaves out its prompt without the last token.
    assert batch.input_ids_BS.shape[1] - found.input_ids_BS.shape[1] == 2 * 10 + 1 * 1
    assert found.num_targets == batch.num_targets
    labels = batch.labels_BS[batch.labels_BS >= 0]
    assert np.array_equal(labels, found.labels_BS[found.labels_BS >= 0])


def test_a_row_without_shared_prompts_is_as_it_was():
    dataset = answers(((5, (3,)), (7, (2,))))
    batch = in_order(dataset)
    assert share_prompts(batch) is batch


ARCHITECTURES = ("llama", "gemma3", "mistral", "gpt_oss", "gemma2", "qwen3_moe", "gpt2")


@pytest.mark.parametrize("train_type", ["lora", "qlora"])
@pytest.mark.parametrize("architecture", but_slow(ARCHITECTURES, ("llama", "gpt_oss")))
def test_log_probabilities_and_gradients_are_those_of_repeated_prompts(architecture, train_type):
    built = engine(architecture, train_type=train_type, layout="padding_free")
    built.forward.use(dataclasses.replace(built.forward.layout, shares_prompts=False))  # as the batches are
    batch = in_order(answers())
    results = []
    for one in (batch, share_prompts(batch)):
        log_probs, _ = built.forward.target_log_probs(one)
        weights = torch.linspace(-1, 2, len(log_probs))
        (log_probs * weights).sum().backward()
        results.append(
            (log_probs.detach(), {n: p.grad.clone() for n, p in trainable_params(built).items() if p.grad is not None})
        )
        built.optimizer.zero_grad()
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert_same(results[1][1], results[0][1], 1e-5)


def test_recomputed_layers_see_the_same(monkeypatch):
    built = engine("llama", layout="padding_free")
    batch = share_prompts(in_order(answers()))
    plain, _ = built.forward.target_log_probs(batch)
    plain.sum().backward()
    wanted = {n: p.grad.clone() for n, p in trainable_params(built).items()}
    built.optimizer.zero_grad()
    built.model.gradient_checkpointing_enable(dict(use_reentrant=False))
    built.model.train()
    again, _ = built.forward.target_log_probs(dataclasses.replace(batch))
    again.sum().backward()
    assert_same({n: p.grad for n, p in trainable_params(built).items()}, wanted, 1e-6)
