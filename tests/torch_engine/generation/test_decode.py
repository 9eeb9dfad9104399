"""Sampled answers: the tokens of transformers' generate where they are greedy, the trainer's log-probabilities, and
draws that depend on nothing but the row.
"""

import numpy as np
import pytest
import torch

from finetune.data.collate import microbatches
from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts
from finetune.generation import Sampling, uniforms
from finetune.torch_engine.forward import base_model
from finetune.torch_engine.generation import decode
from finetune.torch_engine.generation.decode import draw
from tests.support.cells import but_slow
from tests.support.engines import engine

ARCHITECTURES = ("llama", "qwen3", "gemma3", "mistral", "qwen3_moe", "gpt_oss", "gemma2", "gpt2", "cohere", "mixtral")
PROMPTS = [[5, 17, 99, 4, 8, 3, 77, 12, 9, 6, 41], [6], [9, 8, 7], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42]]
SEEDS = [[(1, row, sample) for sample in range(3)] for row in range(len(PROMPTS))]
ENDS = {2, 60}
MOST = [20, 20, 7, 20]


PLAIN = Sampling(1.0)
ALL = range(len(PROMPTS))


def sampled(built, how=PLAIN, rows=ALL, most=MOST):
    chosen = [[PROMPTS[row] for row in rows], [SEEDS[row] for row in rows], [most[row] for row in rows]]
    return built.sample(*chosen, ENDS, how)


def trainers(built, found) -> list[list[float]]:
    """The log-probabilities of the same answers in the trainer's forward."""
    parts = []
    for prompt, answers in zip(PROMPTS, found, strict=True):
        for answer in answers:
            ids = np.array(prompt + answer.ids)
            parts.append((ids, np.arange(len(ids)) >= len(prompt)))
    dataset = TokenizedDataset(**joined_parts(parts), sources=("",) * len(parts), counts={})
    batches = microbatches(dataset, range(len(parts)), built.layout, len(parts), 10**6, pad_id=0)
    rows = [row for batch in batches for row in batch.rows]
    by_row = dict(zip(rows, built.target_log_probs(batches, before_training=False), strict=True))
    return [by_row[row] for row in range(len(parts))]


@pytest.mark.parametrize("train_type", ["lora", "qlora"])
@pytest.mark.parametrize("architecture", but_slow(ARCHITECTURES, ("llama", "gemma3", "qwen3_moe")))
def test_log_probabilities_are_those_of_the_trainers_forward(architecture, train_type):
    built = engine(architecture, train_type=train_type, layout="padding_free", preference="grpo")
    found = sampled(built)
    mine = [x for answers in found for answer in answers for x in answer.log_probs]
    theirs = [x for answer in trainers(built, found) for x in answer]
    assert len(mine) > 60
    assert np.abs(np.array(mine) - np.array(theirs)).max() < 1e-5


def test_they_are_of_the_policy_at_its_temperature():
    built = engine(layout="padding_free", preference="grpo", temperature=0.6)
    found = sampled(built, Sampling(0.6))
    mine = [x for answers in found for answer in answers for x in answer.log_probs]
    theirs = [x for answer in trainers(built, found) for x in answer]
    assert np.abs(np.array(mine) - np.array(theirs)).max() < 1e-5


@pytest.mark.parametrize("architecture", but_slow(ARCHITECTURES, ("llama", "mistral", "gpt_oss")))
def test_greedy_answers_are_those_of_generate(architecture):
    built = engine(architecture, layout="padding_free", preference="grpo")
    found = sampled(built, Sampling(0.0))
    for prompt, answers, most in zip(PROMPTS, found, MOST, strict=True):
        (wanted,) = built.generate([prompt], most, ENDS)
        for answer in answers:
            assert answer.ids[: len(answer.ids) - answer.ended] == wanted
            assert answer.ended == (len(wanted) < most)


def test_an_answer_depends_on_its_own_prompt_and_seed_alone():
    built = engine(layout="padding_free", preference="grpo")
    together = sampled(built)
    assert len({tuple(answer.ids) for answer in together[0]}) == 3
    for row in range(len(PROMPTS)):
        (alone,) = sampled(built, rows=[row])
        assert [answer.ids for answer in alone] == [answer.ids for answer in together[row]]


@pytest.mark.parametrize("tokens", [1, 12, 14])
def test_prompts_that_are_prefilled_in_parts_have_the_same_answers(tokens):
    built = engine(layout="padding_free", preference="grpo")
    together = sampled(built)
    sizes = []

    def read(module, words, named):
        sizes.append(named["input_ids"].numel())

    hook = base_model(built.model).register_forward_pre_hook(read, with_kwargs=True)
    built.forward.row_length = tokens
    in_parts = sampled(built)
    hook.remove()
    assert max(sizes) <= max(tokens, max(map(len, PROMPTS)))
    assert [[a.ids for a in answers] for answers in in_parts] == [[a.ids for a in answers] for answers in together]


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_answers_do_not_depend_on_how_many_tokens_are_scored_together(architecture, monkeypatch):
    built = engine(architecture, layout="padding_free", preference="grpo")
    most = [50, 3, 20, 40]
    together = sampled(built, most=most)
    monkeypatch.setattr(decode, "SCORED_TOGETHER", 1)
    alone = sampled(built, most=most)
    assert [[a.ids for a in answers] for answers in together] == [[a.ids for a in answers] for answers in alone]
    logs = [np.concatenate([a.log_probs for answers in found for a in answers]) for found in (together, alone)]
    np.testing.assert_allclose(*logs, atol=1e-5)


def test_an_answer_ends_at_its_end_or_at_its_room():
    built = engine(layout="padding_free", preference="grpo")
    for answers, most in zip(sampled(built), MOST, strict=True):
        for answer in answers:
            assert answer.ended == (answer.ids[-1] in ENDS)
            assert not set(answer.ids[:-1]) & ENDS
            assert len(answer.ids) == most or answer.ended
            assert len(answer.ids) == len(answer.log_probs)


@pytest.mark.parametrize("how", [Sampling(1.0), Sampling(0.5), Sampling(1.0, 0, 0.7), Sampling(1.3, 5, 0.9)])
def test_draws_have_the_frequencies_of_the_distribution(how):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 700, generator=generator) * 2
    number = 40_000
    drawn, log_probs = draw(logits.expand(number, -1), how, torch.from_numpy(uniforms([(3,)], number)[0]))
    whole = torch.log_softmax(logits[0] / how.temperature, -1)
    assert torch.allclose(log_probs, whole[drawn], atol=1e-5)
    counts = torch.bincount(drawn, minlength=700) / number
    wanted = whole.exp()
    if how.top_k:
        wanted = wanted * (wanted >= wanted.topk(how.top_k).values[-1])
        wanted = wanted / wanted.sum()
    if how.top_p < 1:
        ordered, order = wanted.sort(descending=True)
        kept = order[(ordered.cumsum(0) - ordered) < how.top_p]
        only = torch.zeros_like(wanted)
        only[kept] = wanted[kept]
        wanted = only / only.sum()
    assert not counts[wanted == 0].any()
    assert (counts - wanted).abs().max() < 5 * (wanted.max() / number).sqrt()


def test_a_number_of_almost_one_draws_a_token_that_is_possible():
    logits = torch.tensor([[0.0, -1e4, 1.0, -1e4]])
    tokens, _ = draw(logits, Sampling(1.0), torch.tensor([1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [2]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_models_that_take_padded_rows_draw_the_same_answers(architecture):
    packed = sampled(engine(architecture, layout="padding_free", preference="grpo"))
    padded = sampled(engine(architecture, layout="padded", preference="grpo"))
    for one, other in zip(packed, padded, strict=True):
        assert [(a.ids, a.ended) for a in one] == [(a.ids, a.ended) for a in other]
        for a, b in zip(one, other, strict=True):
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
