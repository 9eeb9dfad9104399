"""The output folder opens in plain PEFT and transformers."""

import json
import math

import numpy as np
import peft
import pytest
import torch
import transformers

import export
import generate
import score
from finetune.checkpoint.store import newest_checkpoint
from tests.support.adapters import KINDS
from tests.support.cells import slow
from tests.support.commands import words


@pytest.fixture(scope="module")
def tiny_model(chat_model):
    return chat_model


@pytest.mark.parametrize("kind", ["lora", *slow("dora", "rslora")])
def test_the_adapter_answers_in_plain_peft_merges_scores_and_generates(
    run, tiny_model, rows_file, tmp_path, capsys, kind
):
    run(max_steps=4, **KINDS[kind])
    folder, merged = tmp_path / "out", tmp_path / "merged"
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    assert export.main(["--checkpoint", str(folder), "--output_dir", str(merged)]) == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        # fp32 weights, merged in fp32: one rounding per weight.
        torch.testing.assert_close(plain(input_ids=ids).logits, theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    figures = []
    for checkpoint_dir in (folder, merged, folder / "checkpoints" / "step-4"):
        argv = words("--json --device cpu --precision fp32", checkpoint=checkpoint_dir, dataset=rows_file)
        assert score.main(argv) == 0
        figures.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    losses = [f["loss"] for f in figures]
    assert losses[0] == losses[2] and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert figures[0]["perplexity"] == pytest.approx(math.exp(losses[0]))
    answers = []
    for checkpoint_dir in (folder, merged):
        asked = "--prompt 'What is 2 plus 2? ' --max-new-tokens 6 --device cpu --precision fp32"
        argv = words(asked, checkpoint=checkpoint_dir)
        assert generate.main(argv) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_full_fine_tuning_writes_a_model_that_transformers_loads(run, tiny_model, tmp_path):
    run(train_type="full", lora_rank=None, lora_dropout=None, max_steps=3, lr=1e-3)
    folder = tmp_path / "out"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    assert not torch.equal(model.lm_head.weight, base.lm_head.weight)
    saved = newest_checkpoint(folder)[0].tensors("model.safetensors")
    np.testing.assert_array_equal(saved["lm_head.weight"], model.lm_head.weight.detach().numpy())
    assert transformers.AutoTokenizer.from_pretrained(folder).chat_template
