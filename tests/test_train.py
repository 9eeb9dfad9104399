import json
import math
import os
import shutil
import signal
import threading
import time

import numpy as np
import peft
import pytest
import torch
import transformers

import export
import generate
import score
import train
from finetune.checkpoint.store import Lock, digest_of, newest_checkpoint, steps_of, verify_checkpoint
from finetune.errors import CheckpointDamagedError, NonFiniteError, OutputDirInUseError, PlanError
from finetune.metrics import read_events
from finetune.torch_engine.lora.adapters import attach_adapter
from tests.support import tiny
from train import fine_tune

# Dropout, accumulation, shuffling and warm-up are on; 24 rows in steps of 4 over two epochs are 12 steps.
RUN = dict(
    batch_size=2,
    gradient_accumulation_steps=2,
    num_epochs=2,
    lr=5e-3,
    lora_rank=4,
    lora_dropout=0.1,
    train_type="lora",
    backend="cpu",
    log_to="stdout",
    context_length=64,
    precision="fp32",
)


@pytest.fixture
def run(tiny_model, rows_file, tmp_path):
    """fine_tune on the tiny model and rows, into a fresh folder unless told otherwise."""

    def call(**flags):
        overrides = {
            **RUN,
            "model_name": str(tiny_model),
            "dataset": str(rows_file),
            "output_dir": str(tmp_path / "out"),
        }
        return fine_tune(**{**overrides, **flags})

    return call


def steps(folder):
    keep = ("step", "loss", "lr", "grad_norm", "num_tokens", "num_targets")
    return [{k: e[k] for k in keep} for e in read_events(folder, "step")]


def same_files(one, two, names):
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


WHOLE_STATE = ("adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, rows_file, tmp_path_factory):
    """A 12-step run with every step kept."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    overrides = {**RUN, "model_name": str(tiny_model), "dataset": str(rows_file), "output_dir": str(folder)}
    state = fine_tune(**overrides, save_every=1, keep_last=12)
    assert state.status == "finished" and state.step == 12
    return folder


def copy_up_to(folder, step, target):
    """The folder as a crash right after `step` leaves it: later checkpoints absent, the log running on."""
    shutil.copytree(folder, target)
    for later in steps_of(target):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    for name in ("train_state.json", "adapter_model.safetensors"):
        (target / name).unlink()
    return target


def test_the_same_run_twice_is_the_same_bits(run, uninterrupted, tmp_path):
    run(save_every=1, keep_last=12)
    assert steps(tmp_path / "out") == steps(uninterrupted)
    same_files(tmp_path / "out" / "checkpoints" / "step-12", uninterrupted / "checkpoints" / "step-12", WHOLE_STATE)


@pytest.mark.parametrize("step", range(1, 12))
def test_a_run_resumed_at_any_step_is_bitwise_the_uninterrupted_one(uninterrupted, tmp_path, step):
    folder = copy_up_to(uninterrupted, step, tmp_path / "out")
    state = fine_tune(resume="auto", output_dir=str(folder))
    assert state.step == 12 and state.status == "finished"
    assert steps(folder) == steps(uninterrupted)
    same_files(folder / "checkpoints" / "step-12", uninterrupted / "checkpoints" / "step-12", WHOLE_STATE)
    same_files(folder, uninterrupted, ["adapter_model.safetensors", "adapter_config.json"])


def break_rng(folder):
    arrays = verify_checkpoint(folder).tensors("rng.safetensors")
    torch.manual_seed(1)
    rewrite(folder, "rng.safetensors", {**arrays, "host": torch.get_rng_state().numpy()})


def break_cursor(folder):
    edit_state(folder, index=0, epoch=0)


def break_optimizer(folder):
    arrays = verify_checkpoint(folder).tensors("optimizer.safetensors")
    rewrite(folder, "optimizer.safetensors", {k: np.zeros_like(v) for k, v in arrays.items()})


def break_schedule(folder):
    edit_state(folder, step=3)


def edit_state(folder, **changes):
    content = json.loads((folder / "train_state.json").read_text())
    (folder / "train_state.json").write_text(json.dumps({**content, **changes}))
    resign(folder)


def rewrite(folder, name, arrays):
    from safetensors.numpy import save_file

    save_file(arrays, folder / name)
    resign(folder)


def resign(folder):
    """A manifest that fits the changed files: the damage is meant to be believed."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        path = folder / name
        manifest["files"][name] = {"size": path.stat().st_size, "sha256": digest_of(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("control", [break_rng, break_cursor, break_optimizer, break_schedule])
def test_a_resume_that_forgets_one_part_of_the_state_is_seen(uninterrupted, tmp_path, control):
    folder = copy_up_to(uninterrupted, 5, tmp_path / "out")
    control(folder / "checkpoints" / "step-5")
    fine_tune(resume="auto", output_dir=str(folder))
    mine, theirs = steps(folder), steps(uninterrupted)
    assert [s["loss"] for s in mine[5:12]] != [s["loss"] for s in theirs[5:12]]


@pytest.mark.parametrize("train_type", ["full", "qlora"])
def test_other_train_types_resume_bitwise_too(run, tmp_path, train_type):
    flags = dict(train_type=train_type, save_every=1, keep_last=12, max_steps=6)
    if train_type == "full":
        flags |= dict(lora_rank=None, lora_dropout=None)
    run(output_dir=str(tmp_path / "whole"), **flags)
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for n in (4, 5, 6):
        shutil.rmtree(folder / "checkpoints" / f"step-{n}")
    (folder / "train_state.json").unlink()
    fine_tune(resume=str(folder))
    assert steps(folder) == steps(tmp_path / "whole")
    last = "checkpoints/step-6"
    weights = "model.safetensors" if train_type == "full" else "adapter_model.safetensors"
    same_files(folder / last, tmp_path / "whole" / last, [weights, "optimizer.safetensors"])


def test_a_finished_run_is_already_complete_and_writes_nothing(uninterrupted, tmp_path, capsys):
    folder = shutil.copytree(uninterrupted, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
    state = fine_tune(resume="auto", output_dir=str(folder))
    assert state.status == "finished" and "already complete" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"} == before


def test_a_finished_run_goes_on_to_a_larger_total_and_says_so(uninterrupted, tmp_path, capsys):
    folder = shutil.copytree(uninterrupted, tmp_path / "out")
    state = fine_tune(resume=str(folder), num_epochs=3)
    said = capsys.readouterr().out
    assert state.step == 18 and [s["step"] for s in steps(folder)] == list(range(1, 19))
    assert "total steps: 12 -> 18; the schedule is that of the new total" in said


def test_a_damaged_newest_checkpoint_falls_back_with_a_line_and_all_damaged_is_76(uninterrupted, tmp_path, capsys):
    folder = copy_up_to(uninterrupted, 3, tmp_path / "out")
    (folder / "checkpoints" / "step-3" / "optimizer.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointDamagedError, match="step-3.*optimizer"):
        fine_tune(resume=str(folder / "checkpoints" / "step-3"))
    fine_tune(resume="auto", output_dir=str(folder))
    said = capsys.readouterr().out
    assert "skipped a damaged checkpoint" in said and "at step 2 of 12" in said
    assert steps(folder) == steps(uninterrupted)
    folder = copy_up_to(uninterrupted, 1, tmp_path / "again")
    (folder / "checkpoints" / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointDamagedError) as error:
        fine_tune(resume=str(folder))
    assert error.value.exit_code == 76


def test_resume_auto_without_a_run_starts_anew(run, tmp_path):
    assert run(resume="auto", max_steps=2).step == 2


def test_a_changed_dataset_or_flag_is_refused_on_resume(uninterrupted, tmp_path, rows_file):
    folder = copy_up_to(uninterrupted, 5, tmp_path / "out")
    with pytest.raises(PlanError, match="--lr: 0.005 -> 0.1"):
        fine_tune(resume=str(folder), lr=0.1)
    with pytest.raises(PlanError, match="8|rows a step"):
        fine_tune(resume=str(folder), batch_size=4)
    other = tmp_path / "other.jsonl"
    other.write_text(rows_file.read_text().replace("plus", "and"))
    plan = json.loads((folder / "run_plan.json").read_text())
    for part in ("requested", "settled"):
        plan[part]["dataset"] = str(other)
    (folder / "run_plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="the dataset differs from the one that checkpoint"):
        fine_tune(resume=str(folder))


def test_a_folder_that_holds_a_run_needs_resume_or_overwrite(run, tmp_path):
    run(max_steps=2)
    with pytest.raises(PlanError, match="holds another run. Use --resume auto to continue it, or --overwrite"):
        run(max_steps=2)
    assert run(max_steps=1, overwrite=True).step == 1
    assert len(read_events(tmp_path / "out", "step")) == 1


def test_a_second_run_in_one_folder_is_refused_while_the_first_lives(run, tmp_path):
    lock = Lock(tmp_path / "out")
    with pytest.raises(OutputDirInUseError, match=f"pid {os.getpid()}"):
        run(max_steps=1)
    lock.release()
    assert run(max_steps=1).step == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_at_the_next_step_and_the_run_goes_on_from_there(run, uninterrupted, tmp_path, number, code):
    folder = tmp_path / "out"

    def send():
        while not (folder / "metrics.jsonl").exists() or len(read_complete(folder)) < 3:
            time.sleep(0.0005)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    state = run()
    thread.join()
    assert state.status == "stopped" and state.exit_code == code and 3 <= state.step < 12
    assert [p.name for p in steps_of(folder)] == [f"step-{state.step}"]
    end = read_events(folder, "end")[-1]
    assert (end["status"], end["exit_code"]) == ("stopped", code)
    fine_tune(resume="auto", output_dir=str(folder))
    assert steps(folder) == steps(uninterrupted)


def read_complete(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and '"event": "step"' in line]


def test_an_infinite_learning_rate_stops_with_65_names_step_and_rows_and_saves_nothing_bad(run, tmp_path):
    with pytest.raises(NonFiniteError, match=r"step \d+: .*rows .*rows.jsonl:\d+.*checkpoint") as error:
        run(lr=1e30, save_every=1)
    assert error.value.exit_code == 65
    end = read_events(tmp_path / "out", "end")[-1]
    assert (end["status"], end["exit_code"]) == ("failed", 65)
    for folder in steps_of(tmp_path / "out"):
        saved = verify_checkpoint(folder)
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):
            assert all(np.isfinite(a).all() for a in saved.tensors(name).values())


def test_events_hold_what_programs_rely_on(run, tmp_path, rows_file):
    run(validation_dataset=str(rows_file), score_dataset=str(rows_file), score_samples=4, eval_every=6, save_every=5)
    folder = tmp_path / "out"
    events = read_events(folder)
    assert events[0]["event"] == "start" and events[-1]["event"] == "end"
    assert {"plan", "versions", "machine", "predicted_memory_bytes"} <= events[0].keys()
    assert [e["step"] for e in events if e["event"] == "eval"] == [0, 6, 12]
    assert [e["step"] for e in events if e["event"] == "save"] == [5, 10, 12]
    for e in read_events(folder, "eval"):
        assert 0 <= e["exact_match"] <= 1 and e["num_targets"] > 0
    step = read_events(folder, "step")[0]
    assert {"loss", "lr", "grad_norm", "num_tokens", "num_targets", "tokens_per_s", "memory_bytes"} <= step.keys()
    assert isinstance(step["memory_bytes"]["total"], int) and step["memory_bytes"]["items"]["base"] > 0
    assert events[-1] | {"status": "finished", "exit_code": 0, "step": 12} == events[-1]
    assert events[-1]["peak_memory_bytes"]["total"] > 0
    assert (folder / "best" / "adapter_model.safetensors").is_file()
    assert (folder / "chat_template.jinja").is_file() and (folder / "tokenizer.json").is_file()


def test_an_epoch_takes_each_row_once_and_its_last_step_the_rows_that_remain(run, tmp_path):
    run(batch_size=5, gradient_accumulation_steps=1, num_epochs=2)
    per_step = [s["num_targets"] for s in steps(tmp_path / "out")]
    assert len(per_step) == 10
    assert sum(per_step[:5]) == sum(per_step[5:])


def test_accumulation_changes_nothing_in_the_curve(run, tmp_path):
    flags = dict(lora_dropout=0.0, max_steps=8)
    run(batch_size=1, gradient_accumulation_steps=4, output_dir=str(tmp_path / "a"), **flags)
    run(batch_size=4, gradient_accumulation_steps=1, output_dir=str(tmp_path / "b"), **flags)
    one, two = (np.array([s["loss"] for s in steps(tmp_path / n)]) for n in "ab")
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_a_saved_plan_gives_the_same_run(run, tmp_path):
    run(max_steps=3)
    first = json.loads((tmp_path / "out" / "run_plan.json").read_text())
    settled = train.make_plan(
        train.parse_overrides(["--config", str(tmp_path / "out" / "run_plan.json")], train.build_parser())
    )
    again = settled.to_json()["settled"]
    assert {k: v for k, v in again.items() if k != "batch_layout"} == {
        k: v for k, v in first["settled"].items() if k != "batch_layout"
    }  # the layout is settled on the loaded model
    assert first["settled"]["batch_layout"] == "padding_free"


def test_the_base_folder_is_never_written_to(run, tiny_model):
    before = {p.name: p.read_bytes() for p in tiny_model.iterdir()}
    run(max_steps=1)
    assert {p.name: p.read_bytes() for p in tiny_model.iterdir()} == before


@pytest.mark.parametrize("flags", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"])
def test_the_adapter_answers_in_plain_peft_merges_scores_and_generates(
    run, tiny_model, rows_file, tmp_path, capsys, flags
):
    run(max_steps=4, **flags)
    folder, merged = tmp_path / "out", tmp_path / "merged"
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    assert export.main(["--checkpoint", str(folder), "--output_dir", str(merged)]) == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        # fp32 weights, merged in fp32: one rounding a weight.
        torch.testing.assert_close(plain(input_ids=ids).logits, theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    figures = []
    for checkpoint_dir in (folder, merged, folder / "checkpoints" / "step-4"):
        assert (
            score.main(
                [
                    "--checkpoint",
                    str(checkpoint_dir),
                    "--dataset",
                    str(rows_file),
                    "--json",
                    "--device",
                    "cpu",
                    "--precision",
                    "fp32",
                ]
            )
            == 0
        )
        figures.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    losses = [f["loss"] for f in figures]
    assert losses[0] == losses[2] and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert figures[0]["perplexity"] == pytest.approx(math.exp(losses[0]))
    answers = []
    for checkpoint_dir in (folder, merged):
        argv = [
            "--checkpoint",
            str(checkpoint_dir),
            "--prompt",
            "What is 2 plus 2? ",
            "--max-new-tokens",
            "6",
            "--device",
            "cpu",
            "--precision",
            "fp32",
        ]
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


@pytest.mark.parametrize("architecture", sorted(set(tiny.ARCHITECTURES) - {"llama", "llama_tied"}))
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


@pytest.mark.parametrize("init", ["gaussian", "eva"])
def test_other_starts_of_the_adapter_train_and_peft_reads_them(run, tiny_model, tmp_path, init):
    run(init_lora_weights=init, max_steps=3, train_type="qlora")
    first = read_events(tmp_path / "out", "step")[0]["loss"]
    run(max_steps=1, train_type="qlora", output_dir=str(tmp_path / "plain"), lora_dropout=0.0)
    assert first == pytest.approx(read_events(tmp_path / "plain", "step")[0]["loss"], rel=1e-5)  # B is zero
    peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "out")


@pytest.mark.parametrize("train_type", ["lora", "qlora"])
@pytest.mark.parametrize("init", ["pissa", "olora", "loftq"])
def test_starts_that_change_the_base_resume_bitwise_and_load_on_the_original(
    run, tiny_model, tmp_path, init, train_type
):
    if init == "loftq" and train_type == "lora":
        with pytest.raises(PlanError, match="--init_lora_weights loftq: starts from what quantization loses"):
            run(init_lora_weights=init)
        return
    flags = dict(
        init_lora_weights=init, train_type=train_type, precision="fp32", save_every=1, keep_last=9, max_steps=4
    )
    run(**flags)
    whole = tmp_path / "out"
    cut = copy_up_to(whole, 2, tmp_path / "cut")
    fine_tune(resume=str(cut))
    assert steps(cut) == steps(whole)
    same_files(cut / "checkpoints" / "step-4", whole / "checkpoints" / "step-4", WHOLE_STATE)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    theirs = peft.PeftModel.from_pretrained(model, whole).eval()
    ids = torch.arange(3, 19)[None]
    mine = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    attach_adapter(mine, whole)
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, mine(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    generate.main(["--checkpoint", str(whole), "--prompt", "What is 2?", "--max_new_tokens", "2", "--device", "cpu"])


def test_embeddings_and_head_train_from_the_command_line_and_merge(run, tmp_path, capsys):
    run(
        lora_target_modules="embed_tokens,lm_head,q_proj",
        max_steps=4,
        use_dora=True,
        lora_dropout=0.0,
        loraplus_lr_ratio=4.0,
    )
    losses = [s["loss"] for s in steps(tmp_path / "out")]
    assert losses[-1] < losses[0]
    export.main(["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")])
    off = float(capsys.readouterr().out.rpartition("logits within ")[2].split()[0])
    assert off < 1e-5


@pytest.mark.parametrize(
    "flags",
    [
        {"low_memory": True},
        {"cache_dequantized": "false"},
        {"microbatch_tokens": 20},
        {"use_gradient_checkpointing": "true"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_what_trades_memory_for_speed_changes_no_loss(run, tmp_path, flags):
    same = dict(train_type="qlora", max_steps=4, lora_dropout=0.0)
    run(output_dir=str(tmp_path / "a"), **same)
    run(output_dir=str(tmp_path / "b"), **same, **flags)
    one, two = (np.array([s["loss"] for s in steps(tmp_path / n)]) for n in "ab")
    np.testing.assert_allclose(one, two, rtol=1e-6)  # sums over a batch are cut otherwise


def test_verbose_prints_the_machine_and_the_closing_lines_say_how_to_ask(run, capsys, rows_file):
    run(max_steps=1, verbose=True, log_every_n_steps=5, score_dataset=str(rows_file), score_samples=2)
    said = capsys.readouterr().out
    assert "Selected backend: cpu" in said and "exact match of 2" in said
    assert "try it: python generate.py --checkpoint" in said and "--raw --prompt 'What is 0 plus 0? '" in said


def test_traces_are_written(run, tmp_path):
    run(max_steps=4, profile=True, profiling_output=str(tmp_path / "traces"), with_shapes=True)
    traces = list((tmp_path / "traces").glob("trace-*.json"))
    assert traces and "traceEvents" in json.loads(traces[0].read_text())


def test_a_flag_that_is_none_is_an_error_in_python_too():
    with pytest.raises(PlanError, match="lora_rnk"):
        fine_tune(lora_rnk=3)
    with pytest.raises(PlanError, match="not an integer"):
        fine_tune(lora_rank="four")
