"""Multimodal models as published: text trains, towers are neither loaded nor lost."""

import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from finetune.torch_engine.weights.modalities import auto_class
from finetune.torch_engine.weights.stream import load_dense
from tests.support import architectures, tiny
from train import fine_tune

PUBLISHED = ("gemma3", "mistral3", "qwen2_5_vl", "llama4", "qwen3_vl")


@pytest.fixture
def published(request, tmp_path):
    """A folder of the full model with tokenizer and rows."""
    folder = tmp_path / "model"
    architectures.write_model(request.param, folder)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, architectures.QUESTIONS)))
    return folder


def flags(folder, train_type, **more):
    common = dict(model_name=str(folder), dataset=str(folder.parent / "rows.jsonl"), train_type=train_type, max_steps=2)
    return common | dict(batch_size=4, precision="fp32", lr=1e-2, output_dir=str(folder.parent / "out")) | more


@pytest.mark.parametrize("published", PUBLISHED, indirect=True)
def test_towers_are_not_loaded(published):
    model = load_dense(published, torch.float32)
    assert model.left_out and model.left_in_files
    held = sum(p.numel() for p in model.parameters())
    whole = sum(t.numel() for t in load_file(published / "model.safetensors").values())
    left = sum(load_file(published / "model.safetensors")[n].numel() for n in model.left_in_files)
    tied = sum(t.numel() for n, t in model.state_dict().items() if n in model.all_tied_weights_keys)
    assert held == whole - left and held + left + tied >= whole


@pytest.mark.slow
@pytest.mark.parametrize("published", PUBLISHED, indirect=True)
def test_a_full_model_is_saved_with_its_towers_unchanged(published, tmp_path):
    fine_tune(**flags(published, "full", lr=1e-3))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    before = auto_class(config).from_pretrained(published).state_dict()
    after, info = auto_class(config).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    towers = load_dense(published, torch.float32).left_out
    changed = [n for n, t in after.state_dict().items() if not torch.equal(t, before[n])]
    assert changed and not [n for n in changed if n.startswith(towers)]


@pytest.mark.slow
@pytest.mark.parametrize("published", PUBLISHED, indirect=True)
def test_the_adapter_opens_on_the_full_model(published, tmp_path):
    fine_tune(**flags(published, "lora", lora_rank=4, lora_target_modules="all"))
    config = transformers.AutoConfig.from_pretrained(published)
    full = auto_class(config).from_pretrained(published)
    ids = torch.arange(3, 20)[None]
    base = full(input_ids=ids).logits
    opened = peft.PeftModel.from_pretrained(full, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    taken = {n.replace(".default", ""): p for n, p in opened.named_parameters() if "lora_" in n}
    assert all(torch.equal(taken[n], t) for n, t in stored.items()) and len(taken) == len(stored)
    assert not torch.equal(opened(input_ids=ids).logits, base)


def test_a_text_only_model_has_nothing_to_leave_out():
    assert not hasattr(tiny.build("llama"), "left_out")
