"""Ways a run once went wrong, each by the shortest path that showed it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import generate
import score
from finetune.checkpoint.store import steps_of
from finetune.errors import NonFiniteError, PlanError
from finetune.metrics import Metrics, read_events
from finetune.plan.run_plan import TrainState
from finetune.torch_engine.checks import check_padding_free, no_autocast
from finetune.torch_engine.lora.layers import layers
from tests.plan.test_resolve import plan_of
from tests.support import tiny
from tests.torch_engine.test_engine import batches, engine
from train import fine_tune

ROOT = Path(__file__).parent.parent
RUN = dict(
    train_type="lora",
    lora_rank=4,
    batch_size=4,
    context_length=64,
    backend="cpu",
    log_to="stdout",
    lr=1e-3,
    precision="fp32",
)


@pytest.fixture
def run(tiny_model, rows_file, tmp_path):
    def call(**flags):
        overrides = dict(model_name=str(tiny_model), dataset=str(rows_file), output_dir=str(tmp_path / "out"))
        return fine_tune(**{**RUN, **overrides, **flags})

    return call


def test_overwrite_never_touches_a_folder_that_holds_a_model(run, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(PlanError, match="is the model's own folder"):
        run(model_name=str(folder), output_dir=str(folder), overwrite=True, max_steps=1)
    with pytest.raises(PlanError, match="holds a model that was not written by this tool"):
        run(output_dir=str(folder), overwrite=True, max_steps=1)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_full_run_of_a_bf16_model_evaluates_twice_and_publishes_bf16(run, tiny_model, rows_file, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    run(
        model_name=str(folder),
        train_type="full",
        lora_rank=None,
        validation_dataset=str(rows_file),
        max_steps=3,
        eval_every=1,
    )
    out = tmp_path / "out"
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert (out / "best" / "model.safetensors").is_file()


@pytest.mark.parametrize("precision", ["bf16_autocast", "fp16_autocast", "bf16"])
@pytest.mark.parametrize("dora", [False, True])
def test_dropout_runs_under_every_precision(run, precision, dora):
    assert run(precision=precision, lora_dropout=0.1, use_dora=dora, max_steps=2, train_type="qlora").step == 2


def test_a_run_resumed_at_an_older_step_drops_the_newer_ones(run, tmp_path, capsys):
    run(max_steps=6, save_every=1, keep_last=6)
    out = tmp_path / "out"
    (out / "train_state.json").unlink()
    fine_tune(resume=str(out / "checkpoints" / "step-2"), keep_last=2)
    assert "dropped step-6, step-5, step-4, step-3" in capsys.readouterr().out
    assert [p.name for p in steps_of(out)] == ["step-6", "step-5"]
    assert [e["step"] for e in read_events(out, "step")] == [1, 2, 3, 4, 5, 6]


def test_a_log_shorter_than_its_checkpoint_says_is_not_filled_with_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "start"}\n')
    with Metrics(plan_of(log_to="stdout")) as log:
        log.open(tmp_path, TrainState(), offset=500)
        log.state = None  # no end event
    assert read_events(tmp_path) == [{"event": "start"}]


def test_a_number_that_is_not_finite_is_null_in_the_log(tmp_path):
    log = Metrics(plan_of(log_to="stdout"))
    log.open(tmp_path, TrainState())
    log.event("step", step=1, grad_norm=float("inf"))
    assert read_events(tmp_path)[0]["grad_norm"] is None


def test_the_state_of_a_finished_run_goes_first_when_it_is_taken_further(run, tmp_path, monkeypatch):
    run(max_steps=2)
    real = Path.replace

    def full_disk(self, target):
        if Path(target).name == "run_plan.json":
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError):
        fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=4)
    monkeypatch.undo()
    assert fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=4).step == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_autocast"])
def test_an_encoder_is_no_causal_model(run, make_tokenizer, tmp_path, precision):
    folder = tmp_path / "bert"
    tokenizer = make_tokenizer(folder, bos=False)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(PlanError, match="lets a token see those after it"):
        run(model_name=str(folder), max_steps=1, precision=precision)


def test_a_closed_pipe_is_no_success(tiny_model, rows_file, tmp_path):
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "train.py"),
        "--model_name",
        tiny_model,
        "--dataset",
        rows_file,
        "--output_dir",
        tmp_path / "out",
        "--backend",
        "cpu",
        "--batch_size",
        4,
        "--train_type",
        "lora",
    ]
    read, write = os.pipe()
    os.close(read)
    assert subprocess.run(list(map(str, command)), stdout=write, stderr=subprocess.DEVNULL, cwd=ROOT).returncode == 141
    os.close(write)
    with open("/dev/full", "w") as full:
        out = subprocess.run(list(map(str, command)), stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert out.returncode == 74 and out.stderr.startswith("error: ")


def test_a_folders_own_generation_settings_do_not_change_greedy():
    built = engine()
    plain = built.generate([[3, 4, 5]], 6, {127})
    own = transformers.GenerationConfig(suppress_tokens=[plain[0][0]], no_repeat_ngram_size=1)
    built.model.generation_config = own
    assert built.generate([[3, 4, 5]], 6, {127}) == plain and built.model.generation_config is own


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


def test_a_resumed_run_shows_what_was_before_and_its_own_speed(run, tmp_path, rows_file):
    run(max_steps=2, validation_dataset=str(rows_file))
    state = fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=4)
    first = read_events(tmp_path / "out", "eval")[0]["loss"]
    assert state.scores["before"]["loss"] == first != state.scores["after"]["loss"]


def test_python_reads_config_and_dry_run_as_the_command_line_does(run, tmp_path):
    (tmp_path / "c.yaml").write_text("lora_rank: 2\n")
    assert run(dry_run=True, config=str(tmp_path / "c.yaml")).status == "planned"
    assert not (tmp_path / "out").exists()
    with pytest.raises(PlanError, match="no such file"):
        run(config="/nope.yaml")


def test_dora_norms_come_from_what_is_stored_not_from_rounded_copies():
    built = engine(train_type="qlora", use_dora=True)
    layer = next(iter(layers(built.model).values()))
    before = layer.weight_norm()
    layer.base.cache(torch.bfloat16)
    layer.row_square_O = None
    assert torch.equal(layer.weight_norm(), before)


def test_an_evaluation_that_is_not_finite_ends_the_run(run, rows_file, tmp_path):
    with pytest.raises(NonFiniteError):
        run(lr=1e30, validation_dataset=str(rows_file), max_steps=1, apply_gradient_clipping=False)
    assert read_events(tmp_path / "out", "end")[-1]["exit_code"] == 65


def test_a_resumed_run_keeps_the_precision_it_settled(run, tmp_path):
    run(max_steps=2, save_every=1, precision="auto")
    file = tmp_path / "out" / "run_plan.json"
    plan = json.loads(file.read_text())
    # As a machine of the other kind would have settled.
    other = {"bf16": "fp32", "fp32": "bf16"}[plan["settled"]["precision"]]
    plan["settled"]["precision"] = other
    file.write_text(json.dumps(plan))
    assert fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=3).step == 3
    assert json.loads(file.read_text())["settled"]["precision"] == other


def test_step_folders_and_unfinished_runs_are_opened_or_pointed_to(run, tmp_path, capsys):
    run(max_steps=2, save_every=1, train_type="full", lora_rank=None)
    step = tmp_path / "out" / "checkpoints" / "step-2"
    argv = ["--prompt", "What is 2? ", "--device", "cpu", "--max-new-tokens", "3"]
    assert generate.main(["--checkpoint", str(step), *argv]) == 0
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(PlanError, match="did not finish. Give .*step-2"):
        generate.main(["--checkpoint", str(tmp_path / "out"), *argv])


def test_a_users_hidden_files_stay_and_ours_go(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".notes.2024").write_text("mine")
    (out / ".writing-1-x").write_text("")
    (out / ".tmp-abc").mkdir()
    run(max_steps=1)
    assert (out / ".notes.2024").exists() and not (out / ".writing-1-x").exists() and not (out / ".tmp-abc").exists()


def test_evaluation_makes_no_gradient_of_the_head():
    built = engine(train_type="full")
    seen = []
    linear = built.head.linear
    hook = linear.weight.register_hook(seen.append)
    built.evaluate(batches())
    hook.remove()
    assert not seen and linear.weight.grad is None


def test_a_window_that_only_the_models_own_mask_knows_is_seen():
    config = transformers.PhimoeConfig(
        **{**tiny.COMMON, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 16, "hidden_size": 32}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    proof = check_padding_free(model, no_autocast, context_length=64)
    assert not proof.holds and "not the same two alone" in proof.reason
