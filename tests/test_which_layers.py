"""--num_layers and --layers_to_transform: adapters in some decoder layers only, as PEFT has them."""

import json

import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.adapters.targets import in_layers, layer_of
from finetune.config import TrainConfig
from finetune.errors import PlanError
from finetune.estimate.memory import base_bytes, trainable_weights
from finetune.estimate.model_cost import ModelCost
from finetune.estimate.model_shape import shape_of_files
from finetune.model_files.files import find_model
from finetune.open_checkpoint import base_of
from finetune.parts.parts import Parts
from tests.support.commands import refused
from tests.support.runs import read_events
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
    assert trainable_weights(ModelCost(shape, plan)) == sum(a.size for a in trained.values())
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


# ---- --train_type full: the layers' own weights


@pytest.fixture
def full(flags):
    kept = {k: v for k, v in flags.items() if k not in ("lora_rank", "lora_alpha", "lora_dropout")}
    return kept | {"train_type": "full", "precision": "fp32", "lr_scheduler": "constant", "warmup_steps": 0}


@pytest.mark.parametrize("which", [{"num_layers": 1}, {"layers_to_transform": "0"}])
def test_a_step_of_some_layers_is_transformers_with_requires_grad_set_by_hand(full, which, tmp_path):
    lr, how = 0.5, {"optimizer": "sgd", "apply_gradient_clipping": False, "batch_size": 24, "train_on_prompt": True}
    fine_tune(**full | which | how, lr=lr, max_steps=1)
    model = AutoModelForCausalLM.from_pretrained(full["model_name"], dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    number = 0 if "layers_to_transform" in which else model.config.num_hidden_layers - 1
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".layers.{number}." in name)
    event = read_events(tmp_path / "out", "step")[0]
    nll, count, tokenizer = 0.0, 0, AutoTokenizer.from_pretrained(full["model_name"])
    for row in map(json.loads, open(full["dataset"])):
        ids = torch.tensor([*tokenizer(row["prompt"] + row["completion"]).input_ids, tokenizer.eos_token_id])
        logits = model(input_ids=ids[None]).logits[0, :-1]
        nll = nll + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
        count += len(ids) - 1
    loss = nll / count
    loss.backward()
    assert count == event["num_targets"] and loss.item() == pytest.approx(event["loss"], rel=1e-6)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert after.keys() == before.keys()
    trained = {name for name in before if not torch.equal(before[name], after[name])}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if name in trained:  # the difference of two fp32 weights, divided by lr
            assert torch.allclose((before[name] - after[name]) / lr, parameter.grad, atol=1e-6), name


def test_some_layers_in_full_resume_bitwise_and_their_checkpoints_are_not_models(full, tmp_path, capsys):
    how = full | {"num_layers": 1, "save_every": 1}
    whole = fine_tune(**how | {"output_dir": str(tmp_path / "whole")}, max_steps=4)
    fine_tune(**how, max_steps=2)
    fine_tune(**how, max_steps=4, resume="auto")
    one, two = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert whole.step == 4 and one.read_bytes() == two.read_bytes()
    step = tmp_path / "out" / "checkpoints" / "step-4"
    inside = load_file(step / "model.safetensors")
    assert inside and all(layer_of(name) == layer_of(max(inside)) for name in inside)
    with pytest.raises(PlanError, match="holds the layers that train, and not the rest of the model"):
        base_of(str(step))
    assert base_of(str(tmp_path / "out")).folder == tmp_path / "out"


@pytest.mark.parametrize("which", [{"num_layers": 1}, {"layers_to_transform": "0"}, {}])
def test_memory_of_some_layers_in_full_is_counted_to_the_weight(flags, which):
    shape = shape_of_files(find_model(flags["model_name"])).known
    m = ModelCost(shape, Parts(TrainConfig(train_type="full", precision="fp32", **which)))
    model = AutoModelForCausalLM.from_pretrained(flags["model_name"])
    number = {"num_layers": shape.num_layers - 1, "layers_to_transform": 0}.get(next(iter(which), None))
    held = [p.numel() for n, p in model.named_parameters() if number is None or f".layers.{number}." in n]
    assert trainable_weights(m) == sum(held)
    assert base_bytes(m) == 4 * (shape.num_weights - sum(held))
    assert m.learning_layers == (1 if "num_layers" in which else shape.num_layers)


@pytest.mark.slow
def test_two_ranks_train_some_layers_in_full_as_one_process(full, tmp_path):
    for n in (1, 2):
        how = full | {"num_layers": 1, "output_dir": str(tmp_path / f"r{n}"), "batch_size": 4 // n}
        fine_tune(**how, max_steps=3, world_size=n)
    one, two = (load_file(tmp_path / f"r{n}" / "model.safetensors") for n in (1, 2))
    losses = [[e["loss"] for e in read_events(tmp_path / f"r{n}", "step")] for n in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # fp32 sums over ranks in another order
    # Adam divides by the root of its moment: near a zero gradient, a difference of 1e-9 moves a weight by more.
    assert one.keys() == two.keys() and all(abs(one[name] - two[name]).max() < 1e-4 for name in one)


def test_some_layers_in_full_are_refused_where_they_do_not_train(full, expanded_model):
    said = refused(full, num_layers=1, new_tokens="a")
    assert "embeddings and head train for it, and --num_layers freezes them" in said
    new = {k: v for k, v in full.items() if k not in ("model_name", "train_type")}
    assert "--llama_pro_path says which layers train" in refused(new, num_layers=1, llama_pro_path=expanded_model)
