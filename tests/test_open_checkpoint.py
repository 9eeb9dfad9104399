"""Checkpoints opened by generate.py and score.py."""

import json
import shutil

import pytest

import export
import generate
import score
from finetune.errors import CheckpointDamagedError, PlanError
from tests.support import tiny
from tests.support.runs import PLAIN
from train import fine_tune


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


def test_text_has_a_loss_and_nothing_to_match(tiny_model, tmp_path, capsys):
    file = tmp_path / "a.txt"
    file.write_text("Once upon a time there was a lamp.")
    assert score.main(["--checkpoint", str(tiny_model), "--dataset", str(file), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "| perplexity " in out and "exact match" not in out


def test_step_folders_and_unfinished_runs_are_opened_or_pointed_to(plain_run, tmp_path, capsys):
    plain_run(max_steps=2, save_every=1, train_type="full", lora_rank=None)
    step = tmp_path / "out" / "checkpoints" / "step-2"
    argv = ["--prompt", "What is 2? ", "--device", "cpu", "--max-new-tokens", "3"]
    assert generate.main(["--checkpoint", str(step), *argv]) == 0
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(PlanError, match="did not finish. Give .*step-2"):
        generate.main(["--checkpoint", str(tmp_path / "out"), *argv])


DAMAGED = {
    "weights cut": ("adapter_model.safetensors", lambda data: data[:-9], "is damaged, or does not fit its base"),
    "weights are text": ("adapter_model.safetensors", lambda data: b"x" * 99, "is damaged, or does not fit its base"),
    "r is text": ("adapter_config.json", {"r": "x"}, "r is x, which its weights do not have"),
    "r is huge": ("adapter_config.json", {"r": 10**12}, "r is 1000000000000, which its weights do not have"),
    "r is another": ("adapter_config.json", {"r": 5}, "this base needs"),
    "alpha is text": ("adapter_config.json", {"lora_alpha": "x"}, "is damaged, or does not fit its base"),
    "kind": ("adapter_config.json", {"peft_type": 5}, "peft_type 5 is not supported"),
    "base is a number": ("adapter_config.json", {"base_model_name_or_path": 5}, "has no base_model_name_or_path (it"),
    "revision": ("adapter_config.json", {"revision": 5}, "has no base_model_name_or_path (it is "),
    "config is a list": ("adapter_config.json", b"[]", "has no base_model_name_or_path ("),
    "config is deep": ("adapter_config.json", b"[" * 10**5, "has no base_model_name_or_path ("),
    "digest is a list": ("base_model.json", b"[5]", "base_model.json: cannot be read ("),
    "digest is deep": ("base_model.json", b"[" * 10**5, "base_model.json: cannot be read ("),
}


@pytest.fixture(scope="module")
def trained(flags_of_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "out"
    fine_tune(**flags_of_run, output_dir=str(folder), max_steps=1)
    return folder


@pytest.fixture(scope="module")
def flags_of_run(tiny_model, rows_file):
    return PLAIN | {"model_name": str(tiny_model), "dataset": str(rows_file)}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_adapter_is_one_line(trained, tmp_path, case):
    name, change, fact = DAMAGED[case]
    folder = shutil.copytree(trained, tmp_path / "out")
    file = folder / name
    if isinstance(change, dict):
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    else:
        file.write_bytes(change if isinstance(change, bytes) else change(file.read_bytes()))
    with pytest.raises(PlanError) as error:
        generate.main(["--checkpoint", str(folder), "--prompt", "a", "--device", "cpu", "--max-new-tokens", "1"])
    assert fact in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("program", ["generate", "score", "export", "export --to mlx-lm"])
def test_a_flipped_bit_of_a_checkpoint_is_noticed_by_every_program_that_opens_it(trained, rows_file, tmp_path, program):
    step = shutil.copytree(next((trained / "checkpoints").glob("step-*")), tmp_path / "checkpoints" / "step-2")
    step = step.rename(step.with_name(f"step-{json.loads((step / 'manifest.json').read_text())['step']}"))
    weights = step / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-6] ^= 64  # an exponent bit
    weights.write_bytes(data)
    name, _, more = program.partition(" ")
    argv = {"generate": ["--prompt", "a"], "score": ["--dataset", str(rows_file)]}.get(name, more.split())
    argv += ["--output_dir", str(tmp_path / "out")] if name == "export" else ["--device", "cpu"]
    with pytest.raises(CheckpointDamagedError, match="its content has changed"):
        {"generate": generate, "score": score, "export": export}[name].main(["--checkpoint", str(step), *argv])
    assert not (tmp_path / "out").exists()


def test_a_merge_that_is_not_finite_is_refused_and_leaves_nothing(trained, tmp_path):
    damaged = shutil.copytree(trained, tmp_path / "damaged")
    config = json.loads((damaged / "adapter_config.json").read_text())
    (damaged / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": float("nan")}))
    with pytest.raises(PlanError, match="logits that are not finite"):
        export.main(["--checkpoint", str(damaged), "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
