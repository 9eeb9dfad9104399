"""Training the new layers of an expanded model."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import expand
import export
from finetune.checkpoint.store import steps_of
from finetune.errors import PlanError
from tests.support import tiny
from tests.support.adapters import IDS
from tests.support.model_folders import expand_model, logits
from tests.support.runs import read_events
from train import fine_tune

RUN = dict(
    batch_size=2,
    gradient_accumulation_steps=2,
    num_epochs=1,
    lr=5e-3,
    backend="cpu",
    log_to="stdout",
    context_length=64,
    precision="fp32",
)


def run(expanded_model, rows_file, folder, **flags):
    return fine_tune(
        **{**RUN, "llama_pro_path": str(expanded_model), "dataset": str(rows_file), "output_dir": str(folder), **flags}
    )


@pytest.mark.parametrize("train_type", ["lora", "qlora", "bnb_llama_pro"])
def test_new_layers_train_in_fp32_resume_bitwise_and_all_else_stays(train_type, expanded_model, rows_file, tmp_path):
    whole = tmp_path / "whole"
    if train_type == "bnb_llama_pro":
        pytest.importorskip("bitsandbytes")
    state = run(expanded_model, rows_file, whole, train_type=train_type, save_every=2, keep_last=9)
    assert state.status == "finished"
    losses = [e["loss"] for e in read_events(whole, "step")]
    assert losses[-1] < losses[0]
    tensors = load_file(whole / "trained_blocks.safetensors")
    assert {n.split(".")[2] for n in tensors} == {"2"} and len(tensors) == 9  # every tensor of one layer
    assert all(t.dtype == torch.float32 for t in tensors.values())
    before = load_file(expanded_model / "model.safetensors")
    assert all(not torch.equal(tensors[n], before[n]) for n in tensors if n.endswith("proj.weight"))
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for step in steps_of(cut):
        if int(step.name[5:]) > 2:
            shutil.rmtree(step)
    (cut / "train_state.json").unlink()
    fine_tune(resume=str(cut))
    assert (cut / "trained_blocks.safetensors").read_bytes() == (whole / "trained_blocks.safetensors").read_bytes()
    assert [e["loss"] for e in read_events(cut, "step")] == losses


def test_the_first_loss_is_the_unexpanded_models(expanded_model, tiny_model, rows_file, tmp_path):
    run(expanded_model, rows_file, tmp_path / "a", train_type="lora", max_steps=1)
    same = dict(RUN, model_name=str(tiny_model), dataset=str(rows_file), train_type="lora", max_steps=1)
    fine_tune(**same, output_dir=str(tmp_path / "b"))
    one, two = (read_events(tmp_path / n, "step")[0]["loss"] for n in "ab")
    assert one == two


def test_exported_trained_layers_are_a_plain_model(expanded_model, rows_file, tmp_path, capsys):
    run(expanded_model, rows_file, tmp_path / "out", train_type="lora", max_steps=3)
    export.main(["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")])
    model = transformers.AutoModelForCausalLM.from_pretrained(expanded_model)
    model.load_state_dict(load_file(tmp_path / "out" / "trained_blocks.safetensors"), strict=False)
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "merged"), model.eval()(IDS).logits)


def test_sixteen_bits_keep_the_new_layers_in_fp32(expanded_model, rows_file, tmp_path):
    run(expanded_model, rows_file, tmp_path / "out", train_type="qlora", precision="bf16", max_steps=4)
    losses = [e["loss"] for e in read_events(tmp_path / "out", "step")]
    assert losses[-1] < losses[0]
    assert all(t.dtype == torch.float32 for t in load_file(tmp_path / "out" / "trained_blocks.safetensors").values())


def test_a_mixture_of_experts_trains_its_new_layer(make_tokenizer, rows_file, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "source", bos=False)
    _, target = expand_model(tiny.build("mixtral", vocab_size=len(tokenizer)), tmp_path)
    run(target, rows_file, tmp_path / "out", train_type="qlora", max_steps=3)
    names = load_file(tmp_path / "out" / "trained_blocks.safetensors")
    assert "model.layers.2.mlp.experts.gate_up_proj" in names and len(names) == 9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"train_type": "full"}, "--llama_pro_path .*: trains only the added layers"),
        ({"train_type": "lora", "use_dora": True}, "--use_dora true: --llama_pro_path trains full layers"),
        ({"train_type": "hqq_llama_pro", "llama_pro_path": None}, "needs --llama_pro_path"),
    ],
)
def test_settings_that_contradict_new_layers_are_refused(flags, message, expanded_model, rows_file, tmp_path):
    with pytest.raises(PlanError, match=message):
        run(expanded_model, rows_file, tmp_path / "out", **{"model_name": str(expanded_model), **flags})


def test_a_model_that_was_not_expanded_is_refused(tiny_model, rows_file, tmp_path):
    with pytest.raises(PlanError, match="not an expanded model: it has no llama_pro.json"):
        run(tiny_model, rows_file, tmp_path / "out", train_type="lora")


@pytest.mark.parametrize("new", ["[-1]", '"12"', "[true]", "[1, 1]", "[]", "[0, 1, 2]", "[7]"])
def test_a_record_that_is_not_of_this_model_is_refused(new, tiny_model, rows_file, tmp_path):
    folder = tmp_path / "expanded"
    expand.main(["--model_name", str(tiny_model), "--output_dir", str(folder), "--num_new_blocks", "1"])
    record = json.loads((folder / "llama_pro.json").read_text())
    (folder / "llama_pro.json").write_text(json.dumps(record | {"new_layers": json.loads(new)}))
    with pytest.raises(PlanError, match="--llama_pro_path .*Expand"):
        fine_tune(llama_pro_path=str(folder), dataset=str(rows_file), output_dir=str(tmp_path / "out"), max_steps=1)
    shutil.rmtree(folder)
