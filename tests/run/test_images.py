"""Runs on rows that show images: resumed, on two ranks, scored, asked, exported, and runs on text beside them."""

import json

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from finetune.checkpoint.store import newest_checkpoint
from finetune.errors import PlanError
from tests.support import vision
from tests.support.cells import but_slow
from tests.support.commands import command, finish, refused
from tests.support.runs import PLAIN, RUN, WHOLE_STATE, copy_up_to, losses, read_events, same_files
from train import fine_tune

SCORED = dict(save_every=1, score_samples=3)
ROWS = (1, 2, 0, 1, 1, 1, 0, 2, 1, 1, 1, 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return vision.save_model("qwen2_5_vl", tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return vision.write_chats(tmp_path_factory.mktemp("rows"), ROWS)


@pytest.fixture(scope="module")
def flags(base, rows):
    return RUN | dict(model_name=str(base), dataset=str(rows), context_length=256, lora_dropout=0.1, num_epochs=1)


@pytest.fixture(scope="module")
def trained(flags, rows, tmp_path_factory):
    """A run that saves each step; it is scored on its own rows."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    fine_tune(**flags | SCORED | dict(output_dir=str(folder), score_dataset=str(rows)))
    return folder


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(trained, flags, rows, tmp_path):
    stopped = copy_up_to(trained, 1, tmp_path / "stopped")
    fine_tune(**flags | SCORED | dict(output_dir=str(stopped), score_dataset=str(rows), resume="auto"))
    assert losses(stopped) == losses(trained)
    last = newest_checkpoint(trained)[0].folder
    same_files(newest_checkpoint(stopped)[0].folder, last, WHOLE_STATE)


def test_a_resumed_run_refuses_other_images(trained, flags, tmp_path):
    other = vision.write_chats(tmp_path / "rows", ROWS)
    (other.parent / "0_0.png").write_bytes(vision.png(vision.picture(99)))
    stopped = copy_up_to(trained, 1, tmp_path / "stopped")
    with pytest.raises(PlanError, match="--dataset"):
        fine_tune(**flags | SCORED | dict(output_dir=str(stopped), dataset=str(other), resume="auto"))


@pytest.mark.parametrize("changes", but_slow([dict(world_size=2), dict(world_size=2, dp_shards=2)], []))
def test_two_ranks_are_one(flags, tmp_path, changes):
    plain = flags | dict(lora_dropout=0.0, lr=1e-3, batch_size=2, gradient_accumulation_steps=1)
    one = dict(output_dir=str(tmp_path / "one"), batch_size=4)
    two = dict(output_dir=str(tmp_path / "two")) | changes
    for some in (one, two):
        done = finish(command(plain | some))
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)


def test_what_a_run_prints_and_keeps(trained):
    page = (trained / "report.html").read_text()
    assert page.count('<img class="shown" src="data:image/png;base64,') >= 3
    sample = json.loads((trained / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].count("<|image_pad|>") == len(sample["images"]) == 1
    assert "pipeline_tag: image-text-to-text" in (trained / "README.md").read_text()
    config = json.loads((trained / "adapter_config.json").read_text())
    names = load_file(trained / "adapter_model.safetensors")
    assert all(".language_model." in name for name in names) and config["base_model_name_or_path"]


def test_peft_gives_the_same_logits(trained, base, rows):
    from finetune.model_files.processor import ImageProcessor
    from finetune.model_files.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(base)
    processor = ImageProcessor.open(base, json.loads((base / "config.json").read_text()), tokenizer)
    text = "<|vision_start|><|image_pad|><|vision_end|> What is it?"
    inputs = processor.own(text=[text], images=[[vision.picture(3)]], return_tensors="pt")
    plain = transformers.AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        before = plain(**inputs).logits
        adapted = peft.PeftModel.from_pretrained(plain, trained).eval()(**inputs).logits
    assert (adapted - before).abs().max() > 1e-3
    merged = trained.parent / "merged"
    if not merged.exists():
        done = finish(command(script="export.py", checkpoint=trained, output_dir=merged, dtype="fp32"))
        assert done.returncode == 0, done.stderr
    whole = transformers.AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(whole(**inputs).logits, adapted, atol=1e-5, rtol=0)
    assert (merged / "preprocessor_config.json").is_file()


def test_score_and_generate(trained, rows, base):
    done = finish([*command(script="score.py", checkpoint=trained, dataset=rows, samples=4), "--json"])
    found = json.loads(done.stdout)
    assert found["rows"] == 4 and found["loss"] < 7
    image = rows.parent / "0_0.png"
    asked = dict(prompt="What is 0?", image=image, max_new_tokens=4)
    for folder in (trained, base):
        done = finish(command(script="generate.py", checkpoint=folder, **asked))
        assert done.returncode == 0, done.stderr
    image = rows.parent / "none.png"
    done = finish(command(script="generate.py", checkpoint=trained, **asked | dict(image=image)))
    assert done.returncode == 2 and f"--image {image}" in done.stderr


def test_pairs_with_images(base, tmp_path):
    vision.write_chats(tmp_path, (1, 1, 2, 1))
    found = []
    for row in vision.chats(tmp_path, (1, 1, 2, 1)):
        asked, answer = row["messages"]
        worse = {"role": "assistant", "content": "I do not know."}
        found.append({"prompt": [asked], "chosen": [answer], "rejected": [worse]})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    flags = PLAIN | dict(model_name=str(base), dataset=str(file), preference="dpo", batch_size=2, context_length=256)
    fine_tune(**flags | dict(output_dir=str(tmp_path / "out"), max_steps=3, num_epochs=5))
    assert losses(tmp_path / "out")[0] == pytest.approx(np.log(2), abs=1e-5)
    assert losses(tmp_path / "out")[-1] < np.log(2)


@pytest.mark.parametrize("word", but_slow(["full", "lora", "projector"], ["full"]))
def test_a_trained_tower_is_merged_and_scored_alike(flags, rows, tmp_path, word):
    run = tmp_path / "run"
    fine_tune(**flags | SCORED | dict(output_dir=str(run), score_dataset=str(rows), train_vision=word, lr=2e-2))
    done = finish(command(script="export.py", checkpoint=run, output_dir=tmp_path / "merged", dtype="fp32"))
    assert done.returncode == 0, done.stderr
    for folder in (run, tmp_path / "merged"):
        asked = dict(checkpoint=folder, dataset=rows, samples=3, precision="fp32")
        scored = finish([*command(script="score.py", **asked), "--json"])
        loss = json.loads(scored.stdout)["loss"]
        assert loss == pytest.approx(read_events(run, "eval")[-1]["loss"], abs=1e-5)
        assert f"loss {loss:.4f}" in done.stdout


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(images="false"), "is of type 'image'"),
        (dict(batch_layout="padding_free"), "padded rows only"),
        (dict(streaming=True, max_steps=2), "--streaming holds none"),
        (dict(backend="mlx"), "torch's engine only"),
        (dict(reward="exact"), "while answers are sampled"),
    ],
)
def test_refused(flags, tmp_path, changes, words):
    assert words in refused(flags | dict(output_dir=str(tmp_path / "out")) | changes)


def test_a_run_on_text_loads_no_tower(base, tmp_path, capsys):
    file = vision.write_chats(tmp_path, (0, 0, 0, 0))
    flags = PLAIN | dict(model_name=str(base), dataset=str(file), output_dir=str(tmp_path / "out"), max_steps=1)
    fine_tune(**flags)
    assert "model.visual: " in capsys.readouterr().out
