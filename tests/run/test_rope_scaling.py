"""--rope_scaling: a base for rows longer than it was trained on, which every reader of the result computes alike."""

import json
import os
import shutil

import pytest
import torch
import transformers

import export
import score
from finetune.errors import PlanError
from finetune.torch_engine.lora.adapters import attach_adapter
from finetune.torch_engine.weights.stream import load_dense
from tests.support import tiny
from tests.support.rows import jsonl
from tests.support.runs import PLAIN, copy_up_to, losses, steps
from train import fine_tune

LIMIT = 64
FLAGS = PLAIN | dict(context_length=96, max_steps=4, microbatch_tokens=256, batch_layout="padded")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases") / "llama"
    tokenizer = tiny.train_tokenizer(folder, bos=False)
    tiny.build("llama", vocab_size=len(tokenizer), max_position_embeddings=LIMIT).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    text = "What is 3 plus 4? It is 7. What is 8 plus 1? It is 9. "
    made = [{"text": text * 2 + f"What is {n} plus {n}? It is {2 * n}."} for n in range(12)]
    return jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", made)


def flags_of(base, rows, folder, **changes):
    return FLAGS | dict(model_name=str(base), dataset=str(rows), output_dir=str(folder)) | changes


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 3 + 90)[None] % 50).logits


@pytest.mark.parametrize("word", ["yarn", "linear"])
def test_a_run_is_on_the_base_of_transformers_scaled_config(word, base, rows, tmp_path):
    fine_tune(**flags_of(base, rows, tmp_path / "out", rope_scaling=word))
    made = tmp_path / "out" / "scaled_base"
    config = transformers.AutoConfig.from_pretrained(base)
    config.rope_parameters = config.rope_parameters | {"rope_type": word, "factor": 1.5}
    if word == "yarn":
        config.rope_parameters["original_max_position_embeddings"] = LIMIT
    config.max_position_embeddings = 96
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, config=config, dtype=torch.float32)
    ours = load_dense(made, torch.float32)
    assert torch.equal(logits(ours), logits(theirs))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (logits(plain) - logits(theirs)).abs().max() > 1e-4
    assert os.path.samefile(made / "model.safetensors", base / "model.safetensors")  # no second copy of the weights
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(made)
    # What was trained computes what the run's own loss says, in what is exported too.
    export.main(["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")])
    attach_adapter(theirs, tmp_path / "out")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=1e-5, atol=1e-5)


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(base, rows, tmp_path):
    fine_tune(**flags_of(base, rows, tmp_path / "whole", rope_scaling="yarn", rope_factor=2, save_every=1, keep_last=9))
    stopped = copy_up_to(tmp_path / "whole", 2, tmp_path / "stopped")
    shutil.copytree(tmp_path / "whole" / "scaled_base", stopped / "scaled_base", dirs_exist_ok=True)
    (tmp_path / "whole" / "scaled_base").rename(tmp_path / "away")  # a run that was moved
    fine_tune(resume="auto", output_dir=str(stopped))
    (tmp_path / "away").rename(tmp_path / "whole" / "scaled_base")
    assert steps(stopped) == steps(tmp_path / "whole")
    again = flags_of(base, rows, tmp_path / "whole", rope_scaling="yarn", rope_factor=2, overwrite=True)
    fine_tune(**again)  # on the base that is there
    assert losses(tmp_path / "whole") == losses(stopped)


@pytest.mark.parametrize(
    "changes", [pytest.param(dict(train_type="full", lora_rank=None), marks=pytest.mark.slow), dict(backend="mlx")]
)
def test_full_training_and_mlx_are_on_it_too(changes, base, rows, tmp_path):
    lora = losses_of(base, rows, tmp_path / "lora", rope_scaling="yarn", lr=1e-12)
    assert losses_of(base, rows, tmp_path / "other", rope_scaling="yarn", lr=1e-12, **changes) == pytest.approx(
        lora, rel=1e-5
    )
    assert losses_of(base, rows, tmp_path / "plain", rope_scaling="linear", lr=1e-12) != pytest.approx(lora, rel=2e-6)
    if changes.get("train_type"):
        config = json.loads((tmp_path / "other" / "config.json").read_text())
        assert config["max_position_embeddings"] == 96
        assert score.main(["--checkpoint", str(tmp_path / "other"), "--dataset", str(rows)]) == 0


def losses_of(base, rows, folder, **changes):
    fine_tune(**{name: value for name, value in flags_of(base, rows, folder, **changes).items() if value is not None})
    return losses(folder)


def test_any_length_is_reached(rows, tmp_path):
    """1001 / 1000 times 1000 is a little less than 1001."""
    tokenizer = tiny.train_tokenizer(tmp_path / "m", bos=False)
    tiny.build("llama", vocab_size=len(tokenizer), max_position_embeddings=1000).save_pretrained(tmp_path / "m")
    how = flags_of(tmp_path / "m", rows, tmp_path / "out", rope_scaling="yarn", context_length=1001)
    assert fine_tune(**how, dry_run=True).status == "planned"


def test_a_base_with_a_manifest_or_a_damaged_folder_is_no_traceback(base, rows, tmp_path):
    """A base that a run of ours wrote."""
    fine_tune(**flags_of(base, rows, tmp_path / "full", context_length=64, train_type="full") | {"lora_rank": 16})
    assert (tmp_path / "full" / "manifest.json").is_file()
    how = flags_of(tmp_path / "full", rows, tmp_path / "out", rope_scaling="yarn", context_length=97, max_steps=1)
    fine_tune(**how)
    made = tmp_path / "out" / "scaled_base"
    assert sorted(path.name for path in made.glob("*.lock")) == [] and not (made / "run_plan.json").exists()
    (made / "config.json").write_text("{")
    with pytest.raises(PlanError, match="scaled_base holds something other than this base"):
        fine_tune(**how, overwrite=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(rope_scaling="yarn", parity="cpu,mlx"), "--parity makes no base of its own"),
        (dict(rope_scaling="yarn", context_length=64), "is within the 64 positions of the base"),
        (dict(rope_scaling="yarn", context_length="auto"), "Give --rope_factor, or --context_length"),
        (dict(rope_factor=2.0), "there is no scaling"),
        (dict(rope_scaling="yarn", rope_factor=1.25), "exceeds this model's limit of 80"),
        (dict(rope_scaling="yarn", context_length=64 * 128 + 1), "over 128 times"),
        (dict(rope_scaling="yarn", rope_factor=1.0), "must be > 1"),
        (dict(rope_scaling="dynamic"), "not one of none, linear, yarn"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(changes, said, base, rows, tmp_path):
    with pytest.raises(PlanError, match=said):
        fine_tune(**flags_of(base, rows, tmp_path / "out", **changes))


@pytest.mark.parametrize(
    ("architecture", "sizes", "said"),
    [
        ("gpt2", {}, "are not RoPE's"),
        ("gemma3", {}, "of several kinds"),
        (
            "llama",
            dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4)),
            r"is scaled already \(linear\)",
        ),
    ],
)
def test_a_model_without_such_positions_is_refused(architecture, sizes, said, rows, tmp_path):
    tokenizer = tiny.train_tokenizer(tmp_path / "m", bos=False)
    tiny.build(architecture, vocab_size=len(tokenizer), **sizes).save_pretrained(tmp_path / "m")
    with pytest.raises(PlanError, match=said):
        fine_tune(**flags_of(tmp_path / "m", rows, tmp_path / "out", rope_scaling="yarn", rope_factor=2.0))
