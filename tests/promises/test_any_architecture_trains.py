"""Any architecture that transformers loads as a causal LM trains."""

import json

import peft
import pytest
import transformers

from tests.support import tiny
from tests.support.cells import but_slow
from tests.support.runs import steps

# Without a gate, with windows, of fused matrices, of experts.
QUICK = ("gpt2", "gemma3", "phi3", "gpt_oss")


@pytest.mark.parametrize("architecture", but_slow(sorted(set(tiny.ARCHITECTURES) - {"llama", "llama_tied"}), QUICK))
def test_any_architecture_trains_from_a_folder(architecture, make_tokenizer, run, tmp_path):
    folder = tmp_path / "model"
    tokenizer = make_tokenizer(folder, bos=False)
    tiny.build(architecture, vocab_size=len(tokenizer)).save_pretrained(folder)
    state = run(model_name=str(folder), train_type="qlora", max_steps=3, lora_dropout=0.0)
    losses = [s["loss"] for s in steps(tmp_path / "out")]
    assert state.step == 3 and losses[-1] < losses[0]
    layout = json.loads((tmp_path / "out" / "run_plan.json").read_text())["settled"]["batch_layout"]
    assert layout == ("padded" if architecture in tiny.PADDED else "padding_free")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    peft.PeftModel.from_pretrained(theirs, tmp_path / "out")
