"""Files and flags as hands, other tools and other machines leave them: each is one line that names it, before anything loads."""

import json
import os
import shutil

import pytest

import train
from finetune.errors import PlanError
from finetune.plan import ModelShape


@pytest.fixture
def flags(tiny_model, rows_file, tmp_path):
    """Flags of a tiny run, as fine_tune takes them."""
    return {"model_name": str(tiny_model), "dataset": str(rows_file), "output_dir": str(tmp_path / "out"), "backend": "cpu",
            "train_type": "lora", "lora_rank": 4, "batch_size": 4, "context_length": 64}  # fmt: skip


def refused(flags: dict, **changes) -> str:
    """The one line that the command line answers to these flags; the same with --dry_run, where nothing is loaded."""
    lines = set()
    for last in ([], ["--dry_run"]):
        argv = [part for k, v in (flags | changes).items() for part in (f"--{k}", str(v))]
        with pytest.raises(PlanError) as error:
            train.main(argv + last)
        lines.add(str(error.value))
    (line,) = lines
    assert "\n" not in line and error.value.exit_code == 2
    return line


# ---- a model's config.json


def with_config(tiny_model, tmp_path, **changes):
    """A copy of the tiny model with other values in its config.json."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


QUANTIZED = {
    "bnb": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "unknown": {"quant_method": "nope"},
    "no method": {"bits": 4},
    "no object": "gptq",
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_quantized_model_is_refused(flags, tiny_model, tmp_path, case):
    folder = with_config(tiny_model, tmp_path, quantization_config=QUANTIZED[case])
    line = refused(flags, model_name=folder)
    assert line.startswith(f"--model_name {folder}: its weights are stored quantized (config.json's quantiz")
    assert line.endswith("Give the unquantized model it was made from.")


CONFIGS = {
    "text_config": ("text", 5, [1]),
    "num_hidden_layers": ("2", 0, -1, 1.5, True, {}),
    "hidden_size": ("64", 0),
    "vocab_size": ("many", -5),
    "num_attention_heads": ("4",),
    "rms_norm_eps": ("1e-5",),
    "dtype": ("float31", 5, ["float32"]),
    "torch_dtype": ("no",),
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in CONFIGS.items() for v in values])
def test_a_malformed_config_names_its_key(flags, tiny_model, tmp_path, key, value):
    folder = with_config(tiny_model, tmp_path, **{key: value})
    line = refused(flags, model_name=folder)
    assert line.startswith(f"--model_name {folder}: config.json's {key} is {json.dumps(value)}, ")


def test_a_text_config_that_is_no_object_is_no_shape():
    assert ModelShape.from_config({"model_type": "x", "text_config": "y", "vocab_size": 5}).vocab_size == 5
