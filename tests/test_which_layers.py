"""--num_layers and --layers_to_transform: adapters in some decoder layers only, as PEFT has them."""

import json

import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from finetune.adapters.targets import in_layers
from finetune.config import TrainConfig
from finetune.errors import PlanError
from finetune.estimate.memory import trainable_tensors
from finetune.estimate.model_cost import ModelCost
from finetune.estimate.model_shape import shape_of_files
from finetune.model_files.files import find_model
from finetune.plan.parts import Parts
from tests.support.commands import refused
from train import fine_tune


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_adapters_of_the_last_layers_are_pefts_with_layers_to_transform(flags, backend, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    if backend == "mlx":
        pytest.importorskip("mlx.core")
    base = AutoModelForCausalLM.from_pretrained(flags["model_name"])
    count = base.config.num_hidden_layers
    state = fine_tune(**flags | {"backend": backend}, max_steps=2, num_layers=1)
    trained = load_file(tmp_path / "out" / "adapter_model.safetensors")
    leaves = sorted({name.split(".")[-3] for name in trained})
    config = LoraConfig(r=4, target_modules=leaves, layers_to_transform=[count - 1], layers_pattern="layers")
    theirs = {n for n in get_peft_model(base, config).state_dict() if "lora_" in n}
    assert {n.replace(".weight", ".default.weight") for n in trained} == theirs
    base = AutoModelForCausalLM.from_pretrained(flags["model_name"])
    opened = PeftModel.from_pretrained(base, tmp_path / "out")
    assert {n for n in opened.state_dict() if "lora_" in n} == theirs
    settings = json.loads((tmp_path / "out" / "run_plan.json").read_text())["settled"]
    assert settings["num_layers"] == 1 and state.step == 2


def test_named_layers_train_and_are_counted(flags, tmp_path):
    state = fine_tune(**flags, max_steps=2, layers_to_transform=[0])
    trained = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert trained and all(".layers.0." in name for name in trained)
    shape = shape_of_files(find_model(flags["model_name"]))
    plan = Parts(TrainConfig(train_type="lora", lora_rank=4, layers_to_transform="0"))
    assert sum(trainable_tensors(ModelCost(shape, plan))) == sum(a.size for a in trained.values())
    assert ModelCost(shape, plan).learning_layers == shape.num_layers
    last = Parts(TrainConfig(train_type="lora", num_layers=1))
    assert ModelCost(shape, last).learning_layers == 1
    assert state.step == 2


def test_layers_that_are_not_there_are_refused_before_anything_is_loaded(flags):
    count = AutoModelForCausalLM.from_pretrained(flags["model_name"]).config.num_hidden_layers
    assert f"--num_layers {count + 1}: the model has {count} layers" in refused(flags, num_layers=count + 1)
    assert f"the model has layers 0 to {count - 1}" in refused(flags, layers_to_transform=f"0,{count}")
    assert "must be numbers of layers" in refused(flags, layers_to_transform="-1")
    assert "contradicts --layers_to_transform" in refused(flags, num_layers=1, layers_to_transform="0")
    with pytest.raises(PlanError, match="--num_layers 1: no layer with an adapter is among them"):
        in_layers(["lm_head"], ["model.layers.0.q"], 1, None)
