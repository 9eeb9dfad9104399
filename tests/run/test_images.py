"""Runs on rows that show images: resumed, on two ranks, scored, asked, opened by others; runs on text beside them."""

import json
from argparse import Namespace

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import export
import score
from finetune.checkpoint.store import newest_checkpoint
from finetune.data.tokens.tokenize import generation_examples
from finetune.errors import PlanError
from finetune.from_python import Result
from finetune.open_checkpoint import open_engine
from finetune.parts.train_state import TrainState
from tests.support import vision
from tests.support.cells import but_slow
from tests.support.commands import command, finish, refused
from tests.support.runs import PLAIN, RUN, WHOLE_STATE, copy_up_to, losses, read_events, same_files
from tests.support.seeing import NO_PROJECTOR, SEEN, Seen
from train import fine_tune

SCORED = dict(save_every=1, score_samples=3)
CELLS = [
    ("qwen2_5_vl", "none"),
    *((name, "none") for name in SEEN if name != "qwen2_5_vl"),
    *((name, word) for name in SEEN for word in ("projector", "full") if (name, word) not in NO_PROJECTOR),
    ("qwen2_5_vl", "lora"),
]
NEW = 4  # tokens of an answer
TRACED_ONCE = dict(use_gradient_checkpointing="false")  # not in both ways, to choose
ROWS = (1, 2, 0, 1, 1, 1, 0, 2, 1, 1, 1, 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return vision.save_model("qwen2_5_vl", tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return vision.write_chats(tmp_path_factory.mktemp("rows"), ROWS)


@pytest.fixture(scope="module")
def flags(base, rows):
    found = RUN | dict(model_name=str(base), dataset=str(rows), context_length=256, lora_dropout=0.1, num_epochs=1)
    return found | TRACED_ONCE


@pytest.fixture(scope="module")
def trained(flags, rows, tmp_path_factory):
    """A run that saves each step; it is scored on its own rows."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    fine_tune(**flags | SCORED | dict(output_dir=str(folder), score_dataset=str(rows)))
    return folder


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(trained, flags, rows, tmp_path):
    stopped = copy_up_to(trained, 2, tmp_path / "stopped")
    fine_tune(**flags | SCORED | dict(output_dir=str(stopped), score_dataset=str(rows), resume="auto"))
    assert len(read_events(stopped, "start")) == 2
    assert losses(stopped) == losses(trained)
    last = newest_checkpoint(trained)[0].folder
    same_files(newest_checkpoint(stopped)[0].folder, last, WHOLE_STATE)


@pytest.mark.parametrize("what", but_slow(["dataset", "image processor"], ["image processor"]))
def test_a_resumed_run_refuses_other_images_and_other_settings_of_them(trained, base, rows, flags, tmp_path, what):
    """The files are changed where they are: of another path the plan would speak."""
    if what == "dataset":
        file = rows.parent / "0_0.png"
        other = vision.png(vision.picture(99))
    else:
        file = base / "preprocessor_config.json"
        other = json.dumps(json.loads(file.read_text()) | {"image_mean": [0.4, 0.4, 0.4]}).encode()
    own = file.read_bytes()
    stopped = copy_up_to(trained, 2, tmp_path / "stopped")
    try:
        file.write_bytes(other)
        with pytest.raises(PlanError, match=f"the {what}.* differs from the one that checkpoint"):
            fine_tune(**flags | SCORED | dict(output_dir=str(stopped), resume="auto"))
    finally:
        file.write_bytes(own)


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
    assert json.loads((trained / "run_plan.json").read_text())["settled"]["batch_layout"] == "padding_free"
    page = (trained / "report.html").read_text()
    assert page.count('<img class="shown" src="data:image/png;base64,') >= 3
    sample = json.loads((trained / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].count("<|image_pad|>") == len(sample["images"]) == 1
    assert "pipeline_tag: image-text-to-text" in (trained / "README.md").read_text()
    config = json.loads((trained / "adapter_config.json").read_text())
    names = load_file(trained / "adapter_model.safetensors")
    assert all(".language_model." in name for name in names) and config["base_model_name_or_path"]


def opened(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name, word", but_slow(CELLS, CELLS[:1]))
def test_what_a_run_leaves_is_one_model_to_all_that_open_it(name, word, request, rows, tmp_path):
    if (name, word) == CELLS[0]:
        base = request.getfixturevalue("base")
        run = request.getfixturevalue("trained")
    else:
        base = vision.save_model(name, tmp_path / "base")
        run = tmp_path / "run"
        flags = PLAIN | TRACED_ONCE | dict(context_length=256, lr=5e-2, max_steps=1, train_vision=word)
        fine_tune(**flags, model_name=str(base), dataset=str(rows), output_dir=str(run))
    merged = tmp_path / "merged"
    asked = ["--checkpoint", str(run), "--output_dir", str(merged), "--dtype", "fp32", "--score_dataset", "none"]
    assert export.main(asked) == 0
    seen = Seen(base, rows)
    how = Namespace(checkpoint=str(run), device="cpu", precision="auto", n_bits=None, quiet=True)
    engine, _, _, _ = open_engine(how)
    plain = opened(base)
    whole = opened(merged)
    whole.generation_config = transformers.GenerationConfig()
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    inputs = [seen.theirs(row) for row in seen.raw.rows[:4]]
    with torch.no_grad():
        unadapted = [plain(**given).logits for given, _ in inputs]
        adapted = peft.PeftModel.from_pretrained(plain, run).eval()
        for (given, _), other in zip(inputs, unadapted, strict=True):
            logits = adapted(**given).logits
            assert (logits - other).abs().max() > 1e-3
            for model in (whole, engine.model):
                torch.testing.assert_close(model(**given).logits, logits, atol=1e-5, rtol=0)
    prompts = generation_examples(seen.raw, seen.options, seen.tokenizer, images=seen.inputs)
    answers = engine.generate([prompt for prompt, _, _ in prompts[:4]], NEW, {2})
    for (given, start), ids in zip(inputs, answers, strict=True):
        asked = {n: v[:, :start] if v.shape[:2] == given["input_ids"].shape else v for n, v in given.items()}
        asked.pop("labels", None)
        made = whole.generate(**asked, max_new_tokens=NEW, do_sample=False, eos_token_id=2, pad_token_id=0)
        assert ids == [token for token in made[0, start:].tolist() if token not in (0, 2)]
    saved = load_file(run / "adapter_model.safetensors")
    full = {n.removeprefix("base_model.model."): v for n, v in saved.items() if ".lora_" not in n}
    assert bool(full) == (word in ("projector", "full"))
    after = whole.state_dict()
    for tensor, values in full.items():
        np.testing.assert_array_equal(after[tensor].numpy(), values)
        assert tensor in before
    assert not full or any((before[tensor].numpy() != values).any() for tensor, values in full.items())


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


def test_answers_and_scores_from_python(trained, rows, capsys):
    file = rows.parent / "0_0.png"
    result = Result.of(TrainState(status="finished", output_dir=str(trained)), "cpu", "")
    asked = dict(max_new_tokens=4)
    done = finish(command(script="generate.py", checkpoint=trained, prompt="What is 0?", image=file, **asked))
    for image in (str(file), file, file.read_bytes(), [vision.Image.open(file)]):
        assert result.generate("What is 0?", images=image, **asked) == done.stdout.removesuffix("\n")
    other = result.generate(["What is 0?", "Hi"], images=[file, rows.parent / "1_0.png"], **asked)
    assert len(other) == 2
    with pytest.raises(PlanError, match=r"generate\(images=...\): is an integer"):
        result.generate("What is 0?", images=3)
    with pytest.raises(PlanError, match="none.png cannot be read"):
        result.generate("What is 0?", images=rows.parent / "none.png")
    row = {"question": "What is 0?", "answer": "a dog", "image": "0_0.png"}
    with pytest.raises(PlanError, match="0_0.png"):
        result.score([row], **asked)
    found = [
        result.score([row | dict(image=image)], image_root=str(rows.parent), **asked)
        for image in ("0_0.png", vision.Image.open(file))
    ]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("word", ["none", "projector", "lora", "full"])
def test_an_adapter_is_continued(flags, rows, tmp_path, word):
    scored = flags | dict(score_dataset=str(rows), max_steps=2, lora_dropout=0.0)
    fine_tune(**scored | dict(output_dir=str(tmp_path / "one"), train_vision=word, lr=2e-2))
    again = scored | dict(adapter=str(tmp_path / "one"), output_dir=str(tmp_path / "two"))
    fine_tune(**again)
    last = read_events(tmp_path / "one", "eval")[-1]["loss"]
    found = read_events(tmp_path / "two", "eval")
    assert found[0]["loss"] == pytest.approx(last, abs=1e-6) and found[-1]["loss"] != found[0]["loss"]
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    fine_tune(**again | dict(resume="auto", max_steps=3))
    assert len(losses(tmp_path / "two")) == 3 and len(read_events(tmp_path / "two", "start")) == 2
    text = vision.write_chats(tmp_path / "text", (0, 0, 0, 0))
    again = {name: value for name, value in again.items() if name != "score_dataset"}
    again |= dict(dataset=str(text), output_dir=str(tmp_path / "three"))
    if word == "none":
        fine_tune(**again)
        assert load_file(tmp_path / "three" / "adapter_model.safetensors").keys() == one.keys()
    else:  # what joins them is within this class's tower
        assert "trained the tower for images" in refused(again)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(new_tokens="<a>,<b>"), dict(modules_to_save="embed_tokens")])
def test_what_trains_beside_adapters_is_opened_with_images(flags, rows, tmp_path, changes):
    run = tmp_path / "run"
    fine_tune(**flags | dict(output_dir=str(run), score_dataset=str(rows), max_steps=2, lr=2e-2) | changes)
    last = read_events(run, "eval")[-1]["loss"]
    assert export.main(["--checkpoint", str(run), "--output_dir", str(tmp_path / "merged"), "--dtype", "fp32"]) == 0
    for folder in (run, tmp_path / "merged"):
        asked = dict(checkpoint=folder, dataset=rows, samples=3, precision="fp32")
        done = finish([*command(script="score.py", **asked | dict(samples=-1)), "--json"])
        assert json.loads(done.stdout)["loss"] == pytest.approx(last, abs=1e-5)


@pytest.mark.slow
def test_a_mixture_shows_the_images_of_its_datasets(flags, rows, tmp_path):
    other = vision.write_chats(tmp_path / "other", (1, 0, 2))
    mixed = flags | dict(dataset=[f"{rows}:1", f"{other}:3"], max_steps=3, lora_dropout=0.0)
    for layout in ("padded", "padding_free"):
        fine_tune(**mixed | dict(output_dir=str(tmp_path / layout), batch_layout=layout))
    np.testing.assert_allclose(losses(tmp_path / "padded"), losses(tmp_path / "padding_free"), atol=1e-6)
    alone = flags | dict(dataset=str(rows), max_steps=3, lora_dropout=0.0, output_dir=str(tmp_path / "alone"))
    fine_tune(**alone)
    assert losses(tmp_path / "alone") != losses(tmp_path / "padded")


@pytest.mark.parametrize("layout", but_slow(["auto", "padded"], []))
def test_pairs_with_images(base, tmp_path, layout):
    vision.write_chats(tmp_path, (1, 1, 2, 1))
    found = []
    for row in vision.chats(tmp_path, (1, 1, 2, 1)):
        asked, answer = row["messages"]
        worse = {"role": "assistant", "content": "I do not know."}
        found.append({"prompt": [asked], "chosen": [answer], "rejected": [worse]})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    flags = PLAIN | dict(model_name=str(base), dataset=str(file), preference="dpo", batch_size=2, context_length=256)
    flags |= TRACED_ONCE | dict(batch_layout=layout)
    fine_tune(**flags | dict(output_dir=str(tmp_path / "out"), max_steps=3, num_epochs=5))
    assert losses(tmp_path / "out")[0] == pytest.approx(np.log(2), abs=1e-5)
    assert losses(tmp_path / "out")[-1] < np.log(2)


@pytest.mark.parametrize("word", but_slow(["full", "lora", "projector"], []))
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
        (dict(streaming=True, max_steps=2), "--streaming holds none"),
        (dict(backend="mlx"), "torch's engine only"),
        (dict(reward="exact"), "while answers are sampled"),
        (dict(vision_lr_ratio=0.5), "--train_vision none trains nothing in full"),
        (dict(lora_alpha_pattern="qkv=4"), "--lora_alpha_pattern qkv"),  # of the tower alone
    ],
)
def test_refused(flags, tmp_path, changes, words):
    assert words in refused(flags | dict(output_dir=str(tmp_path / "out")) | changes)


@pytest.mark.slow
def test_a_run_on_text_loads_no_tower(base, tmp_path, capsys):
    file = vision.write_chats(tmp_path, (0, 0, 0, 0))
    flags = PLAIN | TRACED_ONCE | dict(model_name=str(base), dataset=str(file), max_steps=1)
    flags |= dict(output_dir=str(tmp_path / "out"))
    result = fine_tune(**flags)
    out = capsys.readouterr().out
    assert "model.visual: " in out
    assert result.generate("Hi", max_new_tokens=2) == result.generate("Hi", max_new_tokens=2)
    assert result.generate("Hi", images=vision.Image.fromarray(vision.picture(1)), max_new_tokens=2)


@pytest.mark.slow
def test_a_run_on_text_scores_rows_with_images_as_score_py_does(base, tmp_path, capsys):
    flags = PLAIN | TRACED_ONCE | dict(model_name=str(base), max_steps=1, output_dir=str(tmp_path / "out"))
    result = fine_tune(**flags, dataset=str(vision.write_chats(tmp_path / "text", (0, 0, 0, 0))))
    rows = vision.write_chats(tmp_path / "images", (1, 2))
    argv = ["--checkpoint", result.folder, "--dataset", str(rows), "--json", "--metric", "perplexity"]
    capsys.readouterr()
    assert score.main([*argv, "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert result.score(str(rows), metric="perplexity")["loss"] == pytest.approx(found["loss"], rel=1e-6)


@pytest.mark.slow
def test_a_run_says_once_that_layers_are_traced(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fine_tune(**flags | dict(output_dir=str(tmp_path / "out"), max_steps=1))
    assert capsys.readouterr().out.count("tracing them") == 1
