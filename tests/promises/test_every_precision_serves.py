"""Every precision that trains is resumed, generated with, scored and exported: embeddings, experts, new layers."""

import itertools
import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file

import export
import generate
import score
from tests.support import tiny
from tests.support.cells import but_slow
from tests.support.tiny import train_tokenizer
from train import fine_tune

PRECISIONS = ("fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast", "bf16_buffers_autocast")
TARGETS = {
    "embeddings and head": dict(train_type="lora", lora_target_modules="embed_tokens,q_proj,down_proj,lm_head"),
    "quantized, embeddings": dict(train_type="qlora", lora_target_modules="embed_tokens,v_proj"),
    "experts": dict(train_type="lora", lora_target_modules="all"),
    "new layers": dict(train_type="lora"),
}
# The default suite has three targets, in bf16 or fp16; make test-all has all in each.
CELLS = list(itertools.product(TARGETS, PRECISIONS))
QUICK = [("embeddings and head", "fp16"), ("experts", "bf16"), ("new layers", "bf16")]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A folder with a tiny mixture of experts and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "experts"
    tokenizer = train_tokenizer(folder, bos=False)
    tiny.build("mixtral", vocab_size=len(tokenizer), eos_token_id=2, pad_token_id=None).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("target", "precision"), but_slow(CELLS, QUICK))
def test_what_a_precision_saves_every_script_reads(
    target, precision, tiny_model, mixture, expanded_model, rows_file, tmp_path, capsys
):
    model = {"experts": mixture, "new layers": expanded_model}.get(target, tiny_model)
    named = {"llama_pro_path": str(model)} if target == "new layers" else {"model_name": str(model)}
    out, size = str(tmp_path / "out"), {} if target == "new layers" else {"lora_rank": 4}
    run = dict(dataset=str(rows_file), backend="cpu", batch_size=4, context_length=64, lr=5e-3, save_every=1)
    options = {**TARGETS[target], **named, **run, **size}
    assert fine_tune(**options, precision=precision, max_steps=2, output_dir=out).step == 2
    assert fine_tune(resume=out, max_steps=3).step == 3

    used = precision.partition("_")[0] if "autocast" not in precision else "auto"
    serving = ["--checkpoint", out, "--device", "cpu", "--precision", used]
    asked = ["--raw", "--prompt", "What is 3 plus 3? ", "--max_new_tokens", "3"]
    assert generate.main([*serving, *asked]) == 0
    assert score.main([*serving, "--dataset", str(rows_file)]) == 0
    merged = tmp_path / "merged"
    assert export.main(["--checkpoint", out, "--output_dir", str(merged), "--dtype", "fp32"]) == 0
    capsys.readouterr()
    weights = load_file(merged / "model.safetensors")
    assert all(w.isfinite().all() for w in weights.values())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert loaded(input_ids=torch.arange(3, 9)[None]).logits.isfinite().all()
    events = [json.loads(line) for line in open(os.path.join(out, "metrics.jsonl"), encoding="utf-8")]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 3 and losses[-1] < losses[0]
