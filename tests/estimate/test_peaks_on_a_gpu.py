"""Peaks of a step on a GPU against the estimate: on meta tensors of real sizes, and on a stand-in for shards."""

import json
import subprocess
import sys

import pytest

from finetune.estimate.inference import Work
from tests.support import emulated_device, large, meta_peaks
from tests.support.planned import settings_of

FEW = dict(num_hidden_layers=4)
GEMMA3 = dict(
    model_type="gemma3_text",
    vocab_size=262208,
    hidden_size=2560,
    intermediate_size=10240,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=1024,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
QWEN3_MOE = dict(
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=3,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
)
MODELS = {
    "Llama 3 8B": large.LLAMA_8B | FEW,
    "Llama 3.2 1B": large.LLAMA_1B,
    "Qwen 3 8B": large.LLAMA_8B
    | FEW
    | dict(model_type="qwen3", vocab_size=151936, intermediate_size=12288, head_dim=128),
    "Gemma 3 4B": GEMMA3,
    "Mistral 7B, window": large.LLAMA_8B | FEW | dict(model_type="mistral", vocab_size=32000, sliding_window=256),
    "Qwen 3 30B A3B": QWEN3_MOE,
}
CELLS = [
    (model, kind, recomputed) for model in MODELS for kind in ("lora", "qlora") for recomputed in ("false", "true")
]
FAST = {("Llama 3 8B", "lora", "false"), ("Gemma 3 4B", "qlora", "false"), ("Qwen 3 30B A3B", "qlora", "true")}
LENGTHS = (700, 500, 300, 548)


def cells() -> list:
    return [pytest.param(*cell, marks=[] if cell in FAST else pytest.mark.slow) for cell in CELLS]


@pytest.mark.parametrize(("model", "kind", "recomputed"), cells())
def test_a_steps_peak_is_predicted_within_5_percent(model, kind, recomputed):
    """bf16, 2,048 tokens in four documents; layers are the model's, there are fewer of them."""
    settings = settings_of(kind, "bf16", use_gradient_checkpointing=recomputed)
    predicted, counted, items = meta_peaks.counted(MODELS[model], settings, LENGTHS)
    assert predicted == pytest.approx(counted, rel=0.05), items


OUTSIDE = [
    pytest.param(large.LLAMA_8B, (512,), 3.0, id="Llama 3 8B, 512 tokens", marks=pytest.mark.slow),
    pytest.param(large.LLAMA_70B, LENGTHS, 6.0, id="Llama 3 70B, 2,048 tokens", marks=pytest.mark.slow),
    pytest.param(MODELS["Qwen 3 8B"], LENGTHS, None, id="Qwen 3 8B", marks=pytest.mark.slow),
    pytest.param(MODELS["Mistral 7B, window"], LENGTHS, None, id="Mistral 7B", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("config", "lengths", "most"), OUTSIDE)
def test_the_peak_of_a_base_outside_the_device_is_predicted_within_5_percent(config, lengths, most):
    """nf4, adapters on q_proj and v_proj, recomputed; layers pass through two buffers, then the head is there."""
    settings = settings_of(
        "qlora", "bf16", use_gradient_checkpointing="true", base_offload="host", lora_target_modules="q_proj,v_proj"
    )
    predicted, counted, items = meta_peaks.counted(config, settings, lengths)
    assert predicted == pytest.approx(counted, rel=0.05), items
    assert most is None or counted <= most * 2**30


ANSWERED = [pytest.param(m, k, marks=pytest.mark.slow) for m in MODELS for k in ("lora", "qlora")]


@pytest.mark.parametrize("work", [Work(8, 512, 8), Work(1, 2000, 8)], ids=["8 prompts", "one long prompt"])
@pytest.mark.parametrize(("model", "kind"), ANSWERED)
def test_the_peak_of_answers_is_predicted_within_5_percent(model, kind, work):
    """bf16, greedy; keys and values of all prompts, dense copies of a quantized base, experts at once."""
    predicted, counted, items = meta_peaks.answering(MODELS[model], settings_of(kind, "bf16"), work)
    assert predicted == pytest.approx(counted, rel=0.05), items


@pytest.mark.slow
@pytest.mark.skipif(bool(emulated_device.missing()), reason=str(emulated_device.missing()))
def test_what_a_shards_gathers_add_is_predicted_within_5_percent():
    """Two ranks of FSDP2 over a fake process group, against one process: root and first layer are held twice."""
    argv = [sys.executable, "-W", "ignore", "-m", "tests.support.sharded_peaks"]
    done = subprocess.run(argv, env=emulated_device.environment(), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, cell in found.items():
        assert cell["alone"] + cell["gathered"] == pytest.approx(cell["sharded"], rel=0.05), (name, cell)
    large_root = found["large root, lora"]
    assert large_root["sharded"] - large_root["alone"] > 1.5 * large_root["root"]
