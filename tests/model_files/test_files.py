"""Model folders on disk: found, or refused in one line."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import train
from finetune.errors import PlanError
from finetune.model_files.config_values import ROPE_KEYS
from finetune.model_files.files import INDEX, find_model
from tests.support import tiny
from tests.support.commands import ROOT, refused
from tests.support.model_folders import edit_config, refusal, with_config

pytestmark = pytest.mark.usefixtures("own_caches")


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


def test_a_missing_path_names_its_siblings(model):
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
def test_an_index_entry_that_is_not_a_plain_name_is_refused(sharded, name):
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


QUANTIZED = {
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "hqq": {"quant_method": "hqq", "quant_config": {}},
    "unknown": {"quant_method": "nope"},
    "no method": {"bits": 4},
    "no object": "gptq",
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_quantized_model_is_refused(flags, tiny_model, tmp_path, case):
    folder = with_config(tiny_model, tmp_path, quantization_config=QUANTIZED[case])
    line = refused(flags, model_name=folder)
    assert line.startswith(f"--model_name {folder}: its weights are prequantized (config.json's quantiz")
    assert line.endswith("compressed-tensors decoded. Give the unquantized model it was made from.")


CONFIGS = {
    "text_config": ("text", 5, [1]),
    "num_hidden_layers": ("2", 0, -1, 1.5, True, {}),
    "hidden_size": ("64", 0),
    "vocab_size": ("many", -5),
    "num_attention_heads": ("4",),
    "rms_norm_eps": ("1e-5",),
    "mlp_only_layers": (7, {"0": 1}),
    "decoder_sparse_step": ("64", [1]),
    "attention_bias": (1.5, {}),
    "use_cache": (7, "true"),
    "layer_types": ("full_attention",),
    "dtype": ("float31", 5, ["float32"]),
    "torch_dtype": ("no",),
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in CONFIGS.items() for v in values])
def test_a_malformed_config_names_its_key(flags, tiny_model, tmp_path, key, value):
    folder = with_config(tiny_model, tmp_path, **{key: value})
    line = refused(flags, model_name=folder)
    assert line.startswith(f"--model_name {folder}: config.json's {key} is {json.dumps(value)}, ")


BAD_SIZES = {
    "no heads": ({"num_attention_heads": 0}, "config.json's num_attention_heads is 0, must be a positive integer"),
    "no KV heads": ({"num_key_value_heads": 0}, "config.json's num_key_value_heads is 0, must be a positive integer"),
    "no head width": ({"head_dim": 0}, "config.json's head_dim is 0, must be a positive integer"),
    "ten million layers": ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, the maximum is 10000"),
    "far more layers": ({"num_hidden_layers": 9999, "hidden_size": 6400}, "are those of a model far larger than its"),
    "wide": ({"hidden_size": 10**8}, "are those of a model far larger than its weight files, which hold "),
    "a large vocabulary": ({"vocab_size": 10**9}, "config.json's vocab_size 1000000000 and width 64 are those"),
    "large layers": ({"intermediate_size": 10**12}, "config.json's intermediate_size 1000000000000 and width 64"),
    "large heads": ({"head_dim": 10**9}, "config.json's head_dim 1000000000 and width 64 are those of a model far"),
    "many KV heads": ({"num_key_value_heads": 10**9}, "config.json's num_key_value_heads 1000000000 and width 64"),
    "a huge number": ({"initializer_range": 10**400}, "is an integer of 1329 bits, must be below 2**63"),
    "dropout": ({"attention_dropout": 3.5}, "config.json's attention_dropout is 3.5, must be 0 to 1"),
    "layers in a list": ({"num_hidden_layers": ["x"]}, "num_hidden_layers is list, must be a positive integer"),
    "width in a list": ({"hidden_size": [64]}, "config.json's hidden_size is list, must be a positive integer"),
    "odd dropout": ({"attn_pdrop": [1]}, "its config.json is not that of a model (float() argument"),
    "infinite": ({"rope_theta": float("inf")}, "config.json's rope_theta is inf, must be below 2**63"),
}


@pytest.mark.parametrize("case", BAD_SIZES)
def test_sizes_that_no_model_of_these_files_has_are_refused_before_it_is_built(flags, tiny_model, tmp_path, case):
    change, fact = BAD_SIZES[case]
    folder = with_config(tiny_model, tmp_path, **change)
    line = refused(flags, model_name=folder)
    assert line.startswith(f"--model_name {folder}: ") and fact in line


ROPES = {
    "no object": ([1], "rope_parameters is [1], must be an object"),
    "text": ({"rope_theta": "x"}, 'rope_parameters has rope_theta "x", must be a number above 0'),
    "below 0": ({"rope_theta": -1}, "rope_parameters has rope_theta -1, must be a number above 0"),
    "a list": ({"rope_type": "linear", "factor": [2]}, "rope_parameters has factor [2], must be a number above 0"),
    "less": ({"rope_type": "llama3", "factor": 8.0}, "is of rope_type llama3 and has no low_freq_factor"),
    "no list": ({"rope_type": "longrope", "short_factor": [1], "long_factor": "a"}, "has a long_factor that is no"),
    "by layer": ({"full_attention": {"rope_theta": True}}, "rope_parameters.full_attention has rope_theta true, must"),
    "no type": ({"rope_type": 5}, "rope_parameters has rope_type 5, must be text"),
    "unknown": ({"rope_type": "nonsense"}, 'rope_parameters has rope_type "nonsense", which is unknown'),
    "older": ({"type": "nonsense", "factor": 2.0}, 'rope_parameters has rope_type "nonsense", which is unknown'),
}


@pytest.mark.parametrize("case", ROPES)
def test_rope_settings_that_no_frequencies_follow_from_are_refused_in_a_dry_run_too(flags, tiny_model, tmp_path, case):
    rope, fact = ROPES[case]
    line = refused(flags, model_name=with_config(tiny_model, tmp_path, rope_parameters=rope))
    assert fact in line, line


def test_every_rope_of_transformers_that_needs_keys_has_them_listed():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ROPE_INIT_FUNCTIONS) == {*ROPE_KEYS, "proportional"}


OTHER_SIZES = {
    "wide": ({"hidden_size": 128, "head_dim": 16}, "is [64, 96] in its files, [128, 96] by its config"),
    "MLP": ({"intermediate_size": 192}, "mlp.down_proj.weight is [64, 96] in its files, [64, 192] by its config"),
    "KV heads": ({"num_key_value_heads": 4}, "k_proj.weight is [32, 64] in its files, [64, 64] by its config"),
    "vocabulary": ({"vocab_size": 500}, "is [381, 64] in its files, [500, 64] by its config"),
    "layers": ({"num_hidden_layers": 3}, "has no weights of layer 2, counted from 0, and 3 layers by its config"),
}


@pytest.mark.parametrize("case", OTHER_SIZES)
def test_weights_that_do_not_fit_their_config_are_refused_in_a_dry_run_too(flags, tiny_model, tmp_path, case):
    change, fact = OTHER_SIZES[case]
    assert fact in refused(flags, model_name=with_config(tiny_model, tmp_path, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 7},
        {"rms_norm_eps": 1},
        {"layer_types": ["full_attention"]},
        {"layer_types": 5},
        {"hidden_act": "nonsense"},
        {"hidden_act": 5},
        {"rope_parameters": {"rope_type": "nonsense"}},
        {"attention_dropout": 5},
        {"architectures": 5},
        {"tie_word_embeddings": "x"},
        {"use_cache": 5},
        {"id2label": 5},
        {"model_type": "gpt2", "n_head": 7},
        {"transformers_version": 5},
    ],
    ids=str,
)
def test_whatever_transformers_raises_for_a_config_is_one_line(tiny_model, tmp_path, change):
    from finetune.torch_engine.weights.stream import load_dense

    folder = with_config(tiny_model, tmp_path, **change)
    with contextlib.suppress(PlanError):
        load_dense(find_model(str(folder)).folder, torch.float32)


@pytest.mark.slow
def test_a_config_without_head_counts_is_trained_or_refused_in_one_line(flags, tiny_model, tmp_path):
    folder = with_config(tiny_model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "heads" not in k}))
    with pytest.raises(PlanError, match="is .* in its files, .* by its config|does not run|not that of a causal"):
        train.fine_tune(**flags | {"model_name": str(folder)})


def test_an_index_with_a_name_too_long_for_a_file_is_refused(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "x" * 300 + ".safetensors")
    (sharded / INDEX).write_text(json.dumps(index))
    assert f"{INDEX} names the weight file 'xxx" in refusal(sharded)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(model, name):
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is closed to other users
        os.chmod(folder, 0o755)
        copy = Path(shutil.copytree(model, Path(folder) / "model"))
        (copy / name).chmod(0)
        # Root may read anything.
        code = "import os; from finetune.model_files.files import find_model; os.geteuid() or os.setuid(65534); "
        argv = [sys.executable, "-c", f"{code}find_model({str(copy)!r})"]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert f"{name} may not be read (permission denied). Change its permissions." in done.stderr, done.stderr
