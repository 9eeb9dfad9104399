"""Model folders written one tensor at a time, against save_pretrained."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from finetune.model_files.rope_names import add_older_names
from finetune.torch_engine.weights import save
from finetune.torch_engine.weights.save import write_model_folder
from tests.support import tiny

FEW = ("llama_tied", "mixtral", "gpt2")


def tensors_of(folder):
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


@pytest.mark.parametrize("size", ["50GB", "40KB"])
@pytest.mark.parametrize(
    "architecture", [a if a in FEW else pytest.param(a, marks=pytest.mark.slow) for a in tiny.ARCHITECTURES]
)
def test_a_folder_written_by_tensors_is_save_pretrained_s(architecture, size, tmp_path, monkeypatch):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    monkeypatch.setattr(save, "SHARD_SIZE", size)
    model = tiny.build(architecture)
    write_model_folder(model, ours, torch.bfloat16)
    model.to(torch.bfloat16).save_pretrained(theirs, max_shard_size=size)
    mine, wanted = tensors_of(ours), tensors_of(theirs)
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name
    add_older_names(theirs / "config.json")  # all that is added to it
    for file in ("config.json", "generation_config.json"):
        assert (ours / file).exists() == (theirs / file).exists()
        assert not (theirs / file).exists() or (ours / file).read_text() == (theirs / file).read_text()
    index = "model.safetensors.index.json"
    assert (ours / index).exists() == (theirs / index).exists() == (size == "40KB")
    if size == "40KB":
        mine, wanted = (json.loads((f / index).read_text()) for f in (ours, theirs))
        assert mine["metadata"]["total_parameters"] == wanted["metadata"]["total_parameters"]
        assert all((ours / file).is_file() for file in mine["weight_map"].values())
        # Where one tensor in memory is several on disk, transformers keeps those in one file.
        assert mine == wanted or architecture in ("mixtral", "qwen3_moe")


def test_a_folder_of_shards_is_read_as_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "SHARD_SIZE", "40KB")
    model = tiny.build("mixtral")
    write_model_folder(model, tmp_path, torch.float32)
    from finetune.torch_engine.weights.stream import load_dense

    again = load_dense(tmp_path, torch.float32)
    for (name, wanted), (_, found) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(wanted, found), name


def test_a_full_run_of_a_bf16_model_evaluates_twice_and_publishes_bf16(plain_run, tiny_model, rows_file, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    plain_run(
        model_name=str(folder),
        train_type="full",
        lora_rank=None,
        validation_dataset=str(rows_file),
        max_steps=3,
        eval_every=1,
    )
    out = tmp_path / "out"
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert (out / "best" / "model.safetensors").is_file()
