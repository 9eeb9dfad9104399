"""Adapters between PEFT and mlx-lm: each library computes the same logits from its own file."""

import json

import mlx.core as mx
import numpy as np
import peft
import pytest
import torch
import transformers
from mlx_lm.utils import load_adapters
from safetensors.numpy import load_file, save_file

import export
from finetune.errors import PlanError
from finetune.mlx_engine import model as models
from finetune.mlx_engine.load import read_adapter
from tests.mlx_engine.test_logit_check import LLAMA3, MIXED_LAYERS
from tests.support.cells import each_alone
from tests.support.mlx_engines import config_of, save

SHAPES = {
    "llama": ("llama", {}),
    "llama3": ("llama", dict(rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32})),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", MIXED_LAYERS),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {}),
}
IDS = np.arange(3, 27)
PATTERNS = dict(rank_pattern={"q_proj": 2, "v_proj": 7}, alpha_pattern={"v_proj": 40})


def peft_adapter(architecture, base, folder, seed=0, **options):
    """A PEFT adapter with random weights on every linear, and its model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"]
    if architecture == "mixtral":
        targets = ["q_proj", "v_proj"]
        options = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], **options}
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM", **options)
    wrapped = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.3, generator=generator)
    wrapped.save_pretrained(folder)
    return wrapped


def mlx_logits(base, adapter) -> np.ndarray:
    """Logits by mlx-lm's own loading of an adapter, on the base with its config translated."""
    loaded = models.load(base, config_of(base), mx.float32, dequantizes=False)
    return np.array(load_adapters(loaded.model, str(adapter))(mx.array(IDS[None]))[0])


OPTIONS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": PATTERNS,
    "patterns-rslora": PATTERNS | {"use_rslora": True},
}


ONE_OF_EXPERTS = {name: {"target_parameters": [name]} for name in ("gate_up_proj", "mlp.experts.down_proj")}


@pytest.mark.parametrize(
    ("name", "kind"), [*each_alone(SHAPES, OPTIONS), *(("mixtral", kind) for kind in ONE_OF_EXPERTS)]
)
def test_an_exported_adapter_gives_mlx_lm_the_logits_it_gives_peft(tmp_path, name, kind):
    architecture, changes = SHAPES[name]
    options = (OPTIONS | ONE_OF_EXPERTS)[kind]
    if name == "mixtral" and "use_dora" in options:
        pytest.skip("PEFT has no DoRA for experts")
    base = save(tmp_path / "base", architecture, **changes)
    wrapped = peft_adapter(architecture, base, tmp_path / "peft", **options)
    with torch.no_grad():
        theirs = wrapped(torch.from_numpy(IDS[None])).logits[0].numpy()
        with wrapped.disable_adapter():
            plain = wrapped(torch.from_numpy(IDS[None])).logits[0].numpy()
    export_to("mlx-lm", tmp_path / "peft", tmp_path / "mlx")
    ours = mlx_logits(base, tmp_path / "mlx")
    # fp32 products of two libraries; without the adapter the logits are others by far.
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
    assert np.abs(plain - theirs).max() > 0.05 * np.abs(theirs).max()


def export_to(form, source, target, *more):
    assert export.main(["--checkpoint", str(source), "--output_dir", str(target), "--to", form, *more]) == 0


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_there_and_back_is_bitwise_the_same(tmp_path, options):
    base = save(tmp_path / "base")
    peft_adapter("llama", base, tmp_path / "peft", **options)
    export_to("mlx-lm", tmp_path / "peft", tmp_path / "mlx")
    export_to("peft", tmp_path / "mlx", tmp_path / "back")
    one, other = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("peft", "back"))
    assert one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    again = peft.PeftModel.from_pretrained(model, tmp_path / "back").eval()
    wanted = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "peft"
    ).eval()
    with torch.no_grad():
        assert torch.equal(again(torch.from_numpy(IDS[None])).logits, wanted(torch.from_numpy(IDS[None])).logits)


def test_an_adapter_of_mlx_lm_on_the_last_layers_is_imported(tmp_path):
    """As mlx_lm.lora writes it: a literal scale, and num_layers counted from the end."""
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    base = save(tmp_path / "base", num_hidden_layers=3)
    loaded = models.load(base, config_of(base), mx.float32, dequantizes=False)
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.up_proj"]}
    linear_to_lora_layers(loaded.model, 1, parameters)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(0, 0.1, array.shape).astype(np.float32)
        for name, array in tree_flatten(loaded.model.parameters())
        if name.endswith(("lora_a", "lora_b"))
    }
    assert sorted({n.split(".")[2] for n in tensors}) == ["2"]
    (tmp_path / "mlx").mkdir()
    save_file(tensors, tmp_path / "mlx" / "adapters.safetensors")
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters, "model": str(base)}
    (tmp_path / "mlx" / "adapter_config.json").write_text(json.dumps(config))
    export_to("peft", tmp_path / "mlx", tmp_path / "peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "peft").eval()
    with torch.no_grad():
        theirs = wrapped(torch.from_numpy(IDS[None])).logits[0].numpy()
    assert np.abs(mlx_logits(base, tmp_path / "mlx") - theirs).max() < 1e-4 * np.abs(theirs).max()


def test_what_a_format_has_no_place_for_is_refused(tmp_path):
    base, other = save(tmp_path / "base"), save(tmp_path / "other", "phi3")
    peft_adapter("llama", base, tmp_path / "plain")
    export_to("mlx-lm", tmp_path / "plain", tmp_path / "mlx")
    with pytest.raises(PlanError, match="adapts model.layers.0.mlp.gate_proj, which this base does not have"):
        export_to("peft", tmp_path / "mlx", tmp_path / "2", "--base", str(other))


def test_an_adapter_of_mlx_lm_on_a_router_is_refused(tmp_path):
    """It is no linear layer in transformers, and PEFT leaves out what it finds no place for."""
    base = save(tmp_path / "base", "qwen3_moe")
    (tmp_path / "mlx").mkdir()
    config = {"fine_tune_type": "lora", "num_layers": 1, "model": str(base)}
    config["lora_parameters"] = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["mlp.gate"]}
    (tmp_path / "mlx" / "adapter_config.json").write_text(json.dumps(config))
    name = "model.layers.1.mlp.gate.lora_"
    pair = {f"{name}a": np.ones((64, 4), np.float32), f"{name}b": np.ones((4, 4), np.float32)}
    save_file(pair, tmp_path / "mlx" / "adapters.safetensors")
    with pytest.raises(PlanError, match="--to peft: model.layers.1.mlp.gate is a router"):
        export_to("peft", tmp_path / "mlx", tmp_path / "2")


@pytest.mark.parametrize(("key", "value"), [("bias", "lora_only"), ("trainable_token_indices", [1])])
def test_what_mlx_does_not_apply_of_an_adapter_is_refused(tmp_path, key, value):
    peft_adapter("llama", save(tmp_path / "base"), tmp_path / "peft")
    assert read_adapter(tmp_path / "peft")[0].rank
    file = tmp_path / "peft" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(PlanError, match=f"{key}.* not supported"):
        read_adapter(tmp_path / "peft")
