"""A tokenizer's files in what a run or an export writes: all of the base's, and as the base's programs read them."""

import json

import pytest
import sentencepiece
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models

from finetune.data import ollama
from finetune.model_files.files import find_model
from finetune.model_files.gguf_files import tokens_beyond
from finetune.model_files.tokenizer import load_tokenizer
from finetune.model_files.tokenizer_files import is_tokenizer_file, save_tokenizer
from tests.support import tiny

PUBLISHED = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": True,
    "added_tokens_decoder": {"1": {"content": "<s>", "special": True}},
    "additional_special_tokens": ["<pad>"],
    "bos_token": "<s>",
    "eos_token": "</s>",
    "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
}


@pytest.fixture
def base(tmp_path):
    """A base with a SentencePiece model of its own, and files of other programs' tokenizers."""
    folder = tmp_path / "base"
    folder.mkdir()
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the {i} capital of France is Paris, not {i * 7}" for i in range(200)))
    how = dict(input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=120, model_type="bpe")
    sentencepiece.SentencePieceTrainer.train(**how, byte_fallback=False, minloglevel=2)
    (folder / "tokenizer.vocab").unlink()
    tiny.train_tokenizer(folder)
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(PUBLISHED))
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "added_tokens.json").write_text('{"<pad>": 5}')
    for name in ("tekken.json", "tokenizer.model.v3", "qwen.tiktoken", "tokenization_own.py", "model.py"):
        (folder / name).write_text("{}")
    return folder


def test_every_file_of_the_tokenizer_is_kept_and_no_code(base, tmp_path):
    save_tokenizer(load_tokenizer(base), tmp_path / "out", base)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {file.name for file in base.iterdir()} - {"tokenization_own.py", "model.py"}
    for name in ("tokenizer.model", "tekken.json", "tokenizer.model.v3", "qwen.tiktoken", "added_tokens.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) if name == "added_tokens.json" else True
        assert (tmp_path / "out" / name).stat().st_size >= (base / name).stat().st_size - 8


def test_tokenizer_config_is_the_base_s_as_both_versions_of_transformers_read_it(base, tmp_path):
    save_tokenizer(load_tokenizer(base), tmp_path / "out", base)
    found = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] != "TokenizersBackend" and "extra_special_tokens" not in found
    assert found["added_tokens_decoder"] == PUBLISHED["added_tokens_decoder"] and "auto_map" not in found
    assert found["add_bos_token"] is True
    again = load_tokenizer(tmp_path / "out")
    assert again("a  b <s>").input_ids == load_tokenizer(base)("a  b <s>").input_ids


def test_what_a_run_changed_is_in_each_file_that_says_it(base, tmp_path):
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    tokenizer.eos_token = "<s>"
    tokenizer.chat_template = "{{ messages[0].content }}"
    save_tokenizer(tokenizer, tmp_path / "out", base)
    config, named, added = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    new = tokenizer.convert_tokens_to_ids("<tool>")
    assert config["eos_token"] == named["eos_token"] == "<s>" and added == {"<pad>": 5, "<tool>": new}
    assert config["added_tokens_decoder"][str(new)]["content"] == "<tool>"
    again = load_tokenizer(tmp_path / "out")
    assert again.eos_token == "<s>" and again.chat_template == tokenizer.chat_template
    assert again("a <tool>").input_ids == tokenizer("a <tool>").input_ids


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer"])
def test_classes_that_transformers_builds_from_a_vocabulary_keep_all_tokens_beside_new_ones(tmp_path, name):
    """Folders as transformers 5 saves them: added tokens are in tokenizer.json only."""
    tiny.train_tokenizer(tmp_path / "base", bos=False, chat_template=tiny.CHATML, eos_token="<|im_end|>")
    file = tmp_path / "base" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name}))
    tokenizer = load_tokenizer(tmp_path / "base")
    assert "added_tokens_decoder" not in json.loads(file.read_text())
    text = "<|im_start|>user\nHi<|im_end|>\n<tool></s><pad>"
    for new in (None, "<tool>"):
        if new:
            tokenizer.add_tokens([AddedToken(new, normalized=False, special=True)])
        save_tokenizer(tokenizer, tmp_path / f"out {new}", tmp_path / "base")
        assert load_tokenizer(tmp_path / f"out {new}")(text).input_ids == tokenizer(text).input_ids


def test_a_tokenizer_that_encodes_no_other_text_is_saved(tmp_path, capsys):
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path / "base")
    base = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    save_tokenizer(base, tmp_path / "out", tmp_path / "base")
    assert (tmp_path / "out" / "tokenizer.json").is_file() and capsys.readouterr().err == ""


def test_a_class_that_only_transformers_5_has_is_named_as_both_know_it(base, tmp_path):
    (base / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "extra_special_tokens": ["<pad>"]})
    )
    save_tokenizer(load_tokenizer(base), tmp_path / "out", base)
    found = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast" and found["additional_special_tokens"] == ["<pad>"]
    assert "extra_special_tokens" not in found and "backend" not in found


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("spiece.model", True), ("sentencepiece.bpe.model", True), ("source.spm", True), ("vocab-src.json", True)]
    + [("bpe.codes", True), ("merges.txt", True), ("prophetnet.tokenizer", True), ("emoji.json", True)]
    + [("tokenizer.py", False), ("config.json", False), ("model.safetensors", False), ("LICENSE.txt", False)],
)
def test_names_of_tokenizer_files(name, is_one):
    assert is_tokenizer_file(name) == is_one


def test_tokens_without_a_row_are_named(base):
    (base / "config.json").write_text('{"model_type": "llama", "vocab_size": 10}')
    rows = len(load_tokenizer(base).get_vocab())
    assert tokens_beyond(base).startswith(f"{rows - 10} tokens of the tokenizer, such as")
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows}))
    assert tokens_beyond(base) is None


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_a_base_whose_config_names_no_dtype_has_that_of_its_files(tmp_path, stored):
    tiny.build("llama").to(getattr(torch, stored)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("dtype") == stored
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(str(tmp_path)).config["dtype"] == stored


def test_ollama_s_name_is_the_run_s(tmp_path):
    for folder in ("My Run", "My Run/best", "My Run/checkpoints/step-3"):
        assert ollama.model_name(tmp_path / folder, tmp_path / "ollama") == "my-run"
    assert ollama.model_name(tmp_path / "моё", tmp_path / "Out_1") == "out_1"
