"""A model's tokenizer: hostile and damaged ones; ends of generation, read from generation_config.json."""

import json
import os
import shutil
import time

import pytest
import transformers

import train
from finetune.errors import PlanError
from finetune.model_files.plain_tokenizer import PlainTokenizer
from finetune.model_files.tokenizer import TokenizerTrial, continued_ids, generation_ends, load_tokenizer
from finetune.system.untrusted import tokenizer_failures
from tests.support import tiny
from tests.support.commands import refused
from tests.support.model_folders import with_config
from tests.support.sentencepiece_bases import write_sentencepiece
from tests.support.tiny import CHATML, train_tokenizer
from train import fine_tune


@pytest.fixture(scope="module")
def tiny_model(chat_model):
    return chat_model


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("{", "is not JSON ("),
        ("[2]", "contains list, must contain an object"),
        ("5", "contains int, must contain an object"),
        ('{"eos_token_id": "2"}', 'eos_token_id is "2", must be a token id'),
        ('{"eos_token_id": [2, "3"]}', 'eos_token_id is [2, "3"], must be a token id'),
        ('{"eos_token_id": {"a": 1}}', 'eos_token_id is {"a": 1}, must be a token id'),
    ],
)
def test_a_malformed_generation_config_is_refused_before_the_model_loads(
    flags, tiny_model, tmp_path, content, fact, capsys
):
    folder = with_config(tiny_model, tmp_path)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(PlanError) as error:
        train.fine_tune(**flags | {"model_name": str(folder)})
    line = str(error.value)
    assert line.startswith(f"{folder / 'generation_config.json'}: {fact}") and "\n" not in line
    assert "trainable parameters" not in capsys.readouterr().out


def test_the_ends_that_a_generation_config_names_are_read(tmp_path):
    assert generation_ends(tmp_path) == set()
    for named, ids in ((None, set()), (2, {2}), ([2, 5], {2, 5})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert generation_ends(tmp_path) == ids


DOUBLE = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}
REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
HOSTILE = {
    "normalizer bomb": (
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 60}},
        "makes a text over 4096 times",
    ),
    "decoder bomb": ({"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 60}}, "its decoder makes a text over"),
    "backtracking": ({"pre_tokenizer": REGEX}, "does not load and encode a text"),
    "a huge id": (
        {"added_tokens": [{"id": 2**31, "content": "x"}]},
        "has token id 2147483648, the maximum is 16777215",
    ),
    "no model": ({"model": None}, "its tokenizer does not load"),
    "model of another kind": ({"model": {"type": "BPE", "vocab": 5, "merges": []}}, "its tokenizer does not load"),
    "tokens": ({"added_tokens": 5}, "its tokenizer does not load"),
}


def tokenizer_with(tiny_model, tmp_path, name, change):
    """A copy of the tiny model whose `name` holds other values, or another text."""
    folder = with_config(tiny_model, tmp_path)
    text = change if isinstance(change, str) else json.dumps(json.loads((folder / name).read_text()) | change)
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tokenizer_is_one_line_and_ends_a_child_only(tiny_model, tmp_path, case):
    change, fact = HOSTILE[case]
    folder, began = tokenizer_with(tiny_model, tmp_path, "tokenizer.json", change), time.monotonic()
    with pytest.raises(PlanError) as error:
        load_tokenizer(folder)
    assert fact in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)
    assert time.monotonic() - began < 20


def test_a_tokenizer_that_fails_on_a_text_of_its_own_is_one_line_wherever_it_is_used(flags, tiny_model, tmp_path):
    """Its tests pass, and a regex of its decoder gives up on a row's text: Rust's panic is no Exception."""
    words = json.loads((tiny_model / "tokenizer.json").read_text())["decoder"]
    gives_up = {"type": "Replace", "pattern": {"Regex": "(?:q|qq)+c"}, "content": "x"}
    change = {"decoder": {"type": "Sequence", "decoders": [words, gives_up]}}
    folder = tokenizer_with(tiny_model, tmp_path, "tokenizer.json", change)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Say it.", "completion": "q" * 64}) + "\n")
    given = flags | {"model_name": str(folder), "dataset": str(tmp_path / "rows.jsonl")}
    for dry in (True, False):
        with pytest.raises(PlanError, match="tokenizer fails on a text .*Use a tokenizer you trust"):
            fine_tune(**given | {"dry_run": dry})
    with pytest.raises(Exception, match="of the caller's") as error, tokenizer_failures():
        raise Exception("of the caller's")
    assert error.type is Exception


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", "[" * 100_000, '{"version": "1.0"}', "\u0000"])
def test_a_damaged_tokenizer_file_is_one_line(tiny_model, tmp_path, text):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        folder = tokenizer_with(tiny_model, tmp_path / name, name, text)
        try:
            load_tokenizer(folder)
        except PlanError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
        else:  # the other file says enough
            assert name == "tokenizer_config.json"


VALUES = {
    "model_max_length": ("x", [1]),
    "eos_token": (5, ["a"], {"x": 1}),
    "unk_token": (7,),
    "tokenizer_class": (3,),
    "chat_template": (5, [{"name": 1}], {"a": 5}),
    "added_tokens_decoder": ([1], {"x": {"content": "a"}}, {"1": {"content": 5}}),
    "padding_side": ("up", 4),
    "truncation_side": (1,),
    "extra_special_tokens": (4, [1]),
    "additional_special_tokens": ("abc",),
    "model_input_names": (5,),
    "split_special_tokens": ("x",),
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in VALUES.items() for v in values])
def test_values_that_transformers_does_not_load_are_refused_in_a_dry_run_too(flags, tiny_model, tmp_path, key, value):
    folder = tokenizer_with(tiny_model, tmp_path, "tokenizer_config.json", {key: value})
    line = refused(flags, model_name=folder)
    assert line.startswith(f"{folder}/tokenizer_config.json: {key} is {json.dumps(value)}, must be "), line


def test_an_end_token_past_the_model_is_refused_in_a_dry_run_too(flags, tiny_model, tmp_path):
    """transformers adds the special tokens that the vocabulary lacks."""
    folder = tokenizer_with(tiny_model, tmp_path, "tokenizer_config.json", {"eos_token": "<|other|>"})
    assert "token id 381 is out of range for the model's 381 embedding rows" in refused(flags, model_name=folder)


@pytest.mark.parametrize(
    "change", [{"model_max_length": "x"}, {"chat_template": {"a": 5}}, {"eos_token": 5}, {"x": "\ud83d"}]
)
def test_odd_values_of_a_tokenizer_config_are_one_line(flags, tiny_model, tmp_path, change):
    folder = tokenizer_with(tiny_model, tmp_path, "tokenizer_config.json", change)
    if "chat_template" in change:
        (folder / "chat_template.jinja").unlink()
        flags = flags | {"dataset": str(tmp_path / "chat.jsonl"), "batch_size": 1}
        row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
        (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(PlanError) as error:
        train.fine_tune(**flags | {"model_name": str(folder)})
    assert "\n" not in str(error.value)


def test_a_chat_template_named_as_a_path_is_refused_before_anything_is_written(flags, tiny_model, tmp_path):
    folder = with_config(tiny_model, tmp_path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    templates = [{"name": name, "template": "{{ messages }}"} for name in ("default", "../../x")]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": templates}))
    with pytest.raises(PlanError, match=r"its chat template '../../x' is not named as a file can be"):
        train.fine_tune(**flags | {"model_name": str(folder)})
    assert not (tmp_path / "out").exists()


def test_a_config_that_does_not_load_is_not_said_to_be_the_tokenizers_fault(tiny_model, tmp_path):
    """transformers reads config.json to find the tokenizer's class."""
    for change in ({"num_attention_heads": 7}, {"layer_types": ["x"] * 2}):
        folder = with_config(tiny_model, tmp_path / str(len(change)) / next(iter(change)), **change)
        with pytest.raises(PlanError, match="its config.json does not load") as error:
            load_tokenizer(folder)
        assert "tokenizer" not in str(error.value)


@pytest.mark.parametrize("named", [True, False])
def test_the_tokenizer_of_a_plan_has_the_templates_of_the_run(tmp_path, named):
    """transformers writes named templates into a folder of their own."""
    tiny.train_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = {"default": "one", "tool_use": "two"} if named else "one"
    tokenizer.save_pretrained(tmp_path)
    assert PlainTokenizer.from_folder(tmp_path).chat_template == load_tokenizer(tmp_path).chat_template


def test_a_tokenizer_with_dropout_gives_the_same_tokens_again(tiny_model, tmp_path, capsys):
    """A run could not be resumed: its rows were other tokens."""
    model = json.loads((tiny_model / "tokenizer.json").read_text())["model"] | {"dropout": 0.5}
    folder = tokenizer_with(tiny_model, tmp_path, "tokenizer.json", {"model": model})
    text = "The capital of France is Paris."
    wanted = load_tokenizer(tiny_model)(text).input_ids
    found = load_tokenizer(folder)
    assert "leaves out merges at random (dropout 0.5), and none of them here" in capsys.readouterr().err
    assert all(found(text).input_ids == wanted for _ in range(5))
    assert all(PlainTokenizer.from_folder(folder)([text]).encodings[0].ids == wanted for _ in range(5))


def test_a_plan_knows_tokens_that_the_config_alone_lists(tiny_model, tmp_path):
    listed = json.loads((tiny_model / "tokenizer.json").read_text())["added_tokens"]
    folder = tokenizer_with(tiny_model, tmp_path, "tokenizer.json", {"added_tokens": []})
    file = folder / "tokenizer_config.json"
    own = {str(token.pop("id")): token for token in listed}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens_decoder": own}))
    text = "<s>system<|im_end|> hi</s>"
    found = PlainTokenizer.from_folder(folder)([text]).encodings[0].ids
    assert found == load_tokenizer(folder)(text).input_ids == load_tokenizer(tiny_model)(text).input_ids


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("prompt", ["the 3 capital?\n", "capital:", "<s>capital</s>", "the ", "7 8 9 "])
def test_a_text_after_a_prompt_has_the_tokens_that_are_learned(prefix, prompt, tmp_path):
    """A tokenizer of SentencePiece puts a space before a text that stands alone."""
    write_sentencepiece(tmp_path, transformers.LlamaTokenizer, prefix=prefix)
    tokenizer = load_tokenizer(tmp_path)
    before = tokenizer(prompt, add_special_tokens=False).input_ids
    for text in ("Paris", "France", " Paris", "7 and"):
        whole = tokenizer(prompt + text, add_special_tokens=False).input_ids
        if whole[: len(before)] == before:
            assert continued_ids(tokenizer, before, text) == whole[len(before) :]


@pytest.mark.parametrize("kept", [["tokenizer.model"], ["vocab.json", "merges.txt"]])
def test_a_plan_and_a_dry_run_read_rows_with_a_tokenizer_of_other_files(kept, tmp_path, rows_file, capsys):
    """It planned 512 tokens, and showed no row, where a base has no tokenizer.json."""
    base = tmp_path / "base"
    base.mkdir()
    if "tokenizer.model" in kept:
        size = write_sentencepiece(base, transformers.LlamaTokenizer, chat_template=CHATML)
    else:
        whole = train_tokenizer(tmp_path / "whole", bos=False)
        model = json.loads((tmp_path / "whole" / "tokenizer.json").read_text())["model"]
        (base / "vocab.json").write_text(json.dumps(model["vocab"]))
        (base / "merges.txt").write_text("".join(f"{' '.join(pair)}\n" for pair in model["merges"]))
        (base / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}')
        size = len(whole)
    tiny.build("llama", vocab_size=size, pad_token_id=None).save_pretrained(base)
    for file in base.iterdir():
        if file.name not in (*kept, "config.json", "model.safetensors", "tokenizer_config.json"):
            file.unlink()
    how = dict(model_name=str(base), dataset=str(rows_file), backend="cpu", train_type="lora", max_steps=1)
    fine_tune(**how, dry_run=True, output_dir=str(tmp_path / "out"))
    shown = capsys.readouterr().out
    assert "all of the 24 rows read have at most" in shown and "⟦" in shown
    fine_tune(**how, output_dir=str(tmp_path / "out"))
    settled = json.loads((tmp_path / "out" / "run_plan.json").read_text())["settled"]
    assert settled["context_length"] == 64


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_pipe_in_the_place_of_a_tokenizer_s_file_is_refused_by_a_dry_run_too(name, tmp_path, tiny_model, flags):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for how in ({"dry_run": True}, {"max_steps": 1}):
        with pytest.raises(PlanError, match=f"{name}: is not a regular file"):
            fine_tune(**flags | {"model_name": str(folder)} | how)


def test_a_tokenizer_that_passed_is_tried_again_where_its_file_was_written_again(tiny_model, tmp_path):
    folder = with_config(tiny_model, tmp_path)
    load_tokenizer(folder)
    file = folder / "tokenizer.json"
    assert TokenizerTrial(file).child is None
    content = json.loads(file.read_text()) | HOSTILE["backtracking"][0]
    file.write_text(json.dumps(content))
    with pytest.raises(PlanError, match="does not load and encode a text"):
        load_tokenizer(folder)
