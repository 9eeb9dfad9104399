"""Checkpoints opened by generate.py and score.py."""

import pytest

import generate
import score
from finetune.errors import PlanError
from tests.support import tiny


def test_prompts_and_answers_stay_inside_the_models_positions(make_tokenizer, tmp_path, rows_file, capsys):
    folder = tmp_path / "model"
    tokenizer = make_tokenizer(folder, bos=False)
    tiny.build("gpt2", vocab_size=len(tokenizer), n_positions=24).save_pretrained(folder)
    prompt = "What is 1 plus 1? " * 9
    assert (
        generate.main(["--checkpoint", str(folder), "--prompt", prompt, "--device", "cpu", "--max-new-tokens", "90"])
        == 0
    )
    assert (
        score.main(["--checkpoint", str(folder), "--dataset", str(rows_file), "--device", "cpu", "--samples", "3"]) == 0
    )


def test_step_folders_and_unfinished_runs_are_opened_or_pointed_to(plain_run, tmp_path, capsys):
    plain_run(max_steps=2, save_every=1, train_type="full", lora_rank=None)
    step = tmp_path / "out" / "checkpoints" / "step-2"
    argv = ["--prompt", "What is 2? ", "--device", "cpu", "--max-new-tokens", "3"]
    assert generate.main(["--checkpoint", str(step), *argv]) == 0
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(PlanError, match="did not finish. Give .*step-2"):
        generate.main(["--checkpoint", str(tmp_path / "out"), *argv])
