"""The demo reaches its score, and its adapter answers in plain PEFT and transformers."""

import json

import peft
import pytest
import transformers

from finetune.model_files.demo_model import DEMO_MODEL
from finetune.model_files.files import find_model
from tests.support.commands import ROOT, command, finish
from tests.support.runs import read_events


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_demo_reaches_its_score(tmp_path, world_size):
    out = finish(command(output_dir=tmp_path / "demo", world_size=world_size), timeout_s=3600)
    assert out.returncode == 0, out.stderr
    before, after = read_events(tmp_path / "demo", "eval")
    assert before["exact_match"] < 0.05 and after["exact_match"] > 0.9
    assert_answers_elsewhere(tmp_path, find_model(DEMO_MODEL).folder)


def assert_answers_elsewhere(tmp_path, base_folder):
    """The demo's adapter answers in plain transformers + peft, and its merged model in plain transformers."""
    rows = [json.loads(line) for line in (ROOT / "examples" / "orders_test.jsonl").read_text().splitlines()[:4]]
    exported = finish(command(script="export.py", checkpoint=tmp_path / "demo", output_dir=tmp_path / "merged"))
    assert exported.returncode == 0, exported.stderr
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base_folder, dtype="float32")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    for model in (peft.PeftModel.from_pretrained(plain, tmp_path / "demo"), merged):
        right = 0
        for row in rows:
            ids = tokenizer.apply_chat_template(
                row["messages"][:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            out = model.generate(**ids, max_new_tokens=60, do_sample=False)
            text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            right += text.strip() == row["messages"][-1]["content"]
        assert right >= 3  # four rows; the base here is not the quantized one it was trained on
