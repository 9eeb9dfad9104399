"""What engines share in generating: when rows end, and a model's limit of positions."""

import shlex

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from finetune.data.columns import RowOptions, RowReader
from finetune.generation import NewTokens, answered_within
from finetune.model_files.tokenizer import opened_ids
from finetune.run.report import ask_command
from finetune.torch_engine.generation.generate import _sees_past_padding, generate
from finetune.torch_engine.parallel.pipeline import SingleStage
from tests.support import architectures, tiny
from tests.support.mlx_engines import mlx_engine, save, torch_engine_of


def test_rows_end_at_their_stop_tokens_or_when_they_are_stopped():
    shown = []
    new = NewTokens(3, {9}, lambda row, ids: row == 1 and len(ids) == 2, lambda ids: shown.append(list(ids)))
    assert not new.add([1, 2, 9])
    assert not new.add([3, 4, 5])
    assert new.add([9, 6, 7])
    assert new.ids == [[1, 3], [2, 4], []] and shown == [[1], [1, 3]]


def counting(asked: list):
    """An engine that answers with numbers, as many as it may."""

    def answer(prompts, max_new_tokens, stop_row, on_token):
        asked.append(([len(p) for p in prompts], max_new_tokens))
        return [list(range(max_new_tokens)) for _ in prompts]

    return answer


def test_a_row_ends_at_the_limit_whatever_rows_are_beside_it(capsys):
    asked = []
    found = answered_within(10, [[1] * 2, [1] * 7, [1] * 3], 5, None, None, counting(asked))
    assert asked == [([2, 3], 5), ([7], 3)] and [len(new) for new in found] == [5, 3, 5]
    assert not capsys.readouterr().err
    asked.clear()
    assert len(answered_within(8, [[1] * 20], 100, None, None, counting(asked))[0]) == 2 and asked == [([6], 2)]
    assert "note: a prompt of 20 tokens is cut to its last 6, as the model takes 8" in capsys.readouterr().err
    assert len(answered_within(None, [[1] * 20], 100, None, None, counting(asked))[0]) == 100


@pytest.mark.parametrize("engine_of", [torch_engine_of, mlx_engine])
def test_more_tokens_than_the_model_has_positions_leave_the_prompt_as_it_is(engine_of, tmp_path):
    folder = save(tmp_path, max_position_embeddings=16)
    engine, prompts = engine_of(folder), [[5, 6, 7, 8], [9, 3] * 6, [4]]
    engine.verify("auto")
    alone = [engine.generate([p], 4, set())[0] for p in prompts]
    many = engine.generate(prompts, 1000, set())
    assert [len(p) + len(new) for p, new in zip(prompts, many, strict=True)] == [16] * 3
    assert [new[:4] for new in many] == alone


def test_an_end_that_a_tokenizer_adds_is_not_of_a_text_that_goes_on(tmp_path):
    tiny.train_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    begin, end = (tokenizer.bos_token, tokenizer.bos_token_id), (tokenizer.eos_token, tokenizer.eos_token_id)
    plain = tokenizer("Hello", add_special_tokens=False).input_ids
    template = TemplateProcessing(single=f"{begin[0]} $A {end[0]}", special_tokens=[begin, end])
    tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer("Hello").input_ids == [begin[1], *plain, end[1]]
    assert opened_ids(tokenizer, "Hello") == [begin[1], *plain]
    assert opened_ids(tokenizer, "Hello" + end[0]) == [begin[1], *plain, end[1]]  # the user's own
    assert opened_ids(tokenizer, "") == [begin[1]]


@pytest.mark.parametrize(("words", "asked"), [("▁Item ▁a: ▁red", "Item a:"), ("▁Item ▁a: ▁ red", "Item a: ")])
def test_the_command_to_try_asks_without_the_space_that_the_answer_begins_with(words, asked):
    """A tokenizer as Llama 2's; in the second case the prompt's last space is a token of its own."""
    split = (
        pre_tokenizers.Metaspace() if "▁ " not in words else pre_tokenizers.Split(Regex("Item | a:| |red"), "isolated")
    )
    vocabulary = {word: i for i, word in enumerate([*words.split(), "?", "Item ", " a:", " "])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    own.pre_tokenizer = split
    row = RowReader(RowOptions()).read({"prompt": "Item a: ", "completion": "red"}, "rows.jsonl:1")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own)
    assert shlex.split(ask_command("out", row, tokenizer))[-1] == asked
    assert shlex.split(ask_command("out", row))[-1] == "Item a: "


@pytest.mark.parametrize(
    ("name", "sees"), [("llama", True), ("gpt2", True), ("recurrent_gemma", False), ("rwkv", False)]
)
def test_prompts_of_unequal_length_are_answered_as_each_alone(name, sees):
    """Recurrent states run over padding on the left: these classes answer one prompt at a time."""
    model = architectures.build(name).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # a trained model's padding has an embedding, and biases
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    prompts = [[3, 4, 5, 6, 7, 8, 9], [8, 9], [10, 11], [5, 6, 7]]
    with torch.no_grad():
        alone = [generate(model, [p], 5, set(), 0)[0] for p in prompts]
        assert generate(model, prompts, 5, set(), 0) == alone
    assert _sees_past_padding(model, 0, SingleStage()) is sees
