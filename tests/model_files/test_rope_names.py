"""A folder that is written has its RoPE settings under the older names too, which mlx-lm and transformers 4 read."""

import json
import warnings

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import export
from finetune.model_files.rope_names import with_older_names
from tests.support import tiny
from train import fine_tune


def rope_of(config) -> list:
    return [getattr(part, "rope_parameters", None) for part in (config, config.get_text_config())]


@pytest.mark.slow
def test_transformers_reads_the_same_from_both_for_every_architecture(tmp_path):
    warnings.simplefilter("ignore")
    compared = []
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]().to_dict()
        except (ValueError, TypeError, ImportError, AttributeError, KeyError, StrictDataclassError):
            continue  # has no default
        if "rope_parameters" not in json.dumps(config):
            continue
        read = []
        for i, content in enumerate((config, with_older_names(config))):
            folder = tmp_path / f"{name}-{i}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(content))
            read.append(rope_of(transformers.AutoConfig.from_pretrained(folder)))
        assert read[0] == read[1], name
        compared.append(name)
    assert len(compared) > 300


def test_settings_for_all_layers_get_the_older_names_and_what_is_there_stays():
    yarn = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}
    found = with_older_names({"rope_parameters": yarn, "text_config": {"rope_parameters": {"rope_theta": 7.0}}})
    assert (found["rope_theta"], found["partial_rotary_factor"], found["rope_scaling"]) == (5e5, 0.5, yarn)
    assert found["text_config"]["rope_theta"] == 7.0 and "rope_scaling" not in found["text_config"]
    assert with_older_names({"rope_parameters": yarn, "rope_theta": 1.0})["rope_theta"] == 1.0
    by_layer = {"rope_parameters": {"full_attention": yarn, "sliding_attention": yarn}}
    assert with_older_names(by_layer) == by_layer and with_older_names({"a": 1}) == {"a": 1}


@pytest.mark.promise("AT_10")
def test_a_full_run_and_a_merged_model_are_the_same_model_to_mlx_lm(make_tokenizer, rows_file, tmp_path):
    """Its Llama reads rope_theta, whose default is not this model's: the logits are those of another one."""
    mlx_lm, mx = pytest.importorskip("mlx_lm"), pytest.importorskip("mlx.core")
    base = tmp_path / "base"
    tokenizer = make_tokenizer(base, bos=False)
    rope = {"rope_theta": 20.0, "rope_type": "default"}
    tiny.build("llama", vocab_size=len(tokenizer), rope_parameters=rope).save_pretrained(base)
    how = dict(model_name=str(base), dataset=str(rows_file), max_steps=1, backend="cpu", precision="fp32")
    how |= dict(context_length=64, batch_size=4, log_to="stdout")
    fine_tune(**how, train_type="lora", output_dir=str(tmp_path / "out"))
    assert export.main(["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")]) == 0
    fine_tune(**how, train_type="full", output_dir=str(tmp_path / "full"))
    ids = list(range(5, 25))
    for folder in (tmp_path / "merged", tmp_path / "full"):
        model, _ = mlx_lm.load(str(folder))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits.numpy()
        assert np.abs(np.array(model(mx.array([ids]))) - expected).max() < 1e-4 * np.abs(expected).max()
