"""--new_tokens and --modules_to_save: what PEFT has with resize_token_embeddings and modules_to_save, file for file."""

import argparse
import codecs
import json

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import export
import train
from finetune.config import TrainConfig
from finetune.estimate.memory import base_bytes, trainable_weights
from finetune.estimate.model_cost import ModelCost
from finetune.estimate.model_shape import planned_shape
from finetune.model_files.files import find_model, with_new_tokens
from finetune.model_files.vocabulary import words_of
from finetune.open_checkpoint import open_engine
from finetune.parts.parts import Parts
from finetune.torch_engine.lora.adapters import attach_adapter
from finetune.torch_engine.weights.load import load_trained
from finetune.torch_engine.weights.stream import empty_model, load_weights
from tests.support import tiny
from tests.support.cells import slow
from tests.support.commands import refused
from tests.support.runs import PLAIN, losses
from tests.support.tiny import train_tokenizer
from train import fine_tune

WORDS = ["<|tool|>", "<|call|>", "zylophor"]
TEXT = "What is 3 plus 3? <|tool|><|call|>It is zylophor"
GROWN = {"new_tokens": ",".join(WORDS), "modules_to_save": "norm"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """{architecture: folder}: head and embeddings apart, or tied."""
    found = {}
    for name in ("llama", "llama_tied"):
        folder = tmp_path_factory.mktemp("bases") / name
        tokenizer = train_tokenizer(folder, bos=False)
        tiny.build(name, vocab_size=len(tokenizer), pad_token_id=None).save_pretrained(folder)
        found[name] = folder
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    found = [{"prompt": f"What is {i}? <|tool|>", "completion": f"<|call|>{2 * i} zylophor"} for i in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(file)


@pytest.fixture
def trained(bases, rows, tmp_path):
    """Trains with new tokens into tmp_path/NAME; the folder."""

    def make(base="llama", name="out", **flags):
        of_new_adapters = {"lora_rank"} if "adapter" in flags or flags.get("train_type") == "full" else set()
        same = {k: v for k, v in PLAIN.items() if k not in of_new_adapters}
        same |= {"dataset": rows, "lr": 0.01, "max_steps": 3, "output_dir": str(tmp_path / name)}
        same |= {} if "adapter" in flags else {"model_name": str(bases[base])} | GROWN
        fine_tune(**same | flags)
        return tmp_path / name

    return make


def of_peft(base, folder):
    """The adapter on its base as PEFT's documentation opens one with more tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    return peft.PeftModel.from_pretrained(model, folder).eval(), tokenizer


@torch.no_grad()
def logits(model, tokenizer):
    return model(input_ids=torch.tensor([tokenizer(TEXT).input_ids])).logits


def opened(folder):
    how = dict(checkpoint=str(folder), device="cpu", precision="fp32", n_bits=None, world_size=1, quiet=True)
    return open_engine(argparse.Namespace(gather_weights="auto", **how))[0].model


@pytest.mark.parametrize("base", [*slow("llama"), "llama_tied"])
def test_peft_and_the_merged_folder_have_our_logits(bases, trained, base, tmp_path):
    out = trained(base)
    theirs, tokenizer = of_peft(bases[base], out)
    assert [len(tokenizer.encode(word, add_special_tokens=False)) for word in WORDS] == [1, 1, 1]
    assert tokenizer.decode(tokenizer(TEXT).input_ids, skip_special_tokens=True) == TEXT
    expected, model = logits(theirs, tokenizer), opened(out)
    # fp32 sums in another order.
    assert torch.allclose(logits(model, tokenizer), expected, atol=1e-5)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (base == "llama_tied")
    saved = load_file(out / "adapter_model.safetensors")
    assert json.loads((out / "adapter_config.json").read_text())["modules_to_save"][0] == "norm"
    same = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    assert saved.keys() == same.keys() and all(torch.equal(saved[name], tensor) for name, tensor in same.items())
    argv = ["--checkpoint", str(out), "--to", "hf", "--output_dir", str(tmp_path / "merged")]
    assert export.main(argv) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert torch.allclose(logits(merged, AutoTokenizer.from_pretrained(tmp_path / "merged")), expected, atol=1e-5)
    assert merged.config.vocab_size == len(tokenizer)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == (base == "llama_tied")


def test_what_peft_saves_of_resized_embeddings_opens(bases, trained, tmp_path):
    """PEFT saves such modules under three names each."""
    theirs, tokenizer = of_peft(bases["llama_tied"], trained("llama_tied"))
    theirs.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    names = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert "base_model.model.model.embed_tokens.original_module.weight" in names
    # fp32 sums in another order.
    assert torch.allclose(logits(opened(tmp_path / "again"), tokenizer), logits(theirs, tokenizer), atol=1e-5)
    on = trained("llama_tied", "on", adapter=str(tmp_path / "again"), lr=1e-30, max_steps=1)
    assert torch.allclose(logits(opened(on), tokenizer), logits(theirs, tokenizer), atol=1e-5)


def test_a_step_is_the_one_that_peft_s_gradients_give(bases, rows, trained):
    """One SGD step of a continued adapter against autograd through PEFT's copies."""
    first = trained(lr=1e-30, max_steps=1)
    lr, how = 0.5, dict(adapter=str(first), optimizer="sgd", apply_gradient_clipping=False, lr_scheduler="constant")
    second = trained(name="second", lr=lr, max_steps=1, batch_size=24, **how)
    model, tokenizer = of_peft(bases["llama"], first)
    nll, count = 0.0, 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "modules_to_save" in name)
    for row in map(json.loads, open(rows)):
        prompt, answer = (tokenizer(row[k], add_special_tokens=False).input_ids for k in ("prompt", "completion"))
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        targets = ids[0, len(prompt) :]
        nll = nll + torch.nn.functional.cross_entropy(
            model(input_ids=ids).logits[0, len(prompt) - 1 : -1], targets, reduction="sum"
        )
        count += len(targets)
    (nll / count).backward()
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    names = {"embed_tokens.modules_to_save.default.weight", "lm_head.modules_to_save.default.weight"}
    names |= {"norm.modules_to_save.default.weight"}
    found = 0
    for name, parameter in model.named_parameters():
        if any(name.endswith(end) for end in names):
            key = name.replace("modules_to_save.default.", "")
            step = (before[key] - after[key]) / lr
            # The difference of two fp32 weights, divided by lr.
            assert torch.allclose(step, parameter.grad, atol=2e-6), name
            assert parameter.grad.abs().max() > 1e-3
            found += 1
    assert found == 7  # embeddings, head, five norms: names that end in norm, as PEFT matches them


def test_new_rows_are_the_mean_of_the_others_and_spare_rows_come_first(bases, tmp_path):
    def loaded(base, words):
        files = with_new_tokens(find_model(str(base)), words)
        model = empty_model(files.folder, torch.float32, files.vocabulary)
        load_weights(model, files.folder, torch.float32, torch.device("cpu"), {})
        return model

    model = loaded(bases["llama"], "one,two")
    before = AutoModelForCausalLM.from_pretrained(bases["llama"], dtype=torch.float32)
    for grown, end in (
        (model.model.embed_tokens.weight, before.model.embed_tokens.weight),
        (model.lm_head.weight, before.lm_head.weight),
    ):
        assert torch.equal(grown[:-2], end) and torch.allclose(grown[-2:], end.mean(0).expand(2, -1), atol=1e-7)
    tokens = len(AutoTokenizer.from_pretrained(bases["llama"]))
    folder = tmp_path / "spare"
    train_tokenizer(folder, bos=False)
    wide = tiny.build("llama", vocab_size=tokens + 3, pad_token_id=None)
    wide.save_pretrained(folder)
    model = loaded(folder, "one,two")
    grown, end = model.lm_head.weight, wide.lm_head.weight
    assert grown.shape == end.shape and torch.equal(grown[:tokens], end[:tokens]) and torch.equal(grown[-1], end[-1])
    assert torch.allclose(grown[tokens : tokens + 2], end[:tokens].mean(0).expand(2, -1), atol=1e-7)


@pytest.mark.parametrize(
    ("init", "train_type"), [("loftq", "qlora"), *slow(("default", "lora"), ("pissa", "lora"), ("olora", "lora"))]
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(trained, tmp_path, init, train_type):
    how = dict(base="llama_tied", lora_dropout=0.1, lr_scheduler="constant", warmup_steps=0)
    how |= dict(init_lora_weights=init, train_type=train_type)
    whole = trained(name="whole", max_steps=4, **how)
    trained(name="part", max_steps=2, **how)
    part = trained(name="part", max_steps=4, resume="auto", **how)
    for name in ("adapter_model.safetensors", "tokenizer.json"):
        assert (whole / name).read_bytes() == (part / name).read_bytes()
    assert losses(whole) == losses(part)


def test_a_continued_adapter_keeps_its_tokens_and_may_get_more(trained, tmp_path):
    first = trained("llama_tied")
    second = trained(name="second", adapter=str(first), new_tokens="<|end|>", max_steps=1, lr=1e-30)
    before, after = (load_file(f / "adapter_model.safetensors") for f in (first, second))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name][: len(t)], t) for name, t in before.items())
    tokenizer = AutoTokenizer.from_pretrained(second)
    assert (
        len(tokenizer) == len(AutoTokenizer.from_pretrained(first)) + 1 == len(after["base_model.model.lm_head.weight"])
    )
    third = trained(name="second", adapter=str(first), new_tokens="<|end|>", max_steps=2, lr=1e-30, resume="auto")
    assert len(losses(third)) == 2


def test_a_merged_adapter_s_tokens_are_the_new_base_s_own(trained):
    first = trained("llama_tied")
    how = dict(adapter=str(first), adapter_merge=True, new_tokens="<|end|>,0", lora_rank=4)
    second = trained(name="second", **how)
    tokenizer = AutoTokenizer.from_pretrained(second)
    assert tokenizer.encode(WORDS[0] + "<|end|>", add_special_tokens=False) == [len(tokenizer) - 4, len(tokenizer) - 1]
    model = opened(second)
    assert model.lm_head.weight is model.model.embed_tokens.weight and len(model.lm_head.weight) == len(tokenizer)


def test_an_adapter_of_peft_whose_tied_ends_were_trained_apart_opens(bases, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(bases["llama_tied"], dtype=torch.float32)
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.02 * torch.randn_like(parameter) if parameter.requires_grad else 0
    theirs.save_pretrained(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(bases["llama_tied"])
    expected = logits(theirs.eval(), tokenizer)
    ours = AutoModelForCausalLM.from_pretrained(bases["llama_tied"], dtype=torch.float32).requires_grad_(False)
    attach_adapter(ours, tmp_path / "adapter")
    assert torch.allclose(logits(ours, tokenizer), expected, atol=1e-5) and not ours.config.tie_word_embeddings


@pytest.mark.parametrize("base", [*slow("llama"), "llama_tied"])
def test_memory_counts_what_trains_in_full_to_the_weight(bases, trained, base):
    saved = load_file(trained(base, max_steps=1) / "adapter_model.safetensors")
    twice = saved["base_model.model.lm_head.weight"].numel() if base == "llama_tied" else 0
    shape = planned_shape(with_new_tokens(find_model(str(bases[base])), GROWN["new_tokens"]), None).known
    m = ModelCost(shape, Parts(TrainConfig(train_type="lora", lora_rank=4, precision="fp32", **GROWN)))
    assert trainable_weights(m) == sum(t.numel() for t in saved.values()) - twice
    in_full = sum(t.numel() for name, t in saved.items() if ".lora_" not in name) - twice
    assert base_bytes(m) == 4 * (shape.num_weights - in_full) and m.learning_layers == shape.num_layers


@pytest.mark.slow
@pytest.mark.parametrize("train_type", ["lora", "qlora", "full"])
def test_two_ranks_of_fsdp2_train_as_one_process(trained, train_type):
    how = {"train_type": train_type, "base": "llama_tied"} | ({"modules_to_save": None} if train_type == "full" else {})
    one, two = (trained(name=f"r{n}", world_size=n, batch_size=4 // n, **how) for n in (1, 2))
    assert np.allclose(losses(one), losses(two), rtol=1e-6)  # fp32 sums over ranks in another order
    name = "model.safetensors" if train_type == "full" else "adapter_model.safetensors"
    before, after = (load_file(folder / name) for folder in (one, two))
    # Adam divides by the root of its moment: near a zero gradient, a difference of 1e-9 moves a weight by more.
    assert before.keys() == after.keys() and all((before[n] - after[n]).abs().max() < 1e-4 for n in before)


def test_in_16_bits_the_opened_model_is_the_trained_one(bases, trained):
    """What trains in full stays in fp32 when it is opened, as in training; hidden states stay in 16 bits."""
    out, settings = trained(precision="bf16"), TrainConfig(train_type="lora", precision="bf16", **GROWN)
    model = load_trained(out, find_model(str(bases["llama"])), torch.device("cpu"), Parts(settings))
    assert model.model.embed_tokens.weight.dtype == model.model.norm.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.base.weight.dtype == torch.bfloat16
    assert model.model.embed_tokens(torch.tensor([3])).dtype == torch.bfloat16


def test_what_cannot_be_done_is_one_line(bases, rows, tmp_path):
    flags = PLAIN | {"model_name": str(bases["llama"]), "dataset": rows, "output_dir": str(tmp_path / "out")}
    said = refused(flags, modules_to_save="embeddings")
    assert "--modules_to_save embeddings: no module of this model is named so. Choose from" in said
    assert "names no token" in refused(flags, new_tokens=" , ")
    assert "--new_tokens data/words.txt: no such file." in refused(flags, new_tokens="data/words.txt")
    (tmp_path / "words.txt").write_bytes(codecs.BOM_UTF8 + b"fine\r\ntoo\r\n")  # as an editor of Windows saves it
    assert words_of(str(tmp_path / "words.txt")) == "fine,too"
    (tmp_path / "words.txt").write_text("fine\na,b\n")
    assert "'a,b': has a comma" in refused(flags, new_tokens=str(tmp_path / "words.txt"))
    assert "which modules that train in full replace" in refused(flags, modules_to_save="norm", preference="dpo")
    assert "which FSDP and DDP alone share out" in refused(flags, new_tokens="<|a|>", tp_degree=2, world_size=2)
    assert "full fine-tuning has no adapter" in refused(flags, modules_to_save="norm", train_type="full")


def test_words_that_the_tokenizer_has_are_counted_apart(bases, rows, tmp_path, capsys):
    for words, added, known in (("</s>", None, "1 of 1"), ("</s>,<|a|>", "1 new token: ", "1 of 2")):
        argv = f"--model_name {bases['llama']} --dataset {rows} --output_dir {tmp_path / 'out'} --dry_run".split()
        assert train.main([*argv, "--new_tokens", words]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"the tokenizer has {known} already" in said and (added is None or added in said)
        assert ("train in full beside the adapter all the same" in said) is (added is None)
