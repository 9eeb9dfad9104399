"""Optimizers and training options through the command line: over ranks as in one process."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.commands import command, finish
from tests.support.runs import assert_same_run, losses, read_events
from train import fine_tune

REGULARIZED = "--label_smoothing 0.1 --neftune_noise_alpha 5 --data_seed 7"
SCHEDULE = "--lr_scheduler wsd --wsd_decay_ratio 0.5 --wsd_decay_type 1-sqrt"
FULL = {"train_type": "full", "lr": "1e-3"}
# Of the adapter or of all weights, with what is evaluated while it trains.
RUNS = {
    "regularized": ({}, f"{REGULARIZED} {SCHEDULE} --lora_dropout 0.1"),
    "lion": ({"lr": "5e-4"}, "--optimizer lion --wd 0.1"),
    "adafactor": ({}, "--optimizer adafactor"),
    "schedule free": ({}, "--optimizer schedule_free_adamw --warmup_steps 3"),
    "schedule free full": (FULL, "--optimizer schedule_free_adamw"),
    "muon": (FULL, "--optimizer muon --wd 0.1"),
}


def needs(name: str) -> None:
    """Skips without the package of an optimizer."""
    if name.startswith("schedule free"):
        pytest.importorskip("schedulefree")


def flags_of(base: dict, name: str, rows_file) -> tuple:
    changes, words = RUNS[name]
    flags = base | changes
    if flags["train_type"] == "full":
        del flags["lora_rank"]
    return flags, f"{words} --validation_dataset {rows_file} --eval_every 3 --eval_samples 1"


LAYOUTS = {
    "FSDP2": "--batch_size 2 --world_size 2",
    "DDP": "--batch_size 2 --world_size 2 --sharding_strategy ddp",
    "TP": "--batch_size 4 --world_size 2 --tp_degree 2",
    "PP": "--batch_size 4 --world_size 2 --pp_degree 2",
    "CP": "--batch_size 4 --world_size 2 --cp_degree 2",
    "offloaded": "--batch_size 2 --world_size 2 --use_cpu_offload true",
    "recomputed": "--batch_size 4 --use_gradient_checkpointing true --microbatch_tokens 64 --batch_layout padded",
    "streamed": "--batch_size 4 --streaming --shuffle_buffer 1000 --max_steps 12",
}
REFUSED = {("adafactor", w) for w in ("FSDP2", "TP", "PP", "CP", "offloaded")} | {("muon", w) for w in LAYOUTS}
REFUSED -= {("muon", w) for w in ("DDP", "PP", "recomputed", "streamed")}
REFUSED |= {("schedule free full", w) for w in ("FSDP2", "CP", "offloaded")}
KINDS = ("regularized", "lion", "adafactor", "schedule free", "schedule free full", "muon")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_every_option_gives_one_process_s_run_in_every_layout_or_is_refused(base, rows_file, tmp_path, name, layout):
    """Without dropout, whose masks depend on the layout; Lion's signs turn where a moment's rounding decides."""
    needs(name)
    flags, words = flags_of(base, name, rows_file)
    words = words.replace("--lora_dropout 0.1", "")
    flags = flags | {"lr": "1e-4"} if name in ("lion", "muon") else flags
    code, out, err = finish(command(flags, words, LAYOUTS[layout], output_dir=tmp_path / "out"))
    if (name, layout) in REFUSED:
        assert code == 2 and err.startswith("error: --optimizer") and err.count("\n") == 1, err
        return
    assert code == 0, err
    alone = f"{words} --batch_size 4" + (" --streaming --max_steps 12" if layout == "streamed" else "")
    code, _, err = finish(command(flags, alone, output_dir=tmp_path / "alone"))
    assert code == 0, err
    if name == "lion":
        assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    elif flags["train_type"] == "full":
        # Muon orthogonalizes in bf16: a gradient's last bit moves an update by 1e-3 of it.
        rel = 1e-4 if name == "muon" else 1e-5
        assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "alone"), rel=rel)
        one, many = (load_file(tmp_path / f / "model.safetensors") for f in ("alone", "out"))
        for tensor in one:
            np.testing.assert_allclose(many[tensor], one[tensor], atol=1e-3)
    else:
        assert_same_run(tmp_path / "out", tmp_path / "alone")
    evals = [[e["loss"] for e in read_events(tmp_path / f, "eval")] for f in ("alone", "out")]
    assert evals[1] == pytest.approx(evals[0], rel=1e-4)


@pytest.mark.slow
def test_the_best_averaged_weights_are_published_as_they_were_evaluated(flags, rows_file, tmp_path):
    pytest.importorskip("schedulefree")
    more = dict(validation_dataset=str(rows_file), eval_every=2, load_best="true", lr=50.0, max_steps=8, eval_samples=0)
    state = fine_tune(**flags, **more, optimizer="schedule_free_adamw")
    losses_at = {e["step"]: e["loss"] for e in read_events(tmp_path / "out", "eval")}
    assert state.best_step < 8  # at this rate later weights are worse
    best, last = (load_file(tmp_path / "out" / f / "adapter_model.safetensors") for f in ("best", "."))
    for name in best:
        np.testing.assert_array_equal(best[name], last[name])
    found = score_of(flags["model_name"], rows_file, tmp_path / "out")
    assert found == pytest.approx(state.best_loss, rel=1e-5), losses_at


def score_of(model, rows_file, folder) -> float:
    """The loss of these rows with the published adapter, by score.py."""
    argv = command(f"--checkpoint {folder} --dataset {rows_file} --json", script="score.py")
    code, out, err = finish(argv)
    assert code == 0, err
    return json.loads(out)["loss"]
