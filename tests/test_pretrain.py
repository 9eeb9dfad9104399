"""pretrain.py from the command line: what it trains, refuses, saves and resumes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file

import generate
import pretrain
from finetune.checkpoint.store import steps_of, verify_checkpoint
from finetune.distributed.env import RankEnv
from finetune.errors import CheckpointDamagedError, OutOfMemoryError, PlanError
from finetune.parts.train_state import TrainState
from finetune.plan.run_plan import SavedRun
from finetune.run import samples
from recursive.memory import parameters
from recursive.plan import PretrainPlan, inherited, resolve, with_folder
from recursive.recipe import read_arguments, read_recipe
from tests.support import conformance, pretraining
from tests.support.commands import ROOT, TORCHRUN, Finished
from tests.support.pretraining import QUESTIONS, TINY, call
from tests.support.runs import read_events

RECURSIVE = ["--config-name", "cfg_chat_recursive", *TINY, "global_batch_size=4", "lr_warmup_steps=2", "ema_rate=0.9"]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A checkout with data/tiny (13 rows, 3 test rows), data/other and sudoku."""
    folder = pretraining.checkout(tmp_path_factory.mktemp("pretrain"))
    pretraining.build_chat(folder)
    (folder / "data/other").symlink_to(folder / "data/tiny")
    pretraining.build_sudoku(folder)
    return folder


def train(folder, *argv, code: int = 0) -> Finished:
    """pretrain.py's command line, in `folder`."""
    done = pretraining.call(folder, "pretrain", *argv)
    assert done.returncode == code, done
    return done


def step_values(folder) -> list[dict]:
    """What metrics.jsonl says of each step, without times and memory."""
    kept = ("step", "loss", "lr", "grad_norm", "num_tokens", "num_targets")
    return [{name: event[name] for name in kept} for event in read_events(folder, "step")]


def plan_of(*argv, backend="cpu", ranks=1) -> PretrainPlan:
    name, overrides = read_arguments(list(argv))
    manager, env = pretraining.manager_of(backend), RankEnv(size=ranks, local_size=ranks) if ranks > 1 else None
    return resolve(read_recipe(name or "cfg_chat"), overrides, manager, env)


def weights(step) -> dict:
    saved, found = verify_checkpoint(step), {}
    for file in saved.manifest["files"]:
        if file.endswith(".safetensors"):
            found |= {f"{file}:{name}": tensor for name, tensor in saved.tensors(file).items()}
    return found


def same(one, other) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


# ---- what it does


@pytest.mark.promise("TR_01", "TR_03", "TR_12")
def test_a_run_trains_saves_and_publishes(here, tmp_path):
    out = tmp_path / "out"
    argv = [*RECURSIVE, "data_paths=[data/tiny,data/other]", "epochs=2", "eval_interval=1", f"checkpoint_path={out}"]
    done = train(here, *argv)
    assert done.stdout.splitlines()[0] == "Using device: cpu"
    # 2 x 13 rows in steps of 4, the last of an epoch with the 2 that remain.
    assert "26 rows" in done.stdout and "14 steps" in done.stdout
    events = read_events(out)
    steps = [e for e in events if e["event"] == "step"]
    assert len(steps) == 14 and steps[6]["num_targets"] < steps[0]["num_targets"]
    evals = [e for e in events if e["event"] == "eval"]
    assert [e["step"] for e in evals] == [0, 7, 14]
    assert evals[-1]["data/tiny loss"] == evals[-1]["data/other loss"] == pytest.approx(evals[-1]["loss"])
    assert {p.name for p in steps_of(out)} == {"step_7", "step_14"}
    assert events[-1]["exit_code"] == 0
    settings = yaml.safe_load((out / "all_config.yaml").read_text())
    assert settings["arch"]["hidden_size"] == 32 and settings["lr"] == 1e-3
    found = weights(out / "step_14")
    assert not np.array_equal(found["model.safetensors:head.weight"], found["optimizer.safetensors:head.weight.ema"])
    again = train(here, *argv[:-1], f"checkpoint_path={out}", "resume=auto")
    assert "already complete" in again.stdout and len(read_events(out)) == len(events)


def test_fewer_rows_than_a_batch_train_and_a_long_warm_up_is_shortened_with_a_reason(here, tmp_path):
    out = tmp_path / "out"
    argv = ["--config-name", "cfg_chat", *TINY, "data_paths=[data/tiny]", "epochs=3", f"checkpoint_path={out}"]
    done = train(here, *argv, "global_batch_size=8")
    assert "13 rows are fewer than the 64 of a step (8 x accumulation 8)" in done.stdout
    assert "lr_warmup_steps: 1000 -> 0 (the run has 3 steps in all)" in done.stdout
    steps = read_events(out, "step")
    assert len(steps) == 3 and steps[0]["loss"] > steps[-1]["loss"]
    done = train(here, *argv, "global_batch_size=8", "lr_warmup_steps=2", "overwrite=true")
    argv[argv.index("epochs=3")] = "epochs=4"
    train(here, *argv, "global_batch_size=8", "lr_warmup_steps=2", "resume=auto")  # of 4 steps, 2 are not too many
    assert json.loads((out / "run_plan.json").read_text())["settled"]["lr_warmup_steps"] == 2
    argv[argv.index("epochs=4")] = "epochs=3"
    train(here, *argv, "global_batch_size=8", "lr_warmup_steps=2", "overwrite=true")
    train(here, *argv, "global_batch_size=8", "lr_warmup_steps=0", "resume=auto")  # as it was shortened


def test_a_puzzle_run_halts_carries_and_resumes_bitwise(here, tmp_path):
    """Halting, deep supervision, symmetries, AdamATan2, puzzle embeddings; stopped in the middle of rows' steps."""
    common = [
        "--config-name",
        "cfg_puzzle",
        *TINY,
        "data_paths=[sudoku]",
        "global_batch_size=4",
        "arch.puzzle_emb_ndim=8",
    ]
    common += ["arch.halt_max_steps=3", "optimizer=adam_atan2", "arch.loss_type=stablemax_cross_entropy", "epochs=2"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(here, *common, "max_steps=11", f"checkpoint_path={whole}")
    train(here, *common, "max_steps=11", "checkpoint_every=7", f"checkpoint_path={part}", "keep_last=9")
    for name in ("step_11", "train_state.json"):
        os.rename(part / name, part / f"gone-{name}")
    done = train(here, "resume=auto", f"checkpoint_path={part}", "--config-name", "cfg_puzzle")
    assert "resumed from" in done.stdout and "step 7 of 11" in done.stdout
    assert same(whole / "step_11", part / "step_11")
    assert step_values(whole) == step_values(part)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(here, tmp_path):
    common = [*RECURSIVE, "data_paths=[data/tiny]", "arch.halt_max_steps=2", "max_steps=160", "checkpoint_every=1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(here, *common, f"checkpoint_path={whole}")
    rng, kills, argv = random.Random(0), 0, [*common, f"checkpoint_path={killed}", "resume=auto"]
    while kills < 20:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "pretrain.py", *argv], cwd=here, stdout=subprocess.DEVNULL
        )
        before = len(steps_of(killed)) and int(steps_of(killed)[0].name[5:])
        while process.poll() is None and not (steps_of(killed) and int(steps_of(killed)[0].name[5:]) > before):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.15))
        assert process.poll() is None, "the run ended before it could be killed twenty times"
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    train(here, *argv)
    assert same(whole / "step_160", killed / "step_160")
    assert step_values(whole) == step_values(killed) and len(step_values(whole)) == 160


@pytest.mark.slow
def test_a_signal_saves_at_the_next_step_and_the_run_continues(here, tmp_path):
    out = tmp_path / "out"
    argv = [*RECURSIVE, "data_paths=[data/tiny]", "max_steps=100000", f"checkpoint_path={out}", "eval_interval=0"]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "pretrain.py", *argv], cwd=here, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step     5/"):
            process.send_signal(signal.SIGTERM)
            break
    out_text = process.stdout.read()
    assert process.wait(60) == 143 and "continue with resume=" in out_text
    saved = int(steps_of(out)[0].name[5:])
    done = train(
        here, *RECURSIVE, "data_paths=[data/tiny]", "resume=auto", f"checkpoint_path={out}", f"max_steps={saved + 2}"
    )
    assert f"total steps: 100000 -> {saved + 2}" in done.stdout
    assert (out / f"step_{saved + 2}").is_dir()


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(here, tmp_path):
    common = [
        *RECURSIVE,
        "data_paths=[data/tiny]",
        "arch.halt_max_steps=2",
        "max_steps=6",
        "arch.forward_dtype=float32",
    ]
    train(here, *common, f"checkpoint_path={tmp_path / 'one'}")
    argv = [*TORCHRUN, "pretrain.py", *common, f"checkpoint_path={tmp_path / 'two'}"]
    done = subprocess.run(argv, cwd=here, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Using device: cpu") == 1
    one, two = (read_events(tmp_path / name, "step") for name in ("one", "two"))
    # fp32 sums over rows in another order.
    assert [e["loss"] for e in one] == pytest.approx([e["loss"] for e in two], rel=2e-5)
    assert [e["num_targets"] for e in one] == [e["num_targets"] for e in two]


def test_compiled_or_plain_the_same_recipe_says_what_it_is(here, tmp_path):
    done = train(here, *RECURSIVE, "data_paths=[data/tiny]", "arch.plain=true", "dry_run=true")
    assert "plain model on cpu" in done.stdout and "1 layers, each applied once" in done.stdout
    assert "predicted memory above imports" in done.stdout
    done = train(here, *RECURSIVE, "data_paths=[data/tiny]", "dry_run=true")
    assert "T=1 x (n=2 + 1) applications of 1 layers = 3 layers per supervision step" in done.stdout
    assert not list(here.glob("checkpoints/*/*"))


# ---- what it refuses, and how


@pytest.mark.promise("TR_02", "TR_14")
@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["epoch=3"], "epoch: unknown key. Nearest: epochs."),
        (["arch.hidden_sise=3"], "Nearest: arch.hidden_size."),
        (["--config-name", "cfg_caht"], "no such recipe. Use one of cfg_chat"),
        (["lr=fast"], "lr=fast: not a number. Give one, such as 0.0003."),
        (["ema=perhaps"], "not a boolean"),
        (["epochs=0"], "must be 1 to"),
        (["arch.mlp_t=true"], "each token sees the answer"),
        (["arch.halting=true"], "a causal model's first position"),
        (["arch.puzzle_emb_ndim=16"], "embeds the puzzle that a row belongs to"),
        (["arch.causal=false"], "on conversations each token sees the answer"),
        (["--config-name", "cfg_puzzle"], "data/tiny holds conversations"),
        (["arch.forward_dtype=fp8"], "not one of float32, bfloat16"),
        (["evaluators=[arc]"], "not supported"),
        (["data_paths=[data/nothing]"], "data_paths data/nothing: no such folder"),
        (["data_paths=[]"], "names no data set"),
        (["data_paths=[sudoku]"], "holds puzzles"),
        (["device=tpu"], "not one of auto, cuda, mps, cpu, xpu"),
        (["device=cuda"], "device=cuda: Backend 'cuda' is not available"),
        (["device=mps"], "device=mps: MPS is not available."),
        (["freeze_weights=true"], "leaves nothing to train"),
        (["resume=nowhere"], "resume=nowhere: no such folder"),
        (["load_checkpoint=nowhere"], "no such file or folder"),
        (["--epochs", "3"], "written key=value"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(here, argv, text, capfd, monkeypatch):
    monkeypatch.chdir(here)
    with pytest.raises(PlanError) as found:
        pretrain.pretrain(*argv, *([] if any("data_paths" in a for a in argv) else ["data_paths=[data/tiny]"]))
    assert text in str(found.value) and "\n" not in str(found.value) and found.value.exit_code == 2
    assert not list(here.glob("checkpoints/*/*/step_*"))


@pytest.mark.promise("TR_02")
def test_a_refusal_ends_the_process_with_code_2(here):
    done = pretraining.run(here, "pretrain.py", "epoch=3")
    assert done.returncode == 2
    assert done.stderr.startswith("error: epoch: unknown key") and done.stdout == ""


def test_a_damaged_or_foreign_checkpoint_is_named(here, tmp_path):
    out = tmp_path / "out"
    common = [*RECURSIVE, "data_paths=[data/tiny]", f"checkpoint_path={out}"]
    train(here, *common, "max_steps=2")
    file = out / "step_2/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = train(here, *common, "max_steps=4", "resume=auto", code=76)
    assert "no checkpoint verifies" in done.stderr
    with pytest.raises(CheckpointDamagedError, match="content has changed"):
        generate.main(["--checkpoint", str(out / "step_2"), "--prompt", "Hi"])
    done = train(here, *common, "max_steps=4", code=2)
    assert "holds another run. Use resume=auto" in done.stderr
    done = train(here, *common, "resume=auto", "lr=1", code=2)
    assert "lr: 0.001 -> 1.0: cannot change in a resumed run" in done.stderr


def test_arrays_that_do_not_belong_together_are_refused(here, tmp_path, monkeypatch):
    folder = pretraining.build_chat(tmp_path, "data/mine", "--train-on", "all")
    monkeypatch.chdir(here)
    np.save(folder / "train/all__labels.npy", np.zeros((2, 3), np.int32))
    with pytest.raises(PlanError, match="must be integers"):
        pretrain.pretrain(f"data_paths=[{folder}]")
    (folder / "train/all__labels.npy").write_bytes(b"nothing")
    with pytest.raises(PlanError, match="is not an array of numbers"):
        pretrain.pretrain(f"data_paths=[{folder}]")
    (folder / "train/dataset.json").write_text("{}")
    with pytest.raises(PlanError, match="pad_id is missing"):
        pretrain.pretrain(f"data_paths=[{folder}]")


def negative(file):
    array = np.load(file)
    array[0, 0] = -5
    np.save(file, array)


def with_huge_header(file):
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (10000000000, 48), }"
    file.write_bytes(b"\x93NUMPY\x01\x00v\x00" + header.ljust(117) + b"\n")


INPUTS = {
    "a token below 0": (negative, "has token -5; the vocabulary is 0 to "),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), "all__inputs.npy: is not a regular file"),
    "a header of 2 TB": (with_huge_header, "all__inputs.npy: is not an array of numbers (mmap length is greater"),
    "cut": (lambda file: os.truncate(file, 500), "all__inputs.npy: is not an array of numbers (mmap length is greater"),
    "pickled": (lambda file: np.save(file, np.array([{}]), allow_pickle=True), "all__inputs.npy: is not an array of"),
}


@pytest.mark.parametrize("case", INPUTS)
def test_arrays_that_are_none_are_refused_in_one_line(case, here, tmp_path, monkeypatch):
    change, fact = INPUTS[case]
    folder = pretraining.build_chat(tmp_path, "data/mine", "--train-on", "all")
    change(folder / "train" / "all__inputs.npy")
    monkeypatch.chdir(here)
    with pytest.raises(PlanError) as refused:
        pretrain.pretrain(f"data_paths=[{folder}]")
    assert fact in str(refused.value) and "pickle" not in str(refused.value)


def test_a_dry_run_of_a_model_that_does_not_fit_ends_with_code_2(here):
    argv = [*RECURSIVE, "data_paths=[data/tiny]", "dry_run=true", "arch.forward_dtype=float32"]
    done = train(here, *argv, "arch.hidden_size=65536", code=2)
    assert "does not fit: cpu has " in done.stdout


# ---- the plan of other machines


@pytest.mark.promise("TR_08")
def test_several_ranks_are_refused_on_mps_before_anything_is_read():
    with pytest.raises(PlanError) as found:
        plan_of("data_paths=[no/such/data]", backend="mps", ranks=2)
    assert str(found.value) == "Distributed training is not supported on MPS"


@pytest.mark.promise("TR_07")
@pytest.mark.parametrize(
    ("backend", "environment", "word", "compiled"),
    [
        ("mps", {}, "auto", "false"),
        ("mps", {}, "true", "false"),
        ("cuda", {}, "auto", "true"),
        ("cuda", {"DISABLE_COMPILE": "1"}, "true", "false"),
        ("cpu", {}, "auto", "false"),
        ("cpu", {}, "true", "true"),
    ],
)
def test_compilation_is_never_used_on_mps_or_if_disabled(backend, environment, word, compiled, monkeypatch):
    monkeypatch.delenv("DISABLE_COMPILE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert plan_of(f"compile={word}", backend=backend).settings.compile == compiled


@pytest.mark.promise("TR_05")
def test_heads_that_do_not_divide_the_hidden_size_are_fewer_with_a_reason():
    plan = plan_of("arch.hidden_size=512")
    assert plan.settings.arch.num_heads == 8
    assert "arch.num_heads: 12 -> 8 (12 heads do not divide hidden_size 512" in "\n".join(map(str, plan.adjustments))


@pytest.mark.promise("TR_06")
def test_bfloat16_is_used_where_the_machine_computes_in_it():
    for supports, dtype in ((True, "bfloat16"), (False, "float32")):
        manager = pretraining.manager_of("cpu")
        manager.__dict__["capabilities"] = _with_bfloat16(manager, supports)
        plan = resolve(read_recipe("cfg_chat"), {}, manager, None)
        assert plan.settings.arch.forward_dtype == dtype
        said = [a for a in map(str, plan.adjustments) if a.startswith("arch.forward_dtype")]
        assert said == [] if supports else "0.30 x the speed of fp32, measured" in said[0]


def _with_bfloat16(manager, supports: bool):
    from dataclasses import replace

    reasons = manager.capabilities.reasons | {"bf16": "0.30 x the speed of fp32, measured"}
    return replace(manager.capabilities, supports_bfloat16=supports, reasons=reasons)


@pytest.mark.parametrize(("speed", "word"), [(None, "blas"), (1.05, "blas"), (2.0, "onednn")])
def test_the_library_of_fp32_products_is_settled_by_the_probe(speed, word):
    from dataclasses import replace

    manager = pretraining.manager_of("cpu")
    manager.__dict__["capabilities"] = replace(manager.capabilities, onednn_speed=speed)
    assert resolve(read_recipe("cfg_chat"), {}, manager, None).settings.cpu_matmul == word
    assert plan_of("cpu_matmul=blas", backend="mps").settings.cpu_matmul == "blas"
    before = SavedRun(Path("run"), {"settled": {"backend": "cpu"}, "requested": {}}, None)
    assert inherited(before, {}, "cpu")["cpu_matmul"] == "blas"  # saved before it was a setting
    before.saved_plan["settled"]["cpu_matmul"] = "onednn"
    assert inherited(before, {}, "cpu")["cpu_matmul"] == "onednn"
    if speed is None:
        with pytest.raises(PlanError, match="cpu_matmul=onednn: .* Use auto or blas"):
            resolve(read_recipe("cfg_chat"), {"cpu_matmul": "onednn"}, manager, None)


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(here, tmp_path):
    out = tmp_path / "out"
    argv = [*RECURSIVE, "data_paths=[data/tiny]", f"checkpoint_path={out}", "max_steps=2"]
    out.mkdir()
    (out / "run_plan.json").write_text('{"requested": {}, "settled": {}}')
    done = train(here, *argv, "resume=auto")
    assert "ended before its first step_N: it begins again" in done.stdout and (out / "step_2").is_dir()
    assert json.loads((out / "run_plan.json").read_text())["settled"]["cpu_matmul"] in ("blas", "onednn")
    done = train(here, "resume=auto", f"checkpoint_path={out}", "max_steps=1", code=2)
    assert "max_steps=1: " in done.stderr and "is already at step 2" in done.stderr and "--max" not in done.stderr
    done = train(here, f"resume={out}", "--config-name", "cfg_puzzle", "max_steps=3", "load_checkpoint=gone")
    assert "--config-name cfg_puzzle: a resumed run keeps its own recipe; ignored: " in done.stdout


def test_what_another_program_wrote_is_refused_and_overwrite_removes_a_runs_own_files_only(here, tmp_path):
    out = tmp_path / "out"
    argv = [*RECURSIVE, "data_paths=[data/tiny]", f"checkpoint_path={out}", "max_steps=2"]
    out.mkdir()
    mine = {"step_1000": "weights", "step_notes.txt": "a", "step_by_step/tutorial.md": "b", "all_config.yaml": "c"}
    for name, text in mine.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)
    for more in ([], ["overwrite=true"]):
        done = train(here, *argv, *more, code=2)
        assert "holds all_config.yaml, which is not of a run" in done.stderr
        assert {name: (out / name).read_text() for name in mine} == mine
    (out / "all_config.yaml").unlink(), (out / "step_1000").unlink()
    train(here, *argv)
    train(here, *argv, "max_steps=1", "overwrite=true")
    assert [p.name for p in steps_of(out)] == ["step_1"] and (out / "latest").read_text() == "step_1"
    assert (out / "step_notes.txt").exists() and (out / "step_by_step/tutorial.md").exists()
    (out / "step_1000").write_text("weights")
    done = train(here, *argv, "overwrite=true", code=2)
    assert "holds step_1000, which is not of a run" in done.stderr and (out / "step_1").is_dir()


def test_generate_names_the_true_reason_on_a_puzzle_model(here, tmp_path):
    out = tmp_path / "out"
    train(here, "--config-name", "cfg_puzzle", *TINY, "data_paths=[sudoku]", f"checkpoint_path={out}", "max_steps=1")
    with pytest.raises(PlanError, match="was trained on puzzles"):
        generate.main(["--checkpoint", str(out), "--prompt", "Hi"])


@pytest.mark.parametrize(
    ("more", "evaluated", "saved"),
    [
        ([], [3, 6, 9], [3, 6, 9, 12]),
        (["min_eval_interval=2"], [6, 9], [6, 9, 12]),
        (["checkpoint_every_eval=false"], [3, 6, 9], [12]),
        (["checkpoint_every_eval=false", "checkpoint_every=5"], [3, 6, 9], [5, 10, 12]),
    ],
)
def test_when_a_run_evaluates_and_saves(more, evaluated, saved):
    plan = replace(plan_of("--config-name", "cfg_chat", "eval_interval=1", *more), steps_per_epoch=3)
    states = [TrainState(step=step, total_steps=12) for step in range(1, 13)]
    assert [s.step for s in states if plan.eval_due(s)] == evaluated  # the last step is evaluated after the loop
    assert [s.step for s in states if plan.save_due(s, stopping=False)] == saved


def test_generate_computes_in_bf16_where_the_machine_does(here, tmp_path):
    out = tmp_path / "out"
    train(here, *RECURSIVE, "data_paths=[data/tiny]", "max_steps=1", f"checkpoint_path={out}")
    argv = ["--checkpoint", out, "--prompt", "What is 1 plus 1?", "--max_new_tokens", "3", "--precision", "bf16"]
    done = pretraining.call(here, "generate", *argv)
    has_bf16 = pretraining.manager_of("cpu").capabilities.supports_bfloat16
    assert done.returncode == 0 and ("--precision bf16: fp32 is used" in done.stdout) != has_bf16


def test_a_plan_survives_its_way_to_other_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = with_folder(plan_of("data_paths=[a,b]", "arch.hidden_size=512", ranks=2))
    received = PretrainPlan.deserialize(plan.serialize())
    assert received.settings == plan.settings and received.digest() == plan.digest()
    assert received.dims == plan.dims and received.adjustments == plan.adjustments
    assert json.loads(json.dumps(plan.to_json()))["settled"]["arch.num_heads"] == 8


@pytest.mark.promise("TR_04")
def test_rows_are_cut_to_seq_len_and_a_longer_one_is_accepted(here, tmp_path):
    argv = [*RECURSIVE, "data_paths=[data/tiny]", "dry_run=true"]
    done = train(here, *argv, "arch.seq_len=20")
    assert "rows of 48 positions are cut to arch.seq_len 20" in done.stdout and "13 rows of 20 positions" in done.stdout
    assert "13 rows of 48 positions" in train(here, *argv, "arch.seq_len=512").stdout
    assert "no row has a target" in train(here, *argv, "arch.seq_len=3", code=2).stderr


@pytest.mark.promise("TR_16")
def test_the_true_number_of_parameters_is_printed(here, tmp_path):
    """With gpt2's vocabulary the embeddings are most of a tiny model: the guide's table counts the network only."""
    done = train(here, *RECURSIVE, "data_paths=[data/tiny]", "max_steps=1", f"checkpoint_path={tmp_path / 'out'}")
    held = load_file(tmp_path / "out/step_1/model.safetensors")
    held = {name: tensor for name, tensor in held.items() if not name.startswith(("y0", "z0"))}  # never trained
    total, outer = (sum(t.size for n, t in held.items() if n.startswith(names)) for names in ("", ("embed", "head")))
    counts = f"{total:,} parameters: {total - outer:,} in the network, {outer:,} in embedding and head"
    assert counts in done.stdout
    gpt2 = {(384, 4): 45.7e6, (768, 4): 105.5e6}
    for (size, layers), count in gpt2.items():
        arch = plan_of(f"arch.hidden_size={size}", f"arch.L_layers={layers}").settings.arch
        assert sum(parameters(arch, 50_266, 512).values()) == pytest.approx(count, rel=2e-3)


@pytest.mark.promise("TR_13", "TR_14")
@pytest.mark.parametrize(("device", "said"), [("cpu", "cpu ran out of memory"), ("mps", "MPS backend out of memory")])
def test_no_memory_ends_with_a_code_and_advice(device, said):
    engine = conformance.recursive_engine()
    engine.device = torch.device(device)
    batch = conformance.batch_of(conformance.ROWS, np.arange(4), True)
    with pytest.raises(OutOfMemoryError, match=said) as found, engine._memory_advice(batch):
        raise RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)")
    for name in ("global_batch_size=4", "arch.hidden_size=16", "arch.seq_len=12"):
        assert name in str(found.value)
    assert found.value.exit_code == 71


REFUSED_ALLOCATION = """
from finetune.memory_advice import memory_advice
from finetune.system import process
def main():
    with memory_advice("cpu ran out of memory"):
        bytearray(2**60)
process.exit_with(main)
"""


@pytest.mark.promise("TR_13")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited on Linux only")
def test_a_loop_over_sizes_ends_where_memory_does(here):
    """A model that does not fit in the address space, and an allocation of a step: both end with code 71."""
    size = " ".join([*RECURSIVE, "data_paths=[data/tiny]", "arch.forward_dtype=float32", "arch.hidden_size=65536"])
    one = f"{sys.executable} pretrain.py {size} seed=$seed || exit $?"
    loop = f"ulimit -v {2**23}; for seed in 1 2; do {one}; done"
    done = subprocess.run(["bash", "-c", loop], cwd=here, capture_output=True, text=True)
    assert done.returncode == 71 and done.stderr.startswith("error: out of memory"), done.stderr
    assert done.stdout.count("Using device") == 1
    in_a_step = pretraining.run(here, "-c", REFUSED_ALLOCATION)
    assert (in_a_step.returncode, in_a_step.stderr) == (71, "error: cpu ran out of memory\n")


@pytest.mark.promise("TR_15")
def test_no_worker_process_and_no_pinned_memory_is_used():
    """Rows are numpy arrays of this process, on every device: there is nothing to turn off on MPS."""
    for file in ("pretrain.py", "recursive/data/data.py", "recursive/torch_engine/engine.py"):
        text = (ROOT / file).read_text()
        assert "DataLoader" not in text and "pin_memory" not in text and "num_workers" not in text


def test_a_vanishing_temperature_is_greedy():
    for given, used in (("1e-45", 0.0), ("0.5", 0.5)):
        args = generate.build_parser().parse_args(["--checkpoint", "x", "--prompt", "Hi", "--temperature", given])
        generate.check(args)
        assert args.temperature == used


# ---- samples, and the end of a run that diverges


def test_test_prompts_are_answered_at_each_evaluation_as_generate_answers_them(here, tmp_path):
    out = tmp_path / "out"
    # generate.py computes in fp32; in bf16 the likeliest tokens of a hardly trained model are ties.
    train(here, *argv_of(out), "eval_samples=2", "arch.forward_dtype=float32")
    found = samples.read(out)
    assert [s["step"] for s in found] == [0, 0, 4, 4, 8, 8]
    asked = {q: a for q, a in QUESTIONS}
    for sample in found:
        question = next(q for q in asked if q in sample["prompt"])
        assert sample["expected"].strip() == asked[question]
    question = next(q for q in asked if q in found[-1]["prompt"])
    argv = ["--checkpoint", out / "step_8", "--prompt", question, "--max_new_tokens", 64, "--device", "cpu"]
    assert found[-1]["answer"].strip("\ufffd ") in call(here, "generate", *argv).stdout
    assert question in (out / "report.html").read_text()
    # They change nothing of the run.
    plain = tmp_path / "plain"
    train(here, *argv_of(plain), "eval_samples=0", "arch.forward_dtype=float32")
    assert step_values(out) == step_values(plain) and not (plain / "samples.jsonl").exists()


def argv_of(out):
    return [*RECURSIVE, "data_paths=[data/tiny]", "epochs=2", "eval_interval=1", f"checkpoint_path={out}"]


def test_a_puzzle_run_has_no_samples(here, tmp_path):
    out = tmp_path / "out"
    argv = ["--config-name", "cfg_puzzle", *TINY, "data_paths=[sudoku]", "global_batch_size=4", "max_steps=2"]
    train(here, *argv, f"checkpoint_path={out}")
    assert not samples.read(out)


def test_a_run_that_diverges_ends_if_that_is_asked_for(here, tmp_path):
    out = tmp_path / "out"
    argv = [*argv_of(out), "max_steps=60", "lr=10", "lr_warmup_steps=0", "checkpoint_every=1", "eval_interval=0"]
    done = call(here, "pretrain", *argv, "stop_on_divergence=true")
    assert done.returncode == 66 and "the run diverged" in done.stderr and "Lower lr=10" in done.stderr
    end = read_events(out, "end")[-1]
    assert end["exit_code"] == 66 and end["step"] < 60
    assert "the run diverged" in (out / "report.html").read_text()
