"""Runs that continue from a trained adapter: at step 0 they compute what it computes, and go on as PEFT does."""

import json
import math
import shutil
import warnings

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from finetune.adapters.saved import read_adapter
from finetune.errors import PlanError
from finetune.run.metrics import read_events
from finetune.torch_engine.lora.adapters import attach_adapter
from finetune.torch_engine.weights.stream import load_dense
from tests.support import tiny
from tests.support.adapters import IDS
from tests.support.runs import PLAIN
from train import fine_tune

LORA = {k: v for k, v in PLAIN.items() if k not in ("lora_rank", "lr")}
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "embeddings": {"lora_target_modules": "q_proj,embed_tokens,lm_head"},
    "nf4": {"train_type": "qlora", "quantization_backend": "nf4"},
    "hqq": {"train_type": "qlora", "quantization_backend": "hqq", "group_size": 32},
    "mlx-affine": {"train_type": "qlora", "quantization_backend": "mlx", "group_size": 32},
}
OF_RUN = ("train_type", "quantization_backend", "group_size")


@pytest.fixture
def first(tiny_model, rows_file, tmp_path):
    """Trains an adapter in tmp_path/first, so that it matters; the flags of a run that continues from it."""

    def make(model=None, **flags):
        same = LORA | {"dataset": str(rows_file), "model_name": str(model or tiny_model)}
        fine_tune(**same | {"lora_rank": 4, "lr": 0.05, "max_steps": 3} | flags, output_dir=str(tmp_path / "first"))
        continued = same | {k: v for k, v in flags.items() if k in OF_RUN}
        del continued["model_name"]
        return continued | {"adapter": str(tmp_path / "first"), "output_dir": str(tmp_path / "second")}

    return make


def logits_of(base, folder):
    model = load_dense(base, torch.float32).requires_grad_(False)
    attach_adapter(model, folder)
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("kind", ["lora", "dora", *(pytest.param(k, marks=pytest.mark.slow) for k in list(KINDS)[2:])])
def test_without_learning_the_adapter_is_bitwise_what_it_was(first, tmp_path, kind):
    """The smallest rate leaves fp32 weights as they are; the run takes base, rank, scale and layers by itself."""
    fine_tune(**first(**KINDS[kind]), max_steps=1, lr=1e-30)
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    one, two = (json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("first", "second"))
    assert all(one[k] == two[k] for k in ("r", "lora_alpha", "use_dora", "use_rslora", "base_model_name_or_path"))


@pytest.mark.parametrize(
    "kind", ["rslora", *(pytest.param(k, marks=pytest.mark.slow) for k in ("lora", "dora", "embeddings"))]
)
@pytest.mark.parametrize("alpha", [None, 3.0])
def test_more_rank_and_another_alpha_leave_the_function_unchanged(first, tiny_model, tmp_path, kind, alpha):
    flags = first(**KINDS[kind]) | ({"lora_alpha": alpha} if alpha else {})
    fine_tune(**flags, lora_rank=11, max_steps=1, lr=1e-30)
    before, after = (logits_of(tiny_model, tmp_path / name) for name in ("first", "second"))
    # fp32: the same sums with zeros among them, and B scaled by one factor.
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()
    config, tensors = read_adapter(tmp_path / "second")
    assert config["r"] == 11 and any(11 in array.shape for array in tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora", "rslora"])
def test_ten_steps_are_those_of_peft_continued_from_the_same_adapter(first, tiny_model, tmp_path, kind):
    """All rows in each step, so that their order does not matter; SGD, so that the adapter after ten steps sums
    ten gradients. fp32: the same sums in another order, documents packed here and alone there, which later steps
    enlarge in the norm of gradients.
    """
    texts = ["a lamp for a desk", "candles are wax", "what is two plus two", "one more lamp"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = first(**KINDS[kind], lr=0.01) | {"dataset": str(tmp_path / "texts.jsonl"), "lr": 1e-3, "max_steps": 10}
    plain = dict(lr_scheduler="constant", warmup_steps=0, optimizer="sgd", apply_gradient_clipping=False)
    fine_tune(**flags | plain)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "first"), is_trainable=True).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    rows = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
    targets = sum(len(row) - 1 for row in rows)
    steps = read_events(tmp_path / "second", "step")
    for step in steps:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for row in rows:
            logits = theirs(input_ids=torch.tensor([row])).logits[0, :-1]
            loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum") / targets
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in trained]).norm().item()
        assert abs(step["loss"] - loss.item()) <= 1e-5 * loss.item()
        assert abs(step["grad_norm"] - norm) <= 1e-4 * norm
        optimizer.step()
    assert len(steps) == 10
    named = {n.replace(".default", "").replace("_vector.weight", "_vector"): p for n, p in theirs.named_parameters()}
    for name, tensor in load_file(tmp_path / "second" / "adapter_model.safetensors").items():
        assert (named[name] - tensor).abs().max() <= 2e-5 * tensor.abs().max(), name


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 7])
def test_experts_continue_and_are_padded_too(first, make_tokenizer, tmp_path, rank):
    tokenizer = make_tokenizer(tmp_path / "moe", bos=False)
    tiny.build("mixtral", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "moe")
    fine_tune(**first(model=tmp_path / "moe"), lora_rank=rank, max_steps=1, lr=1e-30)
    before, after = (logits_of(tmp_path / "moe", tmp_path / name) for name in ("first", "second"))
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()


@pytest.mark.slow
def test_mlx_continues_the_same_adapter(first, tmp_path):
    pytest.importorskip("mlx_lm")
    fine_tune(**first() | {"backend": "mlx"}, lora_rank=6, max_steps=1, lr=1e-30)
    _, before = read_adapter(tmp_path / "first")
    _, after = read_adapter(tmp_path / "second")
    for name, array in before.items():
        region = tuple(slice(n) for n in array.shape)
        assert np.array_equal(after[name][region], array)


def test_layers_that_the_adapter_lacks_start_anew_and_those_it_has_go_on(first, tiny_model, tmp_path):
    flags = first(lora_target_modules="q_proj")
    fine_tune(**flags, lora_target_modules="q_proj,v_proj", max_steps=1, lr=1e-30)
    before, after = (logits_of(tiny_model, tmp_path / name) for name in ("first", "second"))
    assert torch.equal(before, after)
    assert any("v_proj" in name for name in load_file(tmp_path / "second" / "adapter_model.safetensors"))


def pairs_file(folder):
    rows = [{"prompt": f"What is {i}? ", "chosen": f"It is {i}.", "rejected": "I do not know."} for i in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "pairs.jsonl")


def test_dpo_compares_with_the_adapter_that_it_continues(first, tmp_path):
    """Before the first change both are the same model: the loss is ln 2, and no answer has a reward."""
    flags = first() | {"dataset": pairs_file(tmp_path), "preference": "dpo", "lr": 1e-2, "batch_size": 8}
    fine_tune(**flags, max_steps=2)
    steps = read_events(tmp_path / "second", "step")
    assert abs(steps[0]["loss"] - math.log(2)) < 1e-6 and abs(steps[0]["rewards/chosen"]) < 1e-5
    assert steps[1]["loss"] < math.log(2) - 1e-4
    (tmp_path / "second" / "reference_log_probs.json").unlink()
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step-3", ignore_errors=True)
    with pytest.raises(PlanError, match="reference_log_probs.json is missing or damaged"):
        fine_tune(output_dir=str(tmp_path / "second"), resume="auto", max_steps=4)


REFUSED = {
    "another base": (lambda folder: {"model_name": str(folder / "other")}, "was trained on another base than"),
    "less rank": (lambda folder: {"lora_rank": 2}, "--lora_rank 2: is less than the 4"),
    "DoRA": (lambda folder: {"use_dora": True}, "--use_dora true: .* was trained otherwise"),
    "fewer layers": (lambda folder: {"lora_target_modules": "q_proj"}, "adapts .*, which this run does not"),
    "start": (lambda folder: {"init_lora_weights": "pissa"}, "--init_lora_weights pissa: is how new adapters start"),
    "full": (lambda folder: {"train_type": "full"}, "--adapter .*: full fine-tuning has no adapter"),
    "nothing": (lambda folder: {"adapter": str(folder / "none")}, "is not a folder"),
    "kto": (lambda folder: {"preference": "kto"}, "--preference kto: its reference"),
}


def test_what_does_not_fit_is_one_line(first, tiny_model, tmp_path):
    flags = first()
    shutil.copytree(tiny_model, tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    save_file({n: t + 1 for n, t in weights.items()}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    for changes, fact in REFUSED.values():
        with pytest.raises(PlanError, match=fact) as error:
            fine_tune(**flags | {"max_steps": 1} | changes(tmp_path))
        assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora", "nf4"])
def test_a_resumed_run_needs_no_adapter_and_is_bitwise_the_uninterrupted_one(first, tmp_path, kind):
    flags = first(**KINDS[kind]) | {"lr": 1e-2, "lora_rank": 6}
    fine_tune(**flags | {"output_dir": str(tmp_path / "whole")}, max_steps=6, save_every=3)
    fine_tune(**flags | {"output_dir": str(tmp_path / "cut")}, max_steps=6, save_every=3)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-6")
    shutil.rmtree(tmp_path / "first")
    fine_tune(output_dir=str(tmp_path / "cut"), resume="auto")
    one, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("whole", "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    losses = [[e["loss"] for e in read_events(tmp_path / n, "step")] for n in ("whole", "cut")]
    assert losses[0] == losses[1] and len(losses[0]) == 6
