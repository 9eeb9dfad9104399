"""Merging tensor by tensor: what is written is base + adapter, or nothing is left."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import export
from finetune.errors import PlanError
from finetune.torch_engine import memory_stats
from finetune.torch_engine.lora.adapters import attach_adapter
from finetune.torch_engine.weights import lazy, merge
from finetune.torch_engine.weights.stream import load_dense
from tests.support import architectures, tiny
from tests.support.adapters import IDS, KINDS, adapted, write

CASES = [(name, kind) for name in (*tiny.ARCHITECTURES, "qwen2_moe") for kind in KINDS]
# Other layouts: fused queries, keys and values, shared blocks, state spaces, linear attention, image and text.
MORE = (
    "gpt_neo",
    "opt",
    "bloom",
    "phi",
    "starcoder2",
    "jamba",
    "mamba2",
    "qwen3_next",
    "gemma3",
    "deepseek_v3",
    "gptj",
)
FEW = (("llama_tied", "dora"), ("gpt2", "dora"), ("mixtral", "rslora"), ("gpt_oss", "lora"))


@pytest.fixture
def saved(make_tokenizer, tmp_path):
    """Writes a tiny base and an adapter on it; their logits with the adapter attached."""

    def make(architecture="llama", targets="all", model=None, **changes):
        tokenizer = make_tokenizer(tmp_path / "base", bos=False)
        base = model or tiny.build(architecture, vocab_size=max(len(tokenizer), 128))
        base.save_pretrained(tmp_path / "base")
        ours, settings = adapted(model=load_dense(tmp_path / "base", torch.float32), targets=targets, **changes)
        write(ours, settings, tmp_path / "adapter")
        change(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
        again = load_dense(tmp_path / "base", torch.float32).requires_grad_(False)
        attach_adapter(again, tmp_path / "adapter")
        return again.eval()

    return make


def change(adapter, **changes):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def exported(tmp_path, *flags):
    argv = ["--checkpoint", str(tmp_path / "adapter"), "--output_dir", str(tmp_path / "merged"), *flags]
    assert export.main(argv) == 0
    return tmp_path / "merged"


def assert_merged(with_adapter, tmp_path):
    """fp32: the sums are the same in another order."""
    merged = load_dense(exported(tmp_path), torch.float32).eval()
    with torch.no_grad():
        expected, found = (model(input_ids=IDS, use_cache=False).logits for model in (with_adapter, merged))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.promise("AT_06")
@pytest.mark.parametrize(
    ("architecture", "kind"), [pytest.param(*c, marks=[] if c in FEW else pytest.mark.slow) for c in CASES]
)
def test_the_merged_folder_gives_the_logits_of_base_and_adapter(saved, tmp_path, architecture, kind):
    assert_merged(saved(architecture, **KINDS[kind]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("model_type", MORE)
def test_other_layouts_merge_too(saved, tmp_path, model_type, kind):
    model = architectures.build(model_type, vocab_size=512)
    assert_merged(saved(model=model, **KINDS[kind]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("targets", ["embed_tokens,q_proj", "lm_head,q_proj", "embed_tokens,lm_head"])
@pytest.mark.parametrize("architecture", ["llama", "llama_tied"])
def test_embeddings_and_heads_merge_tied_or_not(saved, tmp_path, architecture, targets, kind):
    assert_merged(saved(architecture, targets, **KINDS[kind]), tmp_path)


def test_blocks_of_rows_give_what_one_block_gives(saved, tmp_path, monkeypatch):
    with_adapter = saved("gpt2", use_dora=True)
    monkeypatch.setattr(lazy, "AT_ONCE", 100)
    assert_merged(with_adapter, tmp_path)


def test_the_line_counts_layers_and_the_logits_are_compared_on_request(saved, tmp_path, capsys):
    saved("mixtral")
    exported(tmp_path, "--dtype", "bf16", "--verify", "logits")
    said = capsys.readouterr().out
    layers, off, copied = re.search(r"(\d+) layers within (\S+) of base \+ adapter, (\d+) other tensors", said).groups()
    assert (int(layers), int(copied)) == (12, 9) and 1e-4 < float(off) < 2**-8  # rounded to bf16
    assert "logits within" in said


def test_logits_that_do_not_fit_in_memory_are_refused_before_anything_is_written(saved, tmp_path, monkeypatch):
    from finetune.backend import machine

    saved()
    monkeypatch.setattr(machine, "system_memory", lambda: (2**20, 2**10))
    with pytest.raises(PlanError, match="--verify logits: the full model takes .* Use --verify layers"):
        exported(tmp_path, "--verify", "logits")
    assert not (tmp_path / "merged").exists()


def spoil(file, name, value):
    tensors = load_file(file)
    found = next(n for n in tensors if n.endswith(name))
    tensors[found].view(-1)[3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return found


@pytest.mark.parametrize(
    ("leaf", "value"), [("down_proj.lora_A.weight", float("nan")), ("lora_magnitude_vector", float("inf"))]
)
def test_numbers_that_are_not_finite_end_it_naming_the_tensor(saved, tmp_path, leaf, value):
    saved(use_dora=True)
    name = spoil(tmp_path / "adapter" / "adapter_model.safetensors", leaf, value)
    with pytest.raises(PlanError, match=f"{re.escape(name)} has numbers that are not finite"):
        exported(tmp_path)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("where", ["base", "fp16", "DoRA of a zero row"])
def test_a_result_that_is_not_finite_ends_it_naming_the_tensor(saved, tmp_path, where):
    saved(use_dora=where.startswith("DoRA"))
    name, flags = "model.layers.1.mlp.up_proj.weight", []
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    if where == "base":
        tensors[name][0, 0] = float("nan")
    elif where == "fp16":
        tensors[name][0, 0], flags = 1e6, ["--dtype", "fp16"]
    else:
        tensors[name][5] = 0
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        adapter = load_file(file)
        adapter["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"][5] = 0
        save_file(adapter, file)
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError, match=f"{re.escape(name)} of base and adapter has numbers that are not finite"):
        exported(tmp_path, *flags)
    assert not (tmp_path / "merged").exists()


def test_layers_that_share_a_weight_and_not_the_adapter_are_refused(saved, tmp_path):
    saved(model=architectures.build("zamba", vocab_size=512))
    with pytest.raises(PlanError, match="share one weight and not the adapter"):
        exported(tmp_path)
    assert not (tmp_path / "merged").exists()


@pytest.mark.promise("AT_06")
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight"])
def test_what_the_disk_changed_is_noticed(saved, tmp_path, name):
    saved()
    target = exported(tmp_path)
    tensors = load_file(target / "model.safetensors")
    tensors[name].view(-1)[7] *= 1.5
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError, match=f"{re.escape(name)} gives other products"):
        merge.check_written(tmp_path / "adapter", tmp_path / "base", target, torch.float32)


@pytest.mark.slow
def test_ends_that_the_files_hold_twice_stay_tied_if_they_are_equal(saved, tmp_path):
    saved("llama_tied")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    assert "lm_head.weight" not in load_file(exported(tmp_path) / "model.safetensors")


@pytest.mark.slow
def test_ends_that_differ_in_the_files_are_both_kept(saved, tmp_path):
    saved("llama_tied")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, file, metadata={"format": "pt"})
    merged = load_file(exported(tmp_path) / "model.safetensors")
    assert np.array_equal(merged["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.promise("AT_07")
def test_merging_holds_two_tensors_and_not_the_model(saved, tmp_path):
    """12 layers of 8 MiB each, after a first merge that leaves only what is this one's."""
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_key_value_heads=8)
    saved(model=tiny.build("llama", num_attention_heads=8, vocab_size=512, **sizes).to(torch.bfloat16))
    merging, size = merge.Merge.of(tmp_path / "adapter", tmp_path / "base"), 2 * 12 * (4 * 512**2 + 3 * 512 * 2048)
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
        memory_stats.trim_heap()
        memory_stats.reset_peak()
        before = memory_stats.current_resident_bytes()
        merging.write(tmp_path / name, torch.bfloat16)
        peak = memory_stats.peak_resident_bytes() - before
    assert sum(file.stat().st_size for file in (tmp_path / "again").glob("*.safetensors")) > size
    assert peak < size / 2, peak
