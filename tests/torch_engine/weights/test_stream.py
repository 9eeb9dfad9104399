"""Weights streamed from files: bit for bit transformers' model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantization_wrapper
from finetune.errors import PlanError
from finetune.torch_engine.lora.targets import linear_names
from finetune.torch_engine.weights.stream import empty_model, load_dense, load_weights
from tests.support import tiny
from tests.support.architectures import tiny_config
from tests.support.cells import each_alone
from tests.support.engines import CPU
from tests.support.stored_quantized import edited, theirs_of


def same_tensors(one, other):
    """Whether all weights and buffers, those that are never saved too, are equal bit for bit and type for type."""
    for mine, theirs in (
        (one.state_dict(), other.state_dict()),
        (dict(one.named_buffers()), dict(other.named_buffers())),
    ):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name


@pytest.mark.parametrize(
    ("architecture", "dtype"), each_alone(tiny.ARCHITECTURES, [torch.float32, torch.bfloat16, torch.float16]), ids=str
)
def test_a_streamed_model_is_transformers_own_bit_for_bit(architecture, dtype, tmp_path):
    """save_pretrained writes the experts of MoE models one by one, as published checkpoints have them."""
    tiny.build(architecture).save_pretrained(tmp_path, max_shard_size="50KB")
    ours, theirs = load_dense(tmp_path, dtype), theirs_of(tmp_path, dtype)
    same_tensors(ours, theirs)
    assert ours.config._attn_implementation == theirs.config._attn_implementation
    ids = torch.arange(3, 20)[None]
    assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_any_number_of_workers_loads_the_same(tmp_path):
    tiny.build("qwen2").save_pretrained(tmp_path)
    states = []
    for workers in (1, 2, 7):
        model = empty_model(tmp_path, torch.float32)
        config = quantization_wrapper.config_for("hqq", group_size=32)
        quantized = {f"{n}.weight": config for n in linear_names(model)}
        load_weights(model, tmp_path, torch.float32, CPU, quantized, workers)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][k], s[k]) for s in states[1:] for k in states[0])


def test_models_built_in_several_threads_at_once_leave_torch_as_it_was(tmp_path):
    import threading

    tiny.build("llama").save_pretrained(tmp_path)
    register, built = torch.nn.Module.register_parameter, []
    threads = [threading.Thread(target=lambda: built.append(load_dense(tmp_path, torch.float32))) for _ in range(4)]
    for thread in threads:
        thread.start()
    beside = [torch.nn.Linear(2, 2) for _ in range(200)]  # made meanwhile, by another thread
    for thread in threads:
        thread.join()
    assert len(built) == 4 and torch.nn.Module.register_parameter is register
    assert not any(layer.weight.is_meta for layer in beside)


def test_experts_larger_than_memory_are_built_on_meta_and_buffers_are_real(tmp_path):
    sizes = {"moe_intermediate_size": 1 << 20, "n_routed_experts": 1024, "num_hidden_layers": 2}
    tiny_config("deepseek_v3", **sizes).save_pretrained(tmp_path)
    model = empty_model(tmp_path, torch.float32)
    assert max(p.nbytes for p in model.parameters()) > 1 << 37
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())


@pytest.mark.parametrize("tied", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_load_from_either_name(tied, tmp_path):
    model = tiny.build("llama_tied")
    model.save_pretrained(tmp_path)
    edited(tmp_path, lambda t: t.update({tied: t.pop("model.embed_tokens.weight")}))
    ours = load_dense(tmp_path, torch.float32)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert torch.equal(ours.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.int8, torch.float8_e4m3fn])
def test_a_tensor_that_is_not_a_weight_is_refused_by_its_dtype(dtype, tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    edited(tmp_path, lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(PlanError, match=f"{name} has dtype .* but no scales"):
        load_dense(tmp_path, torch.float32)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, last = (sorted(set(index["weight_map"].values()))[i] for i in (0, -1))
    one, other = load_file(tmp_path / first), load_file(tmp_path / last)
    save_file(other | {next(iter(one)): torch.zeros(1)}, tmp_path / last)
    with pytest.raises(PlanError, match=f"is in {first} and in {last}"):
        load_dense(tmp_path, torch.float32)
