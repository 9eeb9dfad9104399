"""README's equalities at the sizes of real models: vocabularies of 128,256 and 262,144, rows of thousands of tokens.

The layers are narrow; what grows with these sizes is the sums over the vocabulary, the positions and the attention.
"""

import json

import numpy as np
import pytest
import torch
import transformers

from finetune.data.collate import microbatches
from finetune.model_files.demo_model import DEMO_MODEL
from finetune.model_files.files import find_model
from tests.support import architectures, tiny
from tests.support.commands import ROOT, command, finish
from tests.support.mlx_engines import mlx_engine, save, torch_engine_of
from tests.support.rows import jsonl
from tests.support.runs import WHOLE_STATE, assert_same_run, copy_up_to, losses, same_files, steps
from train import fine_tune

pytestmark = pytest.mark.slow
VOCABULARIES = (128_256, 262_144)
LENGTHS = (700, 3, 2048, 300, 61)
LONG = dict(max_position_embeddings=8192)


@pytest.fixture(scope="module", params=VOCABULARIES)
def folder(request, tmp_path_factory):
    """A tiny Llama with a real vocabulary. Its logits spread as a trained model's do."""
    return save(tmp_path_factory.mktemp("wide"), vocab_size=request.param, initializer_range=0.3, **LONG)


def rows_of(folder, lengths=LENGTHS):
    vocab = transformers.AutoConfig.from_pretrained(folder).vocab_size
    return tiny.dataset(lengths, vocab)


def exact_nll(folder, rows) -> tuple[float, int]:
    """(sum of the targets' negative log-likelihoods in fp64, their number), of each document alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total, number = 0.0, 0
    with torch.no_grad():
        for start, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
            ids = torch.from_numpy(rows.tokens[start:end].astype("int64"))
            wanted = torch.from_numpy(rows.is_target[start:end])[1:]
            hidden = model.model(input_ids=ids[None]).last_hidden_state[0, :-1][wanted]
            for part, labels in zip(hidden.split(256), ids[1:][wanted].split(256), strict=True):
                total += torch.nn.functional.cross_entropy(model.lm_head(part), labels, reduction="sum").item()
            number += int(wanted.sum())
    return total, number


@pytest.mark.parametrize("engine_of", [torch_engine_of, mlx_engine])
def test_an_engine_s_loss_is_that_of_fp64(folder, engine_of):
    """2e-6 of the mean loss: one rounding of fp32 per product of 64 columns, and sums of a quarter of a million."""
    rows, engine = rows_of(folder, (700, 3, 1100, 61)), engine_of(folder, microbatch_tokens=2048)
    found = engine.evaluate(microbatches(rows, range(len(rows)), engine.layout, 2, 2048, 0))
    total, number = exact_nll(folder, rows)
    assert found.num_targets == number
    assert found.nll == pytest.approx(total, rel=2e-6)


def test_the_two_engines_take_the_same_steps(folder):
    mlx, torch_engine = (of(folder, microbatch_tokens=2048) for of in (mlx_engine, torch_engine_of))
    rows = rows_of(folder)
    for _ in range(3):
        mine, theirs = (
            e.train_step(microbatches(rows, range(len(rows)), e.layout, 2, 4096, 0), 1e-3) for e in (mlx, torch_engine)
        )
        assert mine.nll == pytest.approx(theirs.nll, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)  # products of other kernels in fp32


@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_loss_and_gradients_are_those_of_transformers_and_peft(kind, vocab, tmp_path):
    """1e-5, as for tiny vocabularies (test_every_architecture.py)."""
    found = architectures.compare(
        "llama", kind, tmp_path / "model", lengths=(1100, 3, 300), vocab=vocab, vocab_size=vocab, **LONG
    )
    assert found.loss <= 1e-5 and found.gradient <= 1e-5, found


def test_packed_documents_give_the_gradients_of_padded_ones(folder):
    rows, found = rows_of(folder, (1100, 3, 2048, 300)), {}
    for layout in ("padding_free", "padded"):
        engine = torch_engine_of(folder, layout, microbatch_tokens=8192)
        model = engine.forward.model
        architectures.disturb(model)
        batches = microbatches(rows, range(len(rows)), layout, 4, 8192, 0)
        targets = sum(batch.num_targets for batch in batches)
        for batch in batches:
            (engine.forward.nll(batch) / targets).backward()
        found[layout] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert found["padded"] and found["padded"].keys() == found["padding_free"].keys()
    for name, gradient in found["padded"].items():  # sums of thousands of tokens in another order
        off = (found["padding_free"][name] - gradient).abs().max() / gradient.abs().max()
        assert off <= 1e-5, (name, off)


@pytest.fixture(scope="module")
def flags(folder, tmp_path_factory):
    """Flags of six steps with rows of up to 3,000 tokens, with dropout, every step saved."""
    tiny.train_tokenizer(folder)
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": "What is it? " * int(rng.integers(1, 20)), "completion": "naïve cafés " * int(rng.integers(1, 400))}
        for _ in range(24)
    ]
    data = jsonl(tmp_path_factory.mktemp("long") / "rows.jsonl", rows)
    found = dict(model_name=folder, dataset=data, backend="cpu", train_type="lora", lora_rank=4, precision="fp32")
    return found | dict(context_length=3072, microbatch_tokens=4096, lr="1e-3", log_to="stdout", num_epochs=1)


def test_two_ranks_train_as_one_process(flags, tmp_path):
    for name, ranks in (("one", "--world_size 1 --batch_size 4"), ("two", "--world_size 2 --batch_size 2")):
        code, _, err = finish(command(flags, ranks, output_dir=tmp_path / name), timeout_s=900)
        assert code == 0, err
    assert_same_run(tmp_path / "two", tmp_path / "one")


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(flags, tmp_path):
    own = {k: str(v) if k in ("model_name", "dataset") else v for k, v in flags.items()} | {"lr": 1e-3}
    whole = tmp_path / "whole"
    fine_tune(**own, batch_size=4, lora_dropout=0.1, save_every=1, keep_last=9, output_dir=str(whole))
    part = copy_up_to(whole, 2, tmp_path / "part")
    fine_tune(resume="auto", output_dir=str(part))
    assert len(losses(whole)) == 6 and steps(part) == steps(whole)
    same_files(part / "checkpoints" / "step-6", whole / "checkpoints" / "step-6", WHOLE_STATE)


# ---- the demo's real model


@pytest.fixture(scope="module")
def demo():
    """The flags of the demo's model and rows in fp32, four steps."""
    model = find_model(DEMO_MODEL).folder
    data = ROOT / "examples" / "orders_train.jsonl"
    flags = dict(model_name=model, dataset=data, train_type="lora", precision="fp32", max_steps=4, log_to="stdout")
    return flags | dict(backend="cpu", lr="1e-3", lora_rank=16)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_the_demo_s_model_has_the_loss_and_gradients_of_transformers_and_peft(kind, demo, tmp_path):
    """In fp64. Gradients within 2e-4: of 30 layers in fp32 they are 4e-5 off, 1.7e-4 on nf4; transformers' own 2e-5."""
    (tmp_path / "model").symlink_to(demo["model_name"])
    found = architectures.compare("llama", kind, tmp_path / "model", vocab=49_152, exact=True)
    assert found.loss <= 1e-6 and found.gradient <= 2e-4 and found.generates, found


def test_two_ranks_train_the_demo_s_model_as_one_process(demo, tmp_path):
    for name, ranks in (("one", "--world_size 1 --batch_size 8"), ("two", "--world_size 2 --batch_size 4")):
        code, _, err = finish(command(demo, ranks, output_dir=tmp_path / name), timeout_s=900)
        assert code == 0, err
    assert_same_run(tmp_path / "two", tmp_path / "one")


def test_the_demo_s_model_resumes_bitwise(demo, tmp_path):
    own = {k: str(v) if k in ("model_name", "dataset") else v for k, v in demo.items()} | {"lr": 1e-3}
    whole = tmp_path / "whole"
    fine_tune(**own, batch_size=8, lora_dropout=0.1, save_every=1, keep_last=9, output_dir=str(whole))
    part = copy_up_to(whole, 2, tmp_path / "part")
    fine_tune(resume="auto", output_dir=str(part))
    assert len(losses(whole)) == 4 and steps(part) == steps(whole)
    same_files(part / "checkpoints" / "step-4", whole / "checkpoints" / "step-4", WHOLE_STATE)


def test_the_two_engines_take_the_same_steps_on_the_demo_s_model(demo, tmp_path):
    flags = {k: v for k, v in demo.items() if k not in ("backend", "max_steps")}
    code, out, err = finish(command(flags, "--parity cpu,mlx", output_dir=tmp_path / "out"), timeout_s=1800)
    assert code == 0, err
    found = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert found["largest_loss_difference"] <= 1e-5, out
