"""Runs that continue from a trained adapter: at step 0 they compute what it computes, and go on as PEFT does."""

import argparse
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
from finetune.open_checkpoint import open_engine
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.lora.adapters import attach_adapter
from finetune.torch_engine.weights.stream import load_dense
from tests.support import tiny
from tests.support.adapters import IDS, with_patterns
from tests.support.cells import but_slow
from tests.support.runs import PLAIN, read_events
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


@pytest.mark.parametrize("kind", but_slow(KINDS, ["dora"]))
def test_without_learning_the_adapter_is_bitwise_what_it_was(first, tmp_path, kind):
    """The smallest rate leaves fp32 weights as they are; the run takes base, rank, scale and layers by itself."""
    fine_tune(**first(**KINDS[kind]), max_steps=1, lr=1e-30)
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    one, two = (json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("first", "second"))
    assert all(one[k] == two[k] for k in ("r", "lora_alpha", "use_dora", "use_rslora", "base_model_name_or_path"))


@pytest.mark.parametrize("leaf", ["lora_A", "lora_B"])
def test_a_matrix_that_the_base_has_no_place_for_is_refused_in_a_dry_run_too(first, tmp_path, leaf):
    flags = first(max_steps=1)
    file = tmp_path / "first" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = f"base_model.model.model.layers.0.mlp.up_proj.{leaf}.weight"
    tensors[name] = (tensors[name][:-1] if leaf == "lora_B" else tensors[name][:, :-1]).contiguous()
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "first" / "manifest.json").unlink()
    for dry_run in (False, True):
        with pytest.raises(PlanError, match=rf"{name} is .*, this base needs .* Give the base it was trained on"):
            fine_tune(**flags, dry_run=dry_run)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused_in_a_dry_run_too(first, tmp_path, number):
    flags = first(max_steps=1)
    file = tmp_path / "first" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name][0, 0] = number
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "first" / "manifest.json").unlink()
    for dry_run in (False, True):
        with pytest.raises(PlanError, match=f"{name} has numbers that are not finite. Give a complete"):
            fine_tune(**flags, dry_run=dry_run)


@pytest.mark.parametrize("merge", but_slow(["false", "true"], ["false"]))
def test_a_plan_reads_rows_with_the_template_of_the_adapter_as_the_run_does(first, tmp_path, capsys, merge):
    """The base has none: its plan showed ChatML, and chose the context length by it."""
    rows = [{"messages": [{"role": r, "content": "Hi."} for r in ("user", "assistant")]}] * 8
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = tmp_path / "long.jinja"
    template.write_text("{% for m in messages %}" + "word " * 30 + "{{ m.role }} {{ m.content }}</s>{% endfor %}")
    flags = first(dataset=str(chats), chat_template=str(template), context_length=256)
    flags |= {"dataset": str(chats), "context_length": "auto", "max_steps": 1, "adapter_merge": merge}
    capsys.readouterr()
    fine_tune(**flags, dry_run=True)
    said = capsys.readouterr().out
    assert "word word user Hi." in said and "ChatML" not in said
    fine_tune(**flags)
    settled = json.loads((tmp_path / "second" / "run_plan.json").read_text())["settled"]
    assert "word word user Hi." in capsys.readouterr().out and settled["context_length"] >= 192


@pytest.mark.parametrize(
    "degrees", but_slow([{}, {"dp_shards": 1, "dp_degree": 2}, {"tp_degree": 2}, {"pp_degree": 2}], []), ids=str
)
def test_two_ranks_continue_it_as_one_does(first, tmp_path, degrees):
    """Continued with more rank, so that rows of a new adapter stand beside its own."""
    flags = first() | {"lora_rank": 6, "max_steps": 3}
    del flags["batch_size"]
    losses = []
    ranks = {"world_size": 2} | degrees
    for name, how, rows in (("one", {}, 4), ("two", ranks, 4 if {"tp_degree", "pp_degree"} & set(degrees) else 2)):
        fine_tune(**flags | how | {"batch_size": rows, "output_dir": str(tmp_path / name)})
        losses.append([event["loss"] for event in read_events(tmp_path / name, "step")])
    np.testing.assert_allclose(*losses, rtol=2e-6)  # sums over two ranks, in fp32


@pytest.mark.parametrize(
    "kind", ["rslora", *(pytest.param(k, marks=pytest.mark.slow) for k in ("lora", "dora", "embeddings"))]
)
@pytest.mark.parametrize("alpha", but_slow([None, 3.0], [3.0]))
def test_more_rank_and_another_alpha_leave_the_function_unchanged(first, tiny_model, tmp_path, kind, alpha):
    flags = first(**KINDS[kind]) | ({"lora_alpha": alpha} if alpha else {})
    fine_tune(**flags, lora_rank=11, max_steps=1, lr=1e-30)
    before, after = (logits_of(tiny_model, tmp_path / name) for name in ("first", "second"))
    # fp32: the same sums with zeros among them, and B scaled by one factor.
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()
    config, tensors = read_adapter(tmp_path / "second")
    assert config["r"] == 11 and any(11 in array.shape for array in tensors.values())


@pytest.mark.parametrize(("use_rslora", "rank"), but_slow([(False, None), (True, 9)], [(True, 9)]))
def test_an_adapter_with_patterns_goes_on_with_one_rank_and_computes_what_peft_computes(
    tiny_model, rows_file, tmp_path, use_rslora, rank
):
    how = dict(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 40}, use_rslora=use_rslora)
    theirs = with_patterns(tiny_model, tmp_path / "peft", **how)
    flags = {k: v for k, v in LORA.items() if k not in ("lora_rank", "train_type")} | (
        {"lora_rank": rank} if rank else {}
    )
    same = dict(dataset=str(rows_file), output_dir=str(tmp_path / "out"), max_steps=1, lr=1e-30)
    fine_tune(**flags, **same, adapter=str(tmp_path / "peft"))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (rank or 4, {}, {})
    with torch.no_grad():
        expected = theirs(input_ids=IDS).logits
    # fp32: the same sums with zeros among them, and B scaled by one factor.
    assert (logits_of(tiny_model, tmp_path / "out") - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora", "rslora", "nf4", "hqq", "mlx-affine"])
def test_ten_steps_are_those_of_peft_continued_from_the_same_adapter(first, tiny_model, tmp_path, kind):
    """PEFT on what our quantized base dequantizes to, as its own quantizers are others. All rows in each step, so that
    their order does not matter; SGD, so that the adapter after ten steps sums ten gradients. fp32: the same sums in
    another order, documents packed here and alone there, which later steps enlarge in the norm of gradients.
    """
    texts = ["a lamp for a desk", "candles are wax", "what is two plus two", "one more lamp"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = first(**KINDS[kind], lr=0.01) | {"dataset": str(tmp_path / "texts.jsonl"), "lr": 1e-3, "max_steps": 10}
    plain = dict(lr_scheduler="constant", warmup_steps=0, optimizer="sgd", apply_gradient_clipping=False)
    fine_tune(**flags | plain)
    base = dequantized_base(tiny_model, tmp_path / "first")
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


def test_a_parameter_of_experts_goes_on_beside_modules_that_are_excluded(rows_file, tmp_path):
    tokenizer = tiny.train_tokenizer(tmp_path / "moe", bos=False)
    base = tiny.build("mixtral", vocab_size=len(tokenizer))
    base.save_pretrained(tmp_path / "moe")
    named = dict(target_modules=["q_proj", "k_proj"], exclude_modules=["k_proj"], target_parameters=["down_proj"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    peft.get_peft_model(model, peft.LoraConfig(r=4, **named)).save_pretrained(tmp_path / "first")
    flags = LORA | dict(dataset=str(rows_file), adapter=str(tmp_path / "first"), output_dir=str(tmp_path / "second"))
    fine_tune(**flags, max_steps=1, lr=1e-30)
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("second", "first"))
    assert ours.keys() == theirs.keys()
    before, after = (logits_of(tmp_path / "moe", tmp_path / name) for name in ("first", "second"))
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()


def test_linears_that_are_named_as_parameters_go_on(first, make_tokenizer, tmp_path):
    """PEFT takes the linears of shared experts for experts: an adapter names their weights."""
    tokenizer = make_tokenizer(tmp_path / "moe", bos=False)
    tiny.build("qwen2_moe", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "moe")
    fine_tune(**first(model=tmp_path / "moe", lora_target_modules="up_proj"), max_steps=1, lr=1e-30)
    assert json.loads((tmp_path / "first" / "adapter_config.json").read_text())["target_parameters"]
    before, after = (logits_of(tmp_path / "moe", tmp_path / name) for name in ("first", "second"))
    assert torch.equal(before, after)


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


def test_an_adapter_of_some_layers_goes_on_in_those_alone(tiny_model, rows_file, tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "first")
    flags = LORA | dict(dataset=str(rows_file), model_name=str(tiny_model), adapter=str(tmp_path / "first"))
    fine_tune(**flags, max_steps=1, output_dir=str(tmp_path / "second"))
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("second", "first"))
    assert ours.keys() == theirs.keys()


def test_an_adapter_goes_on_with_its_own_tokenizer_and_template(first, tmp_path):
    flags = first()
    (tmp_path / "first" / "manifest.json").unlink()
    own = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    config = json.loads((tmp_path / "first" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "first" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "first" / "chat_template.jinja").write_text(own)
    fine_tune(**flags, max_steps=2, save_every=1)
    template = tmp_path / "second" / "chat_template.jinja"
    assert template.read_text() == own
    shutil.rmtree(tmp_path / "first")
    fine_tune(resume=str(tmp_path / "second"), max_steps=3)
    assert template.read_text() == own and len(read_events(tmp_path / "second", "step")) == 3


def dequantized_base(model, folder):
    """transformers' model with the weights that an adapter's base has as it was trained."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    opened, *_ = open_engine(argparse.Namespace(checkpoint=str(folder), device="cpu", precision="auto", n_bits=None))
    for name, module in opened.model.named_modules():
        stored = getattr(module, "base", None)
        if isinstance(stored, QuantizedLinear):
            base.get_submodule(name).weight.data = stored.weight_of(stored.stored(), torch.float32).clone()
    return base


@pytest.mark.promise("AT_05")
@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
def test_a_merged_adapter_is_the_base_of_a_new_one_as_if_peft_had_merged_it(first, tiny_model, tmp_path, kind):
    flags = first(**KINDS[kind]) | {"lr": 1e-2, "max_steps": 4, "lora_rank": 3}
    fine_tune(**flags, adapter_merge=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    peft.PeftModel.from_pretrained(base, str(tmp_path / "first")).merge_and_unload().save_pretrained(
        tmp_path / "theirs"
    )
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "theirs")
    del flags["adapter"]
    fine_tune(**flags | {"model_name": str(tmp_path / "theirs"), "output_dir": str(tmp_path / "third")})
    losses = [[e["loss"] for e in read_events(tmp_path / n, "step")] for n in ("second", "third")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # fp32: W + s B A in two orders
    config = json.loads((tmp_path / "second" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "second" / "merged_base") and config["r"] == 3
    again = transformers.AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"], dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(again, str(tmp_path / "second")).eval()
    with torch.no_grad():
        found = theirs(input_ids=IDS).logits
    expected = logits_of(tmp_path / "second" / "merged_base", tmp_path / "second")
    # fp32 of weights trained at 1e-2: the two orders of W + s B A differ by up to 1.5e-5 of the largest, by processor.
    assert (found - expected).abs().max() <= 3e-5 * expected.abs().max()


@pytest.mark.promise("AT_05")
def test_a_merged_base_is_made_once_and_another_adapter_s_is_refused(first, tmp_path, capsys):
    flags = first() | {"max_steps": 4, "save_every": 2, "lora_rank": 3, "adapter_merge": True}
    fine_tune(**flags)
    capsys.readouterr()
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step-4")
    whole = load_file(tmp_path / "second" / "adapter_model.safetensors")
    fine_tune(**flags, resume="auto")
    assert "merged base" not in capsys.readouterr().out  # a resumed run has it
    resumed = load_file(tmp_path / "second" / "adapter_model.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    fine_tune(**flags, overwrite=True)
    assert f"merged base: {tmp_path / 'second' / 'merged_base'}, from before" in capsys.readouterr().out
    config = tmp_path / "first" / "adapter_config.json"
    written = config.read_text()
    config.write_text(json.dumps(json.loads(written) | {"lora_alpha": 64}))
    (tmp_path / "first" / "manifest.json").unlink()
    with pytest.raises(PlanError, match="merged_base holds something else"):
        fine_tune(**flags, overwrite=True)
    config.write_text(written)
    shutil.copytree(tmp_path / "second", tmp_path / "other")
    with pytest.raises(PlanError, match="merged_base holds something else than this adapter, merged. Remove it"):
        fine_tune(**flags | {"adapter": str(tmp_path / "other"), "model_name": None}, overwrite=True)
    with pytest.raises(PlanError, match="--adapter_merge true: there is no adapter to merge. Add --adapter"):
        fine_tune(**{k: v for k, v in flags.items() if k != "adapter"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "rslora", "nf4"])
def test_dpo_from_an_adapter_is_that_of_trl_with_that_adapter_as_the_reference(first, tiny_model, tmp_path, kind):
    """All pairs in each step, SGD: TRL's DPOTrainer on PEFT's model, whose own copy of the adapter is its reference."""
    trl = pytest.importorskip("trl")
    import datasets

    flags = first(**KINDS[kind], lr=0.01) | {"dataset": pairs_file(tmp_path), "preference": "dpo", "batch_size": 8}
    plain = dict(lr_scheduler="constant", warmup_steps=0, optimizer="sgd", apply_gradient_clipping=False, lr=1e-2)
    fine_tune(**flags | plain, max_steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = dequantized_base(tiny_model, tmp_path / "first")
        theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "first"), is_trainable=True)
    rows = [json.loads(line) for line in open(flags["dataset"], encoding="utf-8")]
    args = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=8,
        max_steps=10,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="sgd",
        optim_args="momentum=0.9",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=0.1,
        save_strategy="no",
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    trainer = trl.DPOTrainer(
        theirs, None, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    assert "ref" in trainer.model.peft_config
    trainer.train()
    wanted = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = [event["loss"] for event in read_events(tmp_path / "second", "step")]
    assert len(found) == 10 and found[9] < found[0]
    assert found == pytest.approx(wanted, abs=5e-5)  # TRL logs four digits
    named = {
        n.replace(".default", "").replace("_vector.weight", "_vector"): p for n, p in trainer.model.named_parameters()
    }
    for name, tensor in load_file(tmp_path / "second" / "adapter_model.safetensors").items():
        assert (named[name] - tensor).abs().max() <= 5e-5 * tensor.abs().max(), name


def pairs_file(folder):
    # The space before an answer is the answer's, so that every tokenizer's user agrees where the prompt ends.
    rows = [{"prompt": f"What is {i}?", "chosen": f" It is {i}.", "rejected": " I do not know."} for i in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "pairs.jsonl")


def test_dpo_compares_with_the_adapter_that_it_continues(first, tmp_path):
    """Before the first change both are the same model: the loss is ln 2, and no answer has a reward."""
    flags = first() | {"dataset": pairs_file(tmp_path), "preference": "dpo", "lr": 1e-2, "batch_size": 8}
    fine_tune(**flags, max_steps=2)
    steps = read_events(tmp_path / "second", "step")
    assert abs(steps[0]["loss"] - math.log(2)) < 1e-6 and abs(steps[0]["rewards/chosen"]) < 1e-5
    assert steps[1]["loss"] < math.log(2) - 1e-4
    more = dict(output_dir=str(tmp_path / "second"), resume="auto")
    before = {file: file.read_bytes() for file in (tmp_path / "second").glob("*.json*")}
    with pytest.raises(PlanError, match="is of other rows or settings. Give the --dataset and --validation_dataset of"):
        fine_tune(**more, max_steps=3, validation_dataset=flags["dataset"])
    assert all(file.read_bytes() == content for file, content in before.items())  # and the first command goes on
    fine_tune(**more, max_steps=3)
    (tmp_path / "second" / "reference_log_probs.json").unlink()
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step-3", ignore_errors=True)
    with pytest.raises(PlanError, match="reference_log_probs.json is missing or damaged"):
        fine_tune(**more, max_steps=4)


def test_a_reference_that_was_computed_of_another_adapter_in_this_place_is_computed_again(first, tmp_path):
    flags = first() | {"dataset": pairs_file(tmp_path), "preference": "dpo", "lr": 1e-2, "max_steps": 1}

    def cut(event):
        raise KeyError("before the first checkpoint")

    with pytest.raises(KeyError):
        fine_tune(**flags, on_step=cut)
    assert (tmp_path / "second" / "reference_log_probs.json").is_file()
    file = tmp_path / "first" / "adapter_model.safetensors"
    save_file({name: 3 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    (tmp_path / "first" / "manifest.json").unlink()
    fine_tune(**flags, resume="auto")
    (step,) = read_events(tmp_path / "second", "step")
    assert abs(step["loss"] - math.log(2)) < 1e-6


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


@pytest.mark.parametrize("alpha", but_slow([0, -3.0], [0]))
def test_an_adapter_whose_scale_is_not_above_zero_is_refused(first, tmp_path, alpha):
    flags = first()
    config = json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    (tmp_path / "first" / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}))
    (tmp_path / "first" / "manifest.json").unlink()
    with pytest.raises(PlanError, match=f"lora_alpha is {alpha}, must be above 0 to train on"):
        fine_tune(**flags | {"max_steps": 1})


def test_an_adapter_of_dora_without_its_magnitudes_is_refused(first, tmp_path):
    flags = first()
    config = json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    (tmp_path / "first" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    (tmp_path / "first" / "manifest.json").unlink()
    with pytest.raises(PlanError, match="use_dora, and .*lora_magnitude_vector is not in adapter_model.safetensors"):
        fine_tune(**flags | {"max_steps": 1})


def test_an_adapter_without_the_module_that_it_names_is_refused(first, tmp_path):
    flags = first(modules_to_save="lm_head")
    file = tmp_path / "first" / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if "lm_head" not in name}, file)
    (tmp_path / "first" / "manifest.json").unlink()
    with pytest.raises(PlanError, match="modules_to_save is lm_head, and it holds no .*lm_head.weight"):
        fine_tune(**flags, max_steps=1)


def test_modules_of_the_size_of_a_vocabulary_go_on(first, tmp_path):
    tiny.train_tokenizer(tmp_path / "base", bos=False)
    tiny.build("llama_tied", vocab_size=512, intermediate_size=1024).save_pretrained(tmp_path / "base")
    fine_tune(**first(model=tmp_path / "base", modules_to_save="mlp"), max_steps=1, lr=1e-30)
    before, after = (logits_of(tmp_path / "base", tmp_path / name) for name in ("first", "second"))
    assert torch.equal(before, after)


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_ends_that_peft_trained_apart_are_merged_and_not_continued(modules, rows_file, tmp_path):
    """The base has one weight for both, and so has what would go on from it."""
    tiny.train_tokenizer(tmp_path / "base", bos=False)
    tiny.build("llama_tied", vocab_size=512).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=modules, task_type="CAUSAL_LM")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        expected = theirs(input_ids=IDS).logits
    theirs.save_pretrained(tmp_path / "first")
    flags = LORA | dict(dataset=str(rows_file), adapter=str(tmp_path / "first"), output_dir=str(tmp_path / "second"))
    with pytest.raises(PlanError, match="trained apart, and this base has one weight for embeddings and head"):
        fine_tune(**flags, max_steps=1, dry_run=True)
    fine_tune(**flags, adapter_merge=True, max_steps=1, lr=1e-30)
    merged = load_dense(tmp_path / "second" / "merged_base", torch.float32).eval()
    with torch.no_grad():  # fp32 sums in another order
        torch.testing.assert_close(merged(input_ids=IDS).logits, expected, atol=1e-5, rtol=1e-4)


def test_a_run_that_is_killed_before_its_first_checkpoint_starts_from_the_adapter_again(first, tmp_path):
    """Only run_plan.json is there, which names the adapter: the run to resume has nothing else of it."""
    flags = first() | {"max_steps": 4, "lr": 1e-2}
    fine_tune(**flags | {"output_dir": str(tmp_path / "whole")})
    fine_tune(**flags | {"output_dir": str(tmp_path / "cut")})
    shutil.rmtree(tmp_path / "cut" / "checkpoints")
    for name in ("train_state.json", "adapter_model.safetensors", "manifest.json"):
        (tmp_path / "cut" / name).unlink()
    fine_tune(**flags | {"output_dir": str(tmp_path / "cut")}, resume="auto")
    losses = [[e["loss"] for e in read_events(tmp_path / n, "step")] for n in ("whole", "cut")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    shutil.rmtree(tmp_path / "first")
    shutil.rmtree(tmp_path / "cut" / "checkpoints")
    (tmp_path / "cut" / "train_state.json").unlink()
    with pytest.raises(PlanError, match="--adapter .*first: is not a folder"):
        fine_tune(**flags | {"output_dir": str(tmp_path / "cut")}, resume="auto")


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


def test_a_run_that_was_killed_before_its_tokenizer_was_written_reads_the_adapters(first, chat_model, tmp_path):
    """So does a checkpoint that was copied out of its run."""
    rows = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo."}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}")
    flags = first(chat_model, dataset=str(rows), chat_template=str(template)) | {"dataset": str(rows), "max_steps": 2}
    fine_tune(**flags, save_every=1)
    second = tmp_path / "second"
    losses = [event["loss"] for event in read_events(second, "step")]
    own = (second / "chat_template.jinja").read_text()
    assert own.startswith("{% for m in messages %}[")
    shutil.copytree(second / "checkpoints" / "step-1", tmp_path / "copied")
    for name in ("checkpoints", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "train_state.json"):
        path = second / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    fine_tune(**flags, resume="auto")
    assert [event["loss"] for event in read_events(second, "step")] == losses
    assert (second / "chat_template.jinja").read_text() == own
    fine_tune(resume=str(tmp_path / "copied"), output_dir=str(tmp_path / "third"))
    assert (tmp_path / "third" / "chat_template.jinja").read_text() == own
